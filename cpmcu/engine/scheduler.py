"""Schedules requests within the engine's slots and pages.

Slots and pages are given in order of arrival. Only requests whose prefix is being computed are
passed over. Prompts are read in chunks and share passes (`prompt_passes.py`). A long prompt delays
the first token of a shorter one by at most two passes, those in flight. Passes alternate with
decode steps. While streamed sequences decode, passes take a few decode steps, so a long prompt does
not stall these sequences. If no streamed sequence decodes, all prompts are read first, in passes of
full length: short passes and decode steps of few sequences cost more per token. A pass has no
decode rows. Their kernels differ from those of prompts, so a pass with both would read the weights
twice, too.

Pages are reserved ahead for the steps in flight. A mask of a grammar or of `min_tokens` depends on
all earlier tokens. If a sequence is masked, a decode step with it therefore waits until no other
step of the sequence is in flight.

If pages run out, the newest sequence is preempted. Once it has emitted a token, its pages move to
the swap space, and it goes on later with the same bits. If the swap space is full, the sequence is
computed again. Sampling is keyed by (seed, stream, position), so draws do not change. On a GPU the
last bits of recomputed keys and values may differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import operator
from collections import Counter, deque
from typing import TYPE_CHECKING

from cpmcu.engine.pages import Found, Lease, Leases
from cpmcu.engine.prompt_passes import PassTimes, divide
from cpmcu.engine.request import Request
from cpmcu.engine.shapes import Shape

if TYPE_CHECKING:
    from cpmcu import C

logger = logging.getLogger(__name__)

# Maximum number of requests that wait for their prefix while later ones are admitted.
MOST_PASSED_OVER = 256


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """A request that holds a slot."""

    request: Request
    lease: Lease
    tokens: list[int]  # tokens to prefill: the prompt; after a preemption also the output so far
    sent: int = 0  # number of its tokens in launched prefill steps, cached ones included
    read: int = 0  # number of its tokens in completed prefill steps, cached ones included
    released: bool = False  # it no longer holds the slot

    @property
    def slot(self) -> int:
        """The sequence's slot in the engine."""
        return self.lease.slot

    @property
    def rest(self) -> int:
        """Tokens to prefill that no launched step reads."""
        return len(self.tokens) - self.sent

    @property
    def unread(self) -> int:
        """Tokens of coming prefill steps. If only scores are wanted, the last one is not read."""
        return self.rest - self.request.only_scored

    @property
    def wants_scores(self) -> bool:
        """Are log-probabilities of the prompt requested and not yet computed?"""
        return self.request.num_prompt_logprobs is not None and not self.request.tokens


