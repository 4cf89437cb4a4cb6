from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.kernels.util import (
    context,
    empty_structs,
    get_structs,
    on_devices,
    ops,
    put_ints,
    put_raw,
)

SLOTS, VOCAB, MAX_LEN = 5, 11, 120


@dataclass
class State:
    device: str

    def __post_init__(self) -> None:
        self.lengths = put_ints(self.device, [10, 20, 30, 40, 50])
        self.next_tokens = put_ints(self.device, [1, 2, 3, 4, 5])
        self.counts = put_ints(self.device, np.zeros((SLOTS, VOCAB)))
        self.history = put_ints(self.device, np.full((SLOTS, MAX_LEN), -1))
        self.accepted = {
            "ids": put_ints(self.device, np.full((SLOTS, 2), 7)),
            "paths": put_ints(self.device, np.full((SLOTS, 2), 7)),
            "counts": put_ints(self.device, np.full(SLOTS, 7)),
        }
        self.op = ops.SlotState(
            lengths=self.lengths, next_tokens=self.next_tokens, counts=self.counts,
            vocab_size=VOCAB, history=self.history, accepted=ops.Accepted(**self.accepted),
        )  # fmt: skip


class Finisher:
    """finish_step with a ring of 2 steps of up to 3 sequences."""

    def __init__(self, device: str) -> None:
        self.device, self.state = device, State(device)
        sampling = np.zeros(SLOTS, ops.slot_sampling_dtype)
        sampling["use_penalties"][[0, 2]] = 1
        sampling["num_logprobs"] = [-1, 0, 20, -1, -1]
        self.sampling = put_raw(device, sampling)
        self.results = empty_structs(device, [2, 3], ops.slot_result_dtype, pinned=True)
        self.step_counter = put_raw(device, np.zeros(1, np.uint64))
        self.done = put_raw(device, np.zeros(1, np.uint64), pinned=True)
        logprobs = np.zeros(3, ops.token_logprobs_dtype)
        logprobs["logprob"] = [-0.5, -1.5, -2.5]
        logprobs["top_ids"] = np.arange(20)
        logprobs["top_logprobs"] = -np.arange(20)
        self.logprobs = logprobs

    def finish(
        self, slots: list[int], rows: list[int], sampled: list[int], tokens: list[int]
    ) -> None:
        d = self.device
        self.ids = np.arange(sum(rows)) + 1000
        ops.finish_step(
            context(d), seq_slots=put_ints(d, slots),
            seq_token_begin=put_ints(d, np.cumsum([0, *rows])), num_seqs=len(slots),
            ids=put_ints(d, self.ids),
            token_seqs=put_ints(d, np.repeat(np.arange(len(rows)), rows)),
            sampled_seqs=put_ints(d, sampled or [0]), num_sampled=len(sampled),
            tokens=put_ints(d, tokens or [0]), logprobs=put_raw(d, self.logprobs),
            sampling=self.sampling, state=self.state.op,
            sink=ops.ResultSink(
                results=self.results, ring_size=2, max_seqs=3,
                step_counter=self.step_counter, done=self.done,
            ),
        )  # fmt: skip

    def entry(self, index: int) -> Any:
        return get_structs(self.results, ops.slot_result_dtype)[index]

    def counters(self) -> tuple[int, int]:
        return int(self.step_counter.numpy()[0]), int(self.done.numpy()[0])


@on_devices
def test_finish_step_updates_the_slots(device: str) -> None:
    step = Finisher(device)
    step.finish(slots=[2, 0, 3], rows=[1, 7, 100], sampled=[0, 1], tokens=[9, 10])
    assert step.state.lengths.numpy().tolist() == [17, 20, 31, 140, 50]
    assert step.state.next_tokens.numpy().tolist() == [10, 2, 9, 4, 5]
    counts = np.zeros((SLOTS, VOCAB), int)
    counts[2, 9] = counts[0, 10] = 1
    assert np.array_equal(step.state.counts.numpy(), counts)


@on_devices
def test_finish_step_writes_history_and_accepted_tokens(device: str) -> None:
    """History stops at its end. A drawn token is accepted with path -1: no node drew it."""
    step = Finisher(device)
    step.finish(slots=[2, 0, 3], rows=[1, 7, 100], sampled=[0, 1], tokens=[9, 10])
    history = np.full((SLOTS, MAX_LEN), -1)
    history[2, 30], history[0, 10:17] = step.ids[0], step.ids[1:8]
    history[3, 40:] = step.ids[8:88]
    assert np.array_equal(step.state.history.numpy(), history)
    accepted = {name: array.numpy() for name, array in step.state.accepted.items()}
    assert accepted["counts"].tolist() == [1, 7, 1, 7, 7]
    assert accepted["ids"][:, 0].tolist() == [10, 7, 9, 7, 7]
    assert accepted["paths"][:, 0].tolist() == [-1, 7, -1, 7, 7]


