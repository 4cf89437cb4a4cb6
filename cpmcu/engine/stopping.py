"""End conditions of an output: stop strings, stop patterns, stop tokens, and the token limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from cpmcu.engine.stop_regex import StopRegex
from cpmcu.outputs import FinishReason


class StopStrings:
    """Cuts a stream of text at the stop string or match of a pattern that is complete first.

    If several stop strings end at the same character, the longest one matches. Text that may become
    a stop string is held back until this is decided. The result therefore does not depend on the
    division of the text into pieces, except for patterns that end with `$`. A pattern's match is
    part of the text. At the same character, stop strings precede patterns, in their order.
    """

    def __init__(
        self, stops: Sequence[str], *, shown: bool = False, patterns: Sequence[StopRegex] = ()
    ) -> None:
        self._stops = tuple(stops)
        self._patterns = tuple(patterns)
        self._shown = shown  # the text includes the stop string that ends it
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    @property
    def any(self) -> bool:
        """Are there stop strings or patterns?"""
        return bool(self._stops or self._patterns)

    def push(self, text: str, *, final: bool = False, stops: bool = True) -> tuple[str, str | None]:
        """Returns (text to emit, matching stop string or pattern, or None).

        `final`: emits the text that is held back. `stops` False: a stop string that ends in `text`
        does not match. After a match, `push` must not be called again. Raises GrammarError if a
        pattern has become too complex.
        """
        end, pattern = len(text), None
        for each in self._patterns:
            found = each.read(text, matches=stops)
            if found is not None and (pattern is None or found < end):
                end, pattern = found, each.pattern
        given, stop = self._cut(text[:end], final=final or pattern is not None, stops=stops)
        return given, pattern if stop is None else stop

    def _cut(self, text: str, *, final: bool, stops: bool) -> tuple[str, str | None]:
        """`push` for stop strings alone."""
        if not self._stops:
            return text, None
        before, text = len(self._held), self._held + text
        matches = []
        for stop in self._stops if stops else ():
            found = text.find(stop, max(0, before - len(stop) + 1))  # the match ends in new text
            if found >= 0:
                matches.append((found + len(stop), -len(stop), stop))
        if matches:
            end, negative_length, stop = min(matches)
            self._held = ""
            return text[: end if self._shown else end + negative_length], stop
        keep = 0 if final else self._prefix_at_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def _prefix_at_end(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """The reason for the end of an output."""

    reason: FinishReason
    stop_reason: int | str | None = None


class StopTokens:
    """Ends an output at an end-of-sequence token, a stop token, or after `max_tokens` tokens."""

    def __init__(
        self, eos_token_ids: Collection[int], stop_token_ids: Collection[int], max_tokens: int
    ) -> None:
        self._eos = frozenset(eos_token_ids)
        self._stops = frozenset(stop_token_ids)
        self._ids = self._eos | self._stops
        self._max_tokens = max_tokens

    @property
    def ids(self) -> frozenset[int]:
        """The tokens that end the output."""
        return self._ids

    def is_stop(self, token: int) -> bool:
        """Does this token end the output? Its text is not part of the output."""
        return token in self._ids

    def check(self, token: int, num_tokens: int) -> Finish | None:
        """Tells why the output ends after `token`, or None. `num_tokens` counts `token`, too."""
        if token in self._stops:
            return Finish("stop", token)
        if token in self._eos:
            return Finish("stop")
        return Finish("length") if num_tokens >= self._max_tokens else None
