"""State of one choice of a request, from prompt ids to finished text."""

from __future__ import annotations

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

_ids = itertools.count()


class Request:
    """State of one choice. After `Runner.submit`, only the engine thread uses it; any thread may
    call `cancel`.

    The engine thread calls `emit` with one StreamChunk for each step that emitted tokens. The last
    chunk has a finish_reason; on failure, an exception takes its place. `emit` must not block.
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
        self.is_streamed = is_streamed  # False: only the end of the output matters
        self.num_prompt_logprobs = prompt_logprobs  # likeliest tokens per position; None: off
        self.prompt_logprobs: list[TokenLogprobs | None] = [None] * len(self.prompt)
        self.grammar = grammar
        self._min_tokens = min_tokens
        self._bad_words = bad_words
        self._thinking = thinking
        self._shows_stop = shows_stop  # the text has the token that ended it
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self.error: Exception | None = None
        self.cancelled = False
        self.cache_salt = cache_salt
        self.lookup: Prefix | None = None  # in the prefix cache, while it waits
        self.cached_tokens: int | None = None  # prompt tokens that were cached when prefill began
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._stop_tokens = stop_tokens
        self._emit = emit
        self._on_prefill = on_prefill
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] | None = [] if want_logprobs else None
        self._decode_steps = 0
        self.num_preemptions = 0
        self._acceptance = acceptance
        self._arrived = time.perf_counter()
        self._started = self._first = self._last = 0.0

    @property
    def done(self) -> bool:
        """Has the last chunk or an exception been emitted?"""
        return self.finish is not None or self.error is not None

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

    def start(self, num_cached: int = 0) -> None:
        """Records and reports the start of prefill, behind `num_cached` tokens that were cached."""
        self._started = self._started or time.perf_counter()
        if self.cached_tokens is None:
            self.cached_tokens = min(num_cached, len(self.prompt))
        self.prefilled(num_cached)

    def prefilled(self, num_tokens: int) -> None:
        """Reports that the engine has read `num_tokens` of the prompt."""
        report = self._on_prefill
        if report is not None and not self.tokens and not self.done:
            self._guard(lambda: report(num_tokens, len(self.prompt)))

    def scored(self, first: int, entries: Sequence[TokenLogprobs]) -> None:
        """Stores log-probabilities of the prompt tokens from position `first` on."""
        self.prompt_logprobs[first : first + len(entries)] = entries

    def accept(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        *,
        drafted: int = 0,
        inner: tuple[int, int] = (0, 0),
    ) -> None:
        """Takes the tokens of a decode step or of the last prefill step.

        `drafted`: tokens of the longest path that the step verified; 0 if it drafted none.
        `inner`: the draft's own (inner) steps, and their tokens. Tokens after the end of the output
        are dropped.
        """
        if not tokens:
            return
        self._last = time.perf_counter()
        if self.tokens:
            self._decode_steps += 1
        else:
            self._first = self._last
        before = len(self.tokens)
        text = ""
        for token in tokens:
            self.tokens.append(token)
            if self._thinking is not None:
                self._thinking.accept(self.tokens)
            finish = self._stop_tokens.check(token, len(self.tokens))
            if self.grammar is not None:
                self.grammar.accept(token)
                if self.grammar.stopped and (finish is None or finish.reason == "length"):
                    finish = Finish("stop")
            hidden = self._stop_tokens.is_stop(token) and not self._shows_stop
            shown = [] if hidden else [token]
            piece, stop = self._push(shown, final=finish is not None)
            text += piece
            if stop is not None:
                finish = Finish("stop", stop)
            if finish is not None:
                self.finish = finish
                break
        taken = len(self.tokens) - before
        if drafted and self._acceptance is not None:
            ended = self.grammar is not None and self.grammar.stopped
            self._acceptance.add(taken if ended else len(tokens), drafted, inner)
        self._send(text, self.tokens[before:], list(logprobs[:taken]))

    def end(self, reason: FinishReason) -> None:
        """Ends the output after its current tokens and emits the text that was held back."""
        if self.done:
            return
        text, stop = self._push([], final=True)
        self.finish = Finish(reason) if stop is None else Finish("stop", stop)
        self._send(text, [], [])

    def end_scored(self) -> None:
        """Ends a request for log-probabilities of the prompt alone."""
        self._first = self._last = time.perf_counter()
        self.end("length")

    def fail(self, error: Exception) -> None:
        """Ends the request with an exception."""
        if not self.done:
            self.error = error
            self._guard(lambda: self._emit(error))

    def output(self) -> CompletionOutput:
        """The result. Raises the request's exception, or RuntimeError if it is not done."""
        if self.error is not None:
            raise self.error
        if self.finish is None:
            raise RuntimeError("the request is not finished")
        return CompletionOutput(
            index=self.index,
            text="".join(self._text),
            token_ids=list(self.tokens),
            finish_reason=self.finish.reason,
            stop_reason=self.finish.stop_reason,
            logprobs=self._logprobs,
            timings=self._timings(),
            spec_decode_metrics=self._acceptance.metrics() if self._acceptance else None,
        )

    def _timings(self) -> Timings:
        started = self._started or self._arrived
        first = self._first or started
        return Timings(
            queue_s=started - self._arrived,
            prefill_s=first - started,
            decode_s=(self._last - first) if self._first else 0.0,
            prompt_tokens=len(self.prompt),
            output_tokens=len(self.tokens),
            cached_tokens=self.cached_tokens or 0,
            decode_steps=self._decode_steps,
            preemptions=self.num_preemptions,
            grammar_s=self.grammar.seconds if self.grammar is not None else 0.0,
        )

    def _push(self, tokens: Sequence[int], *, final: bool) -> tuple[str, str | None]:
        text = self._detokenizer.push(tokens, final=final)
        early = self._min_tokens is not None and len(self.tokens) <= self._min_tokens.count
        return self._stop_strings.push(text, final=final, stops=not early)

    def _send(self, text: str, tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
        self._text.append(text)
        if self._logprobs is not None:
            self._logprobs.extend(logprobs)
        chunk = StreamChunk(
            index=self.index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs if self._logprobs is not None else None,
            finish_reason=self.finish.reason if self.finish else None,
            stop_reason=self.finish.stop_reason if self.finish else None,
        )
        self._guard(lambda: self._emit(chunk))

    def _guard(self, call: Callable[[], None]) -> None:
        """Calls a listener. If it raises, the request is cancelled and the engine continues."""
        try:
            call()
        except Exception:
            logger.exception("the listener of request %d failed; the request is cancelled", self.id)
            self.cancelled = True
