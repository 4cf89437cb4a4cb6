"""Reads JSON of models and clients strictly, so that every value can be written again.

Python's json module also accepts NaN, numbers beyond floats and half a surrogate pair. It raises
RecursionError for deeply nested values.
"""

from __future__ import annotations

import json
from typing import Any

_DECODER = json.JSONDecoder()


def write(value: Any) -> str:
    """Returns `value` as JSON. Raises ValueError if UTF-8 JSON cannot represent it."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"no JSON can hold it: {error}") from error
    return text


def read(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError if it is not JSON, or text follows it."""
    value, end = read_first(text)
    if text[end:].strip():
        raise ValueError("there is text after the JSON")
    return value


def read_first(text: str) -> tuple[Any, int]:
    """Returns the JSON value at the beginning of a text, and its end. Raises ValueError."""
    begin = len(text) - len(text.lstrip())
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    write(value)
    return value, end
