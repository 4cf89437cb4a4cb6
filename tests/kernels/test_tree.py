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
    """The growth of several sequences' trees, on a device and in the reference."""

    def __init__(self, device: str, num_seqs: int, topk: int, depth: int, seed: int = 0) -> None:
        self.device, self.num_seqs, self.topk, self.depth = device, num_seqs, topk, depth
        self.rng = np.random.default_rng([seed, topk, depth])
        num_slots = num_seqs + 2
        self.slots = self.rng.permutation(num_slots)[:num_seqs]
        self.lengths = self.rng.integers(1000, size=num_slots)
        self.accepted = self.rng.integers(0, 9, size=num_slots)
        self.roots = self.rng.integers(VOCAB, size=num_slots)
        count, rows = num_candidates(topk, depth), (num_seqs, topk)
        self.arrays = {
            "scores": empty(device, (num_seqs, count)),
            "tokens": empty(device, (num_seqs, count), "int32"),
            "level_candidates": empty(device, (num_seqs, depth, topk), "int32"),
            "token_scores": empty(device, rows),
            "ancestor_masks": empty(device, rows, "uint64"),
            "seq_token_begin": empty(device, [num_seqs + 1], "int32"),
        }
        for name in ("ids", "parents", "positions", "seqs"):
            self.arrays[f"token_{name}"] = empty(device, rows, "int32")
        self.op = ops.DraftBeam(num_seqs=num_seqs, topk=topk, depth=depth, **self.arrays)
        self.growths = [reference.Growth(topk) for _ in range(num_seqs)]

    def expand(self, level: int, coarse: bool) -> None:
        """Adds a level. If `coarse`, many log-probabilities are equal."""
        shape = (self.num_seqs, 1 if level == 0 else self.topk, self.topk)
        logprobs = -self.rng.exponential(2, shape)
        if coarse:
            logprobs = np.round(logprobs)
            logprobs[self.rng.random(shape) < 0.05] = -np.inf
        logprobs = -np.sort(-logprobs).astype(np.float32)
        tokens = self.rng.integers(VOCAB, size=shape)
        for seq, growth in enumerate(self.growths):
            growth.expand(tokens[seq], logprobs[seq])
        lengths = put_ints(self.device, self.lengths)
        ops.tree_expand(
            context(self.device), beam=self.op, level=level,
            topk_tokens=put_ints(self.device, tokens), topk_logprobs=put(self.device, logprobs),
            seq_slots=put_ints(self.device, self.slots),
            accepted_counts=put_ints(self.device, self.accepted), draft_lengths=lengths,
        )  # fmt: skip
        if level == 0:
            self.lengths[self.slots] += np.maximum(self.accepted[self.slots], 1)
        assert np.array_equal(lengths.numpy(), self.lengths)

    def check_level(self, level: int) -> None:
        got = {name: array.numpy() for name, array in self.arrays.items()}
        assert got["seq_token_begin"].tolist() == [b * self.topk for b in range(self.num_seqs + 1)]
        for seq, growth in enumerate(self.growths):
            rows = growth.levels[level]
            assert got["level_candidates"][seq, level].tolist() == [c.index for c in rows]
            assert got["token_scores"][seq].tolist() == [c.score for c in rows]
            assert got["ancestor_masks"][seq].tolist() == [growth.ancestor_mask(c) for c in rows]
            assert got["token_ids"][seq].tolist() == [c.token for c in rows]
            parents = [seq * self.topk + c.parent.row if c.parent else seq for c in rows]
            assert got["token_parents"][seq].tolist() == parents
            assert set(got["token_positions"][seq]) == {self.lengths[self.slots[seq]] + level}
            assert set(got["token_seqs"][seq]) == {seq}
            known = len(growth.candidates)
            assert got["tokens"][seq, :known].tolist() == [c.token for c in growth.candidates]
            assert got["scores"][seq, :known].tolist() == [c.score for c in growth.candidates]

    def build(self, num_nodes: int) -> Trees:
        shape = (self.num_seqs, num_nodes - 1)
        draft = {name: empty(self.device, shape, "int32") for name in ("tokens", "parents")}
        self.draft_scores = empty(self.device, shape)
        op = ops.Draft(**draft, scores=self.draft_scores)
        ops.draft_select(context(self.device), beam=self.op, draft=op)
        trees = Trees(self.device, self.num_seqs, num_nodes)
        ops.tree_build(
            context(self.device), draft=op, trees=trees.op,
            seq_slots=put_ints(self.device, self.slots),
            slots=slot_state(self.device, self.lengths, self.roots),
        )  # fmt: skip
        trees.check_rows(self.slots, self.lengths)
        return trees

    def check_scores(self, num_nodes: int) -> None:
        for got, growth in zip(self.draft_scores.numpy(), self.growths):
            chosen = reference.best(growth.candidates, num_nodes - 1)
            assert got.tolist() == [c.score for c in chosen]


