"""Block-sparse attention after InfLLM-v2 in float64: compress, score, pool, select, attend.

A slow restatement of the rule in docs/kernels/sparse_attention.md, one query at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.reference.ops import attention_row

F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

BLOCK = 64
FINE = (32, 16)  # tokens of a fine compressed key, and tokens from one to the next
COARSE = (128, 64)


@dataclass(frozen=True)
class Rule:
    init_blocks: int = 1
    window_size: int = 2048  # tokens
    topk: int = 64
    dense_len: int = 8192


def compress(k: F64, spans: tuple[int, int]) -> F64:
    """Returns the mean [spans, Hkv, D] of each complete span of k [tokens, Hkv, D]."""
    length, stride = spans
    begins = range(0, len(k) - length + 1, stride)
    return np.array([k[i : i + length].mean(axis=0) for i in begins]).reshape(-1, *k.shape[1:])


def num_visible(position: int, spans: tuple[int, int]) -> int:
    """Number of compressed keys that end at or before block q - 1 of the query's block q."""
    length, stride = spans
    end = BLOCK * (position // BLOCK - 1)
    return max(0, (end - length) // stride + 1)


def block_scores(q: F64, fine: F64, coarse: F64, position: int, scale: float) -> F64:
    """Returns scores [Hkv, blocks before the query's]. A block without a visible key has -inf.

    q [Hq, D]; fine and coarse: compressed keys [spans, Hkv, D].
    """
    num_kv_heads = fine.shape[1]
    group = len(q) // num_kv_heads
    fine = fine[: num_visible(position, FINE)]
    coarse = coarse[: num_visible(position, COARSE)]
    scores = np.full((num_kv_heads, position // BLOCK), -np.inf)
    for head in range(num_kv_heads):
        total = np.zeros(len(fine))
        for h in range(head * group, (head + 1) * group):
            s = scale * fine[:, head] @ q[h]
            reference = scale * coarse[:, head] @ q[h]
            total += np.exp(s - reference.max()) / np.exp(reference - reference.max()).sum()
        for block in range(scores.shape[1]):
            near = total[max(0, 4 * block - 1) : 4 * block + 4]
            scores[head, block] = near.max(initial=-np.inf)
    return scores


def candidates(position: int, rule: Rule) -> range:
    """The blocks between the first ones and the window."""
    return range(rule.init_blocks, position // BLOCK - rule.window_size // BLOCK + 1)


def selected_blocks(
    q: F64, fine: F64, coarse: F64, position: int, rule: Rule, scale: float
) -> Bools:
    """Returns bool [Hkv, blocks up to the query's]: does the query attend to the block?"""
    own = position // BLOCK
    chosen = np.zeros((fine.shape[1], own + 1), bool)
    if position < rule.dense_len:
        chosen[:] = True
        return chosen
    chosen[:, : rule.init_blocks] = True
    chosen[:, max(0, own + 1 - rule.window_size // BLOCK) :] = True
    between = candidates(position, rule)
    count = rule.topk - rule.init_blocks
    if count == 0:
        return chosen
    if len(between) <= count:
        chosen[:, list(between)] = True
        return chosen
    scores = block_scores(q, fine, coarse, position, scale)[:, between.start : between.stop]
    for head, of_head in enumerate(scores):
        best = sorted(range(len(between)), key=lambda i: (-of_head[i], i))[:count]
        chosen[head, [between[i] for i in best]] = True
    return chosen


def attend(q: F64, k: F64, v: F64, position: int, chosen: Bools, scale: float) -> F64:
    """q [Hq, D] over k and v [tokens, Hkv, D] up to `position` in the chosen blocks."""
    group = len(q) // k.shape[1]
    out = np.empty_like(q)
    for head, blocks in enumerate(chosen):
        tokens = np.flatnonzero(np.repeat(blocks, BLOCK)[: position + 1])
        heads = slice(head * group, (head + 1) * group)
        of_head = slice(head, head + 1)
        out[heads] = attention_row(q[heads], k[tokens, of_head], v[tokens, of_head], scale)
    return out


def attention(q: F64, k: F64, v: F64, rule: Rule, scale: float, first: int = 0) -> F64:
    """q [T, Hq, D] of the positions from `first` on; all of k and v [tokens, Hkv, D]."""
    fine, coarse = compress(k, FINE), compress(k, COARSE)
    rows = []
    for position, row in enumerate(q, first):
        chosen = selected_blocks(row, fine, coarse, position, rule, scale)
        rows.append(attend(row, k, v, position, chosen, scale))
    return np.array(rows)
