"""Tables in plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"-?\d+(\.\d+)?%?")


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns aligned columns under a ruled header, numbers to the right, with a final newline."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells)]
    right = [
        bool(rows) and all(_NUMBER.fullmatch(row[i]) for row in cells) for i in range(len(columns))
    ]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right)
        ]
        return "  ".join(parts).rstrip()

    return (
        "\n".join([line(columns), line(["-" * min(w, 40) for w in widths]), *map(line, cells)])
        + "\n"
    )


def text_bar(share: float, width: int = 30) -> str:
    """Returns a bar of up to `width` characters; at least one if `share` is above 0."""
    return "#" * (round(share * width) or share > 0)


def mebibytes(num_bytes: int) -> float:
    """Converts bytes to MiB with two decimals."""
    return round(num_bytes / (1 << 20), 2)
