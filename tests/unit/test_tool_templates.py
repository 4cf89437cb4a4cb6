"""A family's parser reads the calls that its chat template writes into a conversation."""

from __future__ import annotations

import json
from typing import Any

import family_templates
import pytest
from answer_pieces import parsed, pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmcu.chat_template import ChatTemplate
from cpmcu.serving.chat.answers import AnswerParser
from cpmcu.serving.chat.conversation import render
from cpmcu.serving.protocol.chat import ChatMessage, Tool
from cpmcu.serving.reasoning_parsers.registry import find_reasoning_parser
from cpmcu.serving.tool_parsers.registry import find_tool_format

# Template, name of the parser, end of a turn, content beside calls, several calls in a turn.
FAMILIES = {
    "QWEN3": ("hermes", "<|im_end|>\n", True, True),
    "QWEN35": ("qwen3_coder", "<|im_end|>\n", True, True),
    "MINICPM4": ("minicpm4", "<|im_end|>\n", False, True),
    "MINICPM5": ("minicpm5", "<|im_end|>\n", True, True),
    "LLAMA31": ("llama3_json", "<|eot_id|>", False, False),
    "GEMMA4": ("gemma4", "<turn|>\n", True, True),
    "MISTRAL_LIST": ("mistral", "</s>", False, True),
    "MISTRAL_NAMED": ("mistral", "</s>", True, True),
}
CHARACTERS = st.characters(exclude_categories=("Cs",))
# Signs that parsers look at are likelier than they are among all characters.
SIGNS = st.sampled_from([*"\"'\\<>{}[]&;,:\n\t ", "</", "```", "True", "null", "]]>", "🙂", "5"])
TEXTS = st.lists(st.one_of(SIGNS, st.text(CHARACTERS, max_size=5)), max_size=6).map("".join)
NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
ANY_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
PARAMETERS: dict[str, tuple[dict[str, Any], st.SearchStrategy[Any]]] = {
    "path": ({"type": "string"}, TEXTS),
    "content": ({"type": "string", "description": "text"}, TEXTS),
    "count": ({"type": "integer"}, st.integers()),
    "ratio": ({"type": "number"}, NUMBERS),
    "force": ({"type": "boolean"}, st.booleans()),
    "nothing": ({"type": "null"}, st.none()),
    "rows": ({"type": "array"}, st.lists(ANY_JSON, max_size=3)),
    "options": ({"type": "object"}, st.dictionaries(TEXTS, ANY_JSON, max_size=3)),
    "maybe": (
        {"anyOf": [{"type": "integer"}, {"type": "null"}, {"type": "array"}]},
        st.one_of(st.none(), st.integers(), st.lists(NUMBERS, max_size=2)),
    ),
}
SCHEMA = {
    "type": "object",
    "properties": {name: schema for name, (schema, _) in PARAMETERS.items()},
}
NAMES = ("write_file", "calc.add", "f2")
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": SCHEMA}})
    for name in NAMES
]
ARGUMENTS = st.fixed_dictionaries(
    {}, optional={name: values for name, (_, values) in PARAMETERS.items()}
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


def answer_text(source: str, message: dict[str, Any], end: str, **variables: Any) -> str:
    """The text that the template writes for an answer, without the end of the turn."""
    template = ChatTemplate(source, {})
    question = ChatMessage(role="user", content="Go on.")
    fields: dict[str, Any] = {
        "tools": TOOLS, "variables": variables, "continue_final_message": False,
    }  # fmt: skip
    answer = ChatMessage.model_validate({"role": "assistant", **message})
    before = render(template, [question], add_generation_prompt=True, **fields)
    after = render(template, [question, answer], add_generation_prompt=False, **fields)
    assert after.endswith(end)
    opened = before.rfind("<think>\n")
    if opened > 0:  # the template of the conversation writes it only before reasoning
        before = before[:opened]
    assert after.startswith(before)
    return after[len(before) : len(after) - len(end)]


def as_message(calls: list[tuple[str, Any]], content: str = "", **more: Any) -> dict[str, Any]:
    listed = [
        {"id": f"call{i:05}", "type": "function",
         "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]  # fmt: skip
    return {"content": content, "tool_calls": listed, **more}


def same(value: Any) -> str:
    """JSON that tells 1, 1.0 and true apart."""
    return json.dumps(value, sort_keys=True)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15, deadline=None)
@given(calls=CALLS, cuts=st.lists(st.integers(0, 500), max_size=8), before=st.booleans())
def test_the_parser_reads_what_the_template_writes(family, calls, cuts, before):
    name, end, has_content, several = FAMILIES[family]
    source = getattr(family_templates, family)
    content = "I shall look." if before and has_content else ""
    calls = calls if several else calls[:1]
    text = answer_text(source, as_message(calls, content), end)
    tool_format = find_tool_format("auto", source)
    assert tool_format is not None and tool_format.name == name
    parser = AnswerParser(None, tool_format.make({n: SCHEMA for n in NAMES}))
    _, found_content, found = parsed(parser, pieces(text, cuts))
    assert found_content.strip() == content
    assert [(n, same(a)) for n, a in found] == [(n, same(a)) for n, a in calls]


@pytest.mark.parametrize("family", ["QWEN3", "QWEN35", "MINICPM5", "GEMMA4"])
@settings(max_examples=10, deadline=None)
@given(
    reasoning=st.text(CHARACTERS, min_size=1, max_size=20),
    calls=CALLS,
    cuts=st.lists(st.integers(0, 500), max_size=8),
)
def test_reasoning_before_calls(family, reasoning, calls, cuts):
    """The template of the next turn keeps the reasoning of a turn with calls."""
    end = FAMILIES[family][1]
    source = getattr(family_templates, family)
    message = as_message(calls, reasoning_content=reasoning)
    text = answer_text(source, message, end)
    thinking, tools = find_reasoning_parser("auto", source), find_tool_format("auto", source)
    assert thinking is not None and tools is not None
    parser = AnswerParser(thinking(), tools.make({n: SCHEMA for n in NAMES}))
    thought, content, found = parsed(parser, pieces(text, cuts))
    assert thought == reasoning.strip()
    assert (content.strip(), [n for n, _ in found]) == ("", [n for n, _ in calls])


@pytest.mark.parametrize("family", ["QWEN3", "QWEN35", "MINICPM5"])
def test_reasoning_of_earlier_turns_is_dropped(family):
    """Reasoning after the last question stays, because the model is still answering it."""
    source = getattr(family_templates, family)
    called = as_message([("f2", {"path": "x"})], reasoning_content="OLD PLAN")
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", **called},
        {"role": "tool", "content": "done", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "ok", "reasoning": "OLD THOUGHT"},
        {"role": "user", "content": "two"},
        {"role": "assistant", **called, "reasoning_content": "NEW PLAN"},
        {"role": "tool", "content": "done", "tool_call_id": "call00000"},
    ]
    text = render(
        ChatTemplate(source, {}),
        [ChatMessage.model_validate(message) for message in messages],
        tools=TOOLS,
        variables={},
        add_generation_prompt=True,
        continue_final_message=False,
    )
    assert "OLD" not in text
    assert "<think>\nNEW PLAN\n</think>" in text


@pytest.mark.parametrize(
    ("family", "enable_thinking", "opened", "closed"),
    [
        ("QWEN35", None, True, False),
        ("QWEN35", True, True, False),
        ("QWEN35", False, False, True),
        ("QWEN3", None, False, False),
        ("QWEN3", False, False, True),
        ("GEMMA4", None, False, False),
        ("GEMMA4", False, False, True),
        ("MINICPM5", None, False, False),
        ("MINICPM5", True, True, False),
        ("MINICPM5", False, False, True),
    ],
)
def test_whether_the_prompt_begins_to_think(family, enable_thinking, opened, closed):
    source = getattr(family_templates, family)
    variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    prompt = ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], **variables)
    thinking = find_reasoning_parser("auto", source)
    assert thinking is not None
    assert thinking.is_open(prompt) == opened
    assert prompt.rstrip().endswith(thinking.end) == closed


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arguments", ['{"path": "cut o', "[1]", "5", ""])
def test_a_conversation_goes_on_after_a_malformed_call(family, arguments):
    message = as_message([("f2", {})])
    message["tool_calls"][0]["function"]["arguments"] = arguments
    text = answer_text(getattr(family_templates, family), message, FAMILIES[family][1])
    assert "f2" in text
    assert arguments in text.replace('\\"', '"')


def test_text_before_a_call_may_end_its_reasoning():
    """gpt-oss's template refuses a message with calls, text and reasoning."""
    source = """
    {%- for message in messages %}
    {%- if message.tool_calls and message.content and message.thinking %}
    {{- raise_exception('both') }}
    {%- elif message.tool_calls %}
    {{- '[' + message.thinking + '|' + message.content + ']' }}
    {%- else %}
    {{- message.content }}
    {%- endif %}
    {%- endfor %}"""
    message = as_message([("f2", {})], reasoning_content="a", content="b")
    assert answer_text(source, message, "") == "[a\n\nb|]"
