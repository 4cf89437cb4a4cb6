"""/v1/messages with the official `anthropic` client, and with requests like Claude Code's."""

from __future__ import annotations

import json
from typing import Literal

import anthropic
import httpx
import pytest
from anthropic.types import Message
from pydantic import BaseModel, ConfigDict

from tests.e2e.conftest import SCRIPTS
from tests.e2e.harness import Server, cue, start
from tests.reference import claude_code

PATH = "/v1/messages"
MODEL = "tiny-python-minicpm"


# The client's newer versions have no parameter `temperature`.
GREEDY = {"temperature": 0}


def client(server: Server, **options) -> anthropic.Anthropic:
    options = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
    return anthropic.Anthropic(base_url=server.url, **options)


def fields_of(content, **fields) -> dict:
    """Fields of a request to the shipped model."""
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "max_tokens": 30, "messages": messages, "extra_body": GREEDY, **fields}


def told(scripted: Server, script: str, **fields) -> Message:
    """The message with which the scripted model continues `script`, streamed and at once."""
    messages = fields.pop("messages", [{"role": "user", "content": cue(script)}])
    fields = {"model": "scripted", "max_tokens": 200, "messages": messages, **fields}
    whole = client(scripted).messages.create(**fields)
    with client(scripted).messages.stream(**fields) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_message()
    assert plain(streamed) == plain(whole)
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.stop_sequence == whole.stop_sequence
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.output_tokens_details == whole.usage.output_tokens_details
    return whole


def plain(message: Message) -> list[tuple]:
    """Returns (type, content) of each block."""
    found = []
    for block in message.content:
        if block.type == "text":
            found.append(("text", block.text))
        elif block.type == "thinking":
            assert block.signature
            found.append(("thinking", block.thinking))
        else:
            found.append((block.type, block.name, block.input))
    return found


# ---- text


def test_text_with_a_model(server):
    fields = fields_of("class Stack:", system="Be brief.")
    whole = client(server).messages.create(**fields)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", MODEL)
    (block,) = whole.content
    chat = server.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, *fields["messages"]],
        max_tokens=30,
        temperature=0,
    )
    assert block.text == chat.choices[0].message.content != ""
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert (
        whole.stop_reason
        == {"length": "max_tokens", "stop": "end_turn"}[chat.choices[0].finish_reason]
    )
    with client(server).messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == block.text
    assert whole._request_id


def test_events_of_a_stream(server):
    with client(server).messages.stream(**fields_of("x = ")) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
    head, tail = ["message_start", "content_block_start"], ["content_block_stop"]
    tail += ["message_delta", "message_stop"]
    assert kinds[:2] == head and kinds[-3:] == tail
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_the_same_seed_gives_the_same_text(server):
    texts = []
    for seed in (5, 5, 6):
        extra = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": seed}
        fields = fields_of("import ", extra_body=extra)
        texts.append(client(server).messages.create(**fields).content[0].text)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(("stops", "end"), [(["zzz", "世界"], 1), (["einmal"], 0), ([" 🙂"], 0)])
def test_stop_sequences(scripted, stops, end):
    message = told(scripted, "story", stop_sequences=stops)
    assert plain(message) == [("text", SCRIPTS["story"].partition(stops[end])[0])]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stops[end])
    message = told(scripted, "story", stop_sequences=["zzz"])
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


def test_limits_of_tokens(scripted):
    message = told(scripted, "story", max_tokens=4)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 4)
    message = told(scripted, "story", max_tokens=0)
    assert (message.content, message.stop_reason) == ([], "max_tokens")
    assert message.usage.output_tokens == 0
    extra = {"ignore_eos": True}
    message = told(scripted, "story", max_tokens=32000, extra_body=extra)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.output_tokens < 512


def test_a_begun_answer_is_continued(scripted):
    begun = [{"role": "user", "content": "Tell."}, {"role": "assistant", "content": cue("story")}]
    assert plain(told(scripted, "", messages=begun)) == [("text", SCRIPTS["story"])]


# ---- thinking


def test_thinking(scripted):
    thought, text = ("thinking", "So, 🤔 two\nand two."), ("text", "Four, 四.")
    message = told(scripted, "think")
    assert plain(message) == [thought, text]
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    adaptive = {"type": "adaptive"}
    assert plain(told(scripted, "think", thinking=adaptive)) == [thought, text]
    omitted = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    assert plain(told(scripted, "think", thinking=omitted)) == [("thinking", ""), text]
    assert plain(told(scripted, "think", thinking={"type": "disabled"})) == [text]
    details = told(scripted, "story").usage.output_tokens_details
    assert details.thinking_tokens == 0


