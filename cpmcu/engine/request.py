"""State of one choice of a request, from prompt ids to finished text."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cpmcu.engine.detokenizer import Detokenizer
from cpmcu.engine.stopping import Finish, StopStrings, StopTokens
from cpmcu.outputs import CompletionOutput, FinishReason, StreamChunk, Timings, TokenLogprobs

if TYPE_CHECKING:
    from cpmcu import C
    from cpmcu.engine.bad_words import BadWords
    from cpmcu.engine.grammar import GrammarState, Words
    from cpmcu.engine.min_tokens import MinTokens
    from cpmcu.engine.prefix.base import Prefix
    from cpmcu.engine.thinking_budget import ThinkingBudget
    from cpmcu.spec_metrics import AcceptanceCounter

logger = logging.getLogger(__name__)

Emit = Callable[["StreamChunk | Exception"], None]
OnPrefill = Callable[[int, int], None]  # (prompt tokens done, prompt tokens in all)
Job = Callable[[], None]

_ids = itertools.count()


class Request:
    """State of one choice. After `Runner.submit`, only the runner uses it; any thread may call
    `cancel`.

    The engine thread takes tokens and finds the ends that follow from their ids. The text thread
    (text_worker.py) makes text, finds stop strings and calls `emit`. With few sequences the engine
    thread does that work, too.
    If a stop string ends the text, the engine thread may have taken later tokens, which are
    dropped.

    `emit` gets one StreamChunk for each step that emitted tokens. The last chunk has a
    finish_reason; on failure, an exception takes its place. `emit` must not block. If the output
    is not streamed, `emit` only gets the last chunk, with all of the text, or the exception.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: C.SamplingConfig,
        *,
        detokenizer: Detokenizer,
        stop_strings: StopStrings,
        stop_tokens: StopTokens,
        max_tokens: int,
        emit: Emit,
        on_prefill: OnPrefill | None = None,
        index: int = 0,
        want_logprobs: bool = False,
        prompt_logprobs: int | None = None,
        acceptance: AcceptanceCounter | None = None,
        grammar: GrammarState | None = None,
        min_tokens: MinTokens | None = None,
        bad_words: BadWords | None = None,
        thinking: ThinkingBudget | None = None,
        shows_stop: bool = False,
        cache_salt: str = "",
        is_streamed: bool = True,
    ) -> None:
        self.id = next(_ids)
        self.prompt = list(prompt)
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.index = index
        self.is_streamed = is_streamed  # False: the client needs only the complete output
        # Likeliest tokens that are reported at each position of the prompt; None: none.
        self.num_prompt_logprobs = prompt_logprobs
        self.prompt_logprobs: list[TokenLogprobs | None] = [None] * len(self.prompt)
        self.grammar = grammar
        self._min_tokens = min_tokens
        self._bad_words = bad_words
        self._thinking = thinking
        self._shows_stop = shows_stop  # the text includes the stop token or string that ended it
        self.tokens: list[int] = []  # tokens that the engine thread has taken
        self.num_tokens = 0  # number of these tokens whose text is made
        self.ended = False  # the engine thread takes no more tokens
        self.run_text: Callable[[Job], None] = _run_now  # runs a job on the text thread, in order
        # Tells the engine thread to look at the request.
        self.notify: Callable[[Request], None] | None = None
        self.finish: Finish | None = None
        self.error: Exception | None = None
        self.cancelled = False
        self.cache_salt = cache_salt
        # The keys of its pages in the prefix cache, while it waits.
        self.lookup: Prefix | None = None
        self.cached_tokens: int | None = None  # prompt tokens that were cached when prefill began
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._stop_tokens = stop_tokens
        self._emit = emit
        self._on_prefill = on_prefill
        self._text: list[str] = []
        self.wants_logprobs = want_logprobs
        self._logprobs: list[TokenLogprobs] | None = [] if want_logprobs else None
        self._decode_steps = 0
        self.num_preemptions = 0
        self._acceptance = acceptance
        self._arrived = time.perf_counter()
        self._started = self._first = self._last = 0.0

    @property
    def done(self) -> bool:
        """Is the last chunk or an exception emitted?"""
        return self.finish is not None or self.error is not None

    @property
    def is_over(self) -> bool:
        """Is its end found, by the engine thread or the text thread?"""
        return self.ended or self.done

    @property
    def output_tokens(self) -> list[int]:
        """The tokens whose text is made."""
        return self.tokens[: self.num_tokens]

    @property
    def stop_tokens(self) -> StopTokens:
        """The end conditions that follow from token ids."""
        return self._stop_tokens

    @property
    def takes_plainly(self) -> bool:
        """If a token does not end the output, is it appended to `tokens` and nothing else done?"""
        return not (self.is_guided or self.wants_logprobs)

    @property
    def is_guided(self) -> bool:
        """May tokens be masked, at some time?"""
        return (
            self.grammar is not None
            or self._min_tokens is not None
            or self._bad_words is not None
            or self._thinking is not None
        )

    @property
    def only_scored(self) -> bool:
        """Is no token wanted, only log-probabilities of the prompt?"""
        return self.max_tokens == 0

    @property
    def is_masked(self) -> bool:
        """May a grammar, `min_tokens`, a bad word or a limit restrict the next token?"""
        if self._thinking is not None and self._thinking.may_force(len(self.tokens)):
            return True
        return self.grammar is not None or self._is_short or self._bad_words is not None

    @property
    def _is_short(self) -> bool:
        least = self._min_tokens
        return least is not None and least.holds_back and len(self.tokens) < least.count

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> dict[int, Words]:
        """Node -> mask of the tokens that may follow it, for a drafted tree.

        A node without a mask is unrestricted. Raises GrammarError if the grammar has become too
        complex.
        """
        masks = None if self.grammar is None else self.grammar.masks(tokens, parents)
        if self._is_short:
            assert self._min_tokens is not None
            masks = self._min_tokens.masks(len(self.tokens), parents, masks)
        free = self.grammar is None  # with a grammar, a node without a mask ends the output
        if self._thinking is not None:
            masks = self._thinking.masks(self.tokens, tokens, parents, masks or {}, unmasked=free)
        if self._bad_words is not None:
            masks = self._bad_words.masks(self.tokens, tokens, parents, masks or {}, unmasked=free)
        return masks or {}

    def cancel(self) -> None:
        """Ends the request at the engine's next step, with finish reason "abort"."""
        self.cancelled = True
        notify = self.notify
        if notify is not None:
            notify(self)

    def start(self, num_cached: int = 0) -> None:
        """Records and reports the start of prefill, behind `num_cached` tokens that were cached."""
        self._started = self._started or time.perf_counter()
        if self.cached_tokens is None:
            self.cached_tokens = min(num_cached, len(self.prompt))
        self.prefilled(num_cached)

    def prefilled(self, num_tokens: int) -> None:
        """Reports that the engine has read `num_tokens` of the prompt."""
        report = self._on_prefill
        if report is not None and not self.tokens and not self.is_over:
            self._guard(lambda: report(num_tokens, len(self.prompt)))

    def scored(self, first: int, entries: Sequence[TokenLogprobs]) -> None:
        """Stores log-probabilities of the prompt tokens from position `first` on."""
        self.prompt_logprobs[first : first + len(entries)] = entries

    def accept(
        self,
        tokens: Sequence[int],
        when: float,
        logprobs: Callable[[], Sequence[TokenLogprobs]] | None = None,
        *,
        drafted: int = 0,
        inner: tuple[int, int] = (0, 0),
    ) -> None:
        """Takes the tokens of a decode step or of the last prefill step, which ended at `when`.

        `logprobs`: makes those of all tokens. `drafted`: tokens of the longest path that the step
        verified; 0 if it drafted none. `inner`: the draft's own (inner) steps, and their tokens.
        Tokens after the end of the output are dropped.
        """
        if not tokens:
            return
        before, finish = len(self.tokens), None
        for token in tokens:
            self.tokens.append(token)
            if self._thinking is not None:
                self._thinking.accept(self.tokens)
            finish = self._stop_tokens.check(token, len(self.tokens))
            if self.grammar is not None:
                self.grammar.accept(token)
                if self.grammar.stopped and (finish is None or finish.reason == "length"):
                    finish = Finish("stop")
            if finish is not None:
                self.ended = True
                break
        taken = self.tokens[before:]
        counted = None  # number of emitted tokens, for the metrics of acceptance
        if drafted:
            ended = self.grammar is not None and self.grammar.stopped
            counted = (len(taken) if ended else len(tokens), drafted, inner)
        self.run_text(functools.partial(self.show, taken, when, finish, logprobs, counted))

    def end(self, reason: FinishReason) -> None:
        """Ends the output after its current tokens and emits the text that was held back."""
        if not self.is_over:
            self.ended = True
            self.run_text(functools.partial(self._show_end, reason))

    def end_scored(self) -> None:
        """Ends a request for log-probabilities of the prompt alone."""
        self._first = self._last = time.perf_counter()
        self.end("length")

    def fail(self, error: Exception, *, logs: bool = False) -> None:
        """Ends the request with an exception, after its current tokens. `logs`: also logs it."""
        if not self.ended:
            self.ended = True
            self.run_text(functools.partial(self._show_error, error, logs))

    # ---- the text thread

    def show_one(self, token: int, when: float) -> None:
        """Makes the text of one token that ends nothing by its id. Fails as `show` does.

        Only for outputs without guides and log-probabilities.
        """
        if self.finish is not None or self.error is not None:
            return
        try:
            self._count_step(when)
            self.num_tokens += 1
            text, stop = self._detokenizer.push((token,)), None
            if self._stop_strings.any:
                text, stop = self._stop_strings.push(text)
            if stop is not None or self.is_streamed:
                self._send(text, (token,), [], None if stop is None else Finish("stop", stop))
            elif text:
                self._text.append(text)
        except Exception as error:  # for example of the tokenizer
            self._show_error(error, logs=True)

    def show(
        self,
        tokens: Sequence[int],
        when: float,
        finish: Finish | None = None,
        logprobs: Callable[[], Sequence[TokenLogprobs]] | None = None,
        counted: tuple[int, int, tuple[int, int]] | None = None,
    ) -> None:
        """Makes the text of tokens. `finish`: the last of them ends the output.

        `counted`: arguments of AcceptanceCounter.add. If this fails, the request fails.
        """
        if self.done:
            return
        try:
            self._show(tokens, when, finish, logprobs, counted)
        except Exception as error:  # for example of the tokenizer
            self._show_error(error, logs=True)

    def _show(
        self,
        tokens: Sequence[int],
        when: float,
        finish: Finish | None,
        logprobs: Callable[[], Sequence[TokenLogprobs]] | None,
        counted: tuple[int, int, tuple[int, int]] | None,
    ) -> None:
        self._count_step(when)
        text, taken, last = "", 0, len(tokens)
        for token in tokens:
            taken += 1
            self.num_tokens += 1
            ends = finish is not None and taken == last
            hidden = ends and not self._shows_stop and self._stop_tokens.is_stop(token)
            piece, stop = self._push(() if hidden else (token,), final=ends)
            text += piece
            if stop is not None:
                finish = Finish("stop", stop)
                break
        if counted is not None and self._acceptance is not None:
            self._acceptance.add(*counted)
        found = [] if logprobs is None else list(logprobs()[:taken])
        self._send(text, tokens if taken == last else tokens[:taken], found, finish)

    def _count_step(self, when: float) -> None:
        """Counts a step that emitted tokens, and ended at `when`. The first is no decode step."""
        self._last = when
        if self.num_tokens:
            self._decode_steps += 1
        else:
            self._first = when

    def _show_end(self, reason: FinishReason) -> None:
        if not self.done:
            text, stop = self._push((), final=True)
            self._send(text, [], [], Finish(reason) if stop is None else Finish("stop", stop))

    def _show_error(self, error: Exception, logs: bool) -> None:
        if self.done:
            return
        if logs:
            logger.error("request %d failed: %s", self.id, error)
        self.error = error
        self._tell_engine()
        self._guard(lambda: self._emit(error))

    def _tell_engine(self) -> None:
        """Tells the engine thread to give the slot back: the text thread has ended the output."""
        if not self.ended and self.notify is not None:
            self.notify(self)

    def output(self) -> CompletionOutput:
        """The result. Raises the request's exception, or RuntimeError if it is not done."""
        if self.error is not None:
            raise self.error
        if self.finish is None:
            raise RuntimeError("the request is not finished")
        return CompletionOutput(
            index=self.index,
            text="".join(self._text),
            token_ids=self.output_tokens,
            finish_reason=self.finish.reason,
            stop_reason=self.finish.stop_reason,
            logprobs=self._logprobs,
            timings=self.timings(),
            spec_decode_metrics=self._acceptance.metrics() if self._acceptance else None,
        )

    def timings(self) -> Timings:
        """Times and numbers of tokens so far. Any thread may call it."""
        started = self._started or self._arrived
        first = self._first or started
        return Timings(
            queue_s=started - self._arrived,
            prefill_s=first - started,
            decode_s=(self._last - first) if self._first else 0.0,
            prompt_tokens=len(self.prompt),
            output_tokens=self.num_tokens,
            cached_tokens=self.cached_tokens or 0,
            decode_steps=self._decode_steps,
            preemptions=self.num_preemptions,
            grammar_s=self.grammar.seconds if self.grammar is not None else 0.0,
        )

    def _push(self, tokens: Sequence[int], *, final: bool) -> tuple[str, str | None]:
        text = self._detokenizer.push(tokens, final=final)
        early = self._min_tokens is not None and self.num_tokens <= self._min_tokens.count
        return self._stop_strings.push(text, final=final, stops=not early)

    def _send(
        self,
        text: str,
        tokens: Sequence[int],
        logprobs: list[TokenLogprobs],
        finish: Finish | None,
    ) -> None:
        self._text.append(text)
        if self._logprobs is not None:
            self._logprobs.extend(logprobs)
        if finish is not None:
            self.finish = finish
            self._tell_engine()
        if not self.is_streamed:
            if finish is None:
                return
            text, tokens = "".join(self._text), self.output_tokens
            logprobs = list(self._logprobs or ())
        chunk = StreamChunk(
            index=self.index,
            text=text,
            token_ids=list(tokens),
            logprobs=logprobs if self._logprobs is not None else None,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
        )
        self._guard(lambda: self._emit(chunk))

    def _guard(self, call: Callable[[], None]) -> None:
        """Calls a listener. If it raises, the request is cancelled and the engine continues."""
        try:
            call()
        except Exception:
            logger.exception("the listener of request %d failed; the request is cancelled", self.id)
            self.cancel()


def _run_now(job: Job) -> None:
    job()
