from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.kernels.test_tree import NUM_NODES, Trees
from tests.kernels.util import (
    PAGE,
    SMALL,
    context,
    empty,
    empty_structs,
    get_structs,
    on_devices,
    ops,
    put_ints,
    put_raw,
)
from tests.reference import tree as reference

VOCAB, MAX_LEN, RING = 9, 60, 2
STOP_ID = VOCAB - 1


class Slots:
    """Per-slot state of several sequences, before and after."""

    def __init__(self, device: str, num_slots: int, max_seqs: int, max_emitted: int, rng) -> None:
        self.device, self.max_seqs, self.max_emitted = device, max_seqs, max_emitted
        self.host = {
            "lengths": rng.integers(MAX_LEN // 2, size=num_slots),
            "next_tokens": rng.integers(VOCAB, size=num_slots),
            "counts": rng.integers(5, size=(num_slots, VOCAB)),
            "history": rng.integers(100, 200, size=(num_slots, MAX_LEN)),
            "accepted_ids": rng.integers(100, size=(num_slots, max_emitted)),
            "accepted_paths": rng.integers(100, size=(num_slots, max_emitted)),
            "accepted_counts": rng.integers(max_emitted, size=num_slots),
        }
        self.sampling = np.zeros(num_slots, ops.slot_sampling_dtype)
        self.sampling["use_penalties"] = rng.integers(2, size=num_slots)
        self.sampling["num_logprobs"] = rng.choice([-1, 0, 3, 20], size=num_slots)
        self.stops = np.zeros(num_slots, ops.slot_stop_dtype)
        self.stops["max_tokens"] = rng.integers(1, 40, size=num_slots)
        self.stops["finished"] = rng.random(num_slots) < 0.1
        for stop in self.stops:
            stop["num_stop_ids"] = rng.integers(4)
            stop["stop_ids"] = rng.integers(50, 60, size=16)
            stop["stop_ids"][stop["num_stop_ids"] :] = 1  # unused: must not end a path
            if stop["num_stop_ids"]:
                stop["stop_ids"][rng.integers(stop["num_stop_ids"])] = STOP_ID
        self.results = empty_structs(device, [RING, max_seqs], ops.slot_result_dtype, pinned=True)
        self.step_counter = put_raw(device, np.zeros(1, np.uint64))
        self.done = put_raw(device, np.zeros(1, np.uint64), pinned=True)

    def put_all(self) -> None:
        self.arrays = {name: put_ints(self.device, value) for name, value in self.host.items()}
        self.stop_array = put_raw(self.device, self.stops)

    def check_all(self) -> None:
        for name, value in self.host.items():
            assert np.array_equal(self.arrays[name].numpy(), value), name
        assert np.array_equal(get_structs(self.stop_array, ops.slot_stop_dtype), self.stops)


class Cycle:
    """Runs one acceptance, and applies the reference to the host's copy of the slots."""

    def __init__(self, slots: Slots, seq_slots: np.ndarray, contents, rng, window=None) -> None:
        """`window` is for top-p verification with random candidates; None: target match."""
        self.slots, self.seq_slots, self.contents = slots, seq_slots, contents
        self.window = window
        self.num_nodes = len(contents[0].tokens)
        self.drawn = np.array([self.draw(tree, rng) for tree in contents])
        self.logprobs = np.zeros(self.drawn.size, ops.token_logprobs_dtype)
        self.logprobs["logprob"] = -rng.random(self.drawn.size)
        self.logprobs["top_ids"] = rng.integers(VOCAB, size=(self.drawn.size, 20))
        self.logprobs["top_logprobs"] = -rng.random((self.drawn.size, 20))
        for slot, tree in zip(seq_slots, contents):
            slots.host["next_tokens"][slot] = tree.tokens[0]
        self.candidates = np.zeros(self.drawn.size, ops.token_candidates_dtype)
        for row, drawn in zip(self.candidates, self.drawn.flat if window is not None else ()):
            there = 0 if drawn < 0 else rng.integers(1, 6)  # the vocabulary may be small
            row["ids"] = [*rng.permutation(VOCAB)[:there], *[-1] * (5 - there)]
            row["num"] = min(there, rng.integers(1, 4))
            row["logprobs"] = -rng.random(5)

    def topp(self, seq: int) -> reference.TopP | None:
        if self.window is None:
            return None
        rows = self.candidates[seq * self.num_nodes : (seq + 1) * self.num_nodes]
        known = [reference.Candidates(row["ids"].tolist(), int(row["num"])) for row in rows]
        return reference.TopP(known, self.window)

    @staticmethod
    def draw(tree: reference.Tree, rng) -> list[int]:
        """Draws the token of a child most of the time, so accepted paths are long."""
        drawn = []
        likely = rng.choice([0.3, 0.8, 1.0])
        for node in range(len(tree.tokens)):
            held = [t for t, p in zip(tree.tokens, tree.parents) if p == node and t >= 0]
            follows = held and rng.random() < likely
            token = rng.choice(held) if follows else rng.integers(VOCAB)
            drawn.append(ops.NO_TOKEN if rng.random() < 0.02 else int(token))
        return drawn

    def run(self) -> None:
        s, d = self.slots, self.slots.device
        s.put_all()
        num_seqs = len(self.seq_slots)
        accepted = {name: s.arrays[f"accepted_{name}"] for name in ("ids", "paths", "counts")}
        before = int(s.step_counter.numpy()[0])
        self.inner = np.zeros(num_seqs, ops.inner_counts_dtype)
        if before % 2:  # else the drafts took no steps of their own
            self.inner["steps"], self.inner["tokens"] = 3 + np.arange(2 * num_seqs).reshape(2, -1)
        ops.accept_tree(
            context(d), trees=Trees(d, num_seqs, self.num_nodes, self.contents).op,
            drawn=put_ints(d, self.drawn),
            logprobs=put_raw(d, self.logprobs), seq_slots=put_ints(d, self.seq_slots),
            sampling=put_raw(d, s.sampling),
            state=ops.SlotState(
                lengths=s.arrays["lengths"], next_tokens=s.arrays["next_tokens"],
                counts=s.arrays["counts"], vocab_size=VOCAB, history=s.arrays["history"],
                accepted=ops.Accepted(**accepted),
            ),
            stops=s.stop_array,
            sink=ops.ResultSink(
                results=s.results, ring_size=RING, max_seqs=s.max_seqs, step_counter=s.step_counter,
                done=s.done,
            ),
            candidates=None if self.window is None else put_raw(d, self.candidates),
            verify_window=self.window or 0,
            inner=put_raw(d, self.inner) if before % 2 else None,
        )  # fmt: skip
        assert (int(s.step_counter.numpy()[0]), int(s.done.numpy()[0])) == (before + 1, before + 1)
        self.results = get_structs(s.results, ops.slot_result_dtype)[before % RING]

    def check(self) -> list[int]:
        """Returns the number of emitted tokens of each sequence."""
        lengths = []
        for seq, slot in enumerate(self.seq_slots):
            found = self.apply(seq, int(slot))
            num = len(found.path)
            rows = [seq * self.num_nodes + node for node in found.path]
            self.check_result(self.results[seq], seq, rows, found)
            lengths.append(num)
        self.slots.check_all()
        return lengths

    def apply(self, seq: int, slot: int) -> reference.Acceptance:
        host, stop, tree = self.slots.host, self.slots.stops[slot], self.contents[seq]
        host["accepted_paths"][slot] = -1
        host["accepted_counts"][slot] = 0
        if stop["finished"]:
            return reference.Acceptance([], [], True)
        stop_ids = stop["stop_ids"][: stop["num_stop_ids"]].tolist()
        most = int(stop["max_tokens"])
        found = reference.accept(tree, self.drawn[seq], stop_ids, most, topp=self.topp(seq))
        exact = reference.accept(tree, self.drawn[seq], stop_ids, most)
        assert len(found.path) >= len(exact.path)  # lossy verification accepts at least as many
        length, num = host["lengths"][slot], len(found.path)
        cached = [tree.tokens[node] for node in found.path]
        room = max(0, min(num, MAX_LEN - length))
        host["history"][slot, length : length + room] = cached[:room]
        host["lengths"][slot] += num
        host["next_tokens"][slot] = found.emitted[-1]
        host["accepted_ids"][slot, :num] = found.emitted
        host["accepted_paths"][slot, :num] = found.path
        host["accepted_counts"][slot] = num
        if self.slots.sampling[slot]["use_penalties"]:
            np.add.at(host["counts"][slot], [t for t in found.emitted if t >= 0], 1)
        stop["max_tokens"] -= num
        stop["finished"] = found.finished
        return found

    def check_result(self, result, seq: int, rows: list[int], found) -> None:
        num, slot = len(rows), int(self.seq_slots[seq])
        fields = tuple(int(result[name]) for name in ("slot", "num_tokens", "finished"))
        assert fields == (slot, num, int(found.finished))
        assert result["inner"] == self.inner[seq]
        assert result["tokens"][:num].tolist() == found.emitted
        num_logprobs = self.slots.sampling[slot]["num_logprobs"]
        for got, row in zip(result["logprobs"], rows) if num_logprobs >= 0 else ():
            expected = self.logprobs[row]
            token = found.emitted[rows.index(row)]
            logprob = expected["logprob"]
            if token != self.drawn.flat[row]:
                own = self.candidates[row]
                logprob = own["logprobs"][own["ids"].tolist().index(token)]
            assert got["logprob"] == logprob
            for name in ("top_ids", "top_logprobs"):
                assert np.array_equal(got[name][:num_logprobs], expected[name][:num_logprobs])


@on_devices
@pytest.mark.parametrize("num_nodes", NUM_NODES)
@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_accept(device: str, num_nodes: int, kind: str) -> None:
    rng = np.random.default_rng(num_nodes)
    max_depth = num_nodes - 1 if kind == "chain" else min(num_nodes - 1, 6)
    lengths: Counter[int] = Counter()
    for num_seqs in [1, 2, 3] if SMALL else [1, 2, 7, 40, 16, 40, 40, 40]:
        slots = Slots(device, num_seqs + 2, num_seqs + 1, max_depth + 1, rng)
        for _ in range(2):
            seq_slots = rng.permutation(num_seqs + 2)[:num_seqs]
            contents = []
            for _ in range(num_seqs):
                if kind == "chain":
                    drafted = rng.integers(VOCAB, size=num_nodes - 1)
                    drafted[rng.random(num_nodes - 1) < 0.02] = -1
                    contents.append(reference.chain(int(rng.integers(VOCAB)), drafted.tolist()))
                else:
                    contents.append(reference.random_tree(rng, num_nodes, max_depth, VOCAB))
            cycle = Cycle(slots, seq_slots, contents, rng)
            cycle.run()
            lengths.update(cycle.check())
    if not SMALL:
        assert set(range(min(max_depth, 6) + 2)) <= set(lengths)


@on_devices
@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_limits_end_a_path(device: str, max_tokens: int) -> None:
    """All 5 drafted tokens of a chain match. A limit or a stop id may end the path earlier."""
    rng = np.random.default_rng(0)
    for stop_at in [None, 0, 5] if SMALL else [None, *range(6)]:
        slots = Slots(device, 1, 1, 6, rng)
        slots.stops["finished"], slots.stops["max_tokens"] = 0, max_tokens
        slots.stops["num_stop_ids"] = 16
        slots.stops["stop_ids"] = [*range(100, 115), STOP_ID]
        drafted = [1, 1, 2, 3, 4]
        cycle = Cycle(slots, np.array([0]), [reference.chain(0, drafted)], rng)
        cycle.drawn = np.array([[*drafted, 5]])
        if stop_at is not None:
            cycle.drawn[0, stop_at] = STOP_ID
            if stop_at < 5:
                cycle.contents[0].tokens[stop_at + 1] = STOP_ID
        cycle.run()
        (num,) = cycle.check()
        assert num == min(6, max_tokens, 7 if stop_at is None else stop_at + 1)
        ended = max_tokens <= 6 or stop_at is not None
        assert cycle.results[0]["finished"] == int(ended)


@on_devices
def test_no_token_ends_a_path(device: str) -> None:
    """The end holds even if the root has unused nodes, whose token is -1, too."""
    rng = np.random.default_rng(0)
    for place in range(4):
        slots = Slots(device, 1, 1, 6, rng)
        slots.stops["finished"], slots.stops["max_tokens"] = 0, 20
        slots.sampling["use_penalties"] = 1
        slots.host["counts"][:] = 0
        drafted = [1, 1, 2, -1, -1]
        cycle = Cycle(slots, np.array([0]), [reference.chain(0, drafted)], rng)
        cycle.drawn = np.array([[1, 1, 2, 3, 3, 3]])
        cycle.drawn[0, place] = ops.NO_TOKEN
        cycle.run()
        assert cycle.check() == [place + 1]
        assert cycle.results[0]["tokens"][: place + 1].tolist() == [*[1, 1, 2][:place], -1]
        assert cycle.results[0]["finished"] == 1


@on_devices
def test_without_history_and_ring(device: str) -> None:
    """A step that publishes no results and stores no history."""
    tree = reference.chain(1, [2, 3])
    lengths, next_tokens = put_ints(device, [5]), put_ints(device, [1])
    stops = np.zeros(1, ops.slot_stop_dtype)
    stops["max_tokens"] = 10
    sampling = np.zeros(1, ops.slot_sampling_dtype)
    sampling["num_logprobs"] = 5
    counts = empty(device, [1], "int32")
    accepted = ops.Accepted(
        ids=empty(device, (1, 3), "int32"), paths=empty(device, (1, 3), "int32"), counts=counts
    )
    ops.accept_tree(
        context(device), trees=Trees(device, 1, 3, [tree]).op,
        drawn=put_ints(device, [[2, 3, 4]]), logprobs=None, seq_slots=put_ints(device, [0]),
        sampling=put_raw(device, sampling), stops=put_raw(device, stops),
        state=ops.SlotState(
            lengths=lengths, next_tokens=next_tokens, counts=None, vocab_size=VOCAB,
            accepted=accepted,
        ),
    )  # fmt: skip
    assert (lengths.numpy()[0], next_tokens.numpy()[0], counts.numpy()[0]) == (8, 4, 3)


@on_devices
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype"),
    [(2, 128, "float16"), (1, 8, "float16"), (3, 256, "float16"), (2, 4, "float32")],
)
@pytest.mark.parametrize("has_hidden", [False, True])
def test_keep_accepted(
    device: str, num_heads: int, head_dim: int, dtype: str, has_hidden: bool
) -> None:
    rng = np.random.default_rng(head_dim)
    num_slots, max_pages, num_layers = 5, 4, 2
    width = 1032 if has_hidden else 8
    for max_emitted in (1, 2, 5, 9, 64):
        slots = rng.permutation(num_slots)[:4]
        pages = rng.permutation(num_slots * max_pages).reshape(num_slots, max_pages)
        before = rng.integers(2, 140, size=num_slots)  # lengths, some near the end of a page
        num_emitted = rng.integers(0, max_emitted + 1, size=4)
        num_emitted[0] = max_emitted
        paths = np.full((4, max_emitted), -1)
        for path, num in zip(paths, num_emitted):
            inner = np.sort(rng.permutation(63)[: max(num - 1, 0)]) + 1
            path[:num] = [0, *inner][:num]
        paths[1, : num_emitted[1]] = np.arange(num_emitted[1])  # no entry has to move
        shape = (num_layers * 2, pages.size, num_heads * PAGE * head_dim)
        content = rng.integers(-99, 99, size=shape).astype(dtype)
        pool = put_raw(device, content)
        lengths = before.copy()
        lengths[slots] += num_emitted
        rows = rng.integers(-99, 99, size=(4, 64, width)).astype(dtype)
        kept = np.full((num_slots, max_emitted, width), -1, dtype)
        accepted_hidden = put_raw(device, kept.reshape(-1, width))
        hidden = put_raw(device, rows.reshape(-1, width)) if has_hidden else None
        by_slot = np.full((num_slots, max_emitted), -1), np.zeros(num_slots, int)
        by_slot[0][slots], by_slot[1][slots] = paths, num_emitted
        ops.keep_accepted(
            context(device), pool=pool, num_heads=num_heads, width=head_dim,
            page_table=put_ints(device, pages), num_nodes=64, seq_slots=put_ints(device, slots),
            lengths=put_ints(device, lengths), accepted=accepted_of(device, *by_slot),
            hidden=hidden, accepted_hidden=accepted_hidden,
        )  # fmt: skip
        for seq, slot in enumerate(slots if has_hidden else ()):
            places = (before[slot] + np.arange(num_emitted[seq])) % max_emitted
            kept[slot, places] = rows[seq, paths[seq, : num_emitted[seq]]]
        assert np.array_equal(accepted_hidden.numpy(), kept.reshape(-1, width)), max_emitted
        paged = (num_layers * 2, -1, num_heads, PAGE, head_dim)
        expected = content.reshape(paged).copy()
        for seq, slot in enumerate(slots):
            entries = expected[:, pages[slot]].transpose(
                1, 3, 0, 2, 4
            )  # page, entry, layer, head, D
            flat = entries.reshape(-1, *entries.shape[2:])
            path = paths[seq, : num_emitted[seq]].tolist()
            moved = reference.compact(flat, int(before[slot]), path).reshape(entries.shape)
            expected[:, pages[slot]] = moved.transpose(2, 0, 3, 1, 4)
        assert np.array_equal(pool.numpy(), expected.reshape(shape)), max_emitted


