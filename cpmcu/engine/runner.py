"""The engine thread, the only user of C.Engine, with the generate loop.

Greedy, sampled, speculative and streamed generation share this loop. Up to `launch_ahead` steps
are in flight, so the device does not wait for Python. Tokens of a sequence that has ended while its
step was in flight are ignored.

A plain decode step of many sequences needs no Python loop over them. The scheduler keeps a `Group`
of lists, C++ reserves pages and returns tokens for all, and a thread of its own makes their text
(`text_worker.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as PySequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from cpmcu.engine.chooser import ShapeChooser
from cpmcu.engine.pages import Leases
from cpmcu.engine.prefix.base import CacheCounters, PageCache
from cpmcu.engine.request import Request
from cpmcu.engine.scheduler import Group, Scheduler, Sequence, Step
from cpmcu.engine.shapes import Shape
from cpmcu.engine.step_tokens import StepTokens
from cpmcu.engine.text_worker import TextWorker
from cpmcu.engine.warm_up import warm_up
from cpmcu.errors import OutputError
from cpmcu.outputs import TokenLogprobs

if TYPE_CHECKING:
    from cpmcu import C
    from cpmcu.engine.grammar import Words

logger = logging.getLogger(__name__)

T = TypeVar("T")

DISK_PAUSE = 0.002  # seconds between two looks at what the disk has done


@dataclasses.dataclass(frozen=True, slots=True)
class EngineLoad:
    """Utilisation of an engine."""

    running: int  # number of sequences that hold a slot
    waiting: int  # number of requests in the queue
    kv_cache_usage: float  # used KV pages / all KV pages
    preemptions: int  # number of preemptions since the start
    num_pages: int = 0  # number of all KV pages
    page_size: int = 0  # tokens of a page
    step_tokens: StepTokens = dataclasses.field(default_factory=StepTokens)
    prefix_cache: CacheCounters | None = None  # None: there is no prefix cache


class Runner:
    """Owns an engine. `submit`, `call` and `close` may be called from any thread."""

    def __init__(
        self,
        engine: C.Engine,
        *,
        page_size: int,
        shapes: PySequence[Shape] = (),
        cache: PageCache | None = None,
        prefill_seconds: float = 0.04,
        draft_depth: int | None = None,
    ) -> None:
        """`cache`: None is a cache that holds nothing, without swap space.

        `prefill_seconds`: most time of a prefill pass while other sequences decode. Passes beside
        short decode steps are shorter; see prompt_passes.py.

        `draft_depth`: tokens of the longest drafted path; None: `engine.tokens_per_step` - 1. With
        MTP modules the path is shorter, since `tokens_per_step` also counts tokens that are
        computed again.
        """
        self._engine: C.Engine | None = engine
        self._chooser = ShapeChooser(shapes) if shapes else None
        self._collected = 0.0  # time.perf_counter() when the last step was collected
        self.draft_depth = engine.tokens_per_step - 1 if draft_depth is None else draft_depth
        self._leases = Leases(engine, page_size, cache or PageCache(engine, page_size))
        self._copies_run = False  # the leases must be called again soon
        self._cache_counters = self._leases.snapshot()
        # Numbers of the last steps that were launched and collected.
        self._launched = self._taken = 0
        self._scheduler = Scheduler(engine, self._leases, engine.tokens_per_step, prefill_seconds)
        self.max_length = self._scheduler.max_length
        self.num_pages = engine.num_pages
        self._page_size = page_size
        self._step_tokens = StepTokens()
        # Number of free pages at the last iteration; any thread may read it.
        self._free_pages = self._leases.num_spare
        self._in_flight = self._scheduler.in_flight
        self._text = TextWorker()
        # Requests that any thread has cancelled, or whose text has ended.
        self._notices: deque[Request] = deque()
        self._inbox: deque[Request] = deque()
        self._calls: deque[tuple[Callable[[C.Engine], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._broken: Exception | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="cpmcu-engine", daemon=True)
        self._thread.start()

    def submit(self, *requests: Request) -> None:
        """Queues requests.

        Raises RuntimeError if the engine is closed or has failed. Raises ValueError for a request
        that could exceed the maximum length of a sequence.
        """
        for request in requests:
            if len(request.prompt) + request.max_tokens > self.max_length:
                raise ValueError(
                    f"the request has {len(request.prompt)} prompt tokens and up to "
                    f"{request.max_tokens} more, but a sequence holds {self.max_length}"
                )
        with self._wake:
            self._check_open()
            for request in requests:
                request.run_text, request.notify = self._text.add, self._notices.append
                if request.cancelled:
                    self._notices.append(request)
            self._inbox.extend(requests)
            self._wake.notify()

    def call(self, function: Callable[[C.Engine], T]) -> T:
        """Runs `function(engine)` on the engine thread, with no step in flight.

        Returns its result or raises its exception. Raises RuntimeError if the engine is closed or
        has failed, or if `check_waiter` does.
        """
        self.check_waiter()
        future: Future[T] = Future()
        with self._wake:
            self._check_open()
            self._calls.append((function, future))
            self._wake.notify()
        return future.result()

    def warm_up(self, sampling: C.SamplingConfig) -> None:
        """Runs the slow first steps before the first request; see warm_up.py.

        Requests, outputs and metrics do not show it. An error here is ignored: it recurs at the
        first request, which reports it.
        """

        try:
            self.call(lambda engine: warm_up(engine, self._page_size, self._chooser, sampling))
        except RuntimeError as error:
            logger.warning("the engine could not be warmed up: %s", error)

    def check_waiter(self) -> None:
        """Raises RuntimeError if waiting for the engine would never end.

        This is the case on the threads of engine and text, which run callbacks, and in a forked
        process, which has no engine thread.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the engine belongs to process {self._process}, which process {os.getpid()} was "
                "forked from; load the model after forking"
            )
        if threading.current_thread() is self._thread or self._text.is_current:
            raise RuntimeError(
                "a callback cannot wait for the engine, since the engine thread runs it"
            )

    @property
    def is_open(self) -> bool:
        """Does `submit` accept requests? False if the engine is closed or has failed."""
        return self._broken is None and not self._closing

    def load(self) -> EngineLoad:
        """Utilisation as of the last iteration of the loop."""
        waiting = self._scheduler.num_waiting + len(self._inbox)
        usage = 1 - self._free_pages / self.num_pages
        return EngineLoad(
            len(self._scheduler.active),
            waiting,
            usage,
            self._scheduler.num_preemptions,
            self.num_pages,
            self._page_size,
            self._step_tokens,
            self._cache_counters,
        )

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prompts. Raises as `call` does."""
        self.call(lambda engine: self._leases.reset_cache())

    def close(self) -> None:
        """Aborts running requests, joins the thread, frees the engine. May be called repeatedly."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread and not self._text.is_current:
            self._thread.join()

    def _check_open(self) -> None:
        if self._broken is not None:
            raise RuntimeError(f"the engine stopped after an error: {self._broken}")
        if self._closing:
            raise RuntimeError("the engine is closed")

    # ---- the methods below run on the engine thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                try:
                    self._turn()
                except Exception as error:
                    self._recover(error)
                self._text.flush(0)
        finally:
            self._stop()

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(
                lambda: (
                    self._closing
                    or self._broken is not None
                    or self._inbox
                    or self._calls
                    or self._in_flight
                    or self._copies_run
                    or self._scheduler.has_work
                )
            )
            self._scheduler.waiting.extend(self._inbox)
            self._inbox.clear()
            return not self._closing and self._broken is None

    def _turn(self) -> None:
        """One iteration of the loop: admit, launch ahead, collect the oldest step."""
        self._heed_notices()
        self._serve_calls()
        self._scheduler.admit()
        while len(self._in_flight) < max(1, self._live.launch_ahead):
            step = self._scheduler.next_step(idle=not self._in_flight)
            if step is None:
                break
            self._launch(step)
        if self._in_flight:
            self._collect()
        self._free_pages = self._leases.num_spare
        self._copies_run = self._leases.tick(self._launched, self._taken)
        self._cache_counters = self._leases.snapshot()
        if self._copies_run and not self._in_flight:
            self._leases.wait(DISK_PAUSE)

    @property
    def _live(self) -> C.Engine:
        assert self._engine is not None
        return self._engine

    def _launch(self, step: Step) -> None:
        num_seqs, group = len(step.sequences), step.group
        if self._chooser is not None and group is not None:
            step.shape = self._chooser.choose(num_seqs)
        step.launched = time.perf_counter()
        if step.targets is not None:
            self._score(step, step.targets)
        elif step.chunks is not None:
            drawing = [s for s, (_, _, last) in zip(step.sequences, step.chunks) if last]
            skip = self._chooser is not None and not self._chooser.may_pay(num_seqs)
            if any(sequence.request.is_masked for sequence in drawing):
                trees = [([0], [-1])] * len(drawing)
                masks = self._masks(drawing, trees)
                self._live.prefill(step.chunks, *masks, skip_draft=skip)
            else:
                self._live.prefill(step.chunks, skip_draft=skip)
            for sequence in step.sequences:
                sequence.lease.sent(sequence.sent)
        elif group is not None and any(s.request.is_masked for s in group.guided):
            trees = self._live.begin_masked(group.slots, step.shape)
            self._live.end_masked(*self._masks(step.sequences, trees))
        elif group is not None:
            self._live.decode(group.slots, step.shape)
        self._in_flight.append(step)
        self._launched += 1

    def _score(self, step: Step, targets: list[int]) -> None:
        assert step.chunks is not None
        slot, chunk, _ = step.chunks[0]
        sequence = step.sequences[0]
        found = self._live.prefill_logprobs(
            slot, chunk, targets, sequence.request.num_prompt_logprobs or 0
        )
        entries = [
            TokenLogprobs(token, logprob, tuple(zip(ids, values)))
            for token, (logprob, ids, values) in zip(targets, found)
        ]
        sequence.request.scored(sequence.sent - len(chunk) + 1, entries)

    def _masks(
        self, sequences: list[Sequence], trees: list[tuple[list[int], list[int]]]
    ) -> tuple[list[int], Words]:
        """Packed masks of the nodes of the sequences' trees.

        If a grammar fails, its request fails and its nodes have no masks.
        """
        from cpmcu.engine.grammar import pack_masks  # loads numpy

        masks: list[dict[int, Words]] = []
        for sequence, (tokens, parents) in zip(sequences, trees):
            masks.append({})
            request = sequence.request
            if request.is_masked and not request.is_over:
                try:
                    masks[-1] = request.masks(tokens, parents)
                except RuntimeError as error:
                    request.fail(error)
        return pack_masks(masks, num_nodes=len(trees[0][0]))

    def _collect(self) -> None:
        step = self._in_flight.popleft()
        self._taken += 1
        outputs = self._live.collect_step()
        tokens = outputs.tokens
        self._observe(step, outputs)
        read = sum(len(chunk) for _, chunk, _ in step.chunks or ())
        self._step_tokens.add(read + len(tokens))
        if not (step.group is not None and self._take_plainly(step, step.group, outputs, tokens)):
            self._take_each(step, outputs)
        self._text.flush(len(step.sequences))
        self._heed_notices()

    def _take_plainly(
        self, step: Step, group: Group, outputs: C.StepOutputs, tokens: list[int]
    ) -> bool:
        """Takes one token of each sequence. False: there are other numbers of tokens, or drafts."""
        if (
            (self.draft_depth if step.shape is None else step.shape[0])
            or outputs.slots != group.slots
            or outputs.counts != group.ones
            or outputs.any_finished
        ):
            return False
        requests, lists = group.requests, group.tokens
        others = group.special | group.ending(tokens)
        if others:
            plain = [i for i in range(len(tokens)) if i not in others]
            requests, lists = [requests[i] for i in plain], [lists[i] for i in plain]
        plain_tokens = [tokens[i] for i in plain] if others else tokens
        deque(map(list.append, lists, plain_tokens), maxlen=0)
        self._text.add(functools.partial(_show_each, requests, plain_tokens, self._collected))
        for i in others:
            self._take(group.sequences[i], outputs[i], step)
        return True

    def _take_each(self, step: Step, outputs: C.StepOutputs) -> None:
        numbers = {slot: i for i, slot in enumerate(outputs.slots)}
        for i, sequence in enumerate(step.sequences):
            emits = True
            if step.chunks is not None:
                _, chunk, emits = step.chunks[i]
                sequence.read += len(chunk)
                sequence.request.prefilled(sequence.read)
                if sequence.request.only_scored and sequence.read + 1 == len(sequence.tokens):
                    sequence.request.end_scored()
            if sequence.released:  # it ended while this step was in flight
                continue
            if step.chunks is not None:
                sequence.lease.wrote(sequence.read)
            found = numbers.get(sequence.slot) if emits else None
            self._take(sequence, None if found is None else outputs[found], step)

    def _take(self, sequence: Sequence, output: C.SlotOutput | None, step: Step) -> None:
        """Takes the output of one sequence, and gives its slot back at its end."""
        if output is not None and not sequence.request.is_over:
            self._accept(sequence.request, output, step)
        if sequence.request.is_over:
            self._scheduler.release(sequence)

    def _heed_notices(self) -> None:
        """Ends the requests that were cancelled, and those whose text has ended."""
        for _ in range(len(self._notices)):
            request = self._notices.popleft()
            if not self._scheduler.drop(request) and not request.is_over:
                self._notices.append(request)  # the request is still in `_inbox`

    def _observe(self, step: Step, outputs: C.StepOutputs) -> None:
        before, self._collected = self._collected, time.perf_counter()
        # A step begins when it is launched and the preceding one has ended.
        seconds = self._collected - max(step.launched, before)
        if step.chunks is not None:
            num_tokens = sum(len(chunk) for _, chunk, _ in step.chunks)
            self._scheduler.pass_times.observe(num_tokens, seconds)
        else:
            self._scheduler.pass_times.observe_step(seconds)
        if self._chooser is None:
            return
        if step.shape is not None:
            emitted = [count for count in outputs.counts if count]
            self._chooser.observe(step.shape, len(step.sequences), seconds, emitted)
        elif step.chunks is not None and any(last for _, _, last in step.chunks):
            self._chooser.forget_text()

    def _accept(self, request: Request, output: C.SlotOutput, step: Step) -> None:
        drafted = 0 if step.chunks is not None else self.draft_depth
        if step.shape is not None:
            drafted = step.shape[0]
        emitted = output.tokens
        tokens = list(itertools.takewhile(lambda token: token >= 0, emitted))
        logprobs = functools.partial(_logprobs, output) if request.wants_logprobs else None
        try:
            request.accept(tokens, self._collected, logprobs, drafted=drafted, inner=output.inner)
            if len(tokens) < len(emitted) and not request.is_over:
                raise OutputError(
                    f"the model's logits for token {len(request.tokens) + 1} of the output are not "
                    "finite: its activations overflow the dtype (float16 holds the least), or its "
                    "weights are wrong"
                )
            if output.finished:  # the device ended the sequence
                request.end("length")
        except Exception as error:  # for example of the grammar; fails this request only
            request.fail(error, logs=True)

    def _serve_calls(self) -> None:
        while self._calls:
            while self._in_flight:
                self._collect()
            function, future = self._calls.popleft()
            try:
                future.set_result(function(self._live))
            except Exception as error:
                future.set_exception(error)

    def _recover(self, error: Exception) -> None:
        """Fails every request with `error`. Continues if all slots can be released."""
        logger.error("an engine step failed: %s", error, exc_info=error)
        failure = error if isinstance(error, RuntimeError) else RuntimeError(str(error))
        for request in self._scheduler.requests():
            request.fail(failure)
        self._scheduler.waiting.clear()
        self._in_flight.clear()
        try:
            for sequence in [*self._scheduler.active, *self._scheduler.swapped]:
                self._scheduler.release(sequence)
            while self._live.in_flight():
                self._live.collect()
        except Exception as again:
            logger.error("the engine cannot go on: %s", again)
            with self._wake:
                self._broken = error

    def _stop(self) -> None:
        """Frees the engine and ends all waiting requests and calls."""
        with self._wake:
            self._closing = True
            requests = [*self._scheduler.requests(), *self._inbox]
            calls = list(self._calls)
            self._inbox.clear()
            self._calls.clear()
        for request in requests:
            if self._broken is not None:
                request.fail(RuntimeError(f"the engine stopped after an error: {self._broken}"))
            else:
                request.end("abort")
        for _, future in calls:
            future.set_exception(RuntimeError("the engine is closed"))
        self._in_flight.clear()
        self._text.close()
        self._close_memory()
        self._scheduler.close()
        del self._leases
        self._engine = None

    def _close_memory(self) -> None:
        """Writes the pages that are not on disk yet, and frees the host memory."""
        try:
            if self._broken is None:
                self._live.pages.wait_for_copies()
            self._leases.close()
        except Exception as error:
            logger.error("the prefix cache could not be closed: %s", error)


def _show_each(requests: list[Request], tokens: list[int], when: float) -> None:
    for request, token in zip(requests, tokens):
        request.show_one(token, when)


def _logprobs(output: C.SlotOutput) -> list[TokenLogprobs]:
    """Log-probabilities of one slot's tokens; empty if not requested."""
    if not output.logprobs:
        return []
    tops = zip(output.top_ids, output.top_logprobs)
    pairs = [tuple(zip(ids, values)) for ids, values in tops]
    pairs += [()] * (len(output.logprobs) - len(pairs))
    return [
        TokenLogprobs(token, logprob, top)
        for token, logprob, top in zip(output.tokens, output.logprobs, pairs)
    ]
