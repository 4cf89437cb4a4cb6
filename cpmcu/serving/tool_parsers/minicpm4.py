"""minicpm4 (MiniCPM3, 4 and 4.1): Python calls between tags, one a line, perhaps fenced:

<|tool_call_start|> ```python name(key=value) ``` <|tool_call_end|>
"""

from __future__ import annotations

import ast
from typing import Any

from cpmcu.serving.http import strict_json
from cpmcu.serving.tool_parsers.base import Steps, ToolParser
from cpmcu.serving.tool_parsers.calls import ToolCall
from cpmcu.serving.tool_parsers.registry import register_tool_parser

_BEGIN, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_JSON_WORDS = {"true": True, "false": False, "null": None}


@register_tool_parser("minicpm4", signs=(_BEGIN,), tags=(_BEGIN, _END))
class MiniCpm4Parser(ToolParser):
    """Parses Python calls. They are complete before they are returned."""

    first_tag = _BEGIN

    def parse(self) -> Steps[None]:
        """Parses an answer."""
        while (yield from self.content_until(_BEGIN)) is not None:
            body, end = yield from self.text_until(_END)
            calls = calls_of(body)
            if calls is None:
                self.content(_BEGIN + body + end)
                continue
            for call in calls:
                self.begin_call(call.name)
                self.arguments(call.arguments)
                self.end_call()


def calls_of(text: str) -> list[ToolCall] | None:
    """Returns the calls in Python code; None if it has anything else."""
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
        arguments = {word.arg: _value(word.value) for word in node.keywords if word.arg}
        call = ToolCall(ast.unparse(node.func), strict_json.write(arguments))
    except (ValueError, TypeError, RecursionError):
        return None
    return call if len(arguments) == len(node.keywords) else None


def _value(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonWords().visit(node))


class _JsonWords(ast.NodeTransformer):
    """Replaces JSON's true, false and null, which models write into Python too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replaces a name that is a word of JSON."""
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node
