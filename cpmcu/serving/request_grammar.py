"""Structured output: converts OpenAI's and vLLM's request fields to the engine's grammars."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from cpmcu.checks import one_line, shown
from cpmcu.grammar import Grammar
from cpmcu.serving import structural_tag
from cpmcu.serving.errors import ApiError, refused

# Returns name -> id of the tokenizer's special tokens. Slow at first, so only some kinds call it.
Names = Callable[[], Mapping[str, int]]

# Last part of vLLM's field names (guided_json, structured_outputs.json) -> constructor.
KINDS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
    "json_object": lambda _: Grammar.json_object(),
    "gbnf": lambda text: Grammar.lark(_from_gbnf(text)),
}
# Fields of requests -> kind: vLLM's, llama.cpp's and SGLang's.
FIELDS = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")} | {
    "json_schema": "json",
    "regex": "regex",
    "grammar": "gbnf",
    "ebnf": "gbnf",
}


class AnswerFormat(Protocol):
    """A request's response_format."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]

    @property
    def structural_tag(self) -> dict[str, Any] | None:
        """The structural tag, if this is one."""

    @property
    def schema_given(self) -> dict[str, Any] | bool | None:
        """The schema, if there is one."""

    def check_extra(self) -> None:
        """Raises ApiError (400) for an unknown member."""


def available() -> bool:
    """True if the grammar library (llguidance) is installed."""
    return importlib.util.find_spec("llguidance") is not None


def missing(param: str) -> ApiError:
    """Returns the error (400) for a field that needs the grammar extra."""
    return ApiError(
        400,
        f"{param} needs structured output, which is not installed on this server: "
        "pip install 'cpmcu[grammar]'.",
        param=param,
        code="missing_extra",
    )


def make(param: str, function: Callable[..., Grammar], *source: Any) -> Grammar:
    """Returns `function(*source)` for the request field `param`.

    Raises ApiError (400) if the source is invalid or the grammar extra is not installed.
    """
    if not available():
        raise missing(param)
    try:
        return function(*source)
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}.", param=param, code="invalid_value") from error


def from_response_format(
    value: AnswerFormat | None, param: str = "response_format", *, names: Names = dict
) -> Grammar | None:
    """Returns the grammar of OpenAI's `response_format`. Raises ApiError (400) for `param`."""
    if value is None:
        return None
    value.check_extra()
    tag = value.structural_tag
    if tag is not None:
        return make(param, _constructor("structural_tag", names), tag)
    schema = value.schema_given
    if value.type == "text":
        if schema is not None:
            raise refused(param, f"{param} has a schema, but type text allows none.")
        return None
    if value.type == "json_object" and (schema is True or schema == {}):
        schema = None  # the schema allows any value; the type requires an object
    if schema is not None:  # llama.cpp and Together allow a schema with json_object too
        return make(param, Grammar.json_schema, schema)
    if value.type == "json_object":
        return make(param, Grammar.json_object)
    raise ApiError(
        400,
        f"{param}: type json_schema needs json_schema.schema.",
        param=f"{param}.json_schema",
        code="invalid_value",
    )


def from_guided(fields: dict[str, Any], *, names: Names = dict) -> Grammar | None:
    """Returns the grammar of vLLM's fields, name -> source. Raises ApiError (400).

    A client may give the same source under an old and a new name. It then counts once.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if given.get("grammar") == "":  # llama.cpp's clients send "" for no grammar
        del given["grammar"]
    if len({(_kind(name), json.dumps(value, sort_keys=True)) for name, value in given.items()}) > 1:
        raise ApiError(
            400,
            f"{' and '.join(given)} exclude each other: give one.",
            param=list(given)[1],
            code="invalid_value",
        )
    for name, value in given.items():
        return make(name, _constructor(_kind(name), names), value)
    return None


def _constructor(kind: str, names: Names) -> Callable[[Any], Grammar]:
    if kind == "structural_tag":
        return lambda tag: structural_tag.to_grammar(tag, KINDS["gbnf"], names())
    return KINDS[kind]


def _kind(name: str) -> str:
    return FIELDS.get(name) or name.rpartition(".")[2]


def _from_gbnf(text: str) -> str:
    """A grammar in llama.cpp's notation as Lark. Raises ValueError."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except (GbnfToLarkError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"the grammar cannot be read as GBNF ({one_line(error)})") from error


