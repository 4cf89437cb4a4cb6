"""Finds the ends of matches of a regular expression in a growing text.

llguidance's automata read one byte at a time and never go back. The time of a byte and the memory
are limited, whatever the pattern.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from cpmcu.checks import one_line, shown
from cpmcu.grammar import GrammarError

_EOS = 256


class StopRegex:
    """A pattern and the text read so far. Not thread-safe. Raises ValueError for a bad pattern.

    If the pattern ends with `$`, its matches count at the end of a piece only.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._only_at_ends = _is_anchored(pattern)
        body = pattern[:-1] if self._only_at_ends else pattern
        _matcher(pattern, body)  # otherwise `a)|(b` would be a valid part of a group
        self._matcher = _matcher(pattern, f"(?s:.*)(?:{body})")

    def copy(self) -> StopRegex:
        """The pattern with an empty text."""
        found = object.__new__(StopRegex)
        found.pattern, found._only_at_ends = self.pattern, self._only_at_ends
        found._matcher = self._matcher.deep_copy()
        found._matcher.reset()
        return found

    def read(self, text: str, *, matches: bool = True) -> int | None:
        """Reads the next piece. Returns the length at whose end a match ends first, or None.

        `matches` False: no match counts. After a match, `read` must not be called again. Raises
        GrammarError if the pattern has become too complex.
        """
        for at, letter in enumerate(text, start=1):
            if not self._matcher.consume_tokens(list(letter.encode())):
                raise GrammarError(
                    f"the stop_regex {shown(self.pattern)} has become too complex: "
                    f"{_reason(self._matcher)}"
                )
            counts = matches and (at == len(text) or not self._only_at_ends)
            if counts and self._matcher.is_accepting():
                return at
        return None


def stop_regexes(patterns: Sequence[str], copies: int) -> list[list[StopRegex]]:
    """The patterns of each of `copies` outputs. Raises ValueError, or ImportError."""
    found = [StopRegex(pattern) for pattern in patterns]
    return [[regex.copy() for regex in found] for _ in range(copies)]


def _is_anchored(pattern: str) -> bool:
    before = pattern.removesuffix("$")
    escaped = (len(before) - len(before.rstrip("\\"))) % 2 == 1
    return before != pattern and not escaped


def _matcher(pattern: str, source: str) -> Any:
    library, tokenizer = _bytes()
    grammar = library.LLMatcher.grammar_from_regex(source)
    matcher = library.LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(f"the pattern {shown(pattern)} cannot be used: {_reason(matcher)}")
    return matcher


def _reason(matcher: Any) -> str:
    """llguidance's reason without its drawings."""
    lines = [line.strip() for line in matcher.get_error().splitlines()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return one_line(reasons[0] if reasons else lines[0])


@functools.cache
def _bytes() -> tuple[Any, Any]:
    """The library, and a tokenizer whose token i is byte i."""
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(
            "stop_regex needs the llguidance package: pip install 'cpmcu[grammar]'"
        ) from error
    wrapper = llguidance.TokenizerWrapper(_Bytes())
    return llguidance, llguidance.LLTokenizer(wrapper, slices=[])


class _Bytes:
    """The tokenizer of bytes, with the members that llguidance reads."""

    eos_token_id = _EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(_EOS)), b"<eos>")
    special_token_ids = (_EOS,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
