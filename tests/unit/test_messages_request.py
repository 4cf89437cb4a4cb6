"""Requests of /v1/messages as chat requests: roles, tools, thinking, sampling, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from cpmcu.checks import PromptTooLongError
from cpmcu.serving.errors import ApiError
from cpmcu.serving.messages.conversation import BLOCK_TYPES, to_chat
from cpmcu.serving.protocol import base
from cpmcu.serving.protocol.chat import MAX_TOOLS, ChatRequest
from cpmcu.serving.protocol.messages import (
    UNSUPPORTED,
    WITHOUT_EFFECT,
    Block,
    CountRequest,
    InputTool,
    MessagesRequest,
    MessagesUsage,
    OutputConfig,
    ResultBlock,
    StopReason,
    Thinking,
    ToolUseChoice,
)

HI = [{"role": "user", "content": "Hi."}]


def text(words: str, **more) -> dict:
    return {"type": "text", "text": words, **more}


def use(call_id: str, name: str, **arguments) -> dict:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id: str, content=None, **more) -> dict:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def chat(messages=HI, **fields) -> ChatRequest:
    body = MessagesRequest.model_validate({"max_tokens": 9, "messages": messages, **fields})
    body.check_extra()
    return to_chat(body)[0]


def messages_of(messages, **fields) -> list[dict]:
    """The chat's messages, with the texts of a message as a list."""
    found = []
    for message in chat(messages, **fields).messages:
        plain = message.model_dump(exclude_none=True)
        content = plain["content"]
        plain["content"] = (
            [content] if isinstance(content, str) else [part["text"] for part in content]
        )
        found.append(plain)
    return found


def user(*contents) -> list[dict]:
    return [{"role": "user", "content": content} for content in contents]


# ---- messages


@pytest.mark.parametrize("system", ["Be brief.", [text("Be brief.")]])
def test_the_system_text_is_the_first_message(system):
    assert messages_of(HI, system=system) == [
        {"role": "system", "content": ["Be brief."]},
        {"role": "user", "content": ["Hi."]},
    ]


def test_system_blocks_stay_apart_for_the_billing_header_to_be_found():
    blocks = [text("x-anthropic-billing-header: a"), text("Be brief.", cache_control={"type": "e"})]
    (system, _) = messages_of(HI, system=blocks)
    assert system["content"] == ["x-anthropic-billing-header: a", "Be brief."]


def test_turns_of_one_role_are_one_message():
    found = messages_of([*user("a", [text("b"), text("c")]), {"role": "user", "content": []}])
    assert found == [{"role": "user", "content": ["a", "b", "c"]}]
    assert messages_of(user([])) == [{"role": "user", "content": [""]}]


def test_a_round_of_tools():
    found = messages_of(
        [
            *user("Add."),
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("Let me see."),
                    use("1", "add", a=1, b="你"),
                    use("2", "sub"),
                ],
            },
            *user(
                [
                    result("1", "3", cache_control={"type": "ephemeral"}),
                    result("2", [text("4"), {"type": "tool_reference", "tool_name": "mul"}]),
                    result("2", is_error=True),
                    text("Go on."),
                ]
            ),
            *user([result("1", [text("no"), text("way")], is_error=True)]),
        ]
    )
    assistant = found[1]
    calls = [(call["id"], call["function"]) for call in assistant.pop("tool_calls")]
    assert [(i, each["name"], json.loads(each["arguments"])) for i, each in calls] == [
        ("1", "add", {"a": 1, "b": "你"}),
        ("2", "sub", {}),
    ]
    assert assistant == {
        "role": "assistant",
        "content": ["Let me see."],
        "reasoning_content": "Hm.",
    }
    assert found[2:] == [
        {"role": "tool", "tool_call_id": "1", "name": "add", "content": ["3"]},
        {"role": "tool", "tool_call_id": "2", "name": "sub", "content": ["4", "mul"]},
        {"role": "tool", "tool_call_id": "2", "name": "sub", "content": ["Error: "]},
        {"role": "user", "content": ["Go on."]},
        {"role": "tool", "tool_call_id": "1", "name": "add", "content": ["Error: no", "way"]},
    ]