@on_devices
def test_finish_step_counts_tokens_only_for_penalties(device: str) -> None:
    step = Finisher(device)
    for _ in range(3):
        step.finish(slots=[0, 1], rows=[1, 1], sampled=[0, 1], tokens=[4, 4])
    assert step.state.counts.numpy()[:, 4].tolist() == [3, 0, 0, 0, 0]


@on_devices
def test_finish_step_publishes_that_no_token_was_drawn(device: str) -> None:
    step = Finisher(device)
    step.finish(slots=[2, 0], rows=[1, 1], sampled=[0, 1], tokens=[ops.NO_TOKEN, 3])
    first, second = step.entry(0)[:2]
    assert (first["num_tokens"], first["tokens"][0], second["tokens"][0]) == (1, ops.NO_TOKEN, 3)
    counts = np.zeros((SLOTS, VOCAB), int)
    counts[0, 3] = 1
    assert np.array_equal(step.state.counts.numpy(), counts)


@on_devices
def test_finish_step_goes_round_the_ring(device: str) -> None:
    step = Finisher(device)
    for n in range(1, 6):
        step.finish(slots=[n % SLOTS], rows=[1], sampled=[0], tokens=[n])
        assert step.counters() == (n, n)
        entry = step.entry((n - 1) % 2)[0]
        assert (entry["slot"], entry["num_tokens"], entry["tokens"][0]) == (n % SLOTS, 1, n)
        if n > 1:  # the ring still holds the step before
            assert step.entry(n % 2)[0]["tokens"][0] == n - 1


@on_devices
def test_finish_step_without_a_drawn_token(device: str) -> None:
    step = Finisher(device)
    step.finish(slots=[1], rows=[64], sampled=[], tokens=[])
    assert step.counters() == (1, 1)
    assert step.state.lengths.numpy()[1] == 84
    assert step.state.next_tokens.numpy()[1] == 2
    assert step.entry(0)[0]["slot"] == -1  # untouched


@on_devices
def test_finish_step_copies_logprobs_if_the_slot_asks(device: str) -> None:
    step = Finisher(device)
    step.finish(slots=[1, 2, 3], rows=[1, 1, 1], sampled=[0, 1, 2], tokens=[0, 1, 2])
    one, two, three = (result["logprobs"][0] for result in step.entry(0))
    assert one["logprob"] == -0.5
    assert two["logprob"] == -1.5
    assert two["top_ids"].tolist() == list(range(20))
    assert two["top_logprobs"].tolist() == [-float(i) for i in range(20)]
    assert np.isnan(three["logprob"])  # not requested: untouched


@on_devices
def test_reset_slot(device: str) -> None:
    state = State(device)
    state.counts.copy_from(np.full((SLOTS, VOCAB), 7, np.int32))
    ids = [3, 5, 3, 5, 9, 5]
    ops.reset_slot(
        context(device), slot=2, state=state.op, ids=put_ints(device, ids), num_ids=6,
        num_prompt=3,
    )  # fmt: skip
    expected = np.full((SLOTS, VOCAB), 7)
    expected[2] = 0
    expected[2, 3], expected[2, 5], expected[2, 9] = ops.PROMPT_BIT, ops.PROMPT_BIT + 2, 1
    assert np.array_equal(state.counts.numpy(), expected)
    assert state.lengths.numpy().tolist() == [10, 20, 0, 40, 50]


@on_devices
def test_reset_slot_with_a_long_prompt(device: str) -> None:
    state = State(device)
    ids = np.random.default_rng(0).integers(VOCAB, size=5000)
    ops.reset_slot(
        context(device), slot=4, state=state.op, ids=put_ints(device, ids), num_ids=5000,
        num_prompt=2000,
    )  # fmt: skip
    generated = np.bincount(ids[2000:], minlength=VOCAB)
    assert np.array_equal(state.counts.numpy()[4], generated + ops.PROMPT_BIT)


@on_devices
def test_reset_slot_without_ids(device: str) -> None:
    state = State(device)
    state.counts.copy_from(np.full((SLOTS, VOCAB), 7, np.int32))
    ops.reset_slot(
        context(device), slot=0, state=state.op, ids=put_ints(device, [0]), num_ids=0,
        num_prompt=0,
    )  # fmt: skip
    assert not state.counts.numpy()[0].any()
