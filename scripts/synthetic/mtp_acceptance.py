"""Models with an MTP head of synthetic acceptance: target and draft in one checkpoint.

Text and target are those of acceptance.py. The head shares the target's tables, so it cannot have a
permuted lm_head. Instead, the last element of an embedding marks the tokens after which the draft
is wrong; it is zero in all other rows and in lm_head. `mtp.fc` passes the embedding on, and adds a
multiple of one token's vector to it if the mark is there. So the head predicts the successor of
that token after each marked token, and the target's token after all others.
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

MARK = 4.0  # the last element of a marked embedding; the others have a root mean square of 1


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
        return np.append(row[: hidden - 1], np.float32(0))

    marks = np.where(pair.accepted, 0.0, MARK)
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
        yield TensorSpec(spec.name, spec.shape, fill) if fill else quiet(spec, config)


def with_last(fill: Fill, last: Array, columns: int) -> Fill:
    """The fill of a matrix [rows, columns] with `last` [rows] as its last column."""

    def replaced(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        begin = 0
        for chunk in fill(source, seed, count, dtype):
            rows = chunk.reshape(-1, columns)
            values = last[begin : begin + len(rows)].astype(np.float32)
            rows[:, -1] = encode(values, dtype)
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
