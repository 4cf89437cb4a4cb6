"""Items of /v1/responses become messages and tools of /v1/chat/completions."""

from __future__ import annotations

import pytest

from cpmcu.serving.errors import ApiError
from cpmcu.serving.protocol.chat import AllowedTools, NamedTool
from cpmcu.serving.protocol.responses import ResponsesRequest
from cpmcu.serving.responses.items import seal, to_chat, unseal


def translated(body):
    """Returns (the messages that a template gets, the chat request, their places)."""
    request = ResponsesRequest.model_validate(body)
    request.check()
    items = [(f"input[{i}]", item) for i, item in enumerate(request.items)]
    chat, origin = to_chat(request, items)
    return [message.to_template() for message in chat.messages], chat, list(origin.places)


def messages(**body):
    return translated(body)[0]


USER = {"role": "user", "content": "a"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
OTHER = {**CALL, "call_id": "c2", "name": "g", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "one"}
THOUGHT = {"type": "reasoning", "id": "r", "summary": []}


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_text_and_instructions():
    assert messages(input="a") == [{"role": "user", "content": "a"}]
    assert messages(input="a", instructions="be brief") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
    ]


@pytest.mark.parametrize("given", [{"input": []}, {"input": ""}])
def test_an_empty_input_is_an_empty_message(given):
    assert messages(**given) == [{"role": "user", "content": ""}]
    with_instructions = messages(**given, instructions="x")
    assert [message["role"] for message in with_instructions] == ["system", "user"]


def test_parts_of_a_message():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    (message,) = messages(input=[{"role": "user", "content": parts}])
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = messages(input=[{"type": "message", "role": "user", "content": parts[:1]}])
    assert message["content"] == "a"
    refusal = [{"type": "refusal", "refusal": "no"}]
    (_, message) = messages(input=[USER, {"role": "assistant", "content": refusal}])
    assert message["content"] == "no"


def test_system_messages_at_the_beginning_become_one():
    system = {"role": "developer", "content": [{"type": "input_text", "text": "c"}]}
    found, _, places = translated(
        {
            "instructions": "b",
            "input": [system, {"role": "system", "content": "d"}, USER, system],
        }
    )
    assert [(message["role"], message["content"]) for message in found] == [
        ("system", "b\n\nc\n\nd"),
        ("user", "a"),
        ("system", "c"),
    ]
    assert places == ["input", "input[2]", "input[3]"]


def test_one_turn_of_the_assistant_is_one_message():
    thought = {**THOUGHT, "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    found, _, places = translated({"input": [USER, thought, said, CALL, OTHER, RESULT, thought]})
    assert found[1] == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "thinking": "hm",
        "tool_calls": [call("c1", "f", {"x": 1}), call("c2", "g", {})],
    }
    assert found[2] == {"role": "tool", "content": "one", "tool_call_id": "c1"}
    assert found[3] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "thinking": "hm",
    }
    assert places == ["input[0]", "input[1]", "input[5]", "input[6]"]


def test_a_second_text_begins_a_second_message():
    said = {"role": "assistant", "content": "b"}
    found = messages(input=[USER, said, said, CALL])
    assert [len(message.get("tool_calls", [])) for message in found] == [0, 0, 1]
    found = messages(input=[USER, CALL, said])
    assert [message["content"] for message in found] == ["a", None, "b"]


@pytest.mark.parametrize("text", ["hm", "三 \n", "x" * 1000])
def test_sealed_reasoning_comes_back(text):
    """Codex sends no text of reasoning with store: false, but its encrypted_content."""
    assert unseal(seal(text)) == text
    found = messages(input=[USER, {**THOUGHT, "encrypted_content": seal(text)}, CALL])
    assert found[1]["reasoning_content"] == text


def test_reasoning_of_another_server():
    for sealed in ("gAAAAA", "&", "", "w6k="):
        assert unseal(sealed) is None
        found = messages(input=[USER, {**THOUGHT, "encrypted_content": sealed}, CALL])
        assert "reasoning_content" not in found[1]
    summary = [{"type": "summary_text", "text": "s"}]
    found = messages(input=[USER, {**THOUGHT, "summary": summary}, CALL])
    assert found[1]["reasoning_content"] == "s"


