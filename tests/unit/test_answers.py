"""Reasoning, content and calls of an answer are the same for every division into pieces."""

from __future__ import annotations

import pytest
from answer_pieces import parsed, pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmcu.serving.chat.answers import AnswerParser
from cpmcu.serving.chat.tags import held_back
from cpmcu.serving.reasoning_parsers.registry import find_reasoning_parser
from cpmcu.serving.reasoning_parsers.think import ThinkParser
from cpmcu.serving.tool_parsers.calls import Tools
from cpmcu.serving.tool_parsers.forced import ForcedCalls
from cpmcu.serving.tool_parsers.hermes import HermesParser
from cpmcu.serving.tool_parsers.registry import find_tool_format

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "</x>", "b": [1, null]}}\n</tool_call>'
F = ("f", {"a": "</x>", "b": [1, None]})


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
        ("<think>a</think>b", True, "a", "b"),
        ("\n<think>\n<think> a</think>b", True, "a", "b"),
        ("<think><think>a<think>b</think>c", False, "a<think>b", "c"),
        ("<think>\n<thi", False, "<thi", ""),
        ("<think><think>", False, "", ""),
        ("a < b </ c</think>d", True, "a < b </ c", "d"),
    ],
)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 100), max_size=12))
def test_reasoning(text, inside, thought, content, cuts):
    parser = AnswerParser(ThinkParser(inside=inside), None)
    assert parsed(parser, pieces(text, cuts)) == (thought, content, [])


CHANNEL, MESSAGE, END = "<|channel|>", "<|message|>", "<|end|>"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}a b{END}<|start|>assistant"
CALL = f"{CHANNEL}commentary to=functions.f <|constrain|>json{MESSAGE}" + '{"a": 1}<|call|>'


@pytest.mark.parametrize(
    ("text", "thought", "content", "calls"),
    [
        (f"{ANALYSIS}{CHANNEL}final{MESSAGE}c < d<|return|>", "a b", "c < d", []),
        (f"{CHANNEL}final{MESSAGE}c", "", "c", []),
        (f"{CHANNEL}analysis{MESSAGE}cut o", "cut o", "", []),
        (f"{CHANNEL}analysis{MESSAGE}cut o<|en", "cut o<|en", "", []),
        (f"{ANALYSIS}{CHANNEL}fin", "a b", "", []),
        (f"{ANALYSIS}{CALL}", "a b", "", [("f", {"a": 1})]),
        (f"{ANALYSIS} to=functions.f{CHANNEL}commentary json{MESSAGE}{{}}", "a b", "", [("f", {})]),
        (
            f"{ANALYSIS}{CHANNEL}commentary{MESSAGE}I call f.{END}<|start|>assistant{CALL}",
            "a b",
            "I call f.",
            [("f", {"a": 1})],
        ),
        (f"{ANALYSIS}{CHANNEL}analysis{MESSAGE}c{END}", "a bc", "", []),
        ("plain text", "", "plain text", []),
        ("t", "", "t", []),
        ("", "", "", []),
    ],
)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_harmony(text, thought, content, calls, cuts):
    parser = find_reasoning_parser("harmony", None)
    tools = find_tool_format("auto", f"{CHANNEL} <|constrain|> {MESSAGE} <|call|>")
    assert parser is not None and tools is not None and tools.name == "harmony"
    answer = AnswerParser(parser(), tools.make({"f": {}}))
    assert parsed(answer, pieces(text, cuts)) == (thought, content, calls)
    assert find_reasoning_parser("auto", f"x {CHANNEL}final{MESSAGE} y") is parser
    inside = parser(inside=True)
    assert inside.push("a", final=False) == ("a", "") and inside.inside


START, CONSTRAINED = f"{END}<|start|>assistant", f"commentary <|constrain|>json{MESSAGE}"
TO_F = f" to=functions.f{CHANNEL}"