class Group:
    """Sequences that decode together, step by step, until one of them ends or another joins.

    What the steps need of each sequence is kept in lists, so that a step needs no loop over them.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        requests = [sequence.request for sequence in sequences]
        self.sequences = sequences
        self.requests = requests
        self.slots = [sequence.slot for sequence in sequences]
        self.ones = [1] * len(sequences)
        self.tokens = [request.tokens for request in requests]
        self.limits = [request.max_tokens for request in requests]
        self.guided = [s for s in sequences if s.request.is_guided]
        # Sequences whose tokens need more than being appended.
        self.special = {i for i, request in enumerate(requests) if not request.takes_plainly}
        self.stops = frozenset[int]().union(*(r.stop_tokens.ids for r in requests)) | {-1}

    @property
    def left(self) -> int:
        """Tokens that every sequence may still emit, those of the steps in flight included."""
        least: int = min(map(operator.sub, self.limits, map(len, self.tokens)))
        return least

    def ending(self, tokens: list[int]) -> set[int]:
        """Numbers of the sequences that may end in a step. `tokens`: one for each sequence."""
        stops = set()
        if not self.stops.isdisjoint(tokens):
            stops = {i for i, token in enumerate(tokens) if token in self.stops}
        if self.left > 1:
            return stops
        lengths = zip(self.limits, self.tokens)
        return stops | {i for i, (limit, old) in enumerate(lengths) if len(old) + 1 >= limit}


@dataclasses.dataclass(slots=True)
class Step:
    """One engine step: prompt chunks (slot, ids, last?), or a decode step of `sequences`."""

    sequences: list[Sequence]
    chunks: list[tuple[int, list[int], bool]] | None = None
    # For a chunk that is scored: the token after each of its tokens.
    targets: list[int] | None = None
    group: Group | None = None  # the group of a decode step's sequences
    shape: Shape | None = None  # shape of a decode step's draft, if it was chosen
    launched: float = 0.0  # time.perf_counter() at the launch

    @property
    def emitting(self) -> list[Sequence]:
        """The sequences that draw tokens."""
        if self.chunks is None:
            return self.sequences
        return [s for s, (_, _, last) in zip(self.sequences, self.chunks) if last]


class Scheduler:
    """Queue, running sequences and page accounting. Used by the engine thread only."""

    def __init__(
        self,
        engine: C.Engine,
        leases: Leases,
        tokens_per_step: int = 1,
        prefill_seconds: float = 0.04,
    ) -> None:
        self._engine = engine
        self._leases = leases
        self.pass_times = PassTimes(prefill_seconds)
        # Maximum number of tokens that a decode step emits for a sequence.
        self._tokens_per_step = tokens_per_step
        self._blocked = False  # a running sequence waits for pages
        self._prompt_blocked = False  # a prompt waits for pages of layers with a window
        self._full = False  # the next request waits for pages
        self.num_preemptions = 0
        self._prefill_next = True
        self._score_next = True
        self.waiting: deque[Request] = deque()
        self.active: list[Sequence] = []  # in order of admission, the oldest first
        self.in_flight: deque[Step] = deque()  # launched and not collected, the oldest first
        # The sequences of `active` whose prompt is not read completely.
        self._reading: list[Sequence] = []
        # The sequences of the next decode step; None: it must be gathered.
        self._group: Group | None = None
        # Sequences in the swap space, the oldest first; older than all waiting ones.
        self.swapped: deque[Sequence] = deque()

    @property
    def max_length(self) -> int:
        """Tokens, prompt and output, that one sequence can have."""
        return min(self._engine.max_model_len, self._engine.num_pages * self._leases.page_size)

    @property
    def has_work(self) -> bool:
        """Is a request waiting or running?"""
        return bool(self.waiting or self.active or self.swapped)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, swapped sequences included."""
        return len(self.waiting) + len(self.swapped)

    def requests(self) -> list[Request]:
        """All requests that are not done."""
        started = [sequence.request for sequence in (*self.active, *self.swapped)]
        return started + list(self.waiting)

    def drop(self, request: Request) -> bool:
        """Ends a request that is cancelled or whose text has ended. False: it is not here."""
        for sequence in (*self.active, *self.swapped):
            if sequence.request is request:
                request.end("abort")
                if request.done:  # these tokens are behind a stop string
                    del request.tokens[request.num_tokens :]
                self.release(sequence)
                return True
        if request in self.waiting:
            request.end("abort")
            self.waiting.remove(request)
            return True
        return False

    def admit(self) -> None:
        """Gives slots and pages to waiting requests while these last; swapped sequences first."""
        self._resume()
        if self.swapped:
            return
        for request in list(itertools.islice(self.waiting, MOST_PASSED_OVER)):
            if self._blocked or self._prompt_blocked or self._full:
                return
            if len(self.active) >= self._engine.max_num_seqs:
                return
            found = self._leases.look_up(request)
            if found is None:
                continue
            if self.active and self._leases.num_new(found) > self._leases.num_spare - 1:
                return
            self.waiting.remove(request)
            self._begin(request, found)

    def next_step(self, *, idle: bool) -> Step | None:
        """The next step to launch, or None. `idle`: no step is in flight."""
        prefill_first = self._prefill_next or not (self._reading and self._is_watched)
        order = (self._prefill, self._decode) if prefill_first else (self._decode, self._prefill)
        while True:
            for make in order:
                step = make()
                if step is not None:
                    self._prefill_next = step.chunks is None
                    return step
            if not (idle and (self._blocked or self._prompt_blocked)):
                return None
            self._make_room()

    def release(self, sequence: Sequence) -> None:
        """Gives a sequence's slot and pages back."""
        if sequence in self.swapped:
            self.swapped.remove(sequence)
        else:
            self.active.remove(sequence)
        if sequence in self._reading:
            self._reading.remove(sequence)
        self._group = None
        sequence.released = True
        self._blocked = self._prompt_blocked = self._full = False
        sequence.lease.end(sequence.read)

    def close(self) -> None:
        """Forgets everything, the engine as well."""
        self.waiting.clear()
        self.active.clear()
        self.swapped.clear()
        self.in_flight.clear()
        self._reading.clear()
        self._group = None
        del self._leases, self._engine

    def _begin(self, request: Request, found: Found) -> None:
        try:
            lease = self._leases.begin(request, found)
        except Exception as error:  # caused by this request alone
            request.fail(error)
            return
        self._start(Sequence(request, lease, found.tokens, lease.cached, lease.cached))

    def _start(self, sequence: Sequence) -> None:
        self.active.append(sequence)
        self._reading.append(sequence)
        if sequence.lease.reserve_prompt(len(sequence.tokens)):
            sequence.lease.restore()
            sequence.request.start(sequence.read)
            if sequence.unread == 0:  # a prompt of one token, without any score
                sequence.request.end_scored()
                self.release(sequence)
            return
        if len(self.active) > 1:  # wait for pages, which the drafter's entries may need
            self.release(sequence)
            self.waiting.appendleft(sequence.request)
            self._full = True
            return
        free = self._engine.num_free_pages
        sequence.request.fail(
            RuntimeError(
                f"the prompt has {len(sequence.tokens)} tokens, but the engine has only {free} "
                f"free pages of {self._leases.page_size} tokens"
            )
        )
        self.release(sequence)

    def _resume(self) -> None:
        """Gives swapped sequences their pages back, the oldest first, while pages last."""
        while self.swapped and not self._blocked:
            sequence = self.swapped[0]
            if self.active and sequence.lease.num_swapped > self._leases.num_spare - 1:
                return
            if not sequence.lease.swap_in(self._needed(sequence)):
                if not self.active:
                    self._end_without_pages(sequence)
                    continue
                return
            self.active.append(self.swapped.popleft())
            self._group = None

    def _prefill(self) -> Step | None:
        self._prompt_blocked = False
        if not self._reading:
            return None
        unread = self._reading = [s for s in self._reading if s.unread > 0]
        scored = [s for s in unread if s.rest > 1 and s.wants_scores]
        others = [s for s in unread if s not in scored]
        room = self._room(unread)
        if scored and (self._score_next or not others):  # passes alternate between the two kinds
            self._score_next = False
            sequence = min(scored, key=lambda s: s.rest)
            take = min(room, sequence.rest - 1)
            if self._reserve_chunk(sequence, sequence.sent + take):
                return self._score(sequence, take)
        self._score_next = True
        chunks: list[tuple[int, list[int], bool]] = []
        step = Step([], chunks)
        shares = divide([s.rest for s in others], room, self._leases.chunk_unit)
        for sequence, share in zip(others, shares):
            begin = sequence.sent
            end = sequence.lease.chunk_end(begin, begin + share) if share > 0 else begin
            if end == begin or not self._reserve_chunk(sequence, end):
                continue
            chunk = sequence.tokens[begin:end]
            sequence.sent = end
            if sequence.rest == 0:
                self._group = None
            step.sequences.append(sequence)
            chunks.append((sequence.slot, chunk, sequence.rest == 0))
        return step if step.sequences else None

    def _reserve_chunk(self, sequence: Sequence, end: int) -> bool:
        """Takes the pages of a chunk in layers with a window; the others were taken before."""
        found = sequence.lease.reserve_windows(end)
        self._prompt_blocked = self._prompt_blocked or not found
        return found

    def _room(self, unread: list[Sequence]) -> int:
        """Maximum number of tokens of the next prefill pass."""
        most = self._engine.chunk_length
        if not unread or not self._is_watched:
            return most
        return min(most, self.pass_times.room([sequence.unread for sequence in unread]))

    @property
    def _is_watched(self) -> bool:
        """Does a streamed sequence decode, whose tokens should come at even intervals?"""
        return any(
            s.request.is_streamed and s.rest == 0 and self._may_decode(s, self._emits(s))
            for s in self.active
        )

    def _score(self, sequence: Sequence, take: int) -> Step:
        """A separate step for a chunk whose next tokens' log-probabilities are requested."""
        begin, end = sequence.sent, sequence.sent + take
        sequence.sent = end
        chunk = (sequence.slot, sequence.tokens[begin:end], False)
        return Step([sequence], [chunk], sequence.tokens[begin + 1 : end + 1])

    def _decode(self) -> Step | None:
        self._blocked = False
        group = self._group
        # Every step in flight emits a token of each sequence, or more.
        if group is None or group.left <= len(self.in_flight):
            group = self._group = self._gather()
        if group is None or any(s.request.is_masked and self._emits(s) for s in group.guided):
            return None
        reserved = self._engine.reserve_step(group.slots)
        ready = group.sequences
        if reserved < len(ready):
            ready = ready[:reserved] + [s for s in ready[reserved:] if self._reserve_step(s)]
        if len(ready) < len(group.sequences):
            self._blocked = True
            group = Group(ready) if ready else None
        return None if group is None else Step(ready, group=group)

    def _gather(self) -> Group | None:
        """The sequences of the next decode step."""
        flying = Counter(itertools.chain.from_iterable(step.emitting for step in self.in_flight))
        ready = [
            sequence
            for sequence in self.active
            if sequence.rest == 0 and self._may_decode(sequence, flying[sequence])
        ]
        return Group(ready) if ready else None

    def _reserve_step(self, sequence: Sequence) -> bool:
        needed = self._needed(sequence)
        return sequence.lease.reserve(needed, needed)

    def _emits(self, sequence: Sequence) -> int:
        """Launched steps that will emit tokens of a sequence."""
        return sum(sequence in step.emitting for step in self.in_flight)

    @staticmethod
    def _may_decode(sequence: Sequence, in_flight: int) -> bool:
        """May the launched steps leave it with fewer tokens than its maximum?"""
        launched = len(sequence.request.tokens) + in_flight  # at least so many tokens
        return launched < sequence.request.max_tokens

    def _needed(self, sequence: Sequence) -> int:
        """KV entries that the slot must hold after one more decode step."""
        request = sequence.request
        ahead = self._emits(sequence) * self._tokens_per_step + self._tokens_per_step - 1
        return min(len(request.prompt) + len(request.tokens) + ahead, self.max_length)

    def _make_room(self) -> None:
        """Preempts the newest sequence. If it is the only one, ends its output."""
        victim = self.active[-1]
        if len(self.active) == 1:
            self._end_without_pages(victim)
            return
        self.num_preemptions += 1
        victim.request.num_preemptions += 1
        if self._swap_out(victim):
            logger.info("KV pages ran out: request %d moves to host memory", victim.request.id)
            return
        logger.info("KV pages ran out: request %d is computed again later", victim.request.id)
        self.release(victim)
        self.waiting.appendleft(victim.request)

    def _swap_out(self, sequence: Sequence) -> bool:
        """Moves the pages of a sequence without steps in flight to the swap space.

        False: they do not fit, or the sequence has emitted nothing. Prefill gives its pages the
        same bits again.
        """
        if sequence.rest > 0 or not sequence.request.tokens:
            return False
        if not sequence.lease.swap_out(sequence.read):
            return False
        self.active.remove(sequence)
        self._group = None
        self.swapped.appendleft(sequence)
        self._blocked = self._prompt_blocked = self._full = False
        return True

    def _end_without_pages(self, sequence: Sequence) -> None:
        logger.warning(
            "KV pages ran out: request %d ends after %d tokens with finish reason 'length'",
            sequence.request.id,
            len(sequence.request.tokens),
        )
        sequence.request.end("length")
        self.release(sequence)
