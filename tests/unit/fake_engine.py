"""An engine without a model: it emits a scripted stream of tokens, under C.Engine's contract.

It checks its caller: chunk sizes, reserved pages, slots, the number of steps in flight. The token
at position p of a sequence is `script(prompt_key, p)`. Like the seeded sampling of a real engine,
it depends on nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

PAGE_SIZE = 4


def sampling(key: int = 0, stop_ids: Sequence[int] = (), max_tokens: int = 1 << 30):
    """A stand-in for SamplingConfig. `key` selects the stream of the script."""
    return SimpleNamespace(key=key, stop_ids=list(stop_ids), max_tokens=max_tokens)


class _Slot:
    def __init__(self, config: SimpleNamespace, prompt: Sequence[int]) -> None:
        self.key = config.key
        self.stop_ids = getattr(config, "stop_ids", [])
        self.left = getattr(config, "max_tokens", 1 << 30)  # tokens until the device ends it
        self.finished = False
        self.prompt = list(prompt)
        self.read = 0  # prompt tokens in the cache
        self.position = 0  # position of the next token to emit; 0: prompt not read
        self.pages = 0


class FakeOutputs(list):
    """A stand-in for StepOutputs."""

    @property
    def slots(self) -> list[int]:
        return [output.slot for output in self]

    @property
    def tokens(self) -> list[int]:
        return [token for output in self for token in output.tokens]

    @property
    def counts(self) -> list[int]:
        return [len(output.tokens) for output in self]

    @property
    def any_finished(self) -> bool:
        return any(output.finished for output in self)


class FakeEngine:
    """See the module's docstring.

    Each decode step emits `burst` tokens, like a drafter whose drafts are all accepted. If
    `device_stops` is set, the engine ends sequences itself, and later steps emit 0 tokens.
    """

    def __init__(
        self,
        script: Callable[[int, int], int],
        *,
        num_pages: int = 1000,
        max_num_seqs: int = 4,
        chunk_length: int = 8,
        max_model_len: int = 1000,
        launch_ahead: int = 2,
        burst: int = 1,
        device_stops: bool = False,
        step_seconds: float = 0.0,
        on_prefill: Callable[[object], object] = lambda items: None,
    ) -> None:
        self.script = script
        self.num_pages = self.num_free_pages = num_pages
        self.max_num_seqs = max_num_seqs
        self.chunk_length = chunk_length
        self.max_model_len = max_model_len
        self.launch_ahead = launch_ahead
        self.burst = self.tokens_per_step = burst
        self.device_stops = device_stops
        self.step_seconds = step_seconds
        self.on_prefill = on_prefill
        self.slots: dict[int, _Slot] = {}
        self.steps: deque[list[tuple[int, _Slot, list[int], bool]]] = deque()
        self.log: list[tuple[str, object]] = []
        self.shapes: list[tuple[int, int] | None] = []  # shape of each decode step
        self.skipped_drafts: list[bool] = []  # skip_draft of each prefill step
        # Nothing is moved to host memory.
        self.pages = SimpleNamespace(
            page_bytes=0,
            slot_bytes=0,
            windows=[0],
            group_page_bytes=lambda group: 0,
            num_pages=lambda group: num_pages,
            wait_for_copies=lambda: None,
        )
        self.fail_on: dict[str, Exception] = {}  # method -> exception, raised once
        self.most_in_flight = 0
        self.open_masked: list[int] = []  # slots of the open masked step
        self.open_burst = 0  # maximum number of tokens that it may emit
        self._thread: int | None = None

    def _called(self, method: str, detail: object = None) -> None:
        thread = threading.get_ident()
        self._thread = self._thread or thread
        assert thread == self._thread, "the engine was called from two threads"
        self.log.append((method, detail))
        if method in self.fail_on:
            raise self.fail_on.pop(method)

    def add_sequence(
        self,
        config: SimpleNamespace,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
        pages: Sequence[int] = (),
        num_cached: int = 0,
    ) -> int:
        assert not pages and num_cached == 0, "it has no prefix cache"
        self._called("add_sequence", (len(prompt), len(generated)))
        free = [slot for slot in range(self.max_num_seqs) if slot not in self.slots]
        if not free:
            raise RuntimeError("no free slot")
        self.slots[free[0]] = _Slot(config, [*prompt, *generated])
        return free[0]

    def release(self, slot: int) -> None:
        self._called("release", slot)
        self.open_masked = []
        self.num_free_pages += self.slots.pop(slot).pages

    def reserve(self, slot: int, num_tokens: int) -> bool:
        self._called("reserve", (slot, num_tokens))
        assert num_tokens <= self.max_model_len
        state = self.slots[slot]
        more = max(0, -(-num_tokens // PAGE_SIZE) - state.pages)
        if more > self.num_free_pages:
            return False
        state.pages += more
        self.num_free_pages -= more
        return True

    def reserve_step(self, slots: Sequence[int]) -> int:
        self._called("reserve_step", list(slots))
        most = min(self.max_model_len, self.num_pages * PAGE_SIZE)
        for i, slot in enumerate(slots):
            if not self.reserve(slot, min(self.slots[slot].position + self.burst - 1, most)):
                return i
        return len(slots)

    def prefill(
        self,
        items: Sequence[tuple[int, Sequence[int], bool]],
        mask_rows: Sequence[int] = (),
        masks: Any = (),
        skip_draft: bool = False,
    ) -> None:
        self.skipped_drafts.append(skip_draft)
        self.on_prefill(items)
        self._called("prefill", [(slot, len(ids), last) for slot, ids, last in items])
        if mask_rows:
            self._check_masks(mask_rows, masks, sum(last for _, _, last in items))
        assert 0 < sum(len(ids) for _, ids, _ in items) <= self.chunk_length
        emitted = []
        for slot, ids, last in items:
            state = self.slots[slot]
            assert list(ids) == state.prompt[state.read : state.read + len(ids)]
            state.read += len(ids)
            assert state.read <= state.pages * PAGE_SIZE
            assert last == (state.read == len(state.prompt))
            if last:
                state.position = state.read
                emitted.append((slot, state, self._emit(state, 1), False))
        self._enqueue(emitted)

    def prefill_logprobs(
        self, slot: int, ids: Sequence[int], targets: Sequence[int], num_top: int
    ) -> list[tuple[float, list[int], list[float]]]:
        self.prefill([(slot, ids, False)])
        state = self.slots[slot]
        assert list(targets) == state.prompt[state.read - len(ids) + 1 : state.read + 1]
        return [(-float(target), [target] * num_top, [0.0] * num_top) for target in targets]

    def decode(self, slots: Sequence[int], shape: tuple[int, int] | None = None) -> None:
        self._called("decode", list(slots))
        self.shapes.append(shape)
        self._decode(slots, self.burst if shape is None else shape[0] + 1)

    def begin_masked(
        self, slots: Sequence[int], shape: tuple[int, int] | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """A chain of all tokens that the step would emit, except the last."""
        self._called("begin_masked", list(slots))
        self.shapes.append(shape)
        self.open_masked = list(slots)
        self.open_burst = self.burst if shape is None else shape[0] + 1
        trees = []
        for state in (self.slots[slot] for slot in slots):
            last = self.open_burst - 1
            drafted = [self.script(state.key, state.position + i) for i in range(last)]
            trees.append(([-7, *drafted], list(range(-1, last))))
        return trees

    def end_masked(self, mask_rows: Sequence[int], masks: Any) -> None:
        self._called("end_masked", list(mask_rows))
        assert self.open_masked, "no masked step has begun"
        self._check_masks(mask_rows, masks, len(self.open_masked) * self.open_burst)
        self._decode(self.open_masked, self.open_burst)
        self.open_masked = []

    @staticmethod
    def _check_masks(rows: Sequence[int], masks: Any, num_rows: int) -> None:
        assert len(rows) == num_rows
        assert sorted(row for row in rows if row >= 0) == list(range(len(masks)))

    def _decode(self, slots: Sequence[int], burst: int) -> None:
        emitted = []
        for slot in slots:
            state = self.slots[slot]
            assert state.position, "decode before the prompt was read"
            tokens = self._emit(state, burst)
            # KV entries of every token except the newest.
            needed = min(state.position - 1, self.max_model_len)
            assert needed <= state.pages * PAGE_SIZE, "a step wrote past its pages"
            emitted.append((slot, state, tokens, state.finished))
        self._enqueue(emitted)

    def _emit(self, state: _Slot, count: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count and not state.finished:
            tokens.append(self.script(state.key, state.position))
            state.position += 1
            state.left -= 1
            ends = tokens[-1] in state.stop_ids or state.left == 0
            # The first token comes from prefill, which does not check the mask.
            state.finished = self.device_stops and ends and state.position > state.read + 1
        return tokens

    def _enqueue(self, emitted: list[tuple[int, _Slot, list[int], bool]]) -> None:
        self.steps.append(emitted)
        self.most_in_flight = max(self.most_in_flight, len(self.steps))
        assert len(self.steps) <= self.launch_ahead

    def in_flight(self) -> int:
        return len(self.steps)

    def collect_step(self) -> FakeOutputs:
        return FakeOutputs(self.collect())

    def collect(self) -> list[SimpleNamespace]:
        self._called("collect")
        if self.step_seconds:
            time.sleep(self.step_seconds)
        return [
            SimpleNamespace(
                slot=slot,
                tokens=t,
                finished=end,
                inner=(0, 0),
                logprobs=[],
                top_ids=[],
                top_logprobs=[],
            )
            for slot, state, t, end in self.steps.popleft()
            if self.slots.get(slot) is state  # a slot that was released meanwhile is left out
        ]
