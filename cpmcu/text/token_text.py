"""Converts single tokens to bytes and text, for log-probabilities and counts of tokens.

The bytes of a token may be a part of a character. They are therefore computed from the token's
spelling in the vocabulary: byte-level (GPT-2's letters for bytes) or SentencePiece's.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Sequence

from cpmcu.tokenizer import Tokenizer

_SOUGHT_BYTES = 256  # bytes of text after which the text's place in the output no longer changes
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Bytes and texts of a tokenizer's tokens, with a cache."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        byte_level = all(tokenizer.id_of(letter) is not None for letter in "ĠĊ")
        self._letters = byte_letters() if byte_level else None
        self._cache: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Returns a token's bytes; of a special token, the bytes of its name."""
        found = self._cache.get(token)
        if found is None:
            found = self._cache[token] = self._read(token)
        return found

    def text_of(self, token: int) -> str:
        """Returns the token as text. Incomplete characters become U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def spelling_of(self, token: int) -> str:
        """Returns OpenAI's spelling of a token: text, or bytes:\\x... if it is not UTF-8."""
        found = self.bytes_of(token)
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def is_special(self, token: int) -> bool:
        """Is it a special token, which is not part of the text?"""
        return self._tokenizer.is_special(token)

    def _read(self, token: int) -> bytes:
        piece = self._tokenizer.piece(token)
        if piece is None:  # padding of the vocabulary
            return b""
        if self._letters is not None:
            values = [self._letters.get(letter) for letter in piece]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(piece) else piece.encode("utf-8")
        byte = _BYTE.fullmatch(piece)
        if byte:
            return bytes([int(byte[1], 16)])
        return piece.replace("\u2581", " ").encode("utf-8")


def byte_letters() -> dict[str, int]:
    """Returns the byte of each letter of GPT-2. Letters of unprintable bytes begin at U+0100."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    letters = {chr(byte): byte for byte in seen}
    return letters | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def tokens_up_to(texts: TokenTexts, tokens: Sequence[int], text: str) -> int:
    """Returns the number of tokens of an output up to the end of `text`; 0 for no text."""
    counter = TokensUpTo(texts)
    counter.add(tokens, text)
    return counter.count


class TokensUpTo:
    """Counts the tokens of an output up to the end of a text within it, while both grow."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._ends: list[int] = []  # the end of each token in the output, in bytes
        # The beginnings of both, until the text has enough bytes to be found in the output.
        self._output = self._text = b""
        self._begin = 0  # the start of the text in the output, in bytes
        self._length = 0

    def add(self, tokens: Sequence[int], text: str) -> None:
        """Adds tokens of the output, and what the text has grown by."""
        seeks = len(self._text) < _SOUGHT_BYTES
        pieces = [self._texts.bytes_of(token) for token in tokens]
        last = self._ends[-1] if self._ends else 0
        self._ends += [last + end for end in itertools.accumulate(map(len, pieces))]
        if seeks:
            self._output += b"".join(pieces)
        if text:
            more = text.encode()
            self._length += len(more)
            if seeks:
                self._text += more
                self._begin = max(self._output.find(self._text), 0)

    @property
    def count(self) -> int:
        """The number of tokens; 0 for no text."""
        if not self._length:
            return 0
        whole = bisect.bisect_left(self._ends, self._begin + self._length)
        return min(whole + 1, len(self._ends))
