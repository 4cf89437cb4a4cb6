"""Text files that a user names, read up to a limit: a device or a pipe may have no end."""

from __future__ import annotations

import io
from pathlib import Path

MOST_BYTES = 16 << 20


def read_text(source: str | Path | int, name: str = "") -> str:
    """The UTF-8 text of a file, with newlines as `open` gives them.

    `source`: a path, or 0 for stdin, which stays open. `name`: its name in messages. Raises OSError
    for an unreadable file. Raises ValueError for more than MOST_BYTES bytes and for bytes that are
    not UTF-8.
    """
    name = name or str(source)
    with open(source, "rb", closefd=source != 0) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{name} has more than {MOST_BYTES >> 20} MiB, expected a shorter text")
    try:
        return io.TextIOWrapper(io.BytesIO(data), "utf-8").read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from error
