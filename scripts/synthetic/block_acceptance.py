"""Pairs of a target and a block drafter with synthetic acceptance: DSpark and DFlash2.

Text, target and accepted tokens are those of acceptance.py. Each token also has an *ahead vector*,
a random unit vector. An embedding has four parts:

| elements | content |
|---|---|
| the first n | the sum of the ahead vectors of this token and of the D tokens after it |
| the next | the unit vector of the token |
| the last but one | ONE, the same in all embeddings |
| the last | ROOT, negative in the embedding of the mask token |

A row of lm_head has the vector of the token before it and its own ahead vector. So the target's
logit of the next token is by far the largest.

The last layer's attention copies the first part of the root's embedding to all rows of a block.
Queries read ONE, and keys read ROOT. fc negates ROOT of context rows, and ROOT of the mask token is
negative. So only the root's key agrees with the queries. Then the root and the D tokens after it
have the largest logits in each row, all equal. The bigram alone chooses among these candidates.

After an accepted token the bigram's score of the right token is the largest, after other tokens the
smallest. So no tree has the right token there, and chains and trees accept 1 + P + ... + P^D tokens
in a step.

With `second` S, a fraction S of those other tokens differs. The best candidate after such a token
is the token itself, and the right one is second.

DFlash and JetSpec heads have no bigram, so nothing tells their rows apart. For them there is no
such pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from scripts.synthetic import mtp_acceptance
from scripts.synthetic.acceptance import TOP_LOGIT, Pair, lay_out, quiet
from scripts.synthetic.blocks import block_config, block_tensors, num_inputs, size, stated
from scripts.synthetic.entries import Entries, entries_matrix
from scripts.synthetic.formats import quantised
from scripts.synthetic.hybrid import hybrid_tensors
from scripts.synthetic.presets import Preset
from scripts.synthetic.sources import Array, Source, encode
from scripts.synthetic.tensors import Config, Fill, TensorSpec, normal, tensor_seed

KINDS = ("dspark", "dflash2")  # kinds of heads with a bigram

# Two elements of each embedding. The root mean square of an embedding is about 1.
ONE = ROOT = 4.0
AHEAD = math.sqrt(0.5)  # norm of the first part over that of both vector parts

FLAT_LOGIT = 12.0  # logit of the root and of the D tokens after it; other logits are near 0
BIGRAM = 60.0  # score of the right token after an accepted one
SECOND_GAP = 8.0  # score of a right second choice below that of the first one
COPIED = 16.0  # the copied part of the root's embedding over the embedding itself
SHARPNESS = 2.0  # weight of the norm of the copying queries


@dataclass(frozen=True, slots=True)
class Plan:
    """A pair, its kind of draft, and the tokens that each embedding announces."""

    kind: str
    pair: Pair
    target: Config
    draft: Config
    seed: int
    num_ahead: int  # n: elements of an ahead vector
    ahead: Array  # [V, D + 1] the token of the text, and the D tokens after it
    mask: int  # id of the mask token

    @property
    def names(self) -> tuple[str, str]:
        """The tables of the bigram: of the token before, and of the token itself."""
        if self.kind == "dspark":
            return "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
        prefix = "candidate_selector."
        return f"{prefix}predecessor_codebook", f"{prefix}successor_codebook"


def make_plan(
    kind: str,
    config: Config,
    draft: Config,
    seed: int,
    acceptance: float,
    draft_vocab: int,
    second: float,
) -> Plan:
    """Returns the plan. `config`, `draft`: configs of the target and the draft, with overrides."""
    mask, rows = size(draft, "mask_token_id"), size(draft, "block_size")
    if mask >= config["vocab_size"]:
        raise SystemExit(
            f"mask_token_id is {mask}, expected an id below the target's {config['vocab_size']}"
        )
    pair = lay_out(config | {"mask_token_id": mask}, seed, acceptance, draft_vocab, second)
    ahead = [pair.embed_rows]
    for _ in range(rows if kind == "dspark" else rows - 1):
        ahead.append(pair.next_token[ahead[-1]])
    copied = size(draft, "num_key_value_heads") * size(draft, "head_dim")
    num_ahead = min(copied, config["hidden_size"] // 2)
    return Plan(kind, pair, config, draft, seed, num_ahead, np.stack(ahead, axis=1), mask)


def unit_vectors(source: Source, seed: int, count: int, columns: int) -> Array:
    """All unit vectors [count, columns] of a seed, in float32."""
    index = np.arange(count)
    chunks = source.vectors(seed, count, index, columns, 1.0, "float32")
    return np.concatenate([chunk.copy() for chunk in chunks]).reshape(count, columns)


def table(
    plan: Plan,
    own: tuple[Array, float],
    ahead: tuple[Array, float],
    marks: Array,
) -> Fill:
    """A fill with rows of three parts: sums of ahead vectors, a unit vector, two elements.

    `own`: index [V] and norm. `ahead`: indices [V, k], of which -1 is no vector, and norm. `marks`:
    the last two elements [V, 2].
    """
    vocab, hidden, n = plan.target["vocab_size"], plan.target["hidden_size"], plan.num_ahead
    indices, norm = ahead

    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        of_ahead = unit_vectors(source, tensor_seed(plan.seed, "ahead"), vocab, n)
        of_token, begin = tensor_seed(plan.seed, "planted"), 0
        columns = hidden - n - marks.shape[1]
        for chunk in source.vectors(of_token, vocab, own[0], columns, own[1], "float32"):
            rows = chunk.reshape(-1, columns)
            here = slice(begin, begin + len(rows))
            begin += len(rows)
            made = np.zeros((len(rows), hidden), np.float32)
            for index in indices[here].T:
                made[:, :n] += of_ahead[index] * (index >= 0)[:, None]
            made[:, :n] *= np.float32(norm)
            made[:, n:-2] = rows
            made[:, -2:] = marks[here]
            yield encode(made.ravel(), dtype)

    return fill


def head_input(target: Config) -> float:
    """The factor of the head's input in the target. In the draft it is 1."""
    hidden: int = target["hidden_size"]
    factor: float = target.get("dim_model_base", hidden) / hidden
    return factor


