from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.test_sample import (
    PENALTIES,
    packed,
    penalty_state,
    random_logits,
    random_masks,
    slots_of,
)
from tests.kernels.util import SMALL, context, empty, on_devices, ops, put, put_ints, put_raw, sizes
from tests.reference import tree as reference

NUM_NODES = (1, 2, 12, 33, 60, 64)
VOCAB = 1000


def num_candidates(topk: int, depth: int) -> int:
    return topk + (depth - 1) * topk * topk


class Beam:
    """The draft's growth of several sequences, on a device and as the reference."""

    def __init__(self, device: str, num_seqs: int, topk: int, depth: int, seed: int = 0) -> None:
        self.device, self.num_seqs, self.topk, self.depth = device, num_seqs, topk, depth
        self.rng = np.random.default_rng([seed, topk, depth])
        num_slots = num_seqs + 2
        self.slots = self.rng.permutation(num_slots)[:num_seqs]
        self.lengths = self.rng.integers(1000, size=num_slots)
        self.pending = self.rng.integers(1, 9, size=num_slots)
        self.roots = self.rng.integers(VOCAB, size=num_slots)
        count, rows = num_candidates(topk, depth), (num_seqs, topk)
        self.arrays = {
            "scores": empty(device, (num_seqs, count)),
            "tokens": empty(device, (num_seqs, count), "int32"),
            "level_candidates": empty(device, (num_seqs, depth, topk), "int32"),
            "row_scores": empty(device, rows),
            "row_masks": empty(device, rows, "uint64"),
            "seq_row_begin": empty(device, [num_seqs + 1], "int32"),
        }
        for name in ("ids", "parents", "positions", "seqs"):
            self.arrays[f"row_{name}"] = empty(device, rows, "int32")
        self.op = ops.DraftBeam(num_seqs=num_seqs, topk=topk, depth=depth, **self.arrays)
        self.growths = [reference.Growth(topk) for _ in range(num_seqs)]

    def expand(self, level: int, coarse: bool) -> None:
        """With `coarse` log-probabilities, many of them equal."""
        shape = (self.num_seqs, 1 if level == 0 else self.topk, self.topk)
        logprobs = -self.rng.exponential(2, shape)
        if coarse:
            logprobs = np.round(logprobs)
            logprobs[self.rng.random(shape) < 0.05] = -np.inf
        logprobs = -np.sort(-logprobs).astype(np.float32)
        tokens = self.rng.integers(VOCAB, size=shape)
        for seq, growth in enumerate(self.growths):
            growth.expand(tokens[seq], logprobs[seq])
        pending = put_ints(self.device, self.pending)
        lengths = put_ints(self.device, self.lengths)
        ops.tree_expand(
            context(self.device), beam=self.op, level=level,
            topk_tokens=put_ints(self.device, tokens), topk_logprobs=put(self.device, logprobs),
            seq_slots=put_ints(self.device, self.slots), pending_counts=pending,
            draft_lengths=lengths,
        )  # fmt: skip
        self.lengths[self.slots] += self.pending[self.slots]
        self.pending[self.slots] = 0
        assert np.array_equal(pending.numpy(), self.pending)
        assert np.array_equal(lengths.numpy(), self.lengths)

    def check_level(self, level: int) -> None:
        got = {name: array.numpy() for name, array in self.arrays.items()}
        assert got["seq_row_begin"].tolist() == [b * self.topk for b in range(self.num_seqs + 1)]
        for seq, growth in enumerate(self.growths):
            rows = growth.levels[level]
            assert got["level_candidates"][seq, level].tolist() == [c.index for c in rows]
            assert got["row_scores"][seq].tolist() == [c.score for c in rows]
            assert got["row_masks"][seq].tolist() == [growth.row_mask(c) for c in rows]
            assert got["row_ids"][seq].tolist() == [c.token for c in rows]
            parents = [seq * self.topk + c.parent.row if c.parent else seq for c in rows]
            assert got["row_parents"][seq].tolist() == parents
            assert set(got["row_positions"][seq]) == {self.lengths[self.slots[seq]] + level}
            assert set(got["row_seqs"][seq]) == {seq}
            known = len(growth.candidates)
            assert got["tokens"][seq, :known].tolist() == [c.token for c in growth.candidates]
            assert got["scores"][seq, :known].tolist() == [c.score for c in growth.candidates]

    def build(self, num_nodes: int) -> Trees:
        trees = Trees(self.device, self.num_seqs, num_nodes)
        ops.tree_build(
            context(self.device), beam=self.op, trees=trees.op,
            seq_slots=put_ints(self.device, self.slots),
            slots=slot_state(self.device, self.lengths, self.roots),
        )  # fmt: skip
        trees.check_rows(self.slots, self.lengths)
        return trees