def test_each_message_has_its_place():
    messages = [*HI, *last(text("Yo."), use("1", "f"))[1:], *user([result("1"), text("a")], "b")]
    body = CountRequest.model_validate({"messages": messages, "system": [text("Be brief.")]})
    chat, origin = to_chat(body)
    assert len(origin.places) == len(chat.messages) == 5
    assert [origin.place(i, "content") for i in range(5)] == [
        "system[0]",
        "messages[0].content",
        "messages[1].content[0]",
        "messages[2].content[0]",
        "messages[2].content[1]",
    ]


def test_later_system_messages_keep_their_place():
    """A new system message at the beginning would change the prompt: no page would be found."""
    system = {"role": "system", "content": [text("5 tokens left")]}
    conversation = [*HI, system, {"role": "assistant", "content": "Yo."}, system, *user("Go.")]
    roles = [message["role"] for message in messages_of(conversation, system="Be brief.")]
    assert roles == ["system", "user", "system", "assistant", "system", "user"]
    leading = messages_of([system, *HI], system="Be brief.")
    assert leading[0] == {"role": "system", "content": ["Be brief.", "5 tokens left"]}


def test_a_last_message_of_the_assistant_is_continued():
    found = chat([*HI, {"role": "assistant", "content": "Yo"}])
    assert found.continue_final_message and not found.add_generation_prompt
    assert not chat(HI).continue_final_message


# ---- other fields


TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def test_tools_have_nothing_that_changes_between_requests():
    marked = {**TOOL, "cache_control": {"type": "ephemeral"}, "strict": True, "type": "custom"}
    (tool,) = chat(tools=[marked]).tools
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert tool.model_dump(exclude_none=True) == {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("choice", "wanted", "num_tools", "parallel"),
    [
        (None, None, 1, None),
        ({"type": "auto"}, "auto", 1, None),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", 1, False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", 1, None),
        ({"type": "none"}, "none", 0, None),
    ],
)
def test_tool_choice(choice, wanted, num_tools, parallel):
    found = chat(tools=[TOOL], tool_choice=choice)
    assert (found.tool_choice, len(found.tools_wanted)) == (wanted, num_tools)
    assert found.parallel_tool_calls is parallel


def test_a_named_tool():
    found = chat(tools=[TOOL], tool_choice={"type": "tool", "name": "add"})
    assert found.tool_choice.function.name == "add"


@pytest.mark.parametrize(
    ("thinking", "variables", "shown"),
    [
        (None, {}, True),
        ({"type": "adaptive"}, {"enable_thinking": True}, True),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}, True),
        ({"type": "disabled"}, {"enable_thinking": False}, False),
    ],
)
def test_thinking(thinking, variables, shown):
    found = chat(thinking=thinking, output_config={"effort": "high"})
    assert (found.chat_template_kwargs, found.include_reasoning) == (variables, shown)
    assert found.reasoning_effort == "high"
    own = chat(thinking=thinking, chat_template_kwargs={"enable_thinking": "maybe"})
    assert own.chat_template_kwargs == {"enable_thinking": "maybe"}


def test_sampling():
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 7}
    found = chat(**given, stop_sequences=["\n\n", ""], stop="b", stream=True, cache_salt="s")
    fields = found.sampling_fields()
    assert {name: fields[name] for name in given} == given
    assert (fields["stop"], fields["cache_salt"]) == (("\n\n", "", "b"), "s")
    assert (found.stream, found.token_limit) == (True, 9)
    assert chat(max_tokens=0).token_limit == 1


@pytest.mark.parametrize("place", ["output_format", "output_config"])
def test_the_format_of_the_answer(place):
    form = {"type": "json_schema", "schema": {"type": "object"}}
    found = chat(**{place: form if place == "output_format" else {"format": form}})
    assert found.response_format.schema_given == {"type": "object"}


def test_claude_codes_other_fields_have_no_effect(caplog):
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    fields = {"metadata": {"user_id": "u"}, "service_tier": "auto", "mcp_servers": []}
    assert chat(context_management={"edits": edits}, **fields) == chat()
    assert not caplog.records