def test_custom_tools_of_an_earlier_session():
    item = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": '"\n'}
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    _, message, answer = messages(input=[USER, item, result])
    assert message["tool_calls"] == [call("c", "apply_patch", {"input": '"\n'})]
    assert answer["tool_call_id"] == "c"


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def test_tools_that_are_no_functions_are_skipped(caplog):
    caplog.set_level("INFO")
    tools = [{"type": "test_tool"}, FUNCTION, {"type": "namespace", "name": "n", "tools": []}]
    for _ in range(2):
        _, chat, _ = translated({"input": "a", "tools": tools})
        assert [tool.function.model_dump(exclude_none=True) for tool in chat.tools] == [
            {"name": "f", "parameters": {"type": "object"}, "strict": True}
        ]
    assert caplog.text.count("tools of type 'test_tool' are skipped") == 1
    assert translated({"input": "a", "tools": tools[:1]})[1].tools is None


def test_tool_choice():
    def chosen(choice):
        return translated({"input": "a", "tools": [FUNCTION], "tool_choice": choice})[1].tool_choice

    assert [chosen(each) for each in ("none", "auto", "required", None)] == [
        "none",
        "auto",
        "required",
        None,
    ]
    named = chosen({"type": "function", "name": "f"})
    assert isinstance(named, NamedTool) and named.function.name == "f"
    allowed = chosen({"type": "allowed_tools", "mode": "required", "tools": [FUNCTION]})
    assert isinstance(allowed, AllowedTools) and allowed.allowed_tools.mode == "required"


def test_other_fields():
    schema = {"type": "object"}
    _, chat, _ = translated(
        {
            "input": "a",
            "max_output_tokens": 1,
            "temperature": 0.5,
            "top_k": 3,
            "seed": 4,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
            "reasoning": {"effort": "none"},
            "parallel_tool_calls": False,
            "include": ["message.output_text.logprobs"],
        }
    )
    assert (chat.token_limit, chat.temperature, chat.top_k, chat.seed) == (1, 0.5, 3, 4)
    assert chat.response_format.schema_given == schema
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    assert chat.parallel_tool_calls is False
    assert chat.logprobs is True and not chat.top_logprobs
    assert translated({"input": "a"})[1].logprobs is False


REFUSED = [
    ([{"type": "web_search_call", "id": "w"}], "input[0].type", "'web_search_call' item"),
    ([{"type": "message", "content": "a"}], "input[0].role", "is missing"),
    ([{}], "input[0].role", "is missing"),
    ([{"role": "user"}], "input[0].content", "is missing"),
    ([USER, {**CALL, "arguments": None}], "input[1].arguments", "is missing"),
    ([USER, {**CALL, "name": None}], "input[1].name", "is missing"),
    ([USER, RESULT], "input[1].call_id", "no item before it is that call"),
    ([USER, CALL, {**RESULT, "output": None}], "input[2].output", "is missing"),
    ([USER, CALL, {**RESULT, "call_id": None}], "input[2].call_id", "is missing"),
    (
        [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        "input[0].content",
        "has a part of type 'input_image', but only text is known",
    ),
]


@pytest.mark.parametrize(("items", "param", "message"), REFUSED)
def test_bad_items(items, param, message):
    with pytest.raises(ApiError) as caught:
        translated({"input": items})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": [USER]}, "messages", "in /v1/responses it is input"),
        ({"max_tokens": 5}, "max_tokens", "it is max_output_tokens"),
        ({"response_format": {"type": "text"}}, "response_format", "it is text.format"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"n": 2}, "n", "not supported"),
        ({"truncation": "auto"}, "truncation", "refused"),
        (
            {"tools": [{"type": "f", "parameters": {"a": float("nan")}}]},
            "tools[0].parameters",
            "is not JSON",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is missing"),
        ({"background": True, "stream": True}, "background", "exclude each other"),
        ({"background": True, "store": False}, "background", "only be used when `store` is true"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "is missing"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "not found in tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "must have function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode", "is missing"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ],
)
def test_bad_fields(fields, param, message):
    with pytest.raises(ApiError) as caught:
        translated({"input": "a", **fields})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert message in str(caught.value)


def test_fields_without_effect_are_not_logged(caplog):
    fields = {"client_metadata": {"a": "b"}, "service_tier": "auto", "n": 1, "logprobs": False}
    translated({"input": "a", **fields, "prompt_cache_key": "k", "conversation": None})
    assert not caplog.records
