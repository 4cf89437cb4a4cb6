"""The rows of several MTP modules (mtp_rows.h), against rows that are made one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.util import context, empty, on_devices, ops, put_ints, sizes
from tests.reference import mtp as reference
from tests.reference.tree import Growth

VOCAB = 1000
UNUSED = -1  # what new arrays hold
NAMES = ("ids", "positions", "token_seqs", "hidden_rows")
DEPTH = 5


class Case:
    """Sequences of many lengths, each with a grown draft, or with the next chunk of a prompt."""

    def __init__(self, num_seqs: int, window: int, topk: int = 0, shortest: int = 1) -> None:
        """Makes random sequences. `topk` 0: the rows are a prompt's."""
        rng = self.rng = np.random.default_rng([num_seqs, window, topk])
        self.window, self.topk, self.num_slots = window, topk, num_seqs + 3
        lengths = [shortest, 1, 2, window - 1, window, window + 1, 61, 64, 131]
        self.lengths = np.array([max(shortest, n) for n in rng.permutation(lengths * 3)])
        self.lengths = self.lengths[: self.num_slots]
        shared = [int(rng.integers(n - shortest + 1)) for n in self.lengths]
        self.num_shared = np.where(rng.random(self.num_slots) < 0.5, 0, shared)
        self.history = np.full((self.num_slots, 140), -99)
        for row, length in zip(self.history, self.lengths):
            row[:length] = rng.integers(VOCAB, size=length)
        self.roots = rng.integers(VOCAB, size=self.num_slots)
        self.accepted = rng.integers(window + 1, size=self.num_slots)
        self.slots = rng.permutation(self.num_slots)[:num_seqs]
        self.growths = [Growth(topk) for _ in range(num_seqs)]
        for growth in self.growths if topk else ():
            for level in range(DEPTH):
                shape = (topk if level else 1, topk)
                logprobs = -rng.exponential(2, shape).astype(np.float32)
                growth.expand(rng.integers(VOCAB, size=shape), logprobs)
        self.chunks = [rng.integers(VOCAB, size=rng.choice([1, 2, 3, 40])) for _ in self.slots]
        self.seqs = [
            reference.MtpSequence(
                slot=int(slot),
                cached=self.history[slot, : self.lengths[slot]].tolist(),
                num_shared=int(self.num_shared[slot]),
                window=window,
                levels=growth.levels,
                following=[int(self.roots[slot])] if topk else chunk.tolist(),
            )
            for slot, growth, chunk in zip(self.slots, self.growths, self.chunks)
        ]

    def state(self, device: str) -> Any:
        accepted = ops.Accepted(
            ids=None,
            paths=empty(device, (self.num_slots, self.window), "int32"),
            counts=put_ints(device, self.accepted),
        )
        return ops.SlotState(
            lengths=put_ints(device, self.lengths), next_tokens=put_ints(device, self.roots),
            counts=None, vocab_size=VOCAB, history=put_ints(device, self.history),
            accepted=accepted, num_shared=put_ints(device, self.num_shared),
        )  # fmt: skip

    def beam(self, device: str, level: int) -> Any:
        """The candidates of the first `level` levels. Later ones are -7."""
        tokens = np.full((len(self.seqs), self.topk + (DEPTH - 1) * self.topk**2), -7)
        chosen = np.full((len(self.seqs), DEPTH, self.topk), -7)
        for seq, growth in enumerate(self.growths):
            known = self.topk + (level - 1) * self.topk**2 if level else 0
            tokens[seq, :known] = [c.token for c in growth.candidates[:known]]
            for i, rows in enumerate(growth.levels[:level]):
                chosen[seq, i] = [c.index for c in rows]
        others = ("scores", "token_scores", "ancestor_masks", "token_ids", "token_parents")
        return ops.DraftBeam(
            num_seqs=len(self.seqs), topk=self.topk, depth=DEPTH, tokens=put_ints(device, tokens),
            level_candidates=put_ints(device, chosen),
            **dict.fromkeys((*others, "token_positions", "token_seqs", "seq_token_begin")),
        )  # fmt: skip

    def run(self, device: str, module: int, chained: bool) -> dict[str, Any]:
        b, most = len(self.seqs), 70
        out = {name: empty(device, [b * most], "int32") for name in NAMES}
        out |= {
            "ancestor_masks": empty(device, [b * most], "uint64"),
            "seq_token_begin": empty(device, [b + 1], "int32"),
            "last_rows": empty(device, [b * max(self.topk, 1)], "int32"),
            "lengths": empty(device, [self.num_slots], "int32"),
            "draft_lengths": empty(device, [self.num_slots], "int32"),
        }
        if self.topk:
            source = {"beam": self.beam(device, module)}
        else:
            begins = np.cumsum([0, *map(len, self.chunks)])
            source = {
                "prompt_ids": put_ints(device, np.concatenate(self.chunks)),
                "prompt_begin": put_ints(device, begins),
            }
        ops.mtp_rows(
            context(device), module=module, window=self.window, chain_hidden=chained,
            seq_slots=put_ints(device, self.slots), state=self.state(device), **source, **out,
        )  # fmt: skip
        return {name: array.numpy() for name, array in out.items()}

    def launch_rows(self, seq: reference.MtpSequence, module: int) -> int:
        """The rows of a sequence, with its padding."""
        return self.window + module * (self.topk - 1) if self.topk else seq.num_rows

    def check(self, device: str, module: int, chained: bool) -> None:
        got = self.run(device, module, chained)
        begin = begin_before = 0
        lengths, drafts = np.full((2, self.num_slots), UNUSED)
        for number, seq in enumerate(self.seqs):
            assert got["seq_token_begin"][number] == begin
            rows = seq.rows(module)
            count = self.launch_rows(seq, module)
            for i, row in enumerate(rows):
                at = begin + i
                assert (got["ids"][at], got["positions"][at]) == (row.token, row.position)
                expected = seq.slot * self.window + row.position % self.window
                if chained and module:
                    expected = begin_before + seq.row_before(module, i)
                assert got["hidden_rows"][at] == expected
            assert set(got["token_seqs"][begin : begin + count]) <= {number}
            if self.topk:
                self.check_masks(got["ancestor_masks"][begin : begin + count], seq, module)
                last = [i for i, row in enumerate(rows) if row.position == len(seq.cached) - 1]
                k = len(seq.branches(module))
                assert got["last_rows"][number * k : (number + 1) * k].tolist() == [
                    begin + i for i in last
                ]
            lengths[seq.slot] = len(seq.cached) - seq.num_rows
            drafts[seq.slot] = len(seq.cached) - max(self.accepted[seq.slot], 1)
            begin += count
            begin_before += self.launch_rows(seq, module - 1)
        assert got["seq_token_begin"][-1] == begin
        for name in NAMES:  # nothing lies behind the rows
            assert (got[name][begin:] == UNUSED).all()
        assert np.array_equal(got["lengths"], lengths)
        assert np.array_equal(
            got["draft_lengths"], drafts if module == 0 else [UNUSED] * len(drafts)
        )

    def check_masks(self, masks: Any, seq: reference.MtpSequence, module: int) -> None:
        """Padding sees itself alone, and no other row sees padding."""
        known = len(seq.rows(module))
        for i, mask in enumerate(masks):
            visible = seq.visible(module, i) if i < known else {i}
            assert {bit for bit in range(64) if int(mask) >> bit & 1} == visible