def target_tables(plan: Plan) -> dict[str, Fill]:
    """The embedding table and lm_head."""
    config = plan.target
    root = math.sqrt(config["hidden_size"])
    of_head, of_table = head_input(config), config.get("scale_emb", 1.0)
    vocab, announced = plan.ahead.shape
    is_mask = np.arange(vocab) == plan.mask
    own = np.where(is_mask, plan.mask, plan.pair.embed_rows)
    ahead = np.where(is_mask[:, None], -1, plan.ahead)
    marks = np.column_stack([np.full(vocab, ONE), np.where(is_mask, -ROOT, ROOT)]) / of_table
    share = math.sqrt(1 - AHEAD**2)
    ids = np.arange(vocab)[:, None]
    return {
        "model.embed_tokens.weight": table(
            plan,
            (own, share * root / of_table),
            (ahead, AHEAD * root / math.sqrt(announced) / of_table),
            marks,
        ),
        "lm_head.weight": table(
            plan,
            (plan.pair.head_rows, TOP_LOGIT / share / root / of_head),
            (ids, FLAT_LOGIT * math.sqrt(announced) / root / of_head),
            np.zeros((vocab, 2)),
        ),
    }


def target_tensors(preset: Preset, config: Config, plan: Plan) -> Iterator[TensorSpec]:
    tables = target_tables(plan)
    quieten = mtp_acceptance.quiet if preset.tensors is hybrid_tensors else quiet
    for spec in preset.tensors(config):
        fill = tables.get(spec.name)
        yield TensorSpec(spec.name, spec.shape, fill) if fill else quieten(spec, config)


