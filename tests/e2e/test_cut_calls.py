"""A forced call that max_tokens cuts off is a call with partial arguments, on every interface."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.calls import CHAT
from tests.e2e.harness import Server

SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": ["one", "two"]}, "n": {"type": "integer", "maximum": 9}},
    "required": ["word", "n"],
    "additionalProperties": False,
}
LENGTHS = {"named": (1, 2, 4, 8, 12), "required": (1, 4, 12, 20, 24)}


def events(server: Server, path: str, body: dict) -> Iterator[dict]:
    for line in server.post(path, {**body, "stream": True}).text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def by_chat(server: Server, choice: str, tokens: int, *, stream: bool) -> tuple[str, str, str]:
    function = {"name": "count", "parameters": SCHEMA}
    named = {"type": "function", "function": {"name": "count"}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": named if choice == "named" else "required",
        "max_tokens": tokens,
        "temperature": 0,
    }
    if not stream:
        (found,) = server.post(CHAT, body).json()["choices"]
        assert found["message"]["content"] is None
        (call,) = found["message"]["tool_calls"]
        return call["function"]["name"], call["function"]["arguments"], found["finish_reason"]
    name, arguments, finish = "", "", None
    for chunk in events(server, CHAT, body):
        (found,) = chunk["choices"]
        assert not found["delta"].get("content")
        for call in found["delta"].get("tool_calls", ()):
            assert call["index"] == 0
            name += call["function"].get("name", "")
            arguments += call["function"]["arguments"]
        finish = found["finish_reason"]
    return name, arguments, finish


def by_messages(server: Server, choice: str, tokens: int, *, stream: bool) -> tuple[str, str, str]:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "count", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "count"} if choice == "named" else {"type": "any"},
        "max_tokens": tokens,
        "temperature": 0,
    }
    if not stream:
        found = server.post("/v1/messages", body).json()
        (block,) = found["content"]
        assert block["type"] == "tool_use"
        name, given, stop = block["name"], block["input"], found["stop_reason"]
    else:
        name, text, stop = "", "", ""
        for event in events(server, "/v1/messages", body):
            if event["type"] == "content_block_start":
                assert (event["index"], event["content_block"]["type"]) == (0, "tool_use")
                name = event["content_block"]["name"]
            elif event["type"] == "content_block_delta":
                text += event["delta"]["partial_json"]
            elif event["type"] == "message_delta":
                stop = event["delta"]["stop_reason"]
        given = json.loads(text)
    arguments = given["INVALID_JSON"] if "INVALID_JSON" in given else json.dumps(given)
    return name, arguments, {"max_tokens": "length", "tool_use": "tool_calls"}[stop]


def by_responses(server: Server, choice: str, tokens: int, *, stream: bool) -> tuple[str, str, str]:
    body = {
        "input": "x",
        "tools": [{"type": "function", "name": "count", "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "count"} if choice == "named" else "required",
        "max_output_tokens": tokens,
        "temperature": 0,
    }
    if stream:
        *_, last = events(server, "/v1/responses", body)
        found = last["response"]
        assert last["type"] == f"response.{found['status']}"
    else:
        found = server.post("/v1/responses", body).json()
    (item,) = found["output"]
    assert (item["type"], item["status"]) == ("function_call", found["status"])
    if found["status"] == "incomplete":
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    finish = {"incomplete": "length", "completed": "tool_calls"}[found["status"]]
    return item["name"], item["arguments"], finish


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["named", "required"])
@pytest.mark.parametrize("interface", [by_chat, by_messages, by_responses])
def test_a_forced_call_that_is_cut_off(server, interface, choice, stream):
    name, whole, finish = by_chat(server, choice, 60, stream=stream)
    assert (name, finish) == ("count", "tool_calls")
    assert json.loads(whole)["word"] in ("one", "two")
    parts = set()
    for tokens in LENGTHS[choice]:
        name, arguments, finish = interface(server, choice, tokens, stream=stream)
        assert (name, finish) == ("count", "length")
        assert whole.startswith(arguments) and arguments != whole
        parts.add(arguments)
    assert len(parts) > 1  # some have begun
