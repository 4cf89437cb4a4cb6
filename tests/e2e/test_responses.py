"""/v1/responses with OpenAI's client: text, streams, reasoning, calls, structured output, usage."""

from __future__ import annotations

import itertools
import json
import re

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.e2e.calls import CHAT, error_of
from tests.e2e.conftest import SCRIPTS
from tests.e2e.harness import cue

PATH = "/v1/responses"


def ask(scripted, script, **fields) -> Response:
    return scripted.client().responses.create(
        model="scripted", input=cue(script), temperature=0, **fields
    )


def plain(response):
    """A response without ids and times."""
    found = response.to_dict()
    for item in found["output"]:
        item.pop("id")
        item.pop("call_id", None)
    for name in ("id", "created_at", "completed_at"):
        found.pop(name, None)
    return found


def streamed(scripted, script, **fields) -> tuple[list, Response]:
    """Returns (all events, the response of the last one). Checks numbers and the first events."""
    events = list(ask(scripted, script, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all(event.response.output == [] for event in events[:2])
    assert events[0].response.status == "in_progress"
    return events, events[-1].response


ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "name": name, "parameters": ADD} for name in ("add", "sub")]
NAMED = {"tools": TOOLS, "tool_choice": {"type": "function", "name": "add"}}

QUESTIONS = {
    "text": ("story", {}),
    "reasoning": ("think", {}),
    "sealed": ("think", {"include": ["reasoning.encrypted_content"]}),
    "calls": ("call", {"tools": TOOLS}),
    "one call": ("call", {"tools": TOOLS, "parallel_tool_calls": False}),
    "no call": ("call", {"tools": TOOLS, "tool_choice": "none"}),
    "no tools": ("call", {}),
    "broken call": ("broken", {"tools": TOOLS}),
    "forced call": ("think", NAMED),
    "cut": ("story", {"max_output_tokens": 9}),
    "one token": ("story", {"max_output_tokens": 1}),
    "cut in reasoning": ("think", {"max_output_tokens": 9}),
    "cut in a call": ("call", {"tools": TOOLS, "max_output_tokens": 28}),
    "cut in a forced call": ("think", {**NAMED, "max_output_tokens": 27}),
    "log-probabilities": ("think", {"include": ["message.output_text.logprobs"]}),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_stream_ends_with_the_whole_response(scripted, name):
    script, fields = QUESTIONS[name]
    whole = ask(scripted, script, **fields)
    events, last = streamed(scripted, script, **fields)
    assert plain(last) == plain(whole)
    assert events[-1].type == f"response.{whole.status}"
    # The deltas of an item are its text.
    for index, item in enumerate(last.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        text = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert text == (item.arguments if item.type == "function_call" else item.content[0].text)
        assert own[0].type == "response.output_item.added" and own[0].item.id == item.id
        assert own[-1].type == "response.output_item.done" and own[-1].item == item


def test_text(scripted):
    reply = ask(scripted, "story")
    assert (reply.output_text, reply.status) == (SCRIPTS["story"], "completed")
    (item,) = reply.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (reply.error, reply.incomplete_details) == (None, None)
    assert (reply.temperature, reply.top_p, reply.tools, reply.tool_choice) == (0, 1, [], "auto")
    assert reply.completed_at >= reply.created_at


def test_reasoning_is_an_item_of_its_own(scripted):
    reply = ask(scripted, "think")
    thought, said = reply.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "So, 🤔 two\nand two.")
    assert (thought.summary, thought.encrypted_content) == ([], None)
    assert said.content[0].text == reply.output_text == "Four, 四."
    details = reply.usage.output_tokens_details
    assert 10 < details.reasoning_tokens < reply.usage.output_tokens


def test_calls(scripted):
    reply = ask(scripted, "call", tools=TOOLS)
    assert reply.output_text == "Let me see.\n"
    found = [item for item in reply.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in found] == [
        ("add", {"a": 1, "b": "你"}),
        ("sub", {}),
    ]
    assert len({call.call_id for call in found} | {call.id for call in found}) == 4
    assert reply.status == "completed"
    assert len(ask(scripted, "call", tools=TOOLS, parallel_tool_calls=False).output) == 2


@pytest.mark.parametrize("choice", [NAMED, {"tools": TOOLS, "tool_choice": "required"}])
def test_a_forced_call_after_reasoning(scripted, choice):
    reply = ask(scripted, "think", parallel_tool_calls=False, **choice)
    thought, call = reply.output
    assert thought.content[0].text == "So, 🤔 two\nand two."
    assert 0 <= json.loads(call.arguments)["a"] <= 9


def test_incomplete_responses(scripted):
    reply = ask(scripted, "story", max_output_tokens=9)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert SCRIPTS["story"].startswith(reply.output_text.rstrip("\ufffd"))
    assert reply.usage.output_tokens == 9
    assert reply.output[0].status == "incomplete"
    (item,) = ask(scripted, "think", max_output_tokens=9).output
    assert (item.type, item.status) == ("reasoning", "incomplete")
    for name in ("cut in a call", "cut in a forced call"):
        script, fields = QUESTIONS[name]
        before, call = ask(scripted, script, **fields).output
        assert (before.status, call.type, call.status) == (
            "completed",
            "function_call",
            "incomplete",
        )
        with pytest.raises(ValueError):
            json.loads(call.arguments)


def test_log_probabilities(scripted):
    """Only tokens of the text have them, not those of reasoning and not the end of the sequence."""
    reply = ask(scripted, "think", include=["message.output_text.logprobs"], top_logprobs=2)
    part = reply.output[1].content[0]
    joined = b"".join(bytes(entry.bytes) for entry in part.logprobs)
    assert joined.decode().strip() == "Four, 四."
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert ask(scripted, "think").output[1].content[0].logprobs == []


@pytest.mark.parametrize("given", [{"input": []}, {"input": ""}])
def test_probes(server, given):
    """Clients probe a server with an empty input and one token."""
    reply = server.post(PATH, {**given, "max_output_tokens": 1}).json()
    assert (reply["status"], reply["usage"]["output_tokens"]) == ("incomplete", 1)
    assert reply["usage"]["input_tokens"] > 0


CONVERSATION = [
    {"role": "system", "content": "# module"},
    {"role": "user", "content": "import os\n"},
    {"role": "assistant", "content": "import sys\n"},
    {"role": "user", "content": "class A:"},
]


def test_the_answer_is_that_of_chat(server):
    """The same conversation gives the same tokens, with instructions or a system item."""
    common = {"temperature": 0.8, "seed": 5}
    chat = server.post(CHAT, {"messages": CONVERSATION, "max_tokens": 30, **common}).json()
    fields = {**common, "max_output_tokens": 30}
    for body in (
        {"input": CONVERSATION},
        {"instructions": "# module", "input": CONVERSATION[1:]},
    ):
        reply = Response.model_validate(server.post(PATH, {**body, **fields}).json())
        assert reply.output_text == chat["choices"][0]["message"]["content"]
        assert reply.usage.input_tokens == chat["usage"]["prompt_tokens"]
        assert reply.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert reply.usage.input_tokens_details.cached_tokens >= 0
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens


def test_cached_tokens(server):
    text = "".join(f"import module_{i}\n" for i in range(60))
    body = {"input": text, "max_output_tokens": 1}
    first, second = (server.post(PATH, body).json()["usage"] for _ in range(2))
    assert second["input_tokens_details"]["cached_tokens"] >= 64
    assert first["input_tokens"] == second["input_tokens"]


COLOUR = {
    "type": "json_schema",
    "name": "colour",
    "strict": True,
    "schema": {
        "type": "object",
        "properties": {"red": {"type": "boolean"}},
        "required": ["red"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    },
}


def test_structured_output(server, scripted):
    reply = server.client().responses.create(
        model="tiny-python-minicpm", input="x", text={"format": COLOUR}, temperature=0
    )
    assert set(json.loads(reply.output_text)) == {"red"}
    assert reply.text.format.name == "colour"
    thinking = ask(scripted, "think", text={"format": COLOUR})
    assert thinking.output[0].content[0].text == "So, 🤔 two\nand two."
    assert re.fullmatch(r'\{"red":(true|false)\}', thinking.output_text)
    error = error_of(
        server.post(
            PATH,
            {"input": "x", "text": {"format": {**COLOUR, "schema": {"type": "no"}}}},
        ),
        400,
    )
    assert "json schema cannot be used" in error["message"]
    assert error["param"] == "text.format"


def test_the_raw_messages_are_given_if_asked_for(server):
    """A response that has ended contains the prompt and the output as texts of the model."""
    body = {"input": "Hello?", "max_output_tokens": 8, "temperature": 0}
    wanted = {**body, "enable_response_messages": True}
    found = server.post("/v1/responses", wanted).json()
    (prompt,), (output,) = found["input_messages"], found["output_messages"]
    assert prompt["type"] == output["type"] == "raw_message_tokens"
    assert "Hello?" in prompt["message"] and found["output"][0]["content"][0]["text"]
    assert output["message"] == found["output"][0]["content"][0]["text"]
    for side, kind in ((prompt, "input_tokens"), (output, "output_tokens")):
        assert len(side["tokens"]) == found["usage"][kind]
        text = server.post("/detokenize", {"tokens": side["tokens"]}).json()["prompt"]
        assert text == side["message"]
    stored = server.get(f"/v1/responses/{found['id']}").json()
    assert stored["output_messages"] == [output]
    lines = server.post("/v1/responses", {**wanted, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    last = [event["response"] for event in events if "response" in event]
    assert last[-1]["input_messages"] == [prompt] and last[-1]["output_messages"] == [output]
    assert "input_messages" not in last[0]
    plain = server.post("/v1/responses", body).json()
    assert "input_messages" not in plain and "output_messages" not in plain


def test_metrics_are_given_if_asked_for(scripted):
    reply = ask(scripted, "story", extra_body={"return_metrics": True})
    assert reply.metrics["speculative_decoding"]["draft_acceptance_rate"] > 0.9
    assert "metrics" not in ask(scripted, "story").to_dict()


# ---- errors


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": 5}, "input"),
        ({}, "input"),
        ({"input": None, "instructions": "a"}, "input"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"id": "x"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "tool_choice": "perhaps"}, "tool_choice"),
        ({"input": "a", "previous_response_id": "resp_x"}, "previous_response_id"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "messages": []}, "messages"),
    ],
)
def test_bad_requests(server, body, param):
    for more in ({}, {"stream": True}):
        error = error_of(server.post(PATH, {**body, **more}), 400)
        assert error["param"] == param and param.split("[")[0] in error["message"]


