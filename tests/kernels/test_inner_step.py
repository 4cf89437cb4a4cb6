"""A draft that inner steps extend (inner_step.h), against lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.util import (
    context,
    empty,
    empty_structs,
    get_structs,
    on_devices,
    ops,
    put_ints,
    put_raw,
    sizes,
)

UNUSED = -1  # what new arrays hold
VOCAB = 1000


class Case:
    """Outer sequences after a step, and the memory of the inner ones."""

    def __init__(self, device: str, num_seqs: int, max_path: int, num_tokens: int) -> None:
        rng = self.rng = np.random.default_rng([num_seqs, max_path, num_tokens])
        self.device, self.max_path, self.num_tokens = device, max_path, num_tokens
        num_slots = self.num_slots = num_seqs + 3
        self.slots = rng.permutation(num_slots)[:num_seqs]
        # 0: the sequence had ended before the step.
        self.counts = rng.integers(0, max_path, size=num_slots)
        self.lengths = self.counts + rng.choice([1, 2, 63, 64, 1009], size=num_slots)
        self.ids = rng.integers(VOCAB, size=(num_slots, max_path))
        self.first = rng.integers(VOCAB, size=num_seqs)
        self.inner = {
            "ids": empty(device, (num_slots, max_path), "int32"),
            "paths": put_ints(device, np.full((num_slots, max_path), 7)),
            "counts": empty(device, [num_slots], "int32"),
        }
        self.inner_lengths = empty(device, [num_slots], "int32")
        self.next_tokens = empty(device, [num_slots], "int32")
        self.stops = empty_structs(device, [num_slots], ops.slot_stop_dtype)
        self.rows, self.slot_rows = (
            empty(device, (num_seqs + 1, max_path), "int32") for _ in range(2)
        )
        self.chain = empty(device, (num_seqs, num_tokens), "int32")
        self.inner_counts = empty_structs(device, [num_seqs], ops.inner_counts_dtype)

    def accepted(self) -> Any:
        return ops.Accepted(
            ids=put_ints(self.device, self.ids),
            paths=empty(self.device, (self.num_slots, self.max_path), "int32"),
            counts=put_ints(self.device, self.counts),
        )

    def begin(self, inner_path: int = 0) -> None:
        inner = dict(self.inner)
        if inner_path:
            inner["paths"] = empty(self.device, (self.num_slots, inner_path), "int32")
        ops.begin_inner(
            context(self.device), seq_slots=put_ints(self.device, self.slots),
            lengths=put_ints(self.device, self.lengths), accepted=self.accepted(),
            first_tokens=put_ints(self.device, self.first),
            inner=ops.SlotState(
                lengths=self.inner_lengths, next_tokens=self.next_tokens, counts=None,
                vocab_size=VOCAB, accepted=ops.Accepted(**inner),
            ),
            stops=self.stops, rows=self.rows, slot_rows=self.slot_rows, chain=self.chain,
            counts=self.inner_counts,
        )  # fmt: skip

    def extend(self, emitted: list[list[int]]) -> None:
        """Changes the state as an inner step does that emits these tokens in each sequence."""
        ids = np.full((self.num_slots, self.max_path), 12345)
        counts = np.full(self.num_slots, 99)  # the number is for slots that are not in the step
        stops = self.stopped()
        for slot, tokens in zip(self.slots, emitted):
            ids[slot, : len(tokens)], counts[slot] = tokens, len(tokens)
            stops["max_tokens"][slot] -= len(tokens)
        self.stops = put_raw(self.device, stops)
        accepted = ops.Accepted(
            ids=put_ints(self.device, ids),
            paths=put_ints(self.device, ids),
            counts=put_ints(self.device, counts),
        )
        ops.extend_chain(
            context(self.device), seq_slots=put_ints(self.device, self.slots), accepted=accepted,
            stops=self.stops, chain=self.chain, counts=self.inner_counts,
        )  # fmt: skip

    def counted(self) -> list[tuple[int, int]]:
        """Inner steps that emitted tokens, and their tokens, of each sequence."""
        return get_structs(self.inner_counts, ops.inner_counts_dtype).tolist()

    def stopped(self) -> Any:
        return get_structs(self.stops, ops.slot_stop_dtype).copy()


def draft_sizes(max_path: int) -> set[int]:
    return {n for n in (1, 2, 7, max_path - 1) if 1 <= n < max_path}


@on_devices
@pytest.mark.parametrize("num_seqs", sizes(1, 7, 31, 257))
@pytest.mark.parametrize("max_path", sizes(2, 3, 9, 17))
def test_inner_sequences_follow_from_outer_ones(device: str, max_path: int, num_seqs: int) -> None:
    for num_tokens in draft_sizes(max_path):
        case = Case(device, num_seqs, max_path, num_tokens)
        case.begin()
        lengths, roots, counts = np.full((3, case.num_slots), UNUSED)
        ids = np.full((case.num_slots, max_path), UNUSED)
        paths = np.full((case.num_slots, max_path), 7)
        rows, slot_rows = np.full((2, num_seqs + 1, max_path), UNUSED)
        for seq, slot in enumerate(case.slots):
            length, first = int(case.lengths[slot]), int(case.first[seq])
            # A sequence that emitted nothing has one row all the same, of an id that exists.
            emitted = case.ids[slot, : case.counts[slot]].tolist() or [0]
            known = [*emitted, first]
            lengths[slot], roots[slot], counts[slot] = length + 1, first, len(known)
            ids[slot] = [*known, *[0] * (max_path - len(known))]
            paths[slot] = -1  # no node drew them
            last = range(length + 1 - len(emitted), length + 1)  # positions of the emitted tokens
            for j, position in enumerate(last):
                rows[seq, j] = seq * max_path + j
                slot_rows[seq, j] = slot * max_path + position % max_path
        assert np.array_equal(case.inner_lengths.numpy(), lengths)
        assert np.array_equal(case.next_tokens.numpy(), roots)
        assert np.array_equal(case.inner["counts"].numpy(), counts)
        assert np.array_equal(case.inner["ids"].numpy(), ids)
        assert np.array_equal(case.inner["paths"].numpy(), paths)
        assert np.array_equal(case.rows.numpy(), rows)
        assert np.array_equal(case.slot_rows.numpy(), slot_rows)
        chains = [[first, *[-1] * (num_tokens - 1)] for first in case.first]
        assert case.chain.numpy().tolist() == chains
        stops = case.stopped()[case.slots]
        assert set(stops["max_tokens"]) == {num_tokens - 1}
        assert set(stops["finished"]) == {int(num_tokens == 1)}
        assert set(stops["num_stop_ids"]) == {0}
        others = np.delete(case.stopped(), case.slots)
        assert set(others["max_tokens"]) == {UNUSED}


@on_devices
@pytest.mark.parametrize("num_seqs", sizes(1, 7, 31, 257))
@pytest.mark.parametrize("max_path", sizes(2, 3, 9, 17))
def test_chains_grow_until_they_are_complete(device: str, max_path: int, num_seqs: int) -> None:
    for num_tokens in draft_sizes(max_path):
        case = Case(device, num_seqs, max_path, num_tokens)
        case.begin()
        assert set(case.counted()) == {(0, 0)}
        drafted = [[int(first)] for first in case.first]
        steps = np.zeros(num_seqs, int)
        for _ in range(4):
            emitted = []
            for tokens in drafted:
                most = num_tokens - len(tokens)
                count = int(case.rng.integers(1, most + 1)) if most else 0
                emitted.append(case.rng.integers(VOCAB, size=count).tolist())
                tokens += emitted[-1]
            case.extend(emitted)
            steps += [len(tokens) > 0 for tokens in emitted]
            assert case.counted() == [(n, len(tokens) - 1) for n, tokens in zip(steps, drafted)]
            expected = [[*tokens, *[-1] * (num_tokens - len(tokens))] for tokens in drafted]
            assert case.chain.numpy().tolist() == expected


@on_devices
def test_drafts_that_do_not_fit_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="a draft of 5 tokens and accepted paths of up to 5"):
        Case(device, 2, 5, 5).begin()
    with pytest.raises(ValueError, match="inner paths have up to 4 tokens, expected 5"):
        Case(device, 2, 5, 4).begin(inner_path=4)
