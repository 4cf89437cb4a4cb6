"""Structured output: from OpenAI's and vLLM's request fields to the engine's grammars."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cpmcu.grammar import Grammar
from cpmcu.serving.errors import ApiError, refused

if TYPE_CHECKING:
    from cpmcu.serving.protocol.base import ResponseFormat

# The last part of vLLM's request fields: guided_json, structured_outputs.json.
KINDS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
    "json_object": lambda _: Grammar.json_object(),
}
GUIDED = ("json", "regex", "choice", "grammar")  # those that are guided_* too


def available() -> bool:
    """Is the library that follows grammars installed?"""
    return importlib.util.find_spec("llguidance") is not None


def make(param: str, function: Callable[..., Grammar], *source: Any) -> Grammar:
    """`function(*source)`, asked for by the request field `param`.

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
    try:
        return function(*source)
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}.", param=param, code="invalid_value") from error


def from_response_format(value: ResponseFormat | None) -> Grammar | None:
    """The grammar of OpenAI's `response_format`. Raises ApiError (400)."""
    param = "response_format"
    if value is None:
        return None
    value.check_extra()
    schema = value.schema_given
    if value.type == "text":
        if schema is not None:
            raise refused(param, f"{param} has a schema, but type text holds to none.")
        return None
    if value.type == "json_object" and (schema is True or schema == {}):
        schema = None  # says nothing, but the type says that it is an object
    if schema is not None:  # also with json_object, as llama.cpp and Together have it
        return make(param, Grammar.json_schema, schema)
    if value.type == "json_object":
        return make(param, Grammar.json_object)
    raise ApiError(
        400,
        "response_format: type json_schema needs json_schema.schema.",
        param=f"{param}.json_schema",
        code="invalid_value",
    )


def from_guided(fields: dict[str, Any]) -> Grammar | None:
    """The grammar of vLLM's fields, name -> source. Raises ApiError (400)."""
    given = {name: value for name, value in fields.items() if value is not None}
    if len(given) > 1:
        raise ApiError(
            400,
            f"{' and '.join(given)} exclude each other: give one.",
            param=list(given)[1],
            code="invalid_value",
        )
    for name, value in given.items():
        return make(name, KINDS[re.split("guided_|[.]", name)[-1]], value)
    return None


def of_arguments(parameters: dict[str, Any]) -> Grammar:
    """The arguments of a call, without white space, which weak models lose themselves in."""
    schema = {"x-guidance": {"whitespace_flexible": False}, **parameters}
    return make("tool_choice", Grammar.json_schema, schema)


def of_calls(tools: dict[str, dict[str, Any]], *, several: bool) -> Grammar:
    """A JSON list of calls to at least one of these tools (name -> schema of its parameters).

    Each schema is a document of its own, so that a `$ref` finds what it found in the request.
    """
    calls: list[str] = []
    parts: dict[str, Grammar] = {}
    for i, (name, parameters) in enumerate(tools.items()):
        parts[f"tool_{i}"] = of_arguments(parameters)
        head = f'{{"name":{json.dumps(name, ensure_ascii=False)},"parameters":'
        calls.append(f'{json.dumps(head, ensure_ascii=False)} @tool_{i} "}}"')
    more = ' ("," call)*' if several else ""
    start = f'start: "[" call{more} "]"\ncall: ' + "\n  | ".join(calls)
    return make("tool_choice", Grammar.composed, start, parts)


def after_thinking(
    answer: Grammar, tags: tuple[str, str], tokens: tuple[int | None, int | None], *, begun: bool
) -> Grammar:
    """`answer`, with thinking between `tags` before it if the model wants to.

    `tokens`: those that the tags are, None for one that is spelt. `begun`: the prompt has begun to
    think, so that thinking must end before the answer.
    """
    begin, end = (
        json.dumps(tag, ensure_ascii=False) if token is None else f"<[{token}]>"
        for tag, token in zip(tags, tokens)
    )
    if tokens[1] is None:
        thought = f"thought[suffix={end}]: /(?s:.*)/"
        lead = r"thought /\s{0,4}/"
    else:
        thought = "thought: /(?s:.*)/"
        lead = rf"thought {end} /\s{{0,4}}/"
    lead = lead if begun else f"({begin} {lead})?"
    return Grammar.composed(f"start: {lead} @answer\n{thought}", {"answer": answer})