@on_devices
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("topk", sizes(1, 2, 3, 7, 12))
@pytest.mark.parametrize("window", sizes(1, 2, 3, 5, 8, 17))
def test_rows_of_a_draft(device: str, window: int, topk: int, chained: bool) -> None:
    for num_seqs in (1, 7, 13):
        case = Case(num_seqs, window, topk)
        for module in range(DEPTH + 1):
            if window + module * (topk - 1) <= 64:
                case.check(device, module, chained)


@on_devices
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("window", sizes(1, 2, 3, 5, 8, 17))
def test_rows_before_a_chunk_of_a_prompt(device: str, window: int, chained: bool) -> None:
    """A sequence of which nothing is cached has no rows."""
    for num_seqs in (1, 7, 13):
        case = Case(num_seqs, window, shortest=0)
        for module in range(DEPTH + 1):
            case.check(device, module, chained)


@on_devices
def test_padding_is_harmless(device: str) -> None:
    """Padding lies behind all entries. It reads id 0, and a hidden state that exists."""
    case = Case(13, 8, 3)
    for module in (0, 1, 3):
        got, count = case.run(device, module, True), 8 + module * 2
        padded = 0
        for number, seq in enumerate(case.seqs):
            begin, own = number * count, len(seq.rows(module))
            padded += count - own
            assert set(got["ids"][begin + own : begin + count]) <= {0}
            behind = got["positions"][begin + own : begin + count]
            first = len(seq.cached) - seq.num_rows + own
            assert behind.tolist() == list(range(first, first + count - own))
            hidden = got["hidden_rows"][begin + own : begin + count]
            assert set(hidden) <= {got["hidden_rows"][begin]}
        assert padded > 0


@on_devices
def test_no_sequence_changes_another(device: str) -> None:
    many = Case(13, 5, 3)
    rows, together = 5 + 2 * 2, many.run(device, 2, True)
    slots = many.slots
    for number in (0, 6, 12):
        many.slots, seqs, growths = slots[number : number + 1], many.seqs, many.growths
        many.seqs, many.growths = seqs[number : number + 1], growths[number : number + 1]
        alone = many.run(device, 2, True)
        many.seqs, many.growths = seqs, growths
        for name in ("ids", "positions", "ancestor_masks"):
            assert np.array_equal(
                alone[name][:rows], together[name][number * rows : (number + 1) * rows]
            )


@on_devices
def test_too_many_rows_are_refused(device: str) -> None:
    case = Case(1, 17, 12)
    with pytest.raises(ValueError, match="module 5, a window of 17 and top-k 12 make 72 rows"):
        case.run(device, 5, False)