def bigram_tables(plan: Plan) -> dict[str, Fill]:
    """The two tables of the bigram. Scores are dot products of their rows."""
    pair, (before, after) = plan.pair, plan.names
    vocab = len(pair.next_token)
    token = plan.ahead[:, 0]
    bigram, gap = (logit / head_input(plan.target) for logit in (BIGRAM, SECOND_GAP))
    rescued = np.isin(token, pair.second_rows[pair.second_rows >= 0])
    of_next = np.where(pair.accepted, bigram, np.where(rescued, bigram - gap, -bigram))
    of_same = np.where(rescued, bigram, 0.0)
    ids = np.arange(vocab)

    def rows(*parts: tuple[Array, Array]) -> Fill:
        """A fill whose rows are sums of unit vectors times factors: (index, factor) of each row."""

        def fill(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
            rank = count // vocab
            units = unit_vectors(source, tensor_seed(plan.seed, "bigram"), vocab, rank)
            made = np.zeros((vocab, rank), np.float32)
            for index, factor in parts:
                made += units[index] * (factor / math.sqrt(bigram)).astype(np.float32)[:, None]
            yield encode(made.ravel(), dtype)

        return fill

    return {
        before: rows((pair.next_token, of_next), (token, of_same)),
        after: rows((ids, np.full(vocab, bigram))),
    }


def copying_entries(plan: Plan) -> dict[str, Entries]:
    """The chosen elements of fc and of the last layer's projections, by module."""
    hidden, n = plan.draft["hidden_size"], plan.num_ahead
    d, heads = size(plan.draft, "head_dim"), size(plan.draft, "num_attention_heads")
    kv_heads = size(plan.draft, "num_key_value_heads")
    # The slowest quarter of the rotary pairs (i, i + d / 2) hardly rotates.
    slow = np.concatenate([np.arange(3 * d // 8, d // 2), np.arange(7 * d // 8, d)])

    def reading(num_heads: int, column: int) -> Entries:
        rows = (np.arange(num_heads)[:, None] * d + slow).ravel()
        return Entries.of(rows, np.array(column), 1.0)

    passed, group = np.arange(n), heads // kv_heads
    of_group = passed // d * group + np.arange(group)[:, None]  # query heads that read an element
    diagonal, signs = np.arange(hidden), np.ones(hidden, np.float32)
    signs[-1] = -1
    module = f"layers.{plan.draft['num_hidden_layers'] - 1}.self_attn."
    return {
        "fc": Entries(diagonal, diagonal, signs),
        f"{module}q_proj": reading(heads, hidden - 2),
        f"{module}k_proj": reading(kv_heads, hidden - 1),
        f"{module}v_proj": Entries.of(passed, passed, 1.0),
        f"{module}o_proj": Entries.of(passed, of_group * d + passed % d, COPIED / group),
    }


def gate_entries(plan: Plan) -> Entries:
    """The elements of DFlash2's hidden_projection [r, H]. They make all gates about 1."""
    hidden, rank = plan.draft["hidden_size"], size(plan.draft, "selector_rank")
    vectors = 1 + (COPIED**2 - 1) * AHEAD**2
    rms = math.sqrt(vectors + (ONE**2 + ROOT**2) / hidden)  # RMS of a row before the last norm
    return Entries.of(np.arange(rank), np.array(hidden - 2), rms / ONE)


def draft_tensors(plan: Plan, quant: str | None = None) -> Iterator[TensorSpec]:
    """The tensors of the draft. Formats other than gptq leave the copying matrices dense."""
    chosen, tables = copying_entries(plan), bigram_tables(plan)
    gates = "candidate_selector.hidden_projection"
    last = f"layers.{plan.draft['num_hidden_layers'] - 1}."
    for spec in block_tensors(plan.draft):
        module = spec.name.removesuffix(".weight")
        if module in chosen:
            yield from entries_matrix(module, *spec.shape, chosen[module], quant == "gptq")
        elif module == gates:
            yield from entries_matrix(module, *spec.shape, gate_entries(plan), False)
        elif spec.name in tables:
            yield TensorSpec(spec.name, spec.shape, tables[spec.name])
        elif module == f"{last}self_attn.q_norm":
            yield TensorSpec(spec.name, spec.shape, normal(0.0, mean=SHARPNESS))
        else:
            made = quiet(spec, plan.draft)
            yield from quantised([made], quant) if quant else [made]


def block_pair(
    preset: Preset,
    config: Config,
    seed: int,
    acceptance: float,
    draft_vocab: int,
    kind: str,
    changes: Config,
    quant: str | None = None,
    second: float = 0.0,
) -> tuple[Preset, Preset]:
    """The presets of target and draft.

    `config`: the target's, with overrides. `changes`, `quant`: overrides and format of the draft.
    """
    if config.get("common_experts"):
        raise SystemExit("common_experts needs embeddings with a mean, which --acceptance replaces")
    config = config | {"tie_word_embeddings": False}
    draft = block_config(kind, config) | {"planted_acceptance": acceptance}
    if "scale_emb" in config:
        draft["input_embedding_scale"] = config["scale_emb"]
    draft |= changes
    num_inputs(draft)  # checks target_layer_ids
    if stated(draft, "hidden_size") != config["hidden_size"]:
        raise SystemExit("the draft's hidden_size must be the target's")
    plan = make_plan(kind, config, draft, seed, acceptance, draft_vocab, second)
    target = replace(preset, config=config, tensors=lambda c: target_tensors(preset, c, plan))
    return target, Preset(
        draft, {}, lambda c: draft_tensors(plan, quant), draft=True, quantised=True
    )