# ---- tools

ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
SUM = {
    "name": "add",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


def test_a_round_of_tools(scripted):
    message = told(scripted, "call", tools=[ADD])
    calls = [("tool_use", "add", {"a": 1, "b": "你"}), ("tool_use", "sub", {})]
    assert plain(message) == [("text", "Let me see.\n"), *calls]
    assert message.stop_reason == "tool_use"
    _, first, second = message.content
    assert first.id != second.id
    results = [
        {"type": "tool_result", "tool_use_id": first.id, "content": "3"},
        {"type": "tool_result", "tool_use_id": second.id, "content": cue("story")},
    ]
    messages = [
        {"role": "user", "content": cue("call")},
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    assert plain(told(scripted, "", messages=messages, tools=[ADD])) == [("text", SCRIPTS["story"])]


def test_a_choice_of_tools(scripted):
    one = {"type": "auto", "disable_parallel_tool_use": True}
    message = told(scripted, "call", tools=[ADD], tool_choice=one)
    assert [block[0] for block in plain(message)] == ["text", "tool_use"]
    message = told(scripted, "call", tools=[ADD], tool_choice={"type": "none"})
    assert plain(message) == [("text", SCRIPTS["call"])]
    thought = ("thinking", "So, 🤔 two\nand two.")
    for choice in ({"type": "tool", "name": "add"}, {"type": "any"}):
        choice = {**choice, "disable_parallel_tool_use": True}
        message = told(scripted, "think", tools=[SUM], tool_choice=choice)
        first, (kind, name, given) = plain(message)
        assert (first, kind, name, set(given)) == (thought, "tool_use", "add", {"a"})
        assert message.stop_reason == "tool_use"
    cut = told(scripted, "think", tools=[SUM], tool_choice=choice, max_tokens=14)
    assert (cut.content[0].type, cut.stop_reason) == ("thinking", "max_tokens")


def test_a_schema_of_the_answer(server):
    schema = {**SUM["input_schema"], "x-guidance": {"whitespace_flexible": False}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = client(server).messages.create(**fields_of("x = ", output_config=config))
    assert set(json.loads(message.content[0].text)) == {"a"}


# ---- tokens and the prefix cache


def test_counted_tokens_are_those_of_the_request(server, scripted):
    system = [{"type": "text", "text": "Be brief. " * 40, "cache_control": {"type": "ephemeral"}}]
    fields = fields_of([{"type": "text", "text": "class "}], system=system, tools=[ADD])
    names = ("model", "messages", "system", "tools")
    counted = client(server).messages.count_tokens(**{name: fields[name] for name in names})
    first, second = (client(server).messages.create(**fields).usage for _ in range(2))
    for usage in (first, second):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert second.cache_read_input_tokens >= 64
    assert first.cache_creation_input_tokens == 0
    one = client(scripted).messages.count_tokens(
        model="scripted", messages=[{"role": "user", "content": cue("story")}]
    )
    assert one.input_tokens == 1


def test_a_prompt_can_be_put_into_the_cache_alone(server):
    fields = fields_of("Only this prompt. " * 30)
    empty = client(server).messages.create(**{**fields, "max_tokens": 0})
    assert (empty.content, empty.stop_reason, empty.usage.output_tokens) == ([], "max_tokens", 0)
    assert client(server).messages.create(**fields).usage.cache_read_input_tokens >= 64


def test_metrics(scripted):
    messages = told(scripted, "story", extra_body={"return_metrics": True}).model_extra["metrics"]
    assert messages["speculative_decoding"]["draft_acceptance_rate"] > 0.9
    body = {"model": "scripted", "max_tokens": 200, "temperature": 0, "return_metrics": True}
    body["messages"] = [{"role": "user", "content": cue("story")}]
    (delta,) = (e for e in events(scripted.url, {**body, "stream": True}) if "metrics" in e)
    assert delta["type"] == "message_delta"


# ---- Claude Code


def events(url: str, body: dict, path: str = PATH, **headers: str) -> list[dict]:
    """The events of a stream; checks that each has its type as a name."""
    found = []
    with httpx.stream("POST", url + path, json=body, headers=headers, timeout=60) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in reply.iter_lines():
            kind, _, value = line.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data":
                found.append(json.loads(value))
                assert found[-1]["type"] == name
            else:
                assert not line
    return found


def test_the_list_of_models(server):
    page = client(server).models.list()
    (model,) = page.data
    assert (model.type, model.id, model.display_name) == ("model", MODEL, MODEL)
    assert model.created_at.year >= 2024 and model.created_at.utcoffset() is not None
    assert (page.has_more, page.first_id, page.last_id) == (False, MODEL, MODEL)
    assert client(server).models.retrieve(MODEL) == model
    length = server.get(f"/v1/models/{MODEL}").json()["max_model_len"]
    assert (model.max_input_tokens, model.max_tokens, model.lifecycle) == (length, length, "active")
    assert server.get("/v1/models").json()["object"] == "list"  # else the form is OpenAI's


def test_a_session_of_claude_code(scripted):
    """Two requests: a question, which is answered with calls, and the results of the calls."""
    body = claude_code.first_request("scripted", "Go.", scale=0)
    body["tools"] = body["tools"][:1]
    body["messages"][1]["content"] = cue("call")  # the template has the texts alone
    found = events(scripted.url, {**body, "temperature": 0}, claude_code.PATH)
    assert found[0]["type"] == "message_start" and found[-1]["type"] == "message_stop"
    blocks = {}
    for event in found:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "json": ""}
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            block["text" if "text" in delta else "json"] += delta.get("text", "") or delta.get(
                "partial_json", ""
            )
    answer = []
    for block in blocks.values():
        given = block.pop("json")
        answer.append({**block, "input": json.loads(given)} if given else block)
    results = {block["id"]: "3" for block in answer if block["type"] == "tool_use"}
    assert len(results) == 2
    more = claude_code.next_request(body, answer, results)
    more["messages"][-1]["content"] = cue("story")
    found = events(scripted.url, {**more, "temperature": 0}, claude_code.PATH)
    texts = [e["delta"]["text"] for e in found if e["type"] == "content_block_delta"]
    assert "".join(texts) == SCRIPTS["story"]


def test_the_billing_header_does_not_keep_prompts_from_the_cache(server):
    usages = []
    for number in (1, 2):
        body = claude_code.first_request(MODEL, "x = ", scale=0.01, number=number)
        body |= {"max_tokens": 2, "stream": False, "tools": []}
        reply = server.post(claude_code.PATH, body, **claude_code.HEADERS)
        assert reply.status_code == 200, reply.text
        usages.append(reply.json()["usage"])
    assert usages[1]["cache_read_input_tokens"] >= 64


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_a_template_that_refuses_later_system_messages(tmp_path):
    path = tmp_path / "strict.jinja"
    path.write_text(STRICT)
    with start("--chat-template", str(path)) as server:
        body = claude_code.first_request(MODEL, "x = ", scale=0.01)
        body |= {"max_tokens": 2, "stream": False}
        assert server.post(PATH, body).status_code == 200
        body = {"messages": body["messages"], "system": "Be brief."}
        count = server.post(f"{PATH}/count_tokens", body).json()["input_tokens"]
        user, system = body["messages"]
        texts = [block["text"] for block in user["content"]] + [system["content"]]
        prompt = "<system>Be brief.<user>" + "".join(texts[:-1]) + "\n\n" + texts[-1]
        assert (
            server.post("/tokenize", {"prompt": prompt, "add_special_tokens": False}).json()[
                "count"
            ]
            == count
        )


def test_the_clients_runner_of_tools(scripted):
    """The beta interface, whose path has a query, calls Python functions until the model ends."""
    called = []

    @anthropic.beta_tool
    def add(a: int, b: str) -> str:
        """Adds."""
        called.append((a, b))
        return cue("story")

    @anthropic.beta_tool
    def sub() -> str:
        """Subtracts."""
        called.append(())
        return cue("story")

    runner = client(scripted).beta.messages.tool_runner(
        model="scripted",
        max_tokens=200,
        messages=[{"role": "user", "content": cue("call")}],
        tools=[add, sub],
        extra_body=GREEDY,
    )
    assert runner.until_done().content[0].text == SCRIPTS["story"]
    assert called == [(1, "你"), ()]


def test_a_thread_is_not_kept(server):
    """The server stores no conversation, so the client sends all messages each time."""
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    with pytest.raises(anthropic.NotFoundError, match="keeps no threads: send all") as error:
        client(server).messages.create(**fields_of("x", extra_body={"thread": thread}))
    assert error.value.body["error"]["details"] == {"error_code": "thread_not_found"}
    created = {"thread": {"type": "create"}}
    assert client(server).messages.create(**fields_of("x", extra_body=created)).usage.output_tokens


def test_the_client_parses_an_answer(server):
    class Step(BaseModel):
        side: Literal["left", "right"]
        model_config = ConfigDict(json_schema_extra={"x-guidance": {"whitespace_flexible": False}})

    fields = fields_of("x = ", max_tokens=100)
    message = client(server).messages.parse(output_format=Step, **fields)
    assert isinstance(message.parsed_output, Step)
