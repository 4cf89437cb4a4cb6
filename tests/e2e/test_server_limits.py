"""Limits of the server: prompts, depth and size of bodies, the queue, silence in a stream."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.calls import CHAT, FIRST, HELLO, begun, error_of


def test_a_prompt_that_is_too_long(limited):
    for count, status in ((127, 200), (128, 400), (1000, 400)):
        body = {"prompt": [7] * count, "max_tokens": 50, "ignore_eos": True}
        reply = limited.post("/v1/completions", body, **FIRST)
        assert reply.status_code == status, reply.text
        if status == 200:
            assert reply.json()["usage"]["completion_tokens"] == 1  # the context has no more room
            assert reply.json()["choices"][0]["finish_reason"] == "length"
        else:
            error = error_of(reply, 400)
            assert error["code"] == "context_length_exceeded"
            assert str(count) in error["message"] and "128" in error["message"]


@pytest.mark.parametrize("depth", [300, 900])
def test_deep_bodies(limited, depth):
    """Values nested beyond Python's recursion limit are not a server error."""
    value: object = "x"
    for _ in range(depth):
        value = {"a": value}
    call = {"function": {"name": "f", "arguments": "[" * 4 * depth}}
    for path, fields in (
        (CHAT, {"messages": [*HELLO["messages"], {"role": "assistant", "tool_calls": [call]}]}),
        (CHAT, {**HELLO, "chat_template_kwargs": value}),
        (CHAT, {**HELLO, "guided_json": value}),
        (CHAT, {**HELLO, "unknown": value}),
        (
            CHAT,
            {
                **HELLO,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": value}}],
            },
        ),
        ("/tokenize", {**HELLO, "chat_template_kwargs": value}),
    ):
        reply = limited.post(path, {"max_tokens": 1, **fields}, **FIRST)
        assert reply.status_code in (200, 400), reply.text


def test_huge_bodies(limited):
    big = b'{"prompt": "' + b"x" * (1 << 20) + b'"}'
    headers = {**FIRST, "Content-Type": "application/json"}
    error_of(
        httpx.post(limited.url + "/v1/completions", content=big, headers=headers, timeout=60), 413
    )

    def chunks():
        for _ in range(20):
            yield b" " * 100_000

    reply = httpx.post(
        limited.url + "/v1/completions", content=chunks(), headers=headers, timeout=60
    )
    error_of(reply, 413)


def test_a_full_queue(limited):
    """While four outputs are running, a fifth is refused; later it is accepted."""
    with begun(limited, {"prompt": ["x"] * 4, "max_tokens": 120, "ignore_eos": True}):
        reply = limited.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, **FIRST)
        error = error_of(reply, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert int(reply.headers["retry-after"]) >= 1
    reply = limited.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, **FIRST)
    assert reply.status_code == 200


def test_silence_in_a_stream(limited):
    """While a request waits for a slot, comments keep its connection open."""
    body = {"prompt": "x", "max_tokens": 1, "stream": True}
    long = {"prompt": ["x"] * 2, "max_tokens": 120, "ignore_eos": True, "logprobs": 20}
    with begun(limited, long):
        reply = limited.post("/v1/completions", body, **FIRST)
    assert reply.text.startswith(": ping\n\n")
    assert reply.text.endswith("data: [DONE]\n\n")


def test_more_outputs_than_the_queue_takes(limited):
    reply = limited.post(
        "/v1/completions", {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 1}, **FIRST
    )
    error = error_of(reply, 400)
    assert (error["param"], error["code"]) == ("prompt", "too_many_outputs")
    assert "6 outputs, but this server takes at most 4" in error["message"]
