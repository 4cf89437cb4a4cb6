"""block_rows, pair_scores and lattice_tree against slow references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.util import (
    context,
    get,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    put_ints,
    put_raw,
    rounded,
    sizes,
)
from tests.reference import lattice as reference

VOCAB = 1000


@on_devices
@pytest.mark.parametrize("num_rows", sizes(1, 2, 8, 17, 64))
@pytest.mark.parametrize("num_seqs", sizes(1, 3, 32))
def test_rows_of_a_block(device: str, num_rows: int, num_seqs: int) -> None:
    rng = np.random.default_rng(num_rows)
    slots = rng.permutation(num_seqs + 2)[:num_seqs]
    lengths, roots = rng.integers(5000, size=(2, num_seqs + 2))
    shape = (num_seqs, num_rows)
    ids, positions, seqs = (put_ints(device, np.full(shape, -7)) for _ in range(3))
    begin = put_ints(device, np.full(num_seqs + 1, -7))
    masks = put_raw(device, np.zeros(shape, np.uint64))
    mask_rows = put_ints(device, np.full((num_seqs, max(1, num_rows - 1)), -7))
    ops.block_rows(
        context(device), mask_id=99, seq_slots=put_ints(device, slots),
        lengths=put_ints(device, lengths), next_tokens=put_ints(device, roots), ids=ids,
        positions=positions, token_seqs=seqs, seq_token_begin=begin, all_masks=masks,
        mask_rows=mask_rows,
    )  # fmt: skip
    expected = np.full(shape, 99)
    expected[:, 0] = roots[slots]
    assert np.array_equal(ids.numpy(), expected)
    assert np.array_equal(positions.numpy(), lengths[slots][:, None] + np.arange(num_rows))
    assert np.array_equal(seqs.numpy(), np.arange(num_seqs)[:, None].repeat(num_rows, 1))
    assert np.array_equal(begin.numpy(), np.arange(num_seqs + 1) * num_rows)
    assert (masks.numpy() == np.uint64(2**num_rows - 1)).all()
    if num_rows > 1:
        rows = np.arange(num_seqs * num_rows).reshape(shape)[:, 1:]
        assert np.array_equal(mask_rows.numpy(), rows)


# ---- pairs


class Pairs:
    """Random candidates and codebooks of rank r."""

    def __init__(self, dtype: str, num_seqs: int, depth: int, topk: int, rank: int) -> None:
        rng = np.random.default_rng([num_seqs, depth, topk, rank])
        self.dtype = dtype
        drafted = VOCAB // 2
        self.slots = rng.permutation(num_seqs + 2)[:num_seqs]
        self.roots = rng.integers(VOCAB, size=num_seqs + 2)
        drawn = [rng.permutation(drafted)[:topk] for _ in range(num_seqs * depth)]
        self.candidates = np.array(drawn).reshape(num_seqs, depth, topk)
        logits = -np.sort(-rng.standard_normal(self.candidates.shape) * 2)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True) + rng.uniform(0.01, 2))
        self.logprobs = logits.astype(np.float32)
        self.id_map = rng.permutation(VOCAB)[:drafted]
        self.predecessors = rounded(rng.standard_normal((VOCAB, rank)), dtype)
        self.successors = rounded(rng.standard_normal((drafted, rank)) / np.sqrt(rank), dtype)
        self.gates = rounded(rng.standard_normal((num_seqs * depth, rank)), dtype)
        self.predecessor_gates = rounded(2 * rng.standard_normal((VOCAB, rank)), dtype)

    def run(
        self, device: str, *, gated: bool, mapped: bool, both: bool = False, **flags: Any
    ) -> tuple[Any, Any]:
        tokens = put_ints(device, np.full(self.candidates.shape, -7))
        pairs = put(device, np.zeros((*self.candidates.shape, self.candidates.shape[-1])))
        ops.pair_scores(
            context(device), candidates=put_ints(device, self.candidates),
            logprobs=put(device, self.logprobs), seq_slots=put_ints(device, self.slots),
            next_tokens=put_ints(device, self.roots), tokens=tokens, pairs=pairs,
            id_map=put_ints(device, self.id_map) if mapped else None,
            predecessors=put(device, self.predecessors, self.dtype),
            successors=put(device, self.successors, self.dtype),
            gates=put(device, self.gates, self.dtype) if gated else None,
            predecessor_gates=put(device, self.predecessor_gates, self.dtype) if both else None,
            **flags,
        )  # fmt: skip
        return tokens.numpy(), get(pairs)

    def check(
        self, device: str, *, gated: bool, mapped: bool, keeps_rest: bool, both: bool = False
    ) -> None:
        """Compares the scores. `both`: the gates depend on the predecessor, too."""
        tokens, pairs = self.run(
            device, gated=gated, mapped=mapped, both=both, keeps_rest=keeps_rest
        )
        expected_tokens, expected = reference.pair_scores(
            self.candidates, self.logprobs, self.roots[self.slots].tolist(), self.predecessors,
            self.successors, id_map=self.id_map if mapped else None,
            gates=self.gates if gated else None,
            predecessor_gates=self.predecessor_gates if both else None, keeps_rest=keeps_rest,
        )  # fmt: skip
        assert np.array_equal(tokens, expected_tokens)
        pairs[:, 0, 1:], expected[:, 0, 1:] = 0, 0  # the root is the only parent at depth 0
        missing = np.isneginf(expected)
        assert np.array_equal(np.isneginf(pairs), missing)
        assert np.abs(pairs[~missing] - expected[~missing]).max(initial=0) < 1e-4


@on_devices_and_dtypes
@pytest.mark.parametrize("keeps_rest", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("num_seqs", "depth", "topk", "rank"),
    sizes((1, 1, 1, 8), (2, 3, 3, 16), (1, 7, 16, 256), (3, 15, 32, 64), (1, 4, 32, 520)),
)
def test_pairs(
    device: str,
    dtype: str,
    num_seqs: int,
    depth: int,
    topk: int,
    rank: int,
    gated: bool,
    keeps_rest: bool,
) -> None:
    case = Pairs(dtype, num_seqs, depth, topk, rank)
    case.check(device, gated=gated, mapped=gated != keeps_rest, keeps_rest=keeps_rest)
    if gated:
        case.check(device, gated=True, mapped=not keeps_rest, keeps_rest=keeps_rest, both=True)


def test_pairs_of_any_rank_on_the_cpu() -> None:
    for rank in (1, 7):
        case = Pairs("float32", 2, 3, 4, rank)
        case.check("cpu", gated=True, mapped=True, keeps_rest=False)


@on_devices
@pytest.mark.parametrize("keeps_rest", [False, True])
def test_missing_candidates_spoil_no_others(device: str, keeps_rest: bool) -> None:
    case = Pairs("float16", 2, 4, 5, 16)
    case.logprobs[0, 1, 2] = np.nan
    case.logprobs[1, 2, 4] = -np.inf
    case.candidates[0, 2, 1] = -1
    case.candidates[1, 3] = -1
    case.check(device, gated=True, mapped=True, keeps_rest=keeps_rest)


# ---- trees


class Trees:
    """Random lattices, with or without pairs."""

    def __init__(self, num_seqs: int, depth: int, topk: int, pairs: bool, seed: int = 0) -> None:
        rng = np.random.default_rng([num_seqs, depth, topk, pairs, seed])
        self.tokens = rng.integers(VOCAB, size=(num_seqs, depth, topk))
        shape = (num_seqs, depth, topk, topk) if pairs else (num_seqs, depth, topk)
        scores = rng.standard_normal(shape) * 2
        scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
        self.scores = scores.astype(np.float32)

    def run(self, device: str, num_tokens: int, depth: int, **flags: Any) -> Any:
        shape = (len(self.tokens), num_tokens)
        tokens, parents = (put_ints(device, np.full(shape, -7)) for _ in range(2))
        scores = put(device, np.zeros(shape))
        key = "pairs" if self.scores.ndim == 4 else "scores"
        ops.lattice_tree(
            context(device), candidates=put_ints(device, self.tokens),
            **{key: put(device, self.scores)}, depth=depth,
            draft=ops.Draft(tokens=tokens, parents=parents, scores=scores), **flags,
        )  # fmt: skip
        return tokens.numpy(), parents.numpy(), scores.numpy()

    def check_tree(self, device: str, num_tokens: int, depth: int, off_path: float = 0) -> None:
        drafts = self.run(device, num_tokens, depth, off_path=off_path)
        for seq, (tokens, parents, scores) in enumerate(zip(*drafts)):
            paths = reference.all_paths(self.scores[seq], depth, off_path)
            num_drafted = min(num_tokens, len(paths))
            assert (tokens[num_drafted:] == -1).all() and (parents[num_drafted:] == 0).all()
            assert np.isneginf(scores[num_drafted:]).all()
            best = sorted(paths.values(), reverse=True)[:num_drafted]
            assert scores[:num_drafted].tolist() == best
            seen: dict[int, tuple[int, ...]] = {0: ()}
            left = dict(paths)
            for node, (token, parent, score) in enumerate(zip(tokens, parents, scores), 1):
                if node > num_drafted:
                    break
                above = seen[int(parent)]  # a parent precedes its children
                own = self.tokens[seq, len(above)]
                fits = [
                    (*above, i)
                    for i in range(len(own))
                    if own[i] == token and left.get((*above, i)) == score
                ]
                assert fits
                seen[node] = fits[0]
                del left[fits[0]]


@on_devices
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("num_seqs", "depth", "topk"), sizes((1, 1, 1), (3, 4, 4), (2, 3, 7), (1, 2, 32), (2, 1, 32))
)
def test_a_tree_has_the_best_paths(
    device: str, num_seqs: int, depth: int, topk: int, pairs: bool
) -> None:
    for seed, num_tokens in enumerate((1, 2, 5, 20, 63)):
        for most in {1, depth}:
            trees = Trees(num_seqs, depth, topk, pairs, seed)
            trees.check_tree(device, num_tokens, most)
            trees.check_tree(device, num_tokens, most, off_path=-1.25)


@on_devices
@pytest.mark.parametrize("pairs", [False, True])
def test_equal_scores(device: str, pairs: bool) -> None:
    """Of equal candidates the lowest index is first. Equal nodes come in their parents' order."""
    trees = Trees(2, 3, 4, pairs)
    trees.scores[:] = -1.0
    trees.scores[1] = 0.0
    trees.check_tree(device, 30, 3)
    _, parents, _ = trees.run(device, 6, 3)
    assert parents[0].tolist() == [0, 0, 0, 0, 1, 2]