def accepted_of(device: str, paths: np.ndarray, counts: np.ndarray):
    """Paths [slots, max] and counts [slots]. The op ignores the ids."""
    paths = put_ints(device, paths)
    return ops.Accepted(ids=paths, paths=paths, counts=put_ints(device, counts))


@on_devices
def test_hidden_state_of_a_root(device: str) -> None:
    """A tree with only a root has a hidden state to copy, and no entries to move."""
    pool, row = np.arange(2 * 64 * 8).reshape(2, 1, 512), np.arange(8)
    array = put_raw(device, pool.astype("float16"))
    kept = put_raw(device, np.zeros((6, 8), "float16"))
    ops.keep_accepted(
        context(device), pool=array, num_heads=1, width=8,
        page_table=put_ints(device, [[0], [0]]), num_nodes=1, seq_slots=put_ints(device, [1]),
        lengths=put_ints(device, [0, 5]),
        accepted=accepted_of(device, np.array([[-1] * 3, [0, -1, -1]]), np.array([0, 1])),
        hidden=put_raw(device, row[None].astype("float16")), accepted_hidden=kept,
    )  # fmt: skip
    assert np.array_equal(array.numpy(), pool)
    # Position 4 of slot 1 has row 3 + 4 % 3.
    assert kept.numpy().tolist() == [[0] * 8] * 4 + [row.tolist()] + [[0] * 8]


@on_devices
def test_keep_accepted_checks_its_tensors(device: str) -> None:
    arguments = {
        "num_heads": 1, "width": 8, "num_nodes": 1,
        "page_table": put_ints(device, [[0]]), "seq_slots": put_ints(device, [0]),
        "lengths": put_ints(device, [1]),
        "accepted": accepted_of(device, np.array([[0]]), np.array([1])),
    }  # fmt: skip
    with pytest.raises(ValueError, match="the pool is"):
        ops.keep_accepted(context(device), pool=empty(device, (2, 3, 100), "float16"), **arguments)
    with pytest.raises(
        ValueError, match=r"hidden is float16 \[1, 8\], accepted_hidden is float16 \[1, 16\]"
    ):
        ops.keep_accepted(
            context(device), pool=empty(device, (2, 3, 512), "float16"),
            hidden=empty(device, (1, 8), "float16"),
            accepted_hidden=empty(device, (1, 16), "float16"), **arguments,
        )  # fmt: skip
