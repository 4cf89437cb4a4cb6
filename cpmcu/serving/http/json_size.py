"""Counts the values of a JSON text without parsing it.

The JSON parser holds the GIL. A body of millions of values would stop all streams for seconds. A
long string is one value and parses fast.
"""

from __future__ import annotations

import re

# The rest of a string, up to its end or the end of the piece. At most a backslash remains.
_REST = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*("?)', re.DOTALL)
_TEXT = re.compile(b'"' + _REST.pattern, re.DOTALL)


class ValueCounter:
    """Counts the values of JSON that arrives in pieces.

    `parts`: lists, objects and members. Parsing a part takes several times as long as a scalar.
    """

    def __init__(self) -> None:
        self.values = 1
        self.parts = 0
        self._inside = False  # True: the last piece ended inside a string
        # True: the last piece ended with a backslash that escapes the next byte.
        self._escaped = False

    def feed(self, piece: bytes) -> None:
        """Counts the values of the next piece."""
        if self._inside:
            piece = self._leave(piece)
        outside, texts = _TEXT.subn(rb"\1", piece)  # each string is replaced by its closing quote
        if texts > outside.count(b'"'):
            self._inside, self._escaped = True, outside.endswith(b"\\")
        members = outside.count(b":")
        self.values += outside.count(b",") + members
        self.parts += outside.count(b"[") + outside.count(b"{") + members

    def _leave(self, piece: bytes) -> bytes:
        """Returns the part of `piece` after the open string; b"" if the string stays open."""
        if self._escaped and piece:
            piece, self._escaped = piece[1:], False
        rest = _REST.match(piece)
        assert rest is not None  # the pattern matches the empty string
        self._inside = not rest[1]
        after = piece[rest.end() :]
        if self._inside:
            self._escaped = self._escaped or after == b"\\"
            return b""
        return after