def slot_state(device: str, lengths: Any, next_tokens: Any) -> Any:
    return ops.SlotState(
        lengths=put_ints(device, lengths), next_tokens=put_ints(device, next_tokens),
        counts=None, vocab_size=VOCAB,
    )  # fmt: skip


class Trees:
    """One tree a sequence; empty, or holding `contents`, whose rows nobody has written."""

    def __init__(
        self, device: str, num_seqs: int, num_nodes: int,
        contents: list[reference.Tree] | None = None,
    ) -> None:  # fmt: skip
        self.arrays = {
            name: empty(device, (num_seqs, num_nodes), "uint64" if name == "masks" else "int32")
            for name in ("tokens", "parents", "depths", "masks")
        }
        for name, array in self.arrays.items() if contents else ():
            values = [getattr(tree, name) for tree in contents or ()]
            array.copy_from(np.array(values, array.numpy().dtype))
        self.rows = {
            name: empty(device, (num_seqs, num_nodes), "int32")
            for name in ("row_ids", "row_positions", "row_slots", "row_seqs")
        }
        self.rows["seq_row_begin"] = empty(device, [num_seqs + 1], "int32")
        self.op = ops.TokenTrees(**self.arrays, **self.rows)

    def check_rows(self, slots: Any, lengths: Any) -> None:
        """That the rows are those of the nodes."""
        trees = {name: array.numpy() for name, array in self.arrays.items()}
        rows = {name: array.numpy() for name, array in self.rows.items()}
        num_seqs, num_nodes = trees["tokens"].shape
        assert np.array_equal(rows["row_ids"], np.maximum(trees["tokens"], 0))
        ancestors = [[int(mask).bit_count() - 1 for mask in masks] for masks in trees["masks"]]
        assert trees["depths"].tolist() == ancestors
        positions = np.asarray(lengths)[slots][:, None] + trees["depths"]
        assert np.array_equal(rows["row_positions"], positions)
        for name, values in (("row_slots", slots), ("row_seqs", range(num_seqs))):
            assert rows[name].tolist() == [[value] * num_nodes for value in values]
        assert rows["seq_row_begin"].tolist() == [b * num_nodes for b in range(num_seqs + 1)]

    def check(self, expected: list[reference.Tree]) -> None:
        for name, array in self.arrays.items():
            for got, tree in zip(array.numpy(), expected, strict=True):
                assert got.tolist() == getattr(tree, name), name


@on_devices
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("topk", sizes(*range(1, 33)))
def test_growth_and_choice(device: str, topk: int, coarse: bool) -> None:
    for depth in [1, 3] if SMALL else [*range(1, 9), 16]:
        if topk * (depth - 1) > 64:
            continue
        beam = Beam(device, num_seqs=2 if SMALL else 5, topk=topk, depth=depth, seed=int(coarse))
        for level in range(depth):
            beam.expand(level, coarse)
            beam.check_level(level)
        for num_nodes in NUM_NODES:
            if num_nodes - 1 > num_candidates(topk, depth):
                continue
            expected = [
                reference.build(growth, int(beam.roots[slot]), num_nodes)
                for growth, slot in zip(beam.growths, beam.slots)
            ]
            beam.build(num_nodes).check(expected)


