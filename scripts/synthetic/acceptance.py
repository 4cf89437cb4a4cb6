"""Pairs of target and draft with synthetic acceptance: text and acceptance are known in advance.

The pair runs through the real kernels at true shapes. Tokens c_0, c_1, ... are a random cycle
through the draft vocabulary. The residual stream of a token is nearly its embedding, a random unit
vector. Row c_(i+1) of the target's head is the embedding of c_i. Random vectors are nearly
orthogonal, so the target predicts c_(i+1) after c_i. A token outside the cycle has the embedding
of a token of the cycle.

The draft passes the embedding on and has a copy of the head. In the copy, a seeded fraction 1 - P
of the rows is permuted: after those tokens the draft predicts a wrong token. A draft token is
accepted with probability P, independently of the others. A speculative step of depth D emits
1 + P + ... + P^D tokens on average.

With `second` S, the draft's second choice is right after a fraction S of the tokens for which its
first choice is wrong: the row of the right token also holds SECOND times the vector of the token
before it. So trees gain over chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from scripts.synthetic.entries import NOISE, Entries, entries_in_4_bits
from scripts.synthetic.formats import quantised
from scripts.synthetic.layouts import (
    decoder_tensors,
    draft_vocabulary,
    eagle_tensors,
    most_frequent,
    special_ids,
)
from scripts.synthetic.presets import Preset
from scripts.synthetic.sources import CHUNK, Array, Source, encode
from scripts.synthetic.tensors import Config, Fill, TensorSpec, matrix, normal, tensor_seed, vectors

SECOND = 0.7  # logit of a right second choice over that of the first one
TOP_LOGIT = 30.0  # logit of the predicted token; other logits are near 0
BRANCHES = 0.1  # norm of all residual branches together; the embedding has norm 1


@dataclass(frozen=True, slots=True)
class Pair:
    """The index of the unit vector in each row of the tables, and the successor of each token."""

    next_token: Array  # [V] the target's next token
    drafted: Array  # [Vd] target ids that the draft knows, ascending
    accepted: Array  # [V] true: the draft predicts the same token
    embed_rows: Array  # [V]
    head_rows: Array  # [V]
    draft_rows: Array  # [Vd]
    second_rows: Array  # [Vd] the vector that is added to draft_rows; -1: none


def lay_out(
    config: Config, seed: int, acceptance: float, draft_vocab: int, second: float = 0.0
) -> Pair:
    """Builds the cycle and the rows of a pair. Raises SystemExit for sizes out of range."""
    vocab = config["vocab_size"]
    most = vocab - len(special_ids(config))
    if not 0.0 <= acceptance <= 1.0:
        raise SystemExit(f"--acceptance is {acceptance}, but must be a probability from 0 to 1")
    if not 0.0 <= second <= 1.0:
        raise SystemExit(f"--second is {second}, but must be a probability from 0 to 1")
    if not 2 <= draft_vocab <= most:
        raise SystemExit(f"--draft-vocab-size is {draft_vocab}, but must be 2 to {most}")
    rng = np.random.default_rng(tensor_seed(seed, "cycle"))
    drafted = np.sort(most_frequent(config, draft_vocab)).astype(np.int64)
    order = rng.permutation(drafted)
    ids = np.arange(vocab)
    embed_rows = drafted[ids % draft_vocab]
    embed_rows[drafted] = drafted
    head_rows = ids.copy()
    head_rows[np.roll(order, -1)] = order
    next_token = np.empty(vocab, np.int64)
    next_token[order] = np.roll(order, -1)
    next_token = next_token[embed_rows]
    wrong = rng.permutation(drafted)[: round((1 - acceptance) * draft_vocab)]
    wrong = (
        wrong if wrong.size != 1 else rng.permutation(drafted)[:2]
    )  # two rows can be exchanged, one cannot
    accepted = ~np.isin(embed_rows, wrong)
    draft_rows = head_rows.copy()
    draft_rows[next_token[wrong]] = np.roll(wrong, 1)
    second_rows = np.full(vocab, -1)
    rescued = wrong[: round(second * wrong.size)]
    second_rows[next_token[rescued]] = rescued
    tables = (embed_rows, head_rows, draft_rows[drafted], second_rows[drafted])
    return Pair(next_token, drafted, accepted, *tables)


def target_tensors(config: Config, seed: int, pair: Pair) -> Iterator[TensorSpec]:
    embed_scale = math.sqrt(config["hidden_size"]) / config.get("scale_emb", 1.0)
    tables = {
        "model.embed_tokens.weight": vectors(seed, pair.embed_rows, config, embed_scale),
        "lm_head.weight": vectors(seed, pair.head_rows, config, head_scale(config)),
    }
    for spec in decoder_tensors(config):
        fill = tables.get(spec.name)
        yield TensorSpec(spec.name, spec.shape, fill) if fill else quiet(spec, config)


def draft_tensors(
    config: Config, seed: int, pair: Pair, quant: str | None = None
) -> Iterator[TensorSpec]:
    hidden = config["hidden_size"]
    yield from draft_vocabulary(pair.drafted, config["vocab_size"])
    for spec in eagle_tensors(config):
        if spec.name != "fc.weight":
            spec = quiet(spec, config)
            yield from quantised([spec], quant) if quant else [spec]
        elif quant == "gptq":
            diagonal = np.arange(hidden)
            yield from entries_in_4_bits("fc", *spec.shape, Entries.of(diagonal, diagonal, 1.0))
        else:
            yield TensorSpec(spec.name, spec.shape, pass_left_half(hidden))
    head = vectors(seed, pair.draft_rows, config, head_scale(config))
    if (pair.second_rows >= 0).any():
        head = with_second(head, seed, pair, config)
    yield TensorSpec("lm_head.weight", (pair.drafted.size, hidden), head)


def with_second(head: Fill, seed: int, pair: Pair, config: Config) -> Fill:
    """The fill `head` of the draft's head, with right second choices."""
    added = vectors(seed, np.maximum(pair.second_rows, 0), config, SECOND * head_scale(config))
    columns = config["hidden_size"]

    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        begin = 0
        more_of = added(source, seed, count, "float32")
        for reused in head(source, seed, count, "float32"):
            chunk = reused.copy()  # the next chunk may have the same memory
            more = next(more_of)
            rows = len(chunk.ravel()) // columns
            has = pair.second_rows[begin : begin + rows, None] >= 0
            begin += rows
            values = chunk.reshape(rows, columns) + has * more.reshape(rows, columns)
            yield encode(values.astype(np.float32).ravel(), dtype)

    return fill


