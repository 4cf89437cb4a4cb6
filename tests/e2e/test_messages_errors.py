"""Errors of /v1/messages: Anthropic's format, which its client maps to its exceptions."""

from __future__ import annotations

import concurrent.futures
import gzip
import signal
import threading
import time

import anthropic
import httpx
import pytest

from tests.e2e.calls import begun
from tests.e2e.harness import Server, start

PATH = "/v1/messages"
HI = {"max_tokens": 4, "messages": [{"role": "user", "content": "x = "}]}
KEY = {"x-api-key": "second"}


def client(server: Server, **options) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, max_retries=0, timeout=60, **options)


def error_of(reply: httpx.Response, status: int, kind: str = "invalid_request_error") -> str:
    """Checks the format of an error; returns its message."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert (body["type"], set(body)) == ("error", {"type", "error", "request_id"})
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert "Traceback" not in body["error"]["message"]
    return body["error"]["message"]


def test_keys(limited):
    fields = {"model": "tiny-python-minicpm", **HI}
    assert client(limited, api_key="second").messages.create(**fields).content
    assert client(limited, auth_token="first").messages.create(**fields).content
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key: KEY"):
        client(limited, api_key="third").messages.create(**fields)
    error_of(limited.post(PATH, HI), 401, "authentication_error")
    assert httpx.head(limited.url, timeout=60).status_code == 200  # Claude Code's first request
    assert limited.get("/v1/models", **KEY).status_code == 200
    both = {"Authorization": "Bearer wrong", **KEY}
    assert limited.get("/v1/models", **both).status_code == 200
    assert limited.get("/v1/models", **{"x-api-key": "Bearer second"}).status_code == 401
    assert limited.get("/v1/models", **{"x-api-key": ""}).status_code == 401


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
def test_statuses(limited, path):
    body = HI if path == PATH else {"messages": HI["messages"]}
    reply = limited.post(path, {**body, "model": "claude"}, **KEY)
    assert "'claude' is not served here" in error_of(reply, 404, "not_found_error")
    error_of(limited.get(path, **KEY), 405)
    big = {**body, "system": "a" * (1 << 20)}
    error_of(limited.post(path, big, **KEY), 413, "request_too_large")
    headers = {**KEY, "Content-Type": "application/json"}
    reply = httpx.post(limited.url + path, content=b"{", headers=headers, timeout=60)
    assert error_of(reply, 400).startswith("The request body is not valid JSON: at character 1: ")
    for content in (gzip.compress(b"{}"), b"\x1f"):
        coded = {**headers, "Content-Encoding": "gzip"}
        reply = httpx.post(limited.url + path, content=content, headers=coded, timeout=60)
        assert "encoded as 'gzip': send it without Content-Encoding" in error_of(reply, 415)
    error_of(limited.post(f"{PATH}/batches", HI, **KEY), 404, "not_found_error")


def test_a_prompt_that_is_too_long(limited):
    """Claude Code shortens a conversation if it finds these words and numbers."""
    long = {**HI, "messages": [{"role": "user", "content": "a b c d " * 200}]}
    message = error_of(limited.post(PATH, long, **KEY), 400)
    assert message.startswith("prompt is too long: ")
    count = limited.post(f"{PATH}/count_tokens", {"messages": long["messages"]}, **KEY).json()
    assert f"{count['input_tokens']} tokens > 128 maximum" in message
    text = {**long, "messages": [{"role": "user", "content": "a" * 2001}]}
    message = error_of(limited.post(PATH, text, **KEY), 400)
    assert message == "messages[0].content has 2001 characters, but may have at most 2000."


def user(block: dict) -> dict:
    return {"messages": [{"role": "user", "content": [block]}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens is null, but must be an integer."),
        ({"messages": []}, "messages is [], but must have at least 1 item"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role is 'tool', but"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3, but must be"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing."),
        (user({"text": "a"}), "messages[0].content[0].type is missing."),
        (user({"type": "text", "text": 3}), "messages[0].content[0].text is 3, but must be a te"),
        (
            user({"type": "tool_result", "tool_use_id": "1", "content": [{"type": 3}]}),
            "messages[0].content[0].content[0].type is 3, but must be a text.",
        ),
        (user({"type": "tool_result", "content": 3}), "messages[0].content[0].content is 3, but"),
        ({"stop_sequences": "a"}, "stop_sequences is 'a', but must be a list."),
        ({"system": 3}, "system is 3, but must be a text or a list of blocks like {"),
        ({"tool_choice": "auto"}, "tool_choice is 'auto', but must be"),
        ({"thinking": {"type": "on"}}, "thinking.type is 'on', but must be 'enabled', 'disabled',"),
        ({"top_p": 2.0}, "top_p is 2.0, but must be at most 1."),
        ({"temperature": "hot"}, "temperature is 'hot', but must be a number."),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing."),
        (
            {"tools": [{"name": "f", "input_schema": {"type": 3}}], "tool_choice": {"type": "any"}},
            "tools: the parameters of a function have type 3, but must be an object.",
        ),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is "),
        (
            {
                "tools": [
                    {"name": name, "input_schema": {"type": "object"}} for name in ("f", "g", "f")
                ]
            },
            "tools[2].name is 'f', but tools[0] has this name, too.",
        ),
        (
            user({"type": "tool_result", "tool_use_id": "x", "content": "1"}),
            "messages[0].content[0].tool_use_id is 'x', but no tool_use block before it has this",
        ),
        ({"n": 2}, "n is a field of /v1/chat/completions"),
        (
            {"logit_bias": {"x": 1}},
            "logit_bias has the key 'x', but must map token ids to numbers.",
        ),
    ],
)
def test_one_sentence_for_each_bad_field(limited, fields, message):
    found = error_of(limited.post(PATH, {**HI, **fields}, **KEY), 400)
    assert found.startswith(message)
    assert found.endswith(".") and "\n" not in found


@pytest.mark.parametrize("depth", [300, 900])
def test_deep_values(limited, depth):
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"a": value}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": value}
    turn = {"role": "assistant", "content": [use]}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
    messages = [*HI["messages"], turn, {"role": "user", "content": [result]}]
    for fields in (
        {"messages": messages},
        {"tools": [{"name": "f", "input_schema": value}]},
        {"tools": [{"name": "f", "input_schema": value}], "tool_choice": {"type": "any"}},
        {"output_format": {"type": "json_schema", "schema": value}},
        {"metadata": value},
    ):
        reply = limited.post(PATH, {**HI, **fields}, **KEY)
        if reply.status_code != 200:
            error_of(reply, 400)


def test_half_a_surrogate_pair(limited):
    body = b'{"max_tokens": 2, "messages": [{"role": "user", "content": "\\ud83d"}]}'
    headers = {**KEY, "Content-Type": "application/json"}
    reply = httpx.post(limited.url + PATH, content=body, headers=headers, timeout=60)
    error_of(reply, 400)


def test_silence_in_a_stream(limited):
    """While a request waits for a slot, events keep its connection open."""
    long = {"prompt": ["x"] * 2, "max_tokens": 120, "ignore_eos": True, "logprobs": 20}
    with begun(limited, long):
        reply = limited.post(PATH, {**HI, "stream": True}, **KEY)
    assert reply.text.startswith('event: ping\ndata: {"type":"ping"}\n\n')
    assert "\n: ping" not in reply.text
    assert reply.text.endswith('data: {"type":"message_stop"}\n\n')


def test_a_full_queue(limited):
    with begun(limited, {"prompt": ["x"] * 4, "max_tokens": 120, "ignore_eos": True}):
        reply = limited.post(PATH, HI, **KEY)
        error_of(reply, 429, "rate_limit_error")
        assert int(reply.headers["retry-after"]) >= 1


def test_a_client_that_leaves_frees_its_slot(server):
    body = {**HI, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + PATH, json=body, timeout=60) as reply:
        next(reply.iter_lines())
    server.wait_left()


def test_a_server_that_stops():
    """A streamed and a whole answer that the server ends are errors that clients may retry."""
    body = {**HI, "max_tokens": 1900, "ignore_eos": True}
    with start("--shutdown-timeout", "0.3") as server:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            heard = threading.Event()

            def stream() -> str:
                text = ""
                fields = {**body, "stream": True}
                with httpx.stream("POST", server.url + PATH, json=fields, timeout=60) as reply:
                    for line in reply.iter_lines():
                        heard.set()
                        text += line + "\n"
                return text

            streamed = pool.submit(stream)
            whole = pool.submit(server.post, PATH, body)
            assert heard.wait(60)
            while server.metric("vllm:num_requests_running") < 2:
                time.sleep(0.01)
            assert server.stop(signal.SIGTERM) == 0
            assert error_of(whole.result(), 503, "overloaded_error") == "The server is stopping."
            last = streamed.result().rstrip().split("\n\n")[-1]
            assert last.startswith('event: error\ndata: {"type":"error","error":{"type":"overload')
        assert "Traceback" not in server.log
