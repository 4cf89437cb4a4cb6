"""rnn_tree against a float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.drafted_paths import check_drafted
from tests.kernels.util import (
    context,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    put_ints,
    rounded,
    sizes,
)
from tests.reference.block_draft import PathLattice
from tests.reference.rnn_markov import RnnMarkov

VOCAB, HIDDEN, NODES = 400, 16, 64


class Rnn:
    """Random candidates, and a random network of rank r."""

    def __init__(self, dtype: str, num_seqs: int, depth: int, topk: int, rank: int) -> None:
        rng = np.random.default_rng([num_seqs, depth, topk, rank])
        self.dtype, self.shape, self.rank = dtype, (num_seqs, depth, topk), rank
        drafted = VOCAB // 2
        self.slots = rng.permutation(num_seqs + 2)[:num_seqs]
        self.roots = rng.integers(VOCAB, size=num_seqs + 2)
        drawn = [rng.permutation(drafted)[:topk] for _ in range(num_seqs * depth)]
        self.candidates = np.array(drawn).reshape(self.shape)
        logits = -np.sort(-rng.standard_normal(self.shape) * 2)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True) + rng.uniform(0.01, 2))
        self.logprobs = logits.astype(np.float32)
        self.id_map = rng.permutation(VOCAB)[:drafted]
        self.predecessors = rounded(rng.standard_normal((VOCAB, rank)), dtype)
        self.successors = rounded(3 * rng.standard_normal((drafted, rank)) / np.sqrt(rank), dtype)
        columns = 2 * rank + HIDDEN
        weight = 2 * rng.standard_normal((3 * rank, columns)) / np.sqrt(2 * rank)
        self.weight = rounded(weight, dtype)
        self.inputs = rng.standard_normal((num_seqs * depth, 3 * rank)).astype(np.float32)

    def run(self, device: str, num_tokens: int, longest: int, mapped: bool, chain: bool) -> Any:
        shape = (self.shape[0], num_tokens)
        tokens, parents = (put_ints(device, np.full(shape, -7)) for _ in range(2))
        scores = put(device, np.zeros(shape))
        ops.rnn_tree(
            context(device), candidates=put_ints(device, self.candidates),
            logprobs=put(device, self.logprobs),
            id_map=put_ints(device, self.id_map) if mapped else None,
            seq_slots=put_ints(device, self.slots), next_tokens=put_ints(device, self.roots),
            inputs=put(device, self.inputs), weight=put(device, self.weight, self.dtype),
            predecessors=put(device, self.predecessors, self.dtype),
            successors=put(device, self.successors, self.dtype),
            states=put(device, np.full((self.shape[0] * NODES, self.rank), np.nan)),
            longest=longest, chain=chain,
            draft=ops.Draft(tokens=tokens, parents=parents, scores=scores),
        )  # fmt: skip
        return tokens.numpy(), parents.numpy(), scores.numpy()

    def lattice(self, seq: int, mapped: bool) -> PathLattice:
        depth, candidates = self.shape[1], self.candidates[seq]
        tokens = np.where(candidates < 0, -1, self.id_map[candidates] if mapped else candidates)
        own = np.where(candidates < 0, np.nan, self.logprobs[seq]).astype(np.float64)
        rnn = RnnMarkov(
            own=own,
            root=self.predecessors[self.roots[self.slots[seq]]].astype(np.float64),
            predecessors=self.predecessors[tokens].astype(np.float64),
            successors=self.successors[candidates].astype(np.float64),
            inputs=self.inputs[seq * depth : (seq + 1) * depth].astype(np.float64),
            weight=self.weight[:, : 2 * self.rank].astype(np.float64),
        )
        return PathLattice(tokens, rnn.below)

    def check(
        self, device: str, num_tokens: int, longest: int, *, mapped: bool, chain: bool = False
    ) -> None:
        drafts = self.run(device, num_tokens, longest, mapped, chain)
        for seq, (tokens, parents, scores) in enumerate(zip(*drafts)):
            lattice = self.lattice(seq, mapped)
            nodes = min(num_tokens, longest) if chain else num_tokens
            best = [lattice.score(path) for path in expected(lattice, longest, nodes, chain)]
            best = best[: next((i for i, s in enumerate(best) if s == -np.inf), len(best))]
            check_drafted(lattice, best, tokens, parents, scores)
            left = np.arange(len(best), num_tokens) if chain else 0
            assert (parents[len(best) :] == left).all()


def expected(lattice: PathLattice, longest: int, nodes: int, chain: bool) -> list[Any]:
    if not chain:
        return lattice.tree(longest, nodes + 1)
    path = lattice.chain(nodes)
    return [tuple(path[: i + 1]) for i in range(nodes)]


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("num_seqs", "depth", "topk", "rank"),
    sizes((1, 1, 1, 8), (3, 4, 5, 16), (1, 7, 16, 256), (2, 15, 32, 64), (1, 3, 32, 520)),
)
def test_trees_and_chains(
    device: str, dtype: str, num_seqs: int, depth: int, topk: int, rank: int
) -> None:
    case = Rnn(dtype, num_seqs, depth, topk, rank)
    for i, num_tokens in enumerate((1, 2, 15, 63)):
        for longest in {1, depth}:
            case.check(device, num_tokens, longest, mapped=i % 2 == 0)
            case.check(device, min(num_tokens, 20), longest, mapped=i % 2 == 1, chain=True)


def test_any_rank_on_the_cpu() -> None:
    for rank in (1, 7):
        Rnn("float32", 2, 3, 4, rank).check("cpu", 20, 3, mapped=True)


@on_devices
@pytest.mark.parametrize("chain", [False, True])
def test_missing_candidates_are_never_drafted(device: str, chain: bool) -> None:
    case = Rnn("float16", 3, 4, 3, 16)
    case.logprobs[0, 1, 2] = np.nan
    case.logprobs[0, 2, 0] = -np.inf
    case.candidates[1, 2] = -1
    case.candidates[2, 0] = -1
    for num_tokens in (4, 40):
        case.check(device, num_tokens, 4, mapped=True, chain=chain)


def test_sequences_and_steps_are_alone() -> None:
    """A batch changes no bit of a sequence. Larger trees begin with smaller ones."""
    case = Rnn("bfloat16", 3, 5, 6, 32)
    tokens, parents, scores = case.run("cpu", 30, 5, mapped=True, chain=False)
    few = case.run("cpu", 9, 5, mapped=True, chain=False)
    assert all(np.array_equal(a[:, :9], b) for a, b in zip((tokens, parents, scores), few))
    for seq in range(3):
        one = Rnn("bfloat16", 3, 5, 6, 32)
        one.shape = (1, 5, 6)
        one.candidates, one.logprobs = one.candidates[[seq]], one.logprobs[[seq]]
        one.slots, one.inputs = one.slots[[seq]], one.inputs[seq * 5 : (seq + 1) * 5]
        alone = one.run("cpu", 30, 5, mapped=True, chain=False)
        for whole, part in zip((tokens, parents, scores), alone):
            assert np.array_equal(whole[[seq]], part)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"longest": 4}, "paths of 4 tokens, expected 1 to 3"),
        ({"num_tokens": 64}, "a draft of 64 tokens, expected at most 63"),
        ({"columns": 20}, "the weight is .*, expected .48, at least 32."),
    ],
)
def test_refusals(change: dict[str, int], message: str) -> None:
    case = Rnn("float32", 1, 3, 4, 16)
    case.weight = case.weight[:, : change.get("columns", 48)]
    with pytest.raises(ValueError, match=message):
        case.run("cpu", change.get("num_tokens", 5), change.get("longest", 3), False, False)