def slot_state(device: str, lengths: Any, next_tokens: Any) -> Any:
    return ops.SlotState(
        lengths=put_ints(device, lengths), next_tokens=put_ints(device, next_tokens),
        counts=None, vocab_size=VOCAB,
    )  # fmt: skip


class Trees:
    """One tree for each sequence: empty, or with `contents` but without the step's tokens."""

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
            for name in ("token_ids", "token_positions", "token_slots", "token_seqs")
        }
        self.rows["seq_token_begin"] = empty(device, [num_seqs + 1], "int32")
        self.op = ops.TokenTrees(**self.arrays, **self.rows)

    def check_rows(self, slots: Any, lengths: Any) -> None:
        """Checks that the tokens of the step match the nodes."""
        trees = {name: array.numpy() for name, array in self.arrays.items()}
        rows = {name: array.numpy() for name, array in self.rows.items()}
        num_seqs, num_nodes = trees["tokens"].shape
        assert np.array_equal(rows["token_ids"], np.maximum(trees["tokens"], 0))
        ancestors = [[int(mask).bit_count() - 1 for mask in masks] for masks in trees["masks"]]
        assert trees["depths"].tolist() == ancestors
        positions = np.asarray(lengths)[slots][:, None] + trees["depths"]
        assert np.array_equal(rows["token_positions"], positions)
        for name, values in (("token_slots", slots), ("token_seqs", range(num_seqs))):
            assert rows[name].tolist() == [[value] * num_nodes for value in values]
        assert rows["seq_token_begin"].tolist() == [b * num_nodes for b in range(num_seqs + 1)]

    def check(self, expected: list[reference.Tree]) -> None:
        for name, array in self.arrays.items():
            for got, tree in zip(array.numpy(), expected, strict=True):
                assert got.tolist() == getattr(tree, name), name


@on_devices
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("topk", sizes(*range(1, 33)))
def test_growth_and_selection(device: str, topk: int, coarse: bool) -> None:
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
            beam.check_scores(num_nodes)


@on_devices
def test_a_selected_child_without_its_parent(device: str) -> None:
    """Only invalid scores (NaN) select a child alone. The root becomes the parent of the child."""
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
    """Log-probabilities of 0, tokens in ascending order."""

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
    with pytest.raises(ValueError, match=r"13 tokens of the 12 candidates that top-k 3"):
        beam.build(14)
    with pytest.raises(ValueError, match=r"64 tokens of the .* expected at most 63"):
        Beam(device, num_seqs=1, topk=10, depth=4).build(65)


@on_devices
@pytest.mark.parametrize("num_nodes", NUM_NODES)
def test_trees_of_chains(device: str, num_nodes: int) -> None:
    rng = np.random.default_rng(num_nodes)
    num_seqs = 50
    slots, roots = rng.permutation(60)[:num_seqs], rng.integers(VOCAB, size=60)
    lengths = rng.integers(1000, size=60)
    chains = rng.integers(VOCAB, size=(num_seqs, num_nodes - 1))
    chains[rng.random(chains.shape) < 0.5 / num_nodes] = -1
    trees = Trees(device, num_seqs, num_nodes)
    build_trees(device, trees, slots, lengths, roots, tokens=put_ints(device, chains))
    trees.check([reference.chain(int(roots[s]), c.tolist()) for s, c in zip(slots, chains)])


def build_trees(device: str, trees: Trees, slots: Any, lengths: Any, roots: Any, **draft: Any):
    draft = {"draft": ops.Draft(**draft)} if draft else {}
    ops.tree_build(
        context(device), trees=trees.op, seq_slots=put_ints(device, slots),
        slots=slot_state(device, lengths, roots), **draft,
    )  # fmt: skip
    trees.check_rows(slots, lengths)


