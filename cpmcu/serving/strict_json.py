"""JSON that a model or a client wrote, read so that it can be written again.

Python's json module takes more than JSON: NaN, numbers beyond floats, half a surrogate pair. And
it ends with a RecursionError where values are nested deeply.
"""

from __future__ import annotations

import json
from typing import Any

_DECODER = json.JSONDecoder()


def write(value: Any) -> str:
    """`value` as JSON. Raises ValueError for what JSON in UTF-8 cannot hold."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"no JSON can hold it: {error}") from error
    return text


def read(text: str) -> Any:
    """The value of a text that is JSON and nothing else, and can be written. Raises ValueError."""
    value, end = read_first(text)
    if text[end:].strip():
        raise ValueError("there is text after the JSON")
    return value


def read_first(text: str) -> tuple[Any, int]:
    """The value at the beginning of a text, and where it ends. Raises ValueError."""
    begin = len(text) - len(text.lstrip())
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    write(value)
    return value, end
