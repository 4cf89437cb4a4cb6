"""Streaming detokenisation: token ids to text, without incomplete characters.

A window of recent tokens is decoded as a whole. This gives the decoder the context that it needs,
for example for leading spaces and for characters whose bytes span several tokens. The window
advances when its text ends with a complete character, and it drops tokens without text. The cost
per token therefore does not grow with the length of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # the decoder's output for an incomplete or invalid character
_PROMPT_TAIL = 6  # prompt tokens that are the context of the first output token
_MAX_HELD = 64  # tokens that wait for the rest of a character; more of them are emitted as they are

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Streams the text that follows a prompt.

    `decode` maps token ids to text, without special tokens. If the output completes a character
    that began in the prompt, its text starts with the whole character.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        # An incomplete character at the end of the prompt may be completed by the output.
        self._window, self._prompt = _tail(decode, prompt)
        self._read = len(self._window)  # number of tokens of the window whose text is emitted
        self._given = self._prompt.rstrip(REPLACEMENT)
        # Number of tokens of the window before the prompt's incomplete character.
        self._whole = self._read
        while self._whole and decode(self._window[: self._whole]).endswith(REPLACEMENT):
            self._whole -= 1

    def push(self, tokens: Sequence[int], *, final: bool = False) -> str:
        """The new text after `tokens`. `final`: includes an incomplete character at the end."""
        self._window.extend(tokens)
        if len(self._window) == self._read:
            return ""
        text = self._decode(self._window)
        held = len(self._window) - self._read
        whole = text if final or held > _MAX_HELD else text.rstrip(REPLACEMENT)
        if whole.startswith(self._prompt):  # the output did not complete the prompt's character
            self._given = max(self._given, self._prompt, key=len)
            self._whole = self._read
        if not whole.startswith(self._given):
            # An invalid byte changed the decoding of earlier bytes, whose text is already emitted.
            # Decode the new tokens alone.
            if whole != text:
                return ""
            delta = self._decode(self._window[self._read :])
        else:
            delta = whole[len(self._given) :]
        self._given += delta
        if len(whole) == len(text):
            if delta:
                self._advance()
            else:  # special tokens: the most recent ones are enough context
                del self._window[self._read : max(self._read, len(self._window) - _PROMPT_TAIL)]
        return delta

    def _advance(self) -> None:
        self._prompt = ""
        del self._window[: self._whole]
        self._read = self._whole = len(self._window)
        self._given = self._decode(self._window)


def _tail(decode: Decode, prompt: Sequence[int]) -> tuple[list[int], str]:
    """Last tokens of a prompt that have text and begin with a complete character, and their text.

    With byte tokens, a decoder may also misread the characters after an incomplete one.
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