def test_half_a_surrogate_pair(server):
    """The response repeats it in fields that are not part of the prompt."""

    def post(body):
        headers = {"Content-Type": "application/json"}
        content = json.dumps({"max_output_tokens": 1, **body})
        return httpx.post(server.url + PATH, content=content, headers=headers, timeout=60)

    half = {"input": "x", "metadata": {"a": "\ud800"}}
    for body in (half, {**half, "stream": True}, {"input": "x", "user": "\ud800"}):
        reply = post(body)
        assert reply.status_code == 200 and "\\ud800" in reply.text
    call = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "\ud800"}
    assert post({"input": [call]}).status_code in (200, 400)
    error_of(post({"input": "\ud800"}), 400)


def test_texts_that_are_too_long(limited):
    key = {"Authorization": "Bearer first"}
    long = {"role": "user", "content": "x" * 2001}
    error = error_of(limited.post(PATH, {"input": [long]}, **key), 400)
    assert error["message"].startswith("input[0] has 2001 characters")
    many = [{"role": "user", "content": "x"}] * 6
    assert error_of(limited.post(PATH, {"input": many}, **key), 400)["param"] == "input"
    error = error_of(limited.post(PATH, {"input": "x y " * 400}, **key), 400)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert limited.post(PATH, {"input": "x"}).status_code == 401
    error = error_of(limited.post(PATH, {"input": "x", "model": "gpt-5"}, **key), 404)
    assert error["code"] == "model_not_found"


