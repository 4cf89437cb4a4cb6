"""Reasoning and tool calls are parsed to the same parts for every division into pieces."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpmcu.serving.answers import AnswerParser, ForcedCalls
from cpmcu.serving.reasoning import ReasoningSplitter, held_back, is_open, tags_of
from cpmcu.serving.tools import NOTATIONS, ToolParser, notation_of

THINK = ("<think>", "</think>")


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(edges)] or [""]


def parsed(parser: AnswerParser, parts: list[str]) -> tuple[str, str, list[tuple[str, object]]]:
    """Parses a text in pieces. Returns (reasoning, content, calls)."""
    thought, content, calls = "", "", []
    for i, part in enumerate(parts):
        found = parser.push(part, final=i == len(parts) - 1)
        thought += found.reasoning
        content += found.content
        calls += [(call.name, json.loads(call.arguments)) for call in found.calls]
    return thought, content, calls


@pytest.mark.parametrize(
    ("text", "inside", "thought", "content"),
    [
        ("plain", False, "", "plain"),
        ("", False, "", ""),
        ("  \n plain", False, "", "  \n plain"),
        ("<think>\n a b \n</think>\n\n c ", False, "a b", "c "),
        ("\n<think>a</think>b", False, "a", "b"),
        ("<think></think>b", False, "", "b"),
        ("<think>\n\n</think>\n\nb", False, "", "b"),
        ("<think>cut off", False, "cut off", ""),
        ("<think>cut off</thi", False, "cut off</thi", ""),
        ("<thi", False, "", "<thi"),
        ("<thinking> no", False, "", "<thinking> no"),
        ("b <think>a</think>", False, "", "b <think>a</think>"),
        ("\na\n</think>\nb</think>", True, "a", "b</think>"),
        ("<think>a</think>b", True, "<think>a", "b"),
        ("a < b </ c</think>d", True, "a < b </ c", "d"),
    ],
)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 100), max_size=12))
def test_reasoning(text, inside, thought, content, cuts):
    parser = AnswerParser(ReasoningSplitter(THINK, inside=inside), None)
    assert parsed(parser, pieces(text, cuts)) == (thought, content, [])


def test_whether_the_prompt_began_to_think():
    assert is_open("<|assistant|><think>\n", THINK)
    assert not is_open("<|assistant|><think>\n\n</think>\n", THINK)
    assert not is_open("what does <think> mean?<|assistant|>", THINK)
    assert is_open("<think>Well,", THINK, continues=True)
    assert not is_open("no tags", THINK, continues=True)


def test_signs_of_a_template():
    assert tags_of("… <think> … </think>", "auto") == THINK
    assert tags_of("… <|thought_end|>", "auto") == ("<|thought_start|>", "<|thought_end|>")
    assert tags_of("</think>", "none") is None
    assert tags_of(None, "auto") is None
    assert tags_of(None, "think") == THINK
    assert notation_of("<tool_call>", "auto") is NOTATIONS["hermes"]
    assert notation_of("x <|tool_call_start|>", "auto") is NOTATIONS["minicpm4"]
    assert notation_of('{"name": f, "parameters": dictionary', "auto") is NOTATIONS["llama3_json"]
    assert notation_of("nothing", "auto") is notation_of(None, "auto") is None
    assert notation_of("<tool_call>", "none") is None
    assert notation_of(None, "minicpm4") is NOTATIONS["minicpm4"]


HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "</x>", "b": [1, null]}}\n</tool_call>'
F = ("f", {"a": "</x>", "b": [1, None]})


BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
AS_TEXT = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
TWO = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'
FENCED = "a\n```python\nb\n```\nc"
CODE = f"{BEGIN}\n```python\nf(a='x', b=[1, {{'c': None}}])\n```\n{END}"

CALLS = [
    ("hermes", HERMES, "", [F]),
    ("hermes", f"Hm.\n{HERMES}\n{HERMES}\n", "Hm.\n", [F, F]),
    ("hermes", f"{HERMES}\n and then", "and then", [F]),
    ("hermes", HERMES.removesuffix("\n</tool_call>"), "", [F]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", HERMES.replace("arguments", "parameters"), "", [F]),
    ("hermes", AS_TEXT, "", [("f", {"a": 1})]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    ("llama3_json", ' \n{"name": "f", "arguments": {}}', "", [("f", {})]),
    ("llama3_json", f"\n<|python_tag|> {TWO}<|eom_id|>", "", [("f", {}), ("g", {})]),
    ("llama3_json", TWO, "", [("f", {}), ("g", {})]),
    ("minicpm4", CODE, "", [("f", {"a": "x", "b": [1, {"c": None}]})]),
    ("minicpm4", f"Ja.{BEGIN}\nf()\nm.g(x=-1)\n{END}", "Ja.", [("f", {}), ("m.g", {"x": -1})]),
    ("minicpm4", f"{BEGIN}```\nf(a='''{FENCED}''')\n```{END}", "", [("f", {"a": FENCED})]),
    ("minicpm4", f"{BEGIN}f(a='''\n```'''){END}", "", [("f", {"a": "\n```"})]),
    ("minicpm4", f"{BEGIN}f(a='x\u2028y\x0c\x85z'){END}", "", [("f", {"a": "x\u2028y\x0c\x85z"})]),
    ("minicpm4", f"{BEGIN}[f(a=1), g()]{END}", "", [("f", {"a": 1}), ("g", {})]),
]
DEEP = "[" * 3000
NO_CALLS = {
    "hermes": [
        "no call",
        "a <tool_c",
        "<tool_call>{1}</tool_call>!",
        '<tool_call>{"name": "f"',
        '<tool_call>["f"]</tool_call>',
        f"<tool_call>{DEEP}</tool_call>",
        f'<tool_call>{{"name": "f", "arguments": "{DEEP}"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d"}}</tool_call>',
        r'<tool_call>{"name": "\ud83d"}</tool_call>',
        r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\\ud83d\"}"}</tool_call>',
    ],
    "llama3_json": [
        'See {"name": "f", "parameters": {}}',
        '{"x": 1}',
        ' \n{"x": 1}\n',
        ' <|python_tag|> {"x": 1}',
        "<|python_tag|>print(1)",
        "<|python_t",
        '{"name": "Alice", "age": 30}',
        '{"name": "f", "parameters": {}}; {"name": "Alice"}',
        '{"name": "f", "par',
        '{"name": "f"}; 5',
        '{"a": ' + DEEP,
        '{"name": "f", "parameters": {"a": -Infinity}}',
        "   ",
    ],
    "minicpm4": [
        f"{BEGIN}{body}{END}" for body in ("f(1)", "f(a=g())", "f(**{})", "import os", "f(", "")
    ]
    + [f"{BEGIN}f(a={value}){END}" for value in ("1e999", r"'\ud83d'", "b''", "-" * 900 + "1")],
}
CALLS += [(notation, text, text, []) for notation, texts in NO_CALLS.items() for text in texts]


@pytest.mark.parametrize(("notation", "text", "content", "calls"), CALLS)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
@example(cuts=list(range(200)))
def test_tool_calls(notation, text, content, calls, cuts):
    parser = AnswerParser(None, ToolParser(NOTATIONS[notation]))
    assert parsed(parser, pieces(text, cuts)) == ("", content, calls)
    assert parser.has_calls == bool(calls)


@pytest.mark.parametrize("notation", ["hermes", "llama3_json"])
def test_a_long_call_takes_no_more_time_per_token(notation):
    begin = '{"name": "f", "parameters": {"a": "'
    parts = ["<tool_call>"] * (notation == "hermes") + [begin] + ["word "] * 100_000 + ['"}}']
    parser = AnswerParser(None, ToolParser(NOTATIONS[notation]))
    start = time.process_time()
    found = parsed(parser, parts)
    assert time.process_time() - start < 3
    assert found == ("", "", [("f", {"a": "word " * 100_000})])


@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_thinking_then_calling(cuts):
    text = f"<think>I may <tool_call>{{}}</tool_call>.</think>\n{HERMES}"
    splitter, calls = ReasoningSplitter(THINK), ToolParser(NOTATIONS["hermes"])
    found = parsed(AnswerParser(splitter, calls), pieces(text, cuts))
    assert found == ("I may <tool_call>{}</tool_call>.", "", [F])


@given(cuts=st.lists(st.integers(0, 200), max_size=5))
def test_only_one_call(cuts):
    parser = AnswerParser(None, ToolParser(NOTATIONS["hermes"]), only_one_call=True)
    assert parsed(parser, pieces(HERMES * 3, cuts))[2] == [F]


@given(cuts=st.lists(st.integers(0, 60), max_size=5))
def test_forced_calls(cuts):
    calls = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    found = parsed(AnswerParser(None, ForcedCalls(None)), pieces(calls, cuts))
    assert found == ("", "", [("f", {"a": 1}), ("g", {})])
    found = parsed(AnswerParser(None, ForcedCalls("h")), pieces('{"b": 2}', cuts))
    assert found == ("", "", [("h", {"b": 2})])
    for wrong in ('[{"name": "f", "para', DEEP, '[{"name": "f", "parameters": {"a": 1e999}}]'):
        found = parsed(AnswerParser(None, ForcedCalls(None)), pieces(wrong, cuts))
        assert found == ("", wrong, [])


def test_held_back():
    assert held_back("abc<", "<think>") == 1
    assert held_back("abc<thin", "<think>") == 5
    assert held_back("abc<think>", "<think>") == 0
    assert held_back("", "<think>") == 0
