"""node_scores, node_rows and node_draft against a float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.drafted_paths import Path, RandomCandidates, check_drafted
from tests.kernels.util import (
    context,
    get,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    put_ints,
    put_raw,
    sizes,
)
from tests.reference.block_draft import PathLattice


class Grown(RandomCandidates):
    """Random candidates and corrections; a tree of them, grown by the ops."""

    def __init__(self, dtype: str, num_seqs: int, depth: int, topk: int, width: int) -> None:
        super().__init__(dtype, num_seqs, depth, topk, width, 2 / np.sqrt(width))

    def moving(self, seq: int, path: Path) -> Any:
        """Returns `moving` of gru_chain.h for the state after a path of tokens."""
        rng = np.random.default_rng([seq, *(token + 1 for token in path)])
        return rng.standard_normal(self.fixed.shape[1]).astype(np.float32)

    def lattice(self, seq: int) -> PathLattice:
        candidates = self.candidates[seq]
        own = np.where(candidates < 0, np.nan, self.logprobs[seq]).astype(np.float64)

        def below(path: Path) -> Any:
            level = len(path)
            logits = own[level].copy()
            if path:
                tokens = tuple(int(candidates[i, c]) for i, c in enumerate(path))
                hidden = self.fixed[seq * self.shape[1] + level] + self.moving(seq, tokens)
                hidden = hidden.astype(np.float64)
                hidden /= 1 + np.exp(-hidden)
                logits = logits + self.successors[candidates[level]] @ hidden
            rest = max(0.0, 1 - float(np.nansum(np.exp(own[level]))))
            scores = logits - np.log(np.nansum(np.exp(logits)) + rest)
            return np.where(np.isnan(scores), -np.inf, scores)

        return PathLattice(candidates, below)

    def grow(self, device: str, num_rows: int, longest: int) -> Any:
        num_seqs, _, topk = self.shape
        made = (longest, num_seqs, num_rows)
        tokens, parents = (put_ints(device, np.full(made, -7)) for _ in range(2))
        row_scores = put(device, np.full(made, 7.0))
        rows = {"tokens": tokens, "parents": parents, "row_scores": row_scores}
        candidates = put_ints(device, self.candidates)
        scores = put(device, np.full((num_seqs, num_rows, topk), np.nan))
        state_rows = put_ints(device, np.full(num_seqs * num_rows, -7))
        roots = put_ints(device, np.full(num_seqs, -7))
        paths: list[list[Path]] = [[()] for _ in range(num_seqs)]  # tokens of each row
        for level in range(longest):
            moving = np.zeros((num_seqs, num_rows, self.fixed.shape[1]))
            for seq in range(num_seqs):
                for row, path in enumerate(paths[seq]):
                    moving[seq, row] = self.moving(seq, path)
            corrected = {
                "fixed": put(device, self.fixed),
                "moving": put(device, moving.reshape(num_seqs * num_rows, -1)),
            }
            ops.node_scores(
                context(device), **rows, candidates=candidates, level=level,
                logprobs=put_raw(device, self.logprobs), **(corrected if level else {}),
                successors=put(device, self.successors, self.dtype), scores=scores,
                seq_slots=put_ints(device, self.slots), next_tokens=put_ints(device, self.roots),
                roots=roots,
            )  # fmt: skip
            ops.node_rows(
                context(device), **rows, candidates=candidates, level=level, scores=scores,
                state_rows=state_rows,
            )  # fmt: skip
            found, above = tokens.numpy()[level], parents.numpy()[level]
            sources = np.arange(num_seqs)[:, None] * (num_rows if level else 1)
            assert np.array_equal(
                state_rows.numpy().reshape(num_seqs, num_rows), sources + above * (level > 0)
            )
            paths = [
                [
                    (*paths[seq][above[seq, row]], int(found[seq, row]))
                    for row in range(num_rows)
                    if found[seq, row] >= 0
                ]
                for seq in range(num_seqs)
            ]
            ordered = get(row_scores)[level]
            for seq in range(num_seqs):
                assert len(set(paths[seq])) == len(paths[seq])
                assert (np.diff(ordered[seq, : len(paths[seq])]) <= 0).all()
                assert np.isneginf(ordered[seq, len(paths[seq]) :]).all()
        assert roots.numpy().tolist() == self.roots[self.slots].tolist()
        shape = (num_seqs, num_rows)
        tokens, parents = (put_ints(device, np.full(shape, -7)) for _ in range(2))
        scores = put(device, np.zeros(shape))
        ops.node_draft(
            context(device), **rows, depth=longest,
            draft=ops.Draft(tokens=tokens, parents=parents, scores=scores),
        )  # fmt: skip
        return tokens.numpy(), parents.numpy(), scores.numpy()

    def check(self, device: str, num_rows: int, longest: int) -> None:
        for seq, (tokens, parents, scores) in enumerate(zip(*self.grow(device, num_rows, longest))):
            lattice = self.lattice(seq)
            best = [lattice.score(path) for path in lattice.tree(longest, num_rows + 1)]
            best = [score for score in best if score > -np.inf]
            check_drafted(lattice, best, tokens, parents, scores)
            assert (parents[len(best) :] == 0).all()


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("num_seqs", "depth", "topk", "width"),
    sizes((1, 1, 1, 8), (3, 4, 5, 16), (1, 7, 16, 256), (2, 15, 32, 64), (1, 16, 2, 520)),
)
def test_trees(device: str, dtype: str, num_seqs: int, depth: int, topk: int, width: int) -> None:
    case = Grown(dtype, num_seqs, depth, topk, width)
    for num_rows in (1, 2, 15, 63):
        for longest in {1, depth}:
            case.check(device, num_rows, longest)


@on_devices
def test_missing_candidates_are_never_drafted(device: str) -> None:
    case = Grown("float16", 3, 4, 3, 16)
    case.logprobs[0, 1, 2] = np.nan
    case.logprobs[0, 2, 0] = -np.inf
    case.candidates[1, 2] = -1
    case.candidates[2, 0] = -1
    for num_rows in (4, 40):
        case.check(device, num_rows, 4)


@on_devices
def test_equal_scores(device: str) -> None:
    """The earlier level is first, then the earlier row, then the lower candidate."""
    case = Grown("float16", 1, 3, 2, 8)
    case.successors[:] = 0
    case.logprobs[:] = np.log([0.5, 0.5])
    case.candidates[:] = [[[1, 2], [3, 4], [5, 6]]]
    tokens, parents, _ = case.grow(device, 9, 3)
    assert tokens.tolist() == [[1, 2, 3, 4, 3, 4, 5, 6, 5]]
    assert parents.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3, 4]]
    case.logprobs[:] = np.log([1.0, 1e-30])  # a child is as likely as its parent
    tokens, parents, _ = case.grow(device, 3, 3)
    assert tokens.tolist() == [[1, 3, 5]] and parents.tolist() == [[0, 1, 2]]


def test_wrong_shapes() -> None:
    case = Grown("float32", 1, 2, 3, 8)
    with pytest.raises(ValueError, match="of 64 rows, level 0 of 2, top-k 3; expected 1 to 63"):
        case.grow("cpu", 64, 2)
    case.fixed = case.fixed[:1]
    with pytest.raises(ValueError, match=r"fixed is float32 \[1, 8\]"):
        case.grow("cpu", 4, 2)
