"""How many values JSON has, told before it is parsed.

Parsing holds the interpreter's lock: a body of millions of values would stop everybody else's
stream for seconds. A long text is one value, and no trouble.
"""

from __future__ import annotations

import re

# Up to its end, or as far as the piece goes: at most one byte is left then, a backslash.
_REST = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*("?)', re.DOTALL)
_TEXT = re.compile(b'"' + _REST.pattern, re.DOTALL)


class ValueCounter:
    """Counts values of JSON that comes in pieces.

    `parts` are lists, objects and their members, which take several times as long as others.
    """

    def __init__(self) -> None:
        self.values = 1
        self.parts = 0
        self._inside = False  # a text
        self._escaped = False  # its last byte was a backslash that escapes the next

    def feed(self, piece: bytes) -> None:
        """Takes the next piece."""
        if self._inside:
            piece = self._leave(piece)
        outside, texts = _TEXT.subn(rb"\1", piece)  # their closing quotes are left
        if texts > outside.count(b'"'):
            self._inside, self._escaped = True, outside.endswith(b"\\")
        members = outside.count(b":")
        self.values += outside.count(b",") + members
        self.parts += outside.count(b"[") + outside.count(b"{") + members

    def _leave(self, piece: bytes) -> bytes:
        """What follows the text that `piece` goes on with; nothing if it does not end there."""
        if self._escaped and piece:
            piece, self._escaped = piece[1:], False
        rest = _REST.match(piece)
        assert rest is not None  # it matches nothing, too
        self._inside = not rest[1]
        after = piece[rest.end() :]
        if self._inside:
            self._escaped = self._escaped or after == b"\\"
            return b""
        return after
