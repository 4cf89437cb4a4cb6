"""Checks of arguments. An error message names the field, the value found and the one expected."""

from __future__ import annotations

import importlib.util
import math
import operator
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class FieldError(ValueError):
    """A wrong value of a field. `field`: a name of SamplingParams, "prompt" or "grammar"."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(FieldError):
    """A prompt of `tokens` tokens, where prompt and output together can have `most`.

    `at_least`: the prompt may have more than `tokens` tokens.
    """

    def __init__(
        self, message: str, *, tokens: int = 0, most: int = 0, at_least: bool = False
    ) -> None:
        super().__init__(message, field="prompt")
        self.tokens, self.most, self.at_least = tokens, most, at_least


@contextmanager
def of_field(name: str) -> Iterator[None]:
    """Names the field of a ValueError."""
    try:
        yield
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(str(error), field=name) from error


def shown(value: object, limit: int = 64) -> str:
    """`repr` of a value, cut to `limit` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def shown_json(value: object) -> str:
    """`shown` for a value of a JSON text: null, true and false have JSON's names."""
    names = {None: "null", True: "true", False: "false"}
    return names[value] if value is None or isinstance(value, bool) else shown(value)


def is_installed(module: str) -> bool:
    """Can this module be imported? It is not imported, which would take long."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its package is missing; the module is blocked
        return False


def one_line(text: object, limit: int = 300) -> str:
    """A foreign message as one line of printable characters, cut to `limit` characters."""
    line = " ".join(str(text).split())[: limit + 1]
    if not line.isprintable():
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def brief(name: str, limit: int = 120) -> str:
    """A name from a file, shortened to `limit` printable characters."""
    return one_line(name, limit)


def integer(name: str, value: Any) -> int:
    """Any integer type as `int`. Raises ValueError for other values, True and False included."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{name} is {shown(value)}, but must be an integer")


def number(name: str, value: Any) -> float:
    """An integer or a float, unchanged. Raises ValueError for other values."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {shown(value)}, but must be a number")
    return value


def truth(name: str, value: Any) -> None:
    """Raises ValueError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}, but must be True or False")


def as_float32(value: float) -> float:
    """Returns the nearest float32; beyond the range of float32, infinity."""
    try:
        return float(struct.unpack("f", struct.pack("f", float(value)))[0])
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_filled(name: str, value: str | None, wanted: str) -> None:
    """Raises ValueError unless the value is None or a non-empty string."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{name} is {shown(value)}, but must be {wanted}")


def listed(name: str, value: Any, wanted: str) -> list[Any]:
    """The items of an iterable as a list. Raises ValueError for strings, mappings and scalars."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} is {shown(value)}, but must be {wanted}")
    return list(value)
