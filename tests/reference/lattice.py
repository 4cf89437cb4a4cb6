"""Lattices of block drafters: scores of pairs, and trees (csrc/kernels/tree/lattice.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
NONE = -np.inf


def pair_scores(
    candidates: Array,
    logprobs: Array,
    roots: Sequence[int],
    predecessors: Array,
    successors: Array,
    *,
    id_map: Array | None = None,
    gates: Array | None = None,
    predecessor_gates: Array | None = None,
    keeps_rest: bool = False,
) -> tuple[Array, Array]:
    """Returns (target ids [B, D, K], scores [B, D, K, K]). At depth 0 only parent 0 counts."""
    num_seqs, depth, topk = candidates.shape
    tokens = candidates.copy()
    if id_map is not None:
        tokens[candidates >= 0] = id_map[candidates[candidates >= 0]]
    pairs = np.full((num_seqs, depth, topk, topk), NONE)
    for b, d, a in np.ndindex(num_seqs, depth, topk):
        parent = roots[b] if d == 0 else tokens[b, d - 1, a]
        if parent < 0 or (d == 0 and a > 0):
            continue
        known = np.where((candidates[b, d] < 0) | np.isnan(logprobs[b, d]), NONE, logprobs[b, d])
        gate = 1 if gates is None else gates[b * depth + d]
        if predecessor_gates is not None:
            gate = 1 / (1 + np.exp(-gate - predecessor_gates[parent]))
        left = predecessors[parent] * gate
        logits = known + np.array([left @ successors[c] if c >= 0 else 0 for c in candidates[b, d]])
        mass = np.exp(known).sum()
        with np.errstate(divide="ignore"):
            if keeps_rest:
                pairs[b, d, a] = logits - np.log(np.exp(logits).sum() + max(0, 1 - mass))
            elif mass > 0:
                pairs[b, d, a] = logits - np.log(np.exp(logits).sum()) + np.log(mass)
    return tokens, pairs


def all_paths(scores: Array, depth: int, off_path: float) -> dict[tuple[int, ...], float]:
    """Returns the scores of all paths of a sequence. `scores` is [D, K] or [D, K, K]."""
    found: dict[tuple[int, ...], float] = {}

    def grow(path: tuple[int, ...], total: np.float32, on_path: bool) -> None:
        d = len(path)
        if d == depth:
            return
        row = scores[d] if scores.ndim == 2 else scores[d, path[-1] if path else 0]
        row = np.where(np.isnan(row), NONE, row).astype(np.float32)
        for i, own in enumerate(row):
            if own == NONE:
                continue
            score = np.float32(total + own) + np.float32(0 if on_path else off_path)
            found[(*path, i)] = float(score)
            grow((*path, i), score, on_path and i == int(np.argmax(row)))

    grow((), np.float32(0), True)
    return found


def greedy_path(scores: Array, depth: int) -> list[int]:
    """The best candidate at each depth below the one before, as long as there is one."""
    path: list[int] = []
    for d in range(depth):
        row = scores[d] if scores.ndim == 2 else scores[d, path[-1] if path else 0]
        row = np.where(np.isnan(row), NONE, row)
        if row.max() == NONE:
            break
        path.append(int(np.argmax(row)))
    return path


def path_scores(scores: Array, path: Sequence[int]) -> list[float]:
    """The score of the path down to each of its candidates."""
    totals, total = [], np.float32(0)
    for d, i in enumerate(path):
        row = scores[d] if scores.ndim == 2 else scores[d, path[d - 1] if d else 0]
        total = np.float32(total + row[i])
        totals.append(float(total))
    return totals
