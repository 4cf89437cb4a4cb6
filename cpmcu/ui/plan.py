"""The memory plan as a table: groups with totals and their buffers, the largest first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cpmcu.ui.tables import mebibytes

COLUMNS = ("buffer", "count", "MiB", "share")
_SMALL = 0.01  # buffers below this share of the total are summed in one row

Row = tuple[str, int, str, str]
Buffer = Mapping[str, Any]


def plan_rows(buffers: Sequence[Buffer], *, full: bool) -> list[Row]:
    """Returns rows of COLUMNS. A buffer that each layer has is one row; small buffers are one row.

    `full`: a row for each buffer. The size of a group is the memory that it covers. Buffers that
    are never in use at the same time share memory, so their sizes may sum to more.
    """
    whole = max((each["offset"] + each["bytes"] for each in buffers), default=0)
    groups: dict[str, list[Buffer]] = {}
    for each in buffers:
        groups.setdefault(each["group"], []).append(each)

    def row(name: str, count: int, size: int) -> Row:
        return name, count, f"{mebibytes(size):.2f}", f"{size / max(whole, 1):.1%}"

    rows = []
    for name, members in sorted(groups.items(), key=lambda item: -_covered(item[1])):
        covered = _covered(members)
        shared = sum(each["bytes"] for each in members) > covered
        rows.append(row(name + " (shared)" * shared, len(members), covered))
        parts = _parts(members, whole, full=full)
        rows += [row(f"  {part}", count, size) for part, count, size in parts]
    return [*rows, row("total", len(buffers), whole)]


def _parts(members: Sequence[Buffer], whole: int, *, full: bool) -> list[tuple[str, int, int]]:
    """Returns (name, count, bytes) of a group's buffers, the largest first."""
    if full:
        found = [(each["name"], 1, each["bytes"]) for each in members]
        return sorted(found, key=lambda part: -part[2])
    merged: dict[str, tuple[int, int]] = {}
    for each in members:
        name = re.sub(r"\.\d+\.", ".*.", each["name"])
        count, size = merged.get(name, (0, 0))
        merged[name] = count + 1, size + each["bytes"]
    parts = [(name, count, size) for name, (count, size) in merged.items()]
    large = [part for part in parts if part[2] >= _SMALL * whole]
    small = [part for part in parts if part[2] < _SMALL * whole]
    large.sort(key=lambda part: -part[2])
    if small and large:
        large.append(("others", sum(part[1] for part in small), sum(part[2] for part in small)))
    return large


def _covered(members: Sequence[Buffer]) -> int:
    """Returns the bytes of memory covered by at least one buffer."""
    covered = end = 0
    for each in sorted(members, key=lambda each: each["offset"]):
        last = each["offset"] + each["bytes"]
        covered += max(0, last - max(end, each["offset"]))
        end = max(end, last)
    return int(covered)
