"""Structured output: from OpenAI's and vLLM's request fields to the engine's grammars."""

from __future__ import annotations

import importlib
import importlib.util
import json
from typing import Any

from cpmcu.serving.errors import ApiError

# Request field -> classmethod of cpmcu.grammar.Grammar.
GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
}


def constraint(kind: str, source: Any, param: str) -> dict[str, Any]:
    """The SamplingParams field that makes an output match; `kind` is a method of Grammar.

    Raises ApiError (400) for a source that is wrong, or if the extra is not installed.
    """
    if not available():
        raise ApiError(
            400,
            f"{param} needs structured output, which is not installed on this server: "
            "pip install 'cpmcu[grammar]'.",
            param=param,
            code="missing_extra",
        )
    grammars = importlib.import_module("cpmcu.grammar")
    make = getattr(grammars.Grammar, kind)
    try:
        return {"grammar": make() if source is None else make(source)}
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}.", param=param, code="invalid_value") from error


def available() -> bool:
    """Is structured output built in and installed?"""
    return all(importlib.util.find_spec(name) for name in ("cpmcu.grammar", "llguidance"))


def from_response_format(value: Any) -> dict[str, Any]:
    """SamplingParams fields of OpenAI's `response_format`. Raises ApiError (400)."""
    param = "response_format"
    if value is None or value.type == "text":
        return {}
    if value.type == "json_object":
        return constraint("json_object", None, param)
    schema = None if value.json_schema is None else value.json_schema.schema_
    if schema is None:
        raise ApiError(
            400,
            "response_format: type json_schema needs json_schema.schema.",
            param=f"{param}.json_schema",
            code="invalid_value",
        )
    return constraint("json_schema", schema, param)


def from_guided(fields: dict[str, Any]) -> dict[str, Any]:
    """SamplingParams fields of vLLM's `guided_*` fields. Raises ApiError (400)."""
    given = {name: value for name, value in fields.items() if value is not None}
    if len(given) > 1:
        raise ApiError(
            400,
            f"{' and '.join(given)} exclude each other: give one.",
            param=list(given)[1],
            code="invalid_value",
        )
    for name, value in given.items():
        if name == "guided_json" and isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise ApiError(
                    400, f"{name} is not valid JSON.", param=name, code="invalid_value"
                ) from None
        return constraint(GUIDED[name], value, name)
    return {}