def head_scale(config: Config) -> float:
    """Returns the norm of the head's rows that gives the predicted token TOP_LOGIT."""
    hidden = config["hidden_size"]
    return TOP_LOGIT / math.sqrt(hidden) / (config.get("dim_model_base", hidden) / hidden)


def quiet(spec: TensorSpec, config: Config) -> TensorSpec:
    """Returns the tensor scaled down, so that it hardly changes the residual stream."""
    if spec.name.endswith("norm.weight") or "input_norm" in spec.name:
        return TensorSpec(spec.name, spec.shape, normal(0.0, mean=1.0))
    if spec.name.endswith(("o_proj.weight", "down_proj.weight")):
        branch = BRANCHES / math.sqrt(2 * config["num_hidden_layers"])
        return matrix(spec.name, *spec.shape, branch)
    return spec


def pass_left_half(hidden: int, last: Callable[[Source], Array] | None = None) -> Fill:
    """A fill with [I | 0] for the input [embedding | hidden state], plus noise.

    Without noise the zeros would make steps faster.

    `last` [H] is added to the column of the embedding's last element.
    """

    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        noise = NOISE / math.sqrt(2 * hidden)
        added = last(source) if last else np.zeros(hidden, np.float32)
        for begin in range(0, hidden, step := max(1, CHUNK // (2 * hidden))):
            rows = min(step, hidden - begin)
            values = np.random.default_rng([seed, begin]).standard_normal(
                (rows, 2 * hidden), dtype=np.float32
            )
            values *= np.float32(noise)
            values[np.arange(rows), np.arange(begin, begin + rows)] += 1
            values[:, hidden - 1] += added[begin : begin + rows]
            yield encode(values.ravel(), dtype)

    return fill


def pair_presets(
    preset: Preset,
    config: Config,
    seed: int,
    acceptance: float,
    draft_vocab: int,
    draft_quant: str | None = None,
    second: float = 0.0,
) -> tuple[Preset, Preset]:
    """Returns the presets of target and draft. `config`: the target's, with overrides applied."""
    if config.get("common_experts"):
        raise SystemExit("common_experts needs embeddings with a mean, which --acceptance replaces")
    config = config | {"tie_word_embeddings": False}
    pair = lay_out(config, seed, acceptance, draft_vocab, second)
    target = replace(preset, config=config, tensors=lambda c: target_tensors(c, seed, pair))
    draft = Preset(
        config
        | {
            "num_hidden_layers": 1,
            "draft_vocab_size": draft_vocab,
            "planted_acceptance": acceptance,
        },
        {},
        lambda c: draft_tensors(c, seed, pair, draft_quant),
        draft=True,
        quantised=True,
    )
    return target, draft