def test_the_document_names_everything():
    text = (Path(__file__).parents[2] / "docs" / "messages.md").read_text("utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"[\w/-]+", " ".join(re.findall(r"`([^`]+)`", text))))
    fields = MessagesRequest.model_fields.keys() | WITHOUT_EFFECT | UNSUPPORTED.keys()
    kinds = {kind for kinds in BLOCK_TYPES.values() for kind in kinds}
    for model in (Block, ResultBlock, InputTool, ToolUseChoice, Thinking, OutputConfig):
        fields |= model.model_fields.keys() - {"text", "thinking"}
    fields |= MessagesUsage.model_fields.keys() | {"stop_reason", "stop_sequence"}
    assert not (fields | kinds) - named
    reasons = set(get_args(StopReason)) | set(get_args(Thinking.model_fields["type"].annotation))
    reasons |= set(get_args(ToolUseChoice.model_fields["type"].annotation))
    assert not reasons - set(re.findall(r'"(\w+)"', text))
    limits = {base.MAX_STOPS, base.MAX_STOP_LENGTH, MAX_TOOLS}
    assert not limits - set(map(int, re.findall(r"\b\d+\b", text)))


# ---- refusals


def refusal(messages=HI, **fields) -> str:
    with pytest.raises(ApiError) as raised:
        chat(messages, **fields)
    assert raised.value.status == 400
    return str(raised.value)


def last(*blocks, role="assistant") -> list[dict]:
    return [*HI, {"role": role, "content": list(blocks)}]


IMAGE = {"type": "image", "source": {"type": "base64", "data": "", "media_type": "image/png"}}
BASH = {"type": "bash_20250124", "name": "bash"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            user([text("Look."), IMAGE]),
            "messages[0].content[1] has type 'image', but must be text or tool_result: the model "
            "reads text only.",
        ),
        (
            user([result("1", [IMAGE])]),
            "messages[0].content[0].content[0] has type 'image', but must be text or "
            "tool_reference: the model reads text only.",
        ),
        (
            last(use("1", "add"), role="user"),
            "messages[1].content[0] has type 'tool_use', but must be text or tool_result.",
        ),
        (
            last(result("1"), role="system"),
            "messages[1].content[0] has type 'tool_result', but must be text.",
        ),
        (user([{"type": "text"}]), "messages[0].content[0].text is missing."),
        (user([{"type": "tool_result"}]), "messages[0].content[0].tool_use_id is missing."),
        (last({"type": "tool_use", "id": "1"}), "messages[1].content[0].name is missing."),
        (last({"type": "tool_use", "id": "1", "name": "f"}), "messages[1].content[0].input is "),
        (last({"type": "thinking"}), "messages[1].content[0].thinking is missing."),
        (
            last(use("1", "add", a=float("nan"))),
            "messages[1].content[0].input is not valid: Out of range float values are not JSON ",
        ),
        (
            [*last(use("1", "add")), *user([result("2", "3")])],
            "messages[2].content[0].tool_use_id is '2', but no tool_use block before it has this ",
        ),
        (last(use("1", "add")), "The last message has a tool_use block, but no tool_result "),
    ],
)
def test_refused_messages(messages, message):
    assert refusal(messages).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"system": [IMAGE]}, "system[0] has type 'image', but must be text: the model reads "),
        ({"tools": [BASH]}, "tools[0] has type 'bash_20250124', but only tools with an input_s"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing."),
        ({"tools": [TOOL, TOOL]}, "tools[1].name is 'add', but tools[0] has this name, too."),
        ({"tool_choice": {"type": "any"}}, "tool_choice any needs tools."),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing."),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}},
            "Tool 'sub' not found in tools list, though tool_choice names it.",
        ),
        ({"n": 2}, "n is a field of /v1/chat/completions, not of this path."),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported by this server."),
        ({"container": "c"}, "container is not supported by this server."),
    ],
)
def test_refused_fields(fields, message):
    assert refusal(**fields).startswith(message)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": -1},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"stop_sequences": ["a" * 1025]},
        {"stop_sequences": ["a"] * 65},
        {"thinking": {"type": "maybe"}},
        {"tools": [{"name": "", "input_schema": {}}]},
        {"tools": [{"name": "a" * 129, "input_schema": {}}]},
        {"temperature": "1"},
    ],
)
def test_values_out_of_range(fields):
    with pytest.raises(ValidationError):
        MessagesRequest.model_validate({"max_tokens": 9, "messages": HI, **fields})


@pytest.mark.parametrize(
    ("at_least", "end"), [(False, "."), (True, "; it has at least 200 tokens.")]
)
def test_a_lower_bound_of_tokens_is_called_so(at_least, end):
    too_long = PromptTooLongError("the prompt", tokens=200, most=128, at_least=at_least)
    error = ApiError(400, "The prompt.", code="context_length_exceeded", too_long=too_long)
    message = error.messages_body()["error"]["message"]
    start = "prompt is too long: 200 tokens > 128 maximum, prompt and output together"
    assert message == start + end
