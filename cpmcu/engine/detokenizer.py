"""Token ids to text, piece by piece, without ever giving half a character.

A window of recent tokens is decoded as a whole, so that a token is seen in the context which its
tokenizer's decoder needs (leading spaces, bytes of one character over several tokens). The window
moves whenever its text ends on a whole character, and forgets tokens without text: the cost of a
token does not grow with the length of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # how decoders show bytes that are no character (yet)
_PROMPT_TAIL = 6  # prompt tokens that give the first output token its context
_MAX_HELD = 64  # tokens without a whole character at the end: garbage, given out as it is

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Streams the text that follows a prompt.

    `decode` maps token ids to text (special tokens skipped). Output that continues a character
    which the prompt left unfinished starts with that whole character.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        # Until output follows, nobody knows if what is no character at its end becomes one.
        self._window, self._prompt = _tail(decode, prompt)
        self._read = len(self._window)  # tokens of the window whose text was given out whole
        self._given = self._prompt.rstrip(REPLACEMENT)

    def push(self, tokens: Sequence[int], *, final: bool = False) -> str:
        """Text that `tokens` (any number) complete; `final` gives out an unfinished tail too."""
        self._window.extend(tokens)
        if len(self._window) == self._read:
            return ""
        text = self._decode(self._window)
        held = len(self._window) - self._read
        whole = text if final or held > _MAX_HELD else text.rstrip(REPLACEMENT)
        if whole.startswith(self._prompt):  # it became none, and is not output
            self._given = max(self._given, self._prompt, key=len)
        if not whole.startswith(self._given):
            # An invalid byte changed how a decoder reads the bytes before it, which are given out
            # already: go on with what the new tokens are by themselves.
            if whole != text:
                return ""
            delta = self._decode(self._window[self._read :])
        else:
            delta = whole[len(self._given) :]
        self._given += delta
        if len(whole) == len(text):
            if delta:
                self._advance()
            else:  # special tokens: the last ones are context enough
                del self._window[self._read : max(self._read, len(self._window) - _PROMPT_TAIL)]
        return delta

    def _advance(self) -> None:
        self._prompt = ""
        del self._window[: self._read]
        self._read = len(self._window)
        self._given = self._decode(self._window)


def _tail(decode: Decode, prompt: Sequence[int]) -> tuple[list[int], str]:
    """The last tokens of a prompt that have text and do not begin within a character, and the text.

    Where bytes are tokens, those of half a character may spoil the whole ones behind them.
    """
    usual = list(prompt[-_PROMPT_TAIL:])
    if not usual:
        return [], ""
    usual_text = text = decode(usual)
    tail = usual
    while not text or text.startswith(REPLACEMENT):
        if len(tail) == min(_MAX_HELD, len(prompt)):
            return usual, usual_text
        tail = list(prompt[-len(tail) - 1 :])
        text = decode(tail)
    return tail, text
