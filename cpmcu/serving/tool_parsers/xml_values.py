"""Values of parameters in XML notations: the text has no type, so the tool's schema decides."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from cpmcu.engine.json_schema import resolved
from cpmcu.serving.http import strict_json
from cpmcu.serving.tool_parsers.calls import Tools

_MAX_DEPTH = 8  # maximum depth of alternatives within alternatives
_PYTHON_WORDS = ("True", "False", "None")  # words of templates that print Python values


def types_of(tools: Tools, function: str, parameter: str) -> set[str]:
    """Returns the JSON types that a tool's schema allows for a parameter; empty: any."""
    root = tools.get(function, {})
    properties = resolved(root, root).get("properties")
    schema = properties.get(parameter) if isinstance(properties, Mapping) else None
    return _types(schema, root, 0)


def to_json(text: str, types: set[str]) -> str:
    """Returns the JSON of a parameter's text.

    JSON other than a string, a Python list or dict, and True, False or None become that value. All
    other text becomes a string, quotes included. If `types` allow a string but not the value's
    type, the text becomes a string, too.
    """
    found = _plain(text.strip())
    if found is not None and (not types or _type(found[0]) & types or "string" not in types):
        return found[1]
    return strict_json.write(text)


def _plain(text: str) -> tuple[Any, str] | None:
    """Returns (value, JSON) of a text that is JSON or Python, but not a string; otherwise None."""
    try:
        value = strict_json.read(text)
        return None if isinstance(value, str) else (value, text)
    except ValueError:
        pass
    if text not in _PYTHON_WORDS and text[:1] not in ("[", "{"):
        return None
    try:
        value = ast.literal_eval(text)
        return value, strict_json.write(value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _type(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"} | ({"integer"} if value.is_integer() else set())
    if isinstance(value, str):
        return {"string"}
    return {"object"} if isinstance(value, dict) else {"array"}


def _types(schema: Any, root: Any, depth: int) -> set[str]:
    schema = resolved(schema, root)
    stated = schema.get("type")
    if isinstance(stated, str):
        return {stated}
    if isinstance(stated, list):
        return {each for each in stated if isinstance(each, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return set().union(*map(_type, values))
    found: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        if isinstance(alternatives, list) and depth < _MAX_DEPTH:
            parts = [_types(each, root, depth + 1) for each in alternatives]
            if key != "allOf" and not all(parts):  # one alternative allows any type
                return set()
            found |= set().union(*parts)
    return found
