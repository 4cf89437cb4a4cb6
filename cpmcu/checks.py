"""Checks of values that callers give: one sentence that says which field, what was found, and what
was expected."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Iterable, Mapping
from typing import Any


def shown(value: object, limit: int = 64) -> str:
    """A value as Python writes it, cut to `limit` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write integers of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def one_line(text: object, limit: int = 300) -> str:
    """A message of somebody else as one line of printable letters, cut to `limit` characters."""
    line = " ".join(str(text).split())
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line[: limit + 1])
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def brief(name: str, limit: int = 120) -> str:
    """A name from a file, as it is unless it is long or cannot be printed."""
    return one_line(name, limit)


def integer(name: str, value: Any) -> int:
    """Any kind of integer as Python's. Raises ValueError for what is none, True and False too."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{name} is {shown(value)}, but must be an integer")


def number(name: str, value: Any) -> float:
    """An integer or a float as it is. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {shown(value)}, but must be a number")
    return value


def truth(name: str, value: Any) -> None:
    """Raises ValueError for anything but True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}, but must be True or False")


def as_float32(value: float) -> float:
    """The nearest float32; infinite beyond its range."""
    try:
        return float(struct.unpack("f", struct.pack("f", float(value)))[0])
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_filled(name: str, value: str | None, wanted: str) -> None:
    """Raises ValueError for what is neither None nor a text of at least one letter."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{name} is {shown(value)}, but must be {wanted}")


def listed(name: str, value: Any, wanted: str) -> list[Any]:
    """What a list, an array or another collection of values holds. Raises ValueError for others."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} is {shown(value)}, but must be {wanted}")
    return list(value)