@on_devices
@pytest.mark.parametrize("num_nodes", NUM_NODES)
def test_trees_of_drafts(device: str, num_nodes: int) -> None:
    """Descendants of an unused token are unused. A draft may have fewer tokens than the tree."""
    rng = np.random.default_rng(num_nodes)
    num_seqs, num_tokens = 20, rng.integers(0, num_nodes)
    slots, lengths = rng.permutation(30)[:num_seqs], rng.integers(1000, size=30)
    drafted = [reference.random_tree(rng, num_tokens + 1, 8, VOCAB) for _ in range(num_seqs)]
    roots = rng.integers(VOCAB, size=30)
    tokens = np.array([tree.tokens[1:] for tree in drafted]).reshape(num_seqs, num_tokens)
    parents = np.array([tree.parents[1:] for tree in drafted]).reshape(num_seqs, num_tokens)
    tokens[rng.random(tokens.shape) < 0.2] = -1
    expected = []
    for slot, its_tokens, its_parents in zip(slots, tokens.tolist(), parents.tolist()):
        tree = reference.Tree([int(roots[slot])], [-1])
        for i in range(num_nodes - 1):
            token = its_tokens[i] if i < num_tokens else -1
            parent = its_parents[i] if i < num_tokens else 0
            used = token >= 0 and (parent == 0 or tree.tokens[parent] >= 0)
            tree.tokens.append(token if used else -1)
            tree.parents.append(parent if used else 0)
        expected.append(tree)
    trees = Trees(device, num_seqs, num_nodes)
    draft = {"tokens": put_ints(device, tokens), "parents": put_ints(device, parents)}
    build_trees(device, trees, slots, lengths, roots, **(draft if num_tokens else {}))
    trees.check(expected)


@on_devices
def test_a_draft_larger_than_its_tree_is_refused(device: str) -> None:
    tokens = put_ints(device, [[1, 2, 3]])
    with pytest.raises(ValueError, match="a draft of 3 tokens for trees of 3 nodes"):
        build_trees(device, Trees(device, 1, 3), [0], [1], [1], tokens=tokens)


@on_devices
@pytest.mark.parametrize("shifted", [True, False])
def test_begin_draft(device: str, shifted: bool) -> None:
    max_path, slots = 4, [3, 0, 2]
    ids = np.arange(20).reshape(5, max_path) + 100
    accepted = ops.Accepted(
        ids=put_ints(device, ids), paths=put_ints(device, ids),
        counts=put_ints(device, [4, 9, 0, 2, 9]),
    )  # fmt: skip
    out = {
        name: empty(device, [3, max_path], "int32")
        for name in ("ids", "positions", "token_seqs", "hidden_rows")
    }
    out["seq_token_begin"] = empty(device, [4], "int32")
    out["last_rows"] = empty(device, [3], "int32")
    draft_lengths = put_ints(device, [1, 2, 3, 4, 5])
    ops.begin_draft(
        context(device), seq_slots=put_ints(device, slots), num_seqs=3,
        lengths=put_ints(device, [14, 0, 30, 42, 0]), accepted=accepted, shifted=shifted,
        draft_lengths=draft_lengths, **out,
    )  # fmt: skip
    rows = {name: array.numpy().tolist() for name, array in out.items()}
    assert rows["ids"] == [[112, 113, 0, 0], [100, 101, 102, 103], [0, 0, 0, 0]]
    first = [40, 10, 29] if shifted else [41, 11, 30]
    assert rows["positions"] == [[at, at + 1, at + 2, at + 3] for at in first]
    assert rows["token_seqs"] == [[0] * 4, [1] * 4, [2] * 4]
    # Row slot * max_path + position % max_path; the tokens begin at 40, 10 and 29.
    assert rows["hidden_rows"] == [[12, 13, 14, 15], [2, 3, 0, 1], [9, 10, 11, 8]]
    assert rows["seq_token_begin"] == [0, 4, 8, 12]
    assert rows["last_rows"] == [1, 7, 8]
    assert draft_lengths.numpy().tolist() == [first[1], 2, first[2], first[0], 5]


