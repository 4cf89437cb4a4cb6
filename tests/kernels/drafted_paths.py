"""Random candidates of drafts, and checks of drafted trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.kernels.util import rounded
from tests.reference.block_draft import PathLattice

VOCAB = 300
Path = tuple[int, ...]


class RandomCandidates:
    """Candidates of each position, the root's slots, and what corrects log-probabilities.

    `scale`: standard deviation of the successors.
    """

    def __init__(
        self, dtype: str, num_seqs: int, depth: int, topk: int, width: int, scale: float = 1
    ) -> None:
        self.rng = rng = np.random.default_rng([num_seqs, depth, topk, width])
        self.dtype, self.shape = dtype, (num_seqs, depth, topk)
        self.slots = rng.permutation(num_seqs + 2)[:num_seqs]
        self.roots = rng.integers(VOCAB, size=num_seqs + 2)
        drawn = [rng.permutation(VOCAB)[:topk] for _ in range(num_seqs * depth)]
        self.candidates = np.array(drawn).reshape(self.shape)
        logits = rng.standard_normal(self.shape)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True) + rng.uniform(0.01, 2))
        self.logprobs = logits.astype(np.float32)
        self.successors = rounded(scale * rng.standard_normal((VOCAB, width)), dtype)
        self.fixed = rng.standard_normal((num_seqs * depth, width)).astype(np.float32)


def check_drafted(
    lattice: PathLattice, best: Sequence[float], tokens: Any, parents: Any, scores: Any
) -> None:
    """Asserts that a draft [N] has distinct paths with the scores `best`, and then no token."""
    count = len(best)
    paths: list[Path] = [()]
    for token, parent in zip(tokens[:count], parents):
        above = paths[parent]  # a parent precedes its children
        paths.append((*above, lattice.tokens[len(above)].tolist().index(token)))
    assert len(set(paths)) == len(paths)
    drafted = [lattice.score(path) for path in paths[1:]]
    assert np.allclose(drafted, best, atol=1e-4, rtol=0)
    assert np.allclose(scores[:count], best, atol=1e-4, rtol=0)
    assert (tokens[count:] == -1).all() and np.isneginf(scores[count:]).all()