@pytest.mark.parametrize(
    ("text", "thought", "content", "calls"),
    [
        (f"{CHANNEL}final{MESSAGE}4{END}", "", "4", []),
        (
            f'{CHANNEL}analysis{MESSAGE}a{START}{TO_F}{CONSTRAINED}{{"a": 1}}<|call|>',
            "a",
            "",
            [("f", {"a": 1})],
        ),
        (f'{TO_F}commentary{MESSAGE}{{"a": 1}}<|call|>', "", "", [("f", {"a": 1})]),
        (
            f"{CHANNEL}analysis{MESSAGE}a{START}{CHANNEL}commentary{MESSAGE}b{START}{TO_F}"
            f"{CONSTRAINED}{{}}<|call|><|start|>assistant{TO_F}{CONSTRAINED}"
            '{"a": "c <|d|> \\"e\\""}<|call|>',
            "a",
            "b",
            [("f", {}), ("f", {"a": 'c <|d|> "e"'})],
        ),
        (
            f"{CHANNEL}analysis{MESSAGE}a{START}{CHANNEL}analysis{MESSAGE}b{START}{CHANNEL}final"
            f"{MESSAGE}c{{{END}",
            "ab",
            "c{",
            [],
        ),
        (
            f"{CHANNEL}analysis{MESSAGE}a{START}{TO_F}analysis <|constrain|>json{MESSAGE}"
            '{"a": 1}<|call|>',
            "a",
            "",
            [("f", {"a": 1})],
        ),
    ],
)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 250), max_size=12))
def test_answers_as_openai_harmony_writes_them(text, thought, content, calls, cuts):
    """The texts are those that openai-harmony 0.0.8 renders; it reads the same messages in them."""
    parser, tools = find_reasoning_parser("harmony", None), find_tool_format("harmony", None)
    assert parser is not None and tools is not None
    answer = AnswerParser(parser(), tools.make({"f": {}}))
    assert parsed(answer, pieces(text, cuts)) == (thought, content, calls)


GEMMA = "<|tool_call>call:f{", "}<tool_call|>"


@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        ("", {}),
        ("a:1", {"a": 1}),
        (" a : -1.5e3 , b:true,c:None ", {"a": -1500.0, "b": True, "c": None}),
        ('a:<|"|>x, y}]:"\\n<|"|>,b:<|"|><|"|>', {"a": 'x, y}]:"\\n', "b": ""}),
        (
            'a:{b:[1,[],{<|"|>c d<|"|>:null}],e:{}},f:word',
            {"a": {"b": [1, [], {"c d": None}], "e": {}}, "f": "word"},
        ),
        ("text:5,number:6", {"text": "5", "number": 6}),
        ("a:", None),
        ("a", None),
        ("a:1 b:2", {"a": "1 b:2"}),
        ("a:[1", None),
        ('a:<|"|>x', None),
        ("a:1}x{", None),
        ("a:" + 70 * "[" + 70 * "]", None),
    ],
)
@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, 250), max_size=8))
def test_gemma4(inner, arguments, cuts):
    """A text without the form of a call is content."""
    call = f"{GEMMA[0]}{inner}{GEMMA[1]}"
    text = f"<|channel>thought\nplan\n<channel|>So {call}{call}"
    parser, tools = find_reasoning_parser("gemma4", None), find_tool_format("gemma4", None)
    assert parser is not None and tools is not None
    properties = {"text": {"type": "string"}, "number": {"type": "integer"}}
    answer = AnswerParser(parser(), tools.make({"f": {"properties": properties}}))
    content, calls = f"So {call}{call}", []
    if arguments is not None:
        content, calls = "So ", [("f", arguments)] * 2
    assert parsed(answer, pieces(text, cuts)) == ("plan", content, calls)


def test_a_call_of_gemma4_that_is_cut_off_is_content():
    tools = find_tool_format("auto", "<|tool_call>call:")
    assert tools is not None and tools.name == "gemma4"
    text = f"{GEMMA[0]}a:1"
    assert parsed(AnswerParser(None, tools.make({})), [text]) == ("", text, [])


def test_whether_the_prompt_began_to_think():
    is_open = ThinkParser.is_open
    assert is_open("<|assistant|><think>\n")
    assert not is_open("<|assistant|><think>\n\n</think>\n")
    assert not is_open("what does <think> mean?<|assistant|>")
    assert is_open("<think>Well,", continues=True)
    assert not is_open("no tags", continues=True)


def test_the_parser_of_a_template():
    def tags(name: str, template: str | None) -> tuple[str, str] | None:
        parser = find_reasoning_parser(name, template)
        return None if parser is None else (parser.begin, parser.end)

    think = ("<think>", "</think>")
    assert tags("auto", "… <think> … </think>") == think
    assert tags("auto", "… <|thought_end|>") == ("<|thought_start|>", "<|thought_end|>")
    assert tags("auto", "[THINK] … [/THINK]") == ("[THINK]", "[/THINK]")
    assert tags("none", "</think>") is tags("auto", None) is tags("auto", "nothing") is None
    assert tags("think", None) == tags("qwen3", None) == think
    with pytest.raises(ValueError, match="reasoning_parser is 'thinking', but must be auto, none"):
        find_reasoning_parser("thinking", None)


