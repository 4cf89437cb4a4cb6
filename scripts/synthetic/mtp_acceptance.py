"""Models with an MTP head of synthetic acceptance: target and draft in one checkpoint.

Text and target are those of acceptance.py. The head shares the target's tables, so it cannot have a
permuted lm_head. Instead, the last element of an embedding marks the tokens after which the draft
is wrong; it is zero in all other rows and in lm_head. `mtp.fc` passes the embedding on, and adds a
large multiple of one token's vector to it if the mark is there. So the head predicts the successor
of that token after each marked token, and the target's token after all others. The target's token
after a marked one is not the second choice either, so trees have the same acceptance.

With `common_experts`, another element has one value in all embeddings and is zero in lm_head.
Routers give common experts higher scores by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from scripts.synthetic.acceptance import BRANCHES, Pair, head_scale, lay_out, pass_left_half
from scripts.synthetic.hybrid import hybrid_tensors
from scripts.synthetic.presets import Preset
from scripts.synthetic.sources import Array, Source, encode
from scripts.synthetic.tensors import Config, Fill, TensorSpec, matrix, normal, vectors

# The last element of a marked embedding, and the one before it with common experts. The other
# elements have a root mean square of 1.
MARK = 4.0
GUESS = 25.0  # with a mark, one token's vector has MARK * GUESS times the norm of the embedding

ROUTER = "mlp.gate.weight"
COMMON_SCORE = 12.0  # score of a common expert; the standard deviation of a score is 2


def mtp_preset(
    preset: Preset, config: Config, seed: int, acceptance: float, draft_vocab: int
) -> Preset:
    """The preset of a model whose MTP head has this acceptance. `config`: with overrides."""
    config = config | {"tie_word_embeddings": False, "planted_acceptance": acceptance}
    pair = lay_out(config, seed, acceptance, draft_vocab)
    return replace(preset, config=config, tensors=lambda c: mtp_pair_tensors(c, seed, pair))


def mtp_pair_tensors(config: Config, seed: int, pair: Pair) -> Iterator[TensorSpec]:
    hidden = config["hidden_size"]
    scale = math.sqrt(hidden)
    right = pair.drafted[pair.accepted[pair.drafted]]
    # With acceptance 0 there is none, and the draft is right after this one token.
    guess = right[0] if right.size else pair.drafted[0]
    guessed = vectors(seed, np.array([guess]), config, scale)

    def add_guess(source: Source) -> Array:
        (row,) = guessed(source, 0, hidden, "float32")
        row = GUESS * row
        row[-marks.shape[1] :] = 0
        return row

    marks = np.where(pair.accepted, 0.0, MARK)[:, None]
    common = config.get("common_experts", 0)
    if common:
        marks = np.column_stack([np.full(len(marks), MARK), marks])
    fills = {
        "model.embed_tokens.weight": with_last(
            vectors(seed, pair.embed_rows, config, scale), marks, hidden
        ),
        "lm_head.weight": with_last(
            vectors(seed, pair.head_rows, config, head_scale(config)), 0 * marks, hidden
        ),
        "mtp.fc.weight": pass_left_half(hidden, add_guess),
    }
    for spec in hybrid_tensors(config):
        fill = fills.get(spec.name)
        if common and spec.name.endswith(ROUTER):
            fill = with_last(normal(spec.std), common_scores(spec.shape[0], common), hidden)
        yield TensorSpec(spec.name, spec.shape, fill) if fill else quiet(spec, config)


def common_scores(num_experts: int, common: int) -> Array:
    """Returns the last two columns of a router's weights."""
    columns = np.zeros((num_experts, 2))
    columns[:common, 0] = COMMON_SCORE / MARK
    return columns


def with_last(fill: Fill, last: Array, columns: int) -> Fill:
    """The fill of a matrix [rows, columns] with `last` [rows, n] as its last columns."""

    def replaced(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        begin = 0
        for chunk in fill(source, seed, count, dtype):
            rows = chunk.reshape(-1, columns)
            values = last[begin : begin + len(rows)].astype(np.float32)
            rows[:, -last.shape[1] :] = encode(values, dtype)
            begin += len(rows)
            yield rows.ravel()

    return replaced


def quiet(spec: TensorSpec, config: Config) -> TensorSpec:
    """The tensor scaled down, so that it hardly changes the residual stream."""
    if "norm" in spec.name:
        factor_is_weight = ".linear_attn.norm." in spec.name  # other norms multiply by 1 + weight
        return TensorSpec(spec.name, spec.shape, normal(0.0, mean=float(factor_is_weight)))
    if spec.name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        branch = BRANCHES / math.sqrt(2 * config["num_hidden_layers"])
        return matrix(spec.name, *spec.shape, branch)
    return spec
