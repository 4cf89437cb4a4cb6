"""Texts of calls with small mistakes that models make: they are calls, and no mark of them stays in
the text."""

from __future__ import annotations

from typing import Any

import pytest

from cpmcu.serving.chat.answers import AnswerParser
from cpmcu.serving.tool_parsers.registry import find_tool_format

TOOLS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "state": {"type": "string"},
            "n": {"type": "integer"},
        },
    },
    "g": {},
}
CITY = '{"name": "f", "arguments": {"city": "x"}}'
CALL = ("f", '{"city": "x"}')


def parsed(parser: str, text: str, step: int) -> tuple[str, list[tuple[str, str]]]:
    made = AnswerParser(None, find_tool_format(parser, None).make(TOOLS))
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    content, calls = "", []
    for i, piece in enumerate(pieces):
        part = made.push(piece, final=i == len(pieces) - 1)
        content += part.content
        calls += [(call.name, call.arguments) for call in part.calls]
    return content, calls


def coder(parameters: str) -> str:
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        (
            "qwen3_coder",
            coder("<parameter=city>\nDallas\n<parameter=state>\nTX\n</parameter>\n"),
            "",
            [("f", '{"city": "Dallas", "state": "TX"}')],
        ),
        (
            "qwen3_coder",
            coder("<parameter=n>\n5\n<parameter=state>\nTX\n<parameter=city>\nA\n</parameter>\n"),
            "",
            [("f", '{"n": 5, "state": "TX", "city": "A"}')],
        ),
        ("hermes", f"<tool_call>\n{CITY}}}\n</tool_call>", "", [CALL]),
        ("hermes", f"a<tool_call>{CITY}}}}}</tool_call>\nb", "ab", [CALL]),
        ("hermes", f"<tool_call>[{CITY}, {CITY}]</tool_call>", "", [CALL, CALL]),
        ("hermes", f"<tool_call>\n[{CITY}}}]\n</tool_call>", "", [CALL]),
        ("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>', "", [("g", "{}")]),
        ("hermes", "<tool_call>[1, 2]</tool_call>", "<tool_call>[1, 2]</tool_call>", []),
        ("mistral", f"[TOOL_CALLS][{CITY}}}]", "", [CALL]),
        ("llama3_json", '{"name": "g", "parameters": null}', "", [("g", "{}")]),
        ("llama3_json", '{"name": "f", "parameters": {"city": "x"}}}', "", [CALL]),
    ],
)
def test_a_call_with_a_small_mistake(
    parser: str, text: str, content: str, calls: list[tuple[str, str]], step: int
) -> None:
    assert parsed(parser, text, step) == (content, calls)
