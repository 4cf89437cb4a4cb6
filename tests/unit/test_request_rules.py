"""Rules of requests that hold for every interface."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pydantic")

from cpmcu import SamplingParams
from cpmcu.serving.errors import ApiError
from cpmcu.serving.messages import conversation as messages
from cpmcu.serving.protocol.chat import ChatMessage, ChatRequest
from cpmcu.serving.protocol.messages import MessagesRequest
from cpmcu.serving.protocol.responses import InputItem, ResponsesRequest
from cpmcu.serving.responses import items as response_items

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


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("seed", -1, None),
        ("seed", -2, (1 << 64) - 2),
        ("seed", -(1 << 63), 1 << 63),
        ("seed", 0, 0),
        ("top_k", -1, 0),
        ("stop", "", ()),
        ("stop", ["", "a", ""], ("a",)),
        ("stop", None, ()),
    ],
)
def test_values_mean_the_same_in_requests_and_in_python(name: str, given: Any, meant: Any) -> None:
    assert getattr(SamplingParams(**{name: given}), name) == meant
    assert getattr(SamplingParams(**chat(**{name: given}).sampling_fields()), name) == meant


def test_equal_grammars_under_two_names_are_one() -> None:
    pytest.importorskip("llguidance")
    twice = {"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "a"'}}
    assert chat(**twice).sampling_fields()["grammar"].source == 'start: "a"'
    schemas = ({"type": "object", "x": 1}, {"x": 1, "type": "object"})
    twice = {"guided_json": schemas[0], "structured_outputs": {"json": schemas[1]}}
    assert chat(**twice).sampling_fields()["grammar"].kind == "json_schema"
    for other in ({"grammar": 'start: "b"'}, {"regex": 'start: "a"'}):
        body = chat(guided_grammar='start: "a"', structured_outputs=other)
        with pytest.raises(ApiError, match="exclude each other"):
            body.sampling_fields()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"logit_bias": {"5": 1, "five": 1}}, "logit_bias has the key 'five', but must map token"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content is null, but"),
        ({"messages": [USER, {"role": "user", "content": []}]}, r"messages\[1\].content is \[\]"),
        (
            {
                "messages": [USER, {"role": "assistant", "content": "a"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message and add_generation_prompt are both true",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(fields: dict[str, Any], sentence: str) -> None:
    body = chat(**fields)
    with pytest.raises(ApiError, match=sentence):
        body.check()
        body.sampling_fields()


def test_an_answer_is_continued_without_asking_for_no_new_one() -> None:
    messages = [USER, {"role": "assistant", "content": "a"}]
    chat(messages=messages, continue_final_message=True).check()


def test_an_empty_list_of_calls_is_no_calls() -> None:
    message = ChatMessage.model_validate({"role": "assistant", "content": "a", "tool_calls": []})
    assert "tool_calls" not in message.to_template()