@on_devices
def test_a_chosen_child_without_its_parent(device: str) -> None:
    """No growth makes such scores, but numbers that are none may: the child hangs on the root."""
    beam = Beam(device, num_seqs=2, topk=4, depth=2)
    for level in range(2):
        beam.expand(level, False)
    scores = beam.arrays["scores"].numpy()
    scores[:, :4] = -1000
    beam.arrays["scores"].copy_from(scores)
    trees = {name: array.numpy() for name, array in beam.build(12).arrays.items()}
    assert trees["parents"].tolist() == [[-1] + [0] * 11] * 2
    assert trees["depths"].tolist() == [[0] + [1] * 11] * 2


@on_devices
def test_all_scores_equal(device: str) -> None:
    for topk, depth in ((10, 4), (32, 3)):
        beam = Beam(device, num_seqs=2, topk=topk, depth=depth)
        beam.rng = ZeroRng(beam.rng)
        for level in range(depth):
            beam.expand(level, coarse=False)
            beam.check_level(level)
        roots = [int(beam.roots[slot]) for slot in beam.slots]
        expected = [reference.build(g, root, 64) for g, root in zip(beam.growths, roots)]
        beam.build(64).check(expected)


class ZeroRng:
    """Log-probabilities of 0, tokens as they come."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.integers = rng.integers

    def exponential(self, _: float, shape: Any) -> np.ndarray:
        return np.zeros(shape)


@on_devices
def test_limits_of_growth(device: str) -> None:
    with pytest.raises(ValueError, match=r"top-k 17 and depth 5 make 68 .* at most 64"):
        Beam(device, num_seqs=1, topk=17, depth=5).expand(0, coarse=False)
    with pytest.raises(ValueError, match="top-k 33"):
        Beam(device, num_seqs=1, topk=33, depth=1).expand(0, coarse=False)
    with pytest.raises(ValueError, match="level 2 of a depth of 2"):
        Beam(device, num_seqs=1, topk=2, depth=2).expand(2, coarse=False)
    beam = Beam(device, num_seqs=1, topk=3, depth=2)
    with pytest.raises(ValueError, match=r"14 nodes needs 13 candidates.*make 12"):
        beam.build(14)
    with pytest.raises(ValueError, match="65 nodes"):
        Beam(device, num_seqs=1, topk=10, depth=4).build(65)


@on_devices
@pytest.mark.parametrize("num_nodes", NUM_NODES)
def test_chain_build(device: str, num_nodes: int) -> None:
    rng = np.random.default_rng(num_nodes)
    num_seqs = 50
    slots, roots = rng.permutation(60)[:num_seqs], rng.integers(VOCAB, size=60)
    lengths = rng.integers(1000, size=60)
    chains = rng.integers(VOCAB, size=(num_seqs, num_nodes - 1))
    chains[rng.random(chains.shape) < 0.5 / num_nodes] = -1
    trees = Trees(device, num_seqs, num_nodes)
    ops.chain_build(
        context(device), chain=put_ints(device, chains), trees=trees.op,
        seq_slots=put_ints(device, slots), slots=slot_state(device, lengths, roots),
    )  # fmt: skip
    trees.check_rows(slots, lengths)
    trees.check([reference.chain(int(roots[s]), c.tolist()) for s, c in zip(slots, chains)])


@on_devices
def test_begin_or_skip_draft(device: str) -> None:
    pending, slots = 4, [3, 0, 2]
    ids = np.arange(20).reshape(5, pending) + 100
    counts = put_ints(device, [4, 9, 0, 2, 9])
    draft_lengths = put_ints(device, [10, 20, 30, 40, 50])
    out = {
        name: empty(device, [3, pending], "int32")
        for name in ("ids", "positions", "row_seqs", "feature_rows")
    }
    out["seq_row_begin"] = empty(device, [4], "int32")
    out["last_rows"] = empty(device, [3], "int32")

    seq_slots = put_ints(device, slots)
    ops.begin_draft(
        context(device), seq_slots=seq_slots, num_seqs=3, max_pending=pending,
        pending_ids=put_ints(device, ids), pending_counts=counts, draft_lengths=draft_lengths,
        **out,
    )  # fmt: skip
    rows = {name: array.numpy().tolist() for name, array in out.items()}
    assert rows["ids"] == [[112, 113, 0, 0], [100, 101, 102, 103], [0, 0, 0, 0]]
    assert rows["positions"] == [[40, 41, 42, 43], [10, 11, 12, 13], [30, 31, 32, 33]]
    assert rows["row_seqs"] == [[0] * 4, [1] * 4, [2] * 4]
    assert rows["feature_rows"] == [[12, 13, 14, 15], [0, 1, 2, 3], [8, 9, 10, 11]]
    assert rows["seq_row_begin"] == [0, 4, 8, 12]
    assert rows["last_rows"] == [1, 7, 8]
    assert draft_lengths.numpy().tolist() == [10, 20, 30, 40, 50]
    assert counts.numpy().tolist() == [4, 9, 0, 2, 9]
    ops.skip_draft(
        context(device), seq_slots=seq_slots, num_seqs=3, pending_counts=counts,
        draft_lengths=draft_lengths,
    )  # fmt: skip
    assert draft_lengths.numpy().tolist() == [14, 20, 30, 42, 50]
    assert counts.numpy().tolist() == [0, 9, 0, 0, 9]


# ---- sampling the rows of trees


@on_devices
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("vocab_size", sizes(7, 1000, 32770, small=2))
def test_penalties_and_masks_on_trees(device: str, vocab_size: int, temperature: float) -> None:
    """A row draws what plain sampling draws once the tokens on its path have been emitted."""
    num_nodes, max_depth = (12, 4) if SMALL or vocab_size > 10000 else (60, 8)
    rng = np.random.default_rng(vocab_size)
    slots = slots_of(*({**f, "temperature": temperature, "seed": 5} for f in PENALTIES))
    num_slots = len(slots)
    counts, bias = penalty_state(num_slots, vocab_size)
    contents = [reference.random_tree(rng, num_nodes, max_depth, 6) for _ in range(num_slots)]
    row_slots = np.repeat(rng.permutation(num_slots), num_nodes)
    positions = 100 * row_slots + np.array([tree.depths for tree in contents]).ravel()
    logits = random_logits(num_slots * num_nodes, vocab_size, scale=2)

    def draw(**kwargs: Any) -> np.ndarray:
        tokens = empty(device, [len(logits)], "int32")
        ops.sample(
            context(device), logits=put(device, logits), tokens=tokens,
            row_positions=put_ints(device, positions), bias=put(device, kwargs.pop("bias")),
            **kwargs,
        )  # fmt: skip
        return tokens.numpy()

    trees = Trees(device, num_slots, num_nodes, contents)
    masks = {
        "mask_rows": put_ints(device, rng.integers(-1, 5, len(logits))),
        "masks": put_raw(device, packed(random_masks(5, vocab_size)).view(np.uint8)),
    }
    drawn = draw(
        sampling=put_raw(device, slots), row_slots=put_ints(device, row_slots), bias=bias,
        counts=put_ints(device, counts), tree_tokens=trees.arrays["tokens"],
        tree_masks=trees.arrays["masks"], tree_size=num_nodes, **masks,
    )  # fmt: skip

    # Plain sampling: a slot for every row.
    row_counts = counts[row_slots].copy()
    for row, row_count in enumerate(row_counts):
        tree = contents[row // num_nodes]
        for node in tree.path_to(row % num_nodes)[1:]:
            if tree.tokens[node] >= 0:
                row_count[tree.tokens[node]] += 1
    plain = draw(
        sampling=put_raw(device, slots[row_slots]), bias=bias[row_slots],
        row_slots=put_ints(device, np.arange(len(logits))), counts=put_ints(device, row_counts),
        **masks,
    )  # fmt: skip
    assert drawn.tolist() == plain.tolist()
    if temperature == 0 and vocab_size == 7:
        assert (drawn != draw(
            sampling=put_raw(device, slots), row_slots=put_ints(device, row_slots), bias=bias,
            counts=put_ints(device, counts), **masks,
        )).any()  # fmt: skip
