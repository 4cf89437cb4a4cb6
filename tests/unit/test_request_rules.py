"""Rules of requests that hold for every interface."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pydantic")

from cpmcu.serving import messages, response_items
from cpmcu.serving.protocol.chat import ChatMessage, ChatRequest
from cpmcu.serving.protocol.messages import MessagesRequest
from cpmcu.serving.protocol.responses import InputItem, ResponsesRequest

USER = {"role": "user", "content": "Hi"}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [USER], **fields})


def from_responses(**fields: Any) -> ChatRequest:
    body = ResponsesRequest.model_validate({"input": [USER], **fields})
    return response_items.to_chat(body, [("input[0]", InputItem.model_validate(USER))])[0]


def from_messages(**fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 5, "messages": [USER], **fields}
    return messages.to_chat(MessagesRequest.model_validate(body))[0]


def test_effort_none_switches_thinking_off() -> None:
    for body in (
        chat(reasoning_effort="none"),
        from_responses(reasoning={"effort": "none"}),
        from_messages(output_config={"effort": "none"}),
    ):
        assert body.chat_template_kwargs == {"enable_thinking": False}
    asked = {"enable_thinking": True}
    body = chat(reasoning_effort="none", chat_template_kwargs=asked)
    assert body.chat_template_kwargs == asked
    assert chat(reasoning_effort="low").chat_template_kwargs is None


def test_seed_minus_one_draws_a_seed() -> None:
    assert chat(seed=-1).sampling_fields()["seed"] is None
    assert chat(seed=-2).sampling_fields()["seed"] == (1 << 64) - 2
    assert chat(seed=0).sampling_fields()["seed"] == 0


def test_an_empty_list_of_calls_is_no_calls() -> None:
    message = ChatMessage.model_validate({"role": "assistant", "content": "a", "tool_calls": []})
    assert "tool_calls" not in message.to_template()