@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_thinking_then_calling(cuts):
    text = f"<think>I may <tool_call>{{}}</tool_call>.</think>\n{HERMES}"
    found = parsed(AnswerParser(ThinkParser(), HermesParser({})), pieces(text, cuts))
    assert found == ("I may <tool_call>{}</tool_call>.", "", [F])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"I shall call.\n{HERMES}", [F]),
        (f"{HERMES}\n{HERMES}\n", [F, F]),
        (f"I may write {HERMES}, but", []),
        ("no call", []),
        ("", []),
    ],
)
@settings(max_examples=10)
@given(cuts=st.lists(st.integers(0, 200), max_size=5))
def test_a_call_at_the_end_of_reasoning_that_did_not_end(text, calls, cuts):
    parser = AnswerParser(ThinkParser(inside=True), HermesParser({}))
    assert parsed(parser, pieces(text, cuts)) == (text.rstrip(), "", calls)


@given(cuts=st.lists(st.integers(0, 200), max_size=5))
def test_only_one_call(cuts):
    parser = AnswerParser(None, HermesParser({}), only_one_call=True)
    assert parsed(parser, pieces(HERMES * 3, cuts))[2] == [F]


TWO: Tools = {"f": {}, "g": {}}


@given(cuts=st.lists(st.integers(0, 60), max_size=5))
def test_forced_calls(cuts):
    calls = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    found = parsed(AnswerParser(None, ForcedCalls(None, TWO)), pieces(calls, cuts))
    assert found == ("", "", [("f", {"a": 1}), ("g", {})])
    found = parsed(AnswerParser(None, ForcedCalls("h", {"h": {}})), pieces('{"b": 2}', cuts))
    assert found == ("", "", [("h", {"b": 2})])
    thinking = AnswerParser(ThinkParser(), ForcedCalls("h", {"h": {}}))
    assert parsed(thinking, pieces("<think>cut", cuts)) == ("cut", "", [])
    for tag in ("<", "<thi", "<think>"):
        thinking = AnswerParser(ThinkParser(), ForcedCalls("h", {"h": {}}))
        assert parsed(thinking, pieces(tag, cuts)) == ("", "", [])
    for wrong in ("[" * 3000, "", "no", '[{"a": 1}]'):
        found = parsed(AnswerParser(None, ForcedCalls(None, TWO)), pieces(wrong, cuts))
        assert found == ("", wrong, [])


FIRST = '[{"name":"f","parameters":{"a":1}}'


@pytest.mark.parametrize(
    ("text", "tools", "calls"),
    [
        ("[", {"f": {}}, [("f", "")]),
        ('[{"name":"', {"f": {}}, [("f", "")]),
        ('[{"name":"', TWO, []),
        ('[{"name":"g', TWO, [("g", "")]),
        ('[{"name":"f', {"f": {}, "ff": {}}, []),
        ('[{"name":"f"', {"f": {}, "ff": {}}, [("f", "")]),
        ('[{"name":"f","para', TWO, [("f", "")]),
        ('[{"name":"f","parameters":', TWO, [("f", "")]),
        ('[{"name":"f","parameters":{"a', TWO, [("f", '{"a')]),
        ('[{"name":"f","parameters":"a', TWO, [("f", '"a')]),
        (
            '[{"name":"f","parameters":[5]},{"name":"g","parameters":7}]',
            TWO,
            [("f", [5]), ("g", 7)],
        ),
        (FIRST[:-1], TWO, [("f", {"a": 1})]),
        (FIRST + ",", {"f": {}}, [("f", {"a": 1})]),
        (FIRST + ',{"name":"g', TWO, [("f", {"a": 1})]),
        (FIRST + ',{"name":"g","parameters":{', TWO, [("f", {"a": 1}), ("g", "{")]),
    ],
)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 60), max_size=5))
def test_forced_calls_that_are_cut_off(text, tools, calls, cuts):
    """Arguments are what came. A call counts as soon as its name is known."""
    parser = AnswerParser(None, ForcedCalls(None, tools))
    assert parsed(parser, pieces(text, cuts)) == ("", "", calls)


def test_a_named_call_that_is_cut_off():
    found = parsed(AnswerParser(None, ForcedCalls("h", {"h": {}})), ['{"b": "c'])
    assert found == ("", "", [("h", '{"b": "c')])


def test_held_back():
    assert held_back("abc<", "<think>") == 1
    assert held_back("abc<thin", "<think>") == 5
    assert held_back("abc<think>", "<think>") == 0
    assert held_back("", "<think>") == 0
