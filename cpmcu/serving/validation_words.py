"""Words for pydantic's errors of validation, made from the code and the values of an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Values = Mapping[str, Any]

# pydantic's code of a type error -> the expected type, in words.
_TYPES = {
    "bool_type": "true or false",
    "dict_type": "a JSON object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer of at most 4300 digits",
    "int_type": "an integer",
    "json_type": "JSON text",
    "list_type": "a list",
    "model_attributes_type": "a JSON object",
    "model_type": "a JSON object",
    "none_required": "null",
    "string_type": "a text",
    "string_unicode": "a text in Unicode",
}
# Code of a value out of range, or of a text that is none of some -> what it must be or have.
_RANGES: dict[str, Callable[[Values], str]] = {
    "greater_than": lambda values: f"be above {_plain(values['gt'])}",
    "greater_than_equal": lambda values: f"be at least {_plain(values['ge'])}",
    "less_than": lambda values: f"be below {_plain(values['lt'])}",
    "less_than_equal": lambda values: f"be at most {_plain(values['le'])}",
    "literal_error": lambda values: f"be {values['expected']}",
    "string_too_long": lambda values: _size("at most", values["max_length"], "character"),
    "string_too_short": lambda values: _size("at least", values["min_length"], "character"),
    "too_long": lambda values: _size("at most", values["max_length"], "item"),
    "too_short": lambda values: _size("at least", values["min_length"], "item"),
    "value_error": lambda values: str(values["error"]),  # a validator of this package's
}


def wanted(code: str, values: Values) -> str:
    """Returns what a value must be or have, from an error's `type` and `ctx`."""
    if code in _RANGES:
        return f"must {_RANGES[code](values)}"
    return f"must be {_TYPES[code]}" if code in _TYPES else f"is not valid ({code})"


def _size(bound: str, number: int, unit: str) -> str:
    return f"have {bound} {number} {unit}{'' if number == 1 else 's'}"


def _plain(number: float) -> float:
    return int(number) if isinstance(number, float) and number.is_integer() else number