def test_counting_the_tokens_of_a_prompt(server):
    responses = server.client().responses
    fields = {"model": "tiny-python-minicpm", "input": "class Stack:", "instructions": "Be brief."}
    first = responses.create(**fields, max_output_tokens=4)
    assert responses.input_tokens.count(**fields).input_tokens == first.usage.input_tokens
    fields["previous_response_id"] = first.id
    second = responses.create(**fields, max_output_tokens=4)
    assert responses.input_tokens.count(**fields).input_tokens == second.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="previous_response_id is 'x'"):
        responses.input_tokens.count(model=fields["model"], input="a", previous_response_id="x")


def test_an_error_of_the_client_library(server):
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().responses.create(model="tiny-python-minicpm", input="a", truncation="auto")
    assert caught.value.param == "truncation"


# ---- helpers of the client


def test_the_stream_helper(scripted):
    fields = {"model": "scripted", "input": cue("call"), "temperature": 0, "tools": TOOLS}
    with scripted.client().responses.stream(**fields) as stream:
        kinds = [kind for kind, _ in itertools.groupby(event.type for event in stream)]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Let me see.\n"
    assert [item.name for item in final.output[1:]] == ["add", "sub"]


def test_models_as_codex_lists_them(server):
    found = server.get("/v1/models").json()
    (model,) = found["models"]
    assert model["slug"] == model["display_name"] == found["data"][0]["id"]
    assert model["context_window"] == found["data"][0]["max_model_len"]
    # Codex takes its system message from this field. If the field is empty, it sends none.
    assert len(model["base_instructions"]) > 300
    assert model["supported_reasoning_levels"] == [] and model["visibility"] == "list"