def of_arguments(parameters: dict[str, Any]) -> Grammar:
    """Returns the grammar of a call's arguments, which are always an object.

    If the schema has no type, it gets type object. If its type excludes objects, ApiError (400) is
    raised. White space is not allowed: a weak model may generate it without end.
    """
    stated = parameters.get("type", "object")
    if "object" not in (stated if isinstance(stated, list) else [stated]):
        raise ApiError(
            400,
            f"tools: the parameters of a function have type {shown(stated)}, but must be an "
            "object.",
            param="tools",
            code="invalid_value",
        )
    schema = {"x-guidance": {"whitespace_flexible": False}, **parameters, "type": "object"}
    return make("tool_choice", Grammar.json_schema, schema)


def of_calls(tools: dict[str, dict[str, Any]], *, several: bool) -> Grammar:
    """Returns the grammar of a non-empty JSON list of calls to `tools`.

    `tools`: name -> schema of the parameters. Each schema stays a document of its own, so that
    its `$ref` paths remain valid.
    """
    calls: list[str] = []
    parts: dict[str, Grammar] = {}
    for name, parameters in tools.items():
        label = "tool_" + re.sub(r"[^a-z0-9]+", "_", name.lower())
        if label in parts:
            label += f"_{len(parts)}"
        parts[label] = of_arguments(parameters)
        head = f'{{"name":{json.dumps(name, ensure_ascii=False)},"parameters":'
        calls.append(f'{json.dumps(head, ensure_ascii=False)} @{label} "}}"')
    more = ' ("," call)*' if several else ""
    start = f'start: "[" call{more} "]"\ncall: ' + "\n  | ".join(calls)
    return make("tool_choice", Grammar.composed, start, parts)


def or_calls(answer: Grammar, begins: Sequence[str], tags: Mapping[str, int | None]) -> Grammar:
    """Returns `answer`, or text that begins with a tool call.

    `begins`: the texts with which a call begins. `tags`: the tags of the notation -> token id; None
    for a tag of several tokens. The text of a call is free, as without a grammar.
    """
    first = " | ".join(_terminal(begin, tags.get(begin)) for begin in begins)
    tokens = [_terminal(tag, token) for tag, token in tags.items() if token is not None]
    rest = f"TEXT? (({' | '.join(tokens)}) TEXT?)*" if tokens else "TEXT?"
    start = f"start: @form | calls\ncalls: ({first}) {rest}\nTEXT: /(?s:.+)/"
    return Grammar.composed(start, {"form": answer})


def after_thinking(
    answer: Grammar, tags: tuple[str, str], tokens: tuple[int | None, int | None], *, begun: bool
) -> Grammar:
    """Returns `answer` with optional reasoning between `tags` before it.

    `tokens`: the tags' token ids; None for a tag of several tokens. `begun`: the prompt ends
    within reasoning, so the reasoning must end before the answer.
    """
    begin, end = map(_terminal, tags, tokens)
    if tokens[1] is None:
        thought = f"thought[suffix={end}]: /(?s:.*)/"
        lead = r"thought /\s{0,4}/"
    else:
        thought = "thought: /(?s:.*)/"
        lead = rf"thought {end} /\s{{0,4}}/"
    lead = lead if begun else f"({begin} {lead})?"
    return Grammar.composed(f"start: {lead} @answer\n{thought}", {"answer": answer})


def _terminal(tag: str, token: int | None) -> str:
    """Returns a tag in Lark's notation."""
    return json.dumps(tag, ensure_ascii=False) if token is None else f"<[{token}]>"