@on_devices
@pytest.mark.parametrize("pairs", [False, True])
def test_impossible_candidates_are_never_drafted(device: str, pairs: bool) -> None:
    trees = Trees(3, 3, 4, pairs)
    trees.scores[0, 1] = -np.inf
    trees.scores[1, :, ..., 2] = np.nan
    trees.scores[2] = np.nan
    trees.check_tree(device, 40, 3)


@on_devices
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("topk", sizes(1, 5, 32))
def test_a_chain_is_the_greedy_path(device: str, topk: int, pairs: bool) -> None:
    trees = Trees(4, 6, topk, pairs)
    trees.scores[1, 3] = np.nan
    for num_tokens, depth in ((1, 6), (4, 6), (6, 6), (9, 6), (6, 2)):
        tokens, parents, scores = trees.run(device, num_tokens, depth, chain=True)
        assert (parents == np.arange(num_tokens)).all()
        for seq in range(4):
            path = reference.greedy_path(trees.scores[seq], min(depth, num_tokens))
            expected = [int(trees.tokens[seq, d, i]) for d, i in enumerate(path)]
            missing = num_tokens - len(path)
            assert tokens[seq].tolist() == expected + [-1] * missing
            best = reference.path_scores(trees.scores[seq], path)
            assert scores[seq].tolist() == best + [-np.inf] * missing


def test_refusals() -> None:
    trees = Trees(1, 3, 4, False)
    with pytest.raises(ValueError, match="paths of 4 tokens, expected 1 to the depth"):
        trees.run("cpu", 5, 4)
    with pytest.raises(ValueError, match="a draft of 64 tokens, expected at most 63"):
        trees.run("cpu", 64, 3)