@on_devices
@pytest.mark.parametrize("counts", [[1], [5], [300], [1, 1, 2, 9, 1], [257, 3, 600]])
def test_shift_prompt(device: str, counts: list[int]) -> None:
    """Entry t of the draft takes the hidden state of token t and the id of token t + 1."""
    rng = np.random.default_rng(sum(counts))
    num_seqs, num_rows, max_path = len(counts), sum(counts), 3
    slots = rng.permutation(num_seqs + 2)[:num_seqs]
    lengths = rng.integers(0, 3, size=num_seqs + 2) * 7
    ids = rng.integers(VOCAB, size=num_rows)
    begin = np.cumsum([0, *counts])
    seqs = np.repeat(np.arange(num_seqs), counts)

    def rows(count: int) -> list[Any]:
        sizes = [count, count, count, count, num_seqs + 1]
        return [empty(device, [max(size, 1)], "int32") for size in sizes]

    first, rest = rows(num_seqs), rows(num_rows - num_seqs)
    first_lengths = put_ints(device, np.full(num_seqs + 2, -5))
    ops.shift_prompt(
        context(device), max_path=max_path, ids=put_ints(device, ids),
        token_seqs=put_ints(device, seqs), seq_slots=put_ints(device, slots),
        seq_token_begin=put_ints(device, begin), lengths=put_ints(device, lengths), first=first,
        first_lengths=first_lengths, rest=rest,
    )  # fmt: skip
    starts = lengths[slots]
    got = [array.numpy().tolist() for array in first]
    before = np.maximum(starts - 1, 0)
    assert got[0] == ids[begin[:-1]].tolist()
    assert got[1] == before.tolist()
    assert got[2] == list(range(num_seqs))
    assert got[3] == (slots * max_path + before % max_path).tolist()
    assert got[4] == list(range(num_seqs + 1))
    assert first_lengths.numpy()[slots].tolist() == before.tolist()
    got = [array.numpy().tolist()[: num_rows - num_seqs] for array in rest[:4]]
    later = [row for row in range(num_rows) if row not in begin]
    assert got[0] == ids[later].tolist()
    assert got[1] == [int(starts[seqs[r]] + r - begin[seqs[r]] - 1) for r in later]
    assert got[2] == seqs[later].tolist()
    assert got[3] == [row - 1 for row in later]
    assert rest[4].numpy().tolist() == (begin - np.arange(num_seqs + 1)).tolist()


# ---- sampling at tree nodes


@on_devices
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("vocab_size", sizes(7, 1000, 32770, small=2))
def test_penalties_and_masks_on_trees(device: str, vocab_size: int, temperature: float) -> None:
    """A node draws the same token as plain sampling after the tokens on its path were emitted."""
    num_nodes, max_depth = (12, 4) if SMALL or vocab_size > 10000 else (60, 8)
    rng = np.random.default_rng(vocab_size)
    slots = slots_of(*({**f, "temperature": temperature, "seed": 5} for f in PENALTIES))
    num_slots = len(slots)
    counts, bias = penalty_state(num_slots, vocab_size)
    contents = [reference.random_tree(rng, num_nodes, max_depth, 6) for _ in range(num_slots)]
    token_slots = np.repeat(rng.permutation(num_slots), num_nodes)
    positions = 100 * token_slots + np.array([tree.depths for tree in contents]).ravel()
    logits = random_logits(num_slots * num_nodes, vocab_size, scale=2)

    def draw(**kwargs: Any) -> np.ndarray:
        tokens = empty(device, [len(logits)], "int32")
        ops.sample(
            context(device), logits=put(device, logits), tokens=tokens,
            token_positions=put_ints(device, positions), bias=put(device, kwargs.pop("bias")),
            **kwargs,
        )  # fmt: skip
        return tokens.numpy()

    trees = Trees(device, num_slots, num_nodes, contents)
    masks = {
        "mask_rows": put_ints(device, rng.integers(-1, 5, len(logits))),
        "masks": put_raw(device, packed(random_masks(5, vocab_size)).view(np.uint8)),
    }
    drawn = draw(
        sampling=put_raw(device, slots), token_slots=put_ints(device, token_slots), bias=bias,
        counts=put_ints(device, counts), tree_tokens=trees.arrays["tokens"],
        tree_masks=trees.arrays["masks"], tree_size=num_nodes, **masks,
    )  # fmt: skip

    # Plain sampling: one slot for each node.
    row_counts = counts[token_slots].copy()
    for row, row_count in enumerate(row_counts):
        tree = contents[row // num_nodes]
        for node in tree.path_to(row % num_nodes)[1:]:
            if tree.tokens[node] >= 0:
                row_count[tree.tokens[node]] += 1
    plain = draw(
        sampling=put_raw(device, slots[token_slots]), bias=bias[token_slots],
        token_slots=put_ints(device, np.arange(len(logits))), counts=put_ints(device, row_counts),
        **masks,
    )  # fmt: skip
    assert drawn.tolist() == plain.tolist()
    if temperature == 0 and vocab_size == 7:
        assert (drawn != draw(
            sampling=put_raw(device, slots), token_slots=put_ints(device, token_slots), bias=bias,
            counts=put_ints(device, counts), **masks,
        )).any()  # fmt: skip
