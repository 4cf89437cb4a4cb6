"""Parses tool calls in a model's text, in the notations of the supported families.

* hermes (Hermes, Qwen2.5, Qwen3): <tool_call>{"name": ..., "arguments": {...}}</tool_call>
* llama3_json (Llama 3.1 and later): the whole answer is {"name": ..., "parameters": {...}}, or
  several such objects with semicolons between them, perhaps after <|python_tag|>
* minicpm4: <|tool_call_start|> ```python name(key=value) ``` <|tool_call_end|>, one call a line
"""

from __future__ import annotations

import ast
import dataclasses
import uuid
from collections.abc import Callable
from typing import Any

from cpmcu.serving import strict_json
from cpmcu.serving.reasoning import held_back


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments` is a JSON object as a string, as in OpenAI's API."""

    name: str
    arguments: str
    id: str = dataclasses.field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def to_dict(self) -> dict[str, Any]:
        """Returns OpenAI's object of the call."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclasses.dataclass(frozen=True, slots=True)
class Notation:
    """A notation of calls. `parse` reads the text between the tags; None: it is not a call."""

    begin: str
    end: str | None  # None: the call extends to the end of the answer
    parse: Callable[[str], list[ToolCall] | None]
    at_start: bool = False  # only at the start of an answer
    lead: str = ""  # optional text before `begin` at the start


def notation_of(template: str | None, parser: str) -> Notation | None:
    """Returns the notation `parser`; for "auto" the template's, if recognised; for "none" None."""
    if parser == "auto":
        parser = next((name for sign, name in _SIGNS if sign in (template or "")), "none")
    return NOTATIONS.get(parser)


class ToolParser:
    """Extracts calls from a stream of text.

    Other text and calls that cannot be parsed are content, unchanged.
    """

    def __init__(self, notation: Notation) -> None:
        self._notation = notation
        self._held = ""
        self._pieces: list[str] = []  # text of the open call after it
        self._inside = False
        self._tail = ""  # end of the open call's text, where the end tag may begin
        self._opening = ""  # text before the body of the open call
        self._after_call = False
        self._started = False  # content other than white space was returned
        self.num_calls = 0

    def push(self, text: str, *, final: bool = False) -> tuple[str, list[ToolCall]]:
        """Returns the (content, calls) that `text` completes; if `final`, also those held back."""
        self._pieces.append(text)
        if self._inside and not final and not self._may_end(text):
            return "", []
        self._held += "".join(self._pieces)
        self._pieces.clear()
        content = ""
        calls: list[ToolCall] = []
        while True:
            more, found, again = self._step(final)
            if self._after_call:  # white space after a call is removed
                more = more.lstrip()
            content += more
            calls += found
            self._after_call = bool(found) or (self._after_call and not more)
            if not again:
                break
        self.num_calls += len(calls)
        self._started = self._started or bool(content.strip())
        return content, calls

    def _may_end(self, text: str) -> bool:
        """True if the open call ends in `text`. Searches only the new text: calls can be long."""
        end = self._notation.end
        if end is None:
            return False
        recent = self._tail + text
        self._tail = recent[-len(end) :]
        return end in recent

    def _step(self, final: bool) -> tuple[str, list[ToolCall], bool]:
        notation = self._notation
        if self._inside:
            return self._finish(final)
        if notation.at_start:
            return self._begin_at_start(final)
        before, tag, after = self._held.partition(notation.begin)
        if tag:
            self._held, self._inside, self._opening = after, True, tag
            return before, [], True
        keep = 0 if final else held_back(self._held, notation.begin)
        return self._take(len(self._held) - keep), [], False

    def _begin_at_start(self, final: bool) -> tuple[str, list[ToolCall], bool]:
        notation = self._notation
        text = self._held.lstrip().removeprefix(notation.lead).lstrip()
        if not self._started and text.startswith(notation.begin):
            start = len(self._held) - len(text) + len(notation.begin)
            self._opening, self._inside = self._take(start), True
            return "", [], True
        undecided = not self._started and notation.lead.startswith(text) and not final
        return "" if undecided else self._take(len(self._held)), [], False

    def _finish(self, final: bool) -> tuple[str, list[ToolCall], bool]:
        notation = self._notation
        body, tag, after = self._held, "", ""
        if notation.end is not None:
            body, tag, after = self._held.partition(notation.end)
        if not tag and not final:
            self._tail = body
            return "", [], False
        self._held, self._inside = after, False
        calls = notation.parse(body)
        if calls is None:
            return self._opening + body + tag, [], bool(tag)
        return "", calls, bool(tag)

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


def _call(value: Any, *arguments_keys: str, bare: bool = False) -> ToolCall | None:
    """Returns the call that a JSON object describes, or None.

    The arguments are the object's first member named in `arguments_keys`. If `bare`, an object
    without such a member is a call without arguments.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if not bare and not any(key in value for key in arguments_keys):
        return None
    arguments: Any = next((value[key] for key in arguments_keys if key in value), {})
    if isinstance(arguments, str):  # a JSON string within the JSON
        try:
            arguments = strict_json.read(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], strict_json.write(arguments))


def _hermes(text: str) -> list[ToolCall] | None:
    try:
        call = _call(strict_json.read(text), "arguments", "parameters", bare=True)
    except ValueError:
        return None
    return None if call is None else [call]


def _llama3_json(text: str) -> list[ToolCall] | None:
    text = ("{" + text).strip().removesuffix("<|eom_id|>").removesuffix("<|eot_id|>").rstrip()
    calls: list[ToolCall] = []
    while text:
        try:
            value, end = strict_json.read_first(text)
        except ValueError:
            return None
        call = _call(value, "parameters", "arguments")
        if call is None:
            return None
        calls.append(call)
        text = text[end:].lstrip(" ;\n")
    return calls or None


def _minicpm4(text: str) -> list[ToolCall] | None:
    lines = text.strip().split("\n")  # splitlines() would also split within strings
    if lines[0].startswith("```"):
        del lines[0]
    if lines and lines[-1].strip() == "```":
        del lines[-1]
    try:
        body = ast.parse("\n".join(lines).strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls: list[ToolCall] = []
    for statement in body:
        if not isinstance(statement, ast.Expr):
            return None
        value = statement.value
        for node in value.elts if isinstance(value, ast.List) else [value]:
            call = _from_node(node)
            if call is None:
                return None
            calls.append(call)
    return calls or None


def _from_node(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    try:
        arguments = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
        call = ToolCall(ast.unparse(node.func), strict_json.write(arguments))
    except (ValueError, TypeError, RecursionError):
        return None
    return call if len(arguments) == len(node.keywords) else None


NOTATIONS = {
    "hermes": Notation("<tool_call>", "</tool_call>", _hermes),
    "llama3_json": Notation("{", None, _llama3_json, at_start=True, lead="<|python_tag|>"),
    "minicpm4": Notation("<|tool_call_start|>", "<|tool_call_end|>", _minicpm4),
}

# A mark in the chat template -> the notation of the model's calls.
_SIGNS = (
    ("<tool_call>", "hermes"),
    ("<|tool_call_start|>", "minicpm4"),
    ('"parameters": dictionary', "llama3_json"),
)
