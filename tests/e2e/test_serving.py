"""Life of the server: disconnects, limits, keys, errors, loading, stopping."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.e2e.harness import Server, start
from tests.python_path import python_path

FIRST = {"Authorization": "Bearer first"}
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "x = "}]}


def error_of(reply: httpx.Response, status: int) -> dict[str, str | None]:
    assert reply.status_code == status, reply.text
    (error,) = reply.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return error


def test_a_client_that_leaves_while_decoding_frees_its_slot(server):
    for path, body in (
        ("/v1/completions", {"prompt": "x = 1\n"}),
        (CHAT, HELLO | {"temperature": 0}),
    ):
        body = body | {"max_tokens": 1900, "ignore_eos": True, "stream": True}
        before = server.metric("vllm:generation_tokens_total")
        with httpx.stream("POST", server.url + path, json=body, timeout=60) as reply:
            lines = (line for line in reply.iter_lines() if line)
            for _ in range(4):
                assert next(lines).startswith("data: {")
            assert server.metric("vllm:num_requests_running") == 1
        assert server.wait_idle() < 5
        assert server.metric("vllm:generation_tokens_total") - before < 1000


def test_a_client_that_leaves_a_whole_response_frees_its_slot(server):
    body = {"prompt": "x = 1\n", "max_tokens": 1900, "ignore_eos": True, "n": 3}
    aborts = server.metric(
        'vllm:request_success_total{engine="0",finished_reason="abort",'
        'model_name="tiny-python-minicpm"}'
    )
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json=body, timeout=0.5)
    assert server.wait_idle() < 5
    after = server.metric(
        'vllm:request_success_total{engine="0",finished_reason="abort",'
        'model_name="tiny-python-minicpm"}'
    )
    assert after == aborts + 3


@pytest.mark.parametrize("scored", [False, True])
def test_a_client_that_leaves_during_prefill_frees_its_slot(server, scored):
    """It leaves at the first chunk of many; the prompt is never read to its end."""
    body = {"prompt": [[7 + i % 4000 for i in range(1950)]] * 4, "max_tokens": 40, "stream": True}
    body |= {"return_progress": True, "echo": scored, "logprobs": 1 if scored else None}
    read = server.metric("vllm:prompt_tokens_total")
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
        first = next(line for line in reply.iter_lines() if line)
        assert json.loads(first.removeprefix("data: "))["prompt_progress"]["processed"] == 192
    assert server.wait_idle() < 5
    assert server.metric("vllm:prompt_tokens_total") == read  # no prompt gave a token
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_client_that_leaves_the_queue(server):
    """Waiting requests go as well as running ones."""
    body = {"prompt": ["x = 1\n"] * 40, "max_tokens": 1900, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json=body, timeout=0.5)
    assert server.wait_idle() < 5
    assert server.metric("vllm:num_requests_waiting") == 0


def test_a_long_prompt_does_not_stop_the_others(server):
    """While one prompt is read in chunks, another request goes on getting tokens."""
    events: list[tuple[float, str]] = []

    def decode() -> None:
        body = {"prompt": "x = 1\n", "max_tokens": 150, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    events.append((time.monotonic(), "token"))

    def prefill() -> None:
        prompt = [7 + i % 4000 for i in range(1950)]
        body = {"prompt": prompt, "max_tokens": 1, "stream": True, "return_progress": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
            for line in reply.iter_lines():
                if "prompt_progress" in line:
                    events.append((time.monotonic(), "chunk"))

    decoder = threading.Thread(target=decode)
    decoder.start()
    while len(events) < 5:
        time.sleep(0.01)
    prefill()
    kinds = [kind for _, kind in sorted(events)]
    decoder.join()
    first = kinds.index("chunk")
    last = len(kinds) - 1 - kinds[::-1].index("chunk")
    between = kinds[first : last + 1]
    assert between.count("chunk") == 11
    assert between.count("token") >= 8


def test_keys(limited):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}):
        for reply in (
            limited.get("/v1/models", **headers),
            limited.get("/metrics", **headers),
            limited.get("/openapi.json", **headers),
            limited.post(CHAT, HELLO, **headers),
        ):
            error = error_of(reply, 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
    for key in ("first", "second"):
        assert limited.get("/v1/models", Authorization=f"Bearer {key}").status_code == 200
    odd = {b"Authorization": b"Bearer f\xe9"}
    assert httpx.get(limited.url + "/v1/models", headers=odd).status_code == 401
    assert limited.get("/health").status_code == 200
    assert "first" not in limited.log


def test_key_files(tmp_path):
    from cpmcu.serving.config import ServerConfig

    path = tmp_path / "keys"
    path.write_text("# ours\nabc\n\n  def \n")
    assert ServerConfig(api_key=(f"@{path}", "ghi")).keys() == ["abc", "def", "ghi"]
    path.write_text("# nothing\n")
    with pytest.raises(ValueError, match="has no API keys"):
        ServerConfig(api_key=(f"@{path}",)).keys()
    path.write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=f"{path} is not UTF-8 text"):
        ServerConfig(api_key=(f"@{path}",)).keys()
    for key in ("", "with space", "schlüssel", "tab\t"):
        with pytest.raises(ValueError, match="API key"):
            ServerConfig(api_key=(key,)).keys()


def test_origins(limited):
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization"
    reply = httpx.options(limited.url + CHAT, headers=asked)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://example.org"
    reply = httpx.options(limited.url + CHAT, headers={**asked, "Origin": "https://evil.org"})
    assert "access-control-allow-origin" not in reply.headers
    asked = {"Access-Control-Request-Method": "POST", "Origin": "https://example.org"}
    asked["Access-Control-Request-Headers"] = "authorization, content-type, x-stainless-lang"
    reply = httpx.options(limited.url + CHAT, headers=asked)  # as OpenAI's JavaScript client does
    assert reply.status_code == 200
    assert "x-stainless-lang" in reply.headers["access-control-allow-headers"]
    # Without --cors-origin nothing is allowed; see the other server.


def test_no_origins_by_default(server):
    reply = server.get("/v1/models", Origin="https://example.org")
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b"[" * 10_000, b'{"messages": 1e999}', b"\0"],
    ids=range(9),
)
def test_malformed_bodies(limited, body):
    headers = {**FIRST, "Content-Type": "application/json"}
    for path in (CHAT, "/v1/completions", "/tokenize"):
        error = error_of(httpx.post(limited.url + path, content=body, headers=headers), 400)
        assert error["type"] == "invalid_request_error"
        if body in (b"{", b"\xff\xfe", b"[" * 10_000, b"\0"):
            assert error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x" * 2001}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x"}] * 6}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 5}, None),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": [""] * 65}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [-5]}, "stop_token_ids"),
        ({"guided_json": 5}, "guided_json"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"seed": 1 << 64}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": float("inf")}}, "logit_bias"),
        ({"logit_bias": {"5": 1e300}}, "logit_bias"),
        ({"temperature": 1e300}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"model": "gpt-4"}, "model"),
        ({"best_of": 2}, "best_of"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_refused_fields_are_named(limited, fields, param):
    content = json.dumps({**HELLO, "max_tokens": 2, **fields})
    headers = {**FIRST, "Content-Type": "application/json"}
    reply = httpx.post(limited.url + CHAT, content=content, headers=headers)
    error = error_of(reply, 404 if "model" in fields else 400)
    assert error["param"] == param
    assert (param or "output").split("[")[0].split(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            "/v1/completions",
            {"prompt": 5},
            "prompt is 5, but must be a text or a list of texts or a list of token ids or a list "
            "of lists of token ids.",
        ),
        ("/v1/completions", {}, "prompt is missing."),
        (
            CHAT,
            {**HELLO, "stop": ["a", 5]},
            "stop is ['a', 5], but must be a text or a list of texts.",
        ),
        (CHAT, {**HELLO, "n": "5"}, "n is '5', but must be a valid integer."),
        (CHAT, {"messages": []}, "messages is [], but must have at least 1 item."),
        (
            CHAT,
            {**HELLO, "logit_bias": {"5": "a"}},
            "logit_bias holds 'a', but must be a valid number.",
        ),
        (
            CHAT,
            {**HELLO, "response_format": "a"},
            "response_format is 'a', but must be a JSON object.",
        ),
        (
            CHAT,
            {**HELLO, "tool_choice": "some"},
            "tool_choice is 'some', but must be 'none', 'auto' or 'required' or an object like "
            '{"type": "function", "function": {"name": "f"}}.',
        ),
        (
            CHAT,
            {**HELLO, "tools": "a" * 100},
            f"tools is '{'a' * 29}...{'a' * 30}', but must be a valid list.",
        ),
    ],
)
def test_sentences_say_what_was_found(limited, path, fields, message):
    error = error_of(limited.post(path, fields, **FIRST), 400)
    assert error["message"] == message
    assert error["param"] == message.split()[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"min_tokens": 0, "use_beam_search": False, "best_of": 1, "length_penalty": 1},
        {"modalities": ["text"], "functions": [], "suffix": None, "n": None, "stop": []},
        {"temperature": 0, "top_k": -1, "top_p": 1, "stop": [""], "logit_bias": {}, "seed": -5},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto"},
        {"stream_options": {}, "parallel_tool_calls": True, "reasoning_effort": "low"},
        {"chat_template_kwargs": {"self": 1, "messages": 2, "args": 3}, "max_tokens": 10**400},
    ],
    ids=range(7),
)
def test_harmless_fields_are_taken(limited, fields):
    reply = limited.post(CHAT, {**HELLO, "max_tokens": 2, **fields}, **FIRST)
    assert reply.status_code == 200, reply.text


def test_unknown_fields_are_logged_once(limited):
    for _ in range(2):
        reply = limited.post(CHAT, {**HELLO, "max_tokens": 1, "zork": 1}, **FIRST)
        assert reply.status_code == 200
    assert limited.log.count("zork") == 1


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [1.5]},
        {"prompt": ["a", 5]},
        {"prompt": [4096]},
        {"prompt": [-1]},
        {"prompt": "x" * 2001},
        {"prompt": ["a"] * 5},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "logprobs": 21},
        {"prompt": "a", "logprobs": True},
        {},
    ],
)
def test_refused_completions(limited, body):
    assert error_of(limited.post("/v1/completions", body, **FIRST), 400)["message"]


def test_a_prompt_that_is_too_long(limited):
    for count, status in ((127, 200), (128, 400), (1000, 400)):
        body = {"prompt": [7] * count, "max_tokens": 50, "ignore_eos": True}
        reply = limited.post("/v1/completions", body, **FIRST)
        assert reply.status_code == status, reply.text
        if status == 200:
            assert reply.json()["usage"]["completion_tokens"] == 1  # all that is left
            assert reply.json()["choices"][0]["finish_reason"] == "length"
        else:
            error = error_of(reply, 400)
            assert error["code"] == "context_length_exceeded"
            assert str(count) in error["message"] and "128" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, r'{"messages": [{"role": "user", "content": "\ud83d"}]}', "messages"),
        (CHAT, r'{"messages": [{"role": "\ud83d"}], "logit_bias": {"\ud83d": "a"}}', None),
        ("/v1/completions", r'{"prompt": ["a", "\ud83d"]}', "prompt"),
        ("/tokenize", r'{"prompt": "\ud83d"}', "prompt"),
        ("/tokenize", r'{"messages": [{"role": "user", "content": "\ud83d"}]}', "messages"),
        (CHAT, '{"messages": [{"role": "user", "content": "' + "x " * 500 + '"}]}', "messages"),
    ],
)
def test_prompts_that_are_refused_are_named(limited, path, body, param):
    headers = {**FIRST, "Content-Type": "application/json"}
    error = error_of(httpx.post(limited.url + path, content=body, headers=headers), 400)
    assert param in (None, error["param"])


@pytest.mark.parametrize("depth", [300, 900])
def test_deep_bodies(limited, depth):
    """Values nested so deeply that Python's recursion may end are no server error."""
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
    error_of(httpx.post(limited.url + "/v1/completions", content=big, headers=headers), 413)

    def chunks():
        for _ in range(20):
            yield b" " * 100_000

    reply = httpx.post(limited.url + "/v1/completions", content=chunks(), headers=headers)
    error_of(reply, 413)


def test_a_body_is_not_read_without_a_key(limited):
    """The answer comes before the body does."""
    with socket.create_connection(("127.0.0.1", limited.port), timeout=10) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 401")


@contextlib.contextmanager
def begun(server, body):
    """A stream of completions, from its first line to its last."""
    url = server.url + "/v1/completions"
    body = {**body, "stream": True}
    with httpx.stream("POST", url, json=body, headers=FIRST, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)  # the first of many: its slots are taken, or will be before others are
        yield
        assert reply.status_code == 200
        assert "data: [DONE]" in lines


def test_a_full_queue(limited):
    """Four outputs are in work; a fifth is refused and comes through later."""
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


def test_paths_and_methods(limited):
    assert "'/v1/nothing'" in error_of(limited.get("/v1/nothing", **FIRST), 404)["message"]
    error = error_of(limited.get(CHAT, **FIRST), 405)
    assert "does not take GET" in error["message"]
    assert limited.get("/version", **FIRST).json().keys() == {"version"}


def test_log_lines_are_json(limited):
    body = {"prompt": "x", "max_tokens": 2, "temperature": 0}
    limited.post("/v1/completions", body, **FIRST, **{"X-Request-Id": "q7"})
    mine: list[dict[str, object]] = []
    for _ in range(100):  # the line of a request is written after its response
        lines = [json.loads(line) for line in limited.log.splitlines()]
        mine = [line for line in lines if line["request_id"] == "q7"]
        if len(mine) == 2:
            break
        time.sleep(0.05)
    assert mine[0]["completion_tokens"] == 2
    assert mine[1]["status"] == 200
    assert {"ms", "path", "method", "client", "time", "level"} <= mine[1].keys()


def test_names_of_metrics(server):
    """What vLLM's dashboards and its benchmark look for."""
    server.post("/v1/completions", {"prompt": "x = 1\n", "max_tokens": 20, "ignore_eos": True})
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:request_time_per_output_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_prefill_time_seconds_count",
        "vllm:request_decode_time_seconds_count",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ):
        assert server.metric(name) >= 0
    drafts = server.metric("vllm:spec_decode_num_drafts_total")
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") == 4 * drafts > 0


def test_structured_output_without_the_extra(monkeypatch):
    from cpmcu.serving import grammar
    from cpmcu.serving.errors import ApiError
    from cpmcu.serving.protocol.chat import ChatRequest

    monkeypatch.setattr(grammar, "available", lambda: False)
    for fields, param in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
    ):
        request = ChatRequest(**HELLO, **fields)
        with pytest.raises(ApiError, match=r"cpmcu\[grammar\]") as caught:
            request.sampling_fields()
        assert (caught.value.status, caught.value.param) == (400, param)


def stream_until_end(server: Server, tokens: int, begun: threading.Event) -> tuple[str, bool]:
    """(last finish reason, was there a [DONE]?) of a stream that is read to its end."""
    body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    reason, done = "", False
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            begun.set()
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                reason = choices[0]["finish_reason"] or ""
    return reason, done


@pytest.mark.parametrize(
    ("seconds", "tokens", "reason"), [("30", 150, "length"), ("0.3", 1900, "abort")]
)
def test_stopping(seconds, tokens, reason):
    """Requests in work end by themselves, or at the deadline, and then the process does."""
    with start("--shutdown-timeout", seconds) as server:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            begun = threading.Event()
            stream = pool.submit(stream_until_end, server, tokens, begun)
            assert begun.wait(60)
            began = time.monotonic()
            assert server.stop(signal.SIGTERM if reason == "length" else signal.SIGINT) == 0
            assert stream.result() == (reason, True)
            assert time.monotonic() - began < 10
        assert "Traceback" not in server.log


def stop_at_once(server: Server) -> int:
    """Sends SIGTERM and, once the server has noticed, Ctrl-C; returns the exit status."""
    server.process.send_signal(signal.SIGTERM)
    while "stopping" not in server.log:
        assert server.process.poll() is None, server.log
        time.sleep(0.01)
    return server.stop(signal.SIGINT)


def test_a_second_ctrl_c():
    """Requests in work are ended at once, streamed or not."""
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True}
    with start("--shutdown-timeout", "60") as server:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            begun = threading.Event()
            whole = pool.submit(server.post, "/v1/completions", body)
            stream = pool.submit(stream_until_end, server, 1900, begun)
            while server.metric("vllm:num_requests_running") < 2:
                time.sleep(0.01)
            assert begun.wait(60)
            assert stop_at_once(server) == 0
            assert stream.result() == ("abort", True)
            assert whole.result().json()["choices"][0]["finish_reason"] == "abort"
        assert "Traceback" not in server.log


def test_stopping_before_a_body_has_come():
    """A request that does not generate yet gets an error like all others."""
    with start() as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
            connection.sendall(head.encode() + b'{"a": ')
            server.get("/health")  # accepted behind it
            assert stop_at_once(server) == 0
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert json.loads(body)["error"]["code"] == "stopping"
        assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_while_the_program_starts(number, tmp_path):
    """A signal, and a Ctrl-C after it, while a library is imported."""
    path = tmp_path / "fastapi.py"
    path.write_text(
        "import os, signal, time\n"
        "try:\n"
        f"    exec('os.kill(os.getpid(), {int(number)}); time.sleep(10)')\n"
        "finally:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    found = run_server("--port", "0", PYTHONPATH=python_path(tmp_path))
    assert (found.returncode, found.stderr) == (0, "")


def test_stopping_while_the_model_loads():
    """The process ends at once, whatever the loading thread is doing."""
    with start(ready=False) as server:
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 5
        assert "Traceback" not in server.log


def test_an_engine_that_is_broken(monkeypatch):
    """/health says so at once, and requests get a 503."""
    from cpmcu.config import EngineConfig
    from cpmcu.serving.app import create_app
    from cpmcu.serving.config import ServerConfig
    from cpmcu.serving.service import Service

    service = Service(EngineConfig(device="cpu", num_threads=1), ServerConfig())
    service.load()

    def fail(*arguments: object) -> None:
        raise RuntimeError("the device is gone")

    async def run() -> None:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            runner = service.model.llm._runner
            monkeypatch.setattr(runner, "_launch", fail)
            monkeypatch.setattr(runner._scheduler, "release", fail)
            error_of(await client.post(CHAT, json=HELLO), 500)
            runner._thread.join(timeout=10)
            reply = await client.get("/health")
            assert (reply.status_code, reply.json()["status"]) == (503, "failed")
            reply = await client.post(CHAT, json=HELLO)
            assert error_of(reply, 503)["code"] == "engine_stopped"

    asyncio.run(run())
    service.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails(monkeypatch, caplog, stream):
    """Requests in work get an error that says nothing, and the next one is answered."""
    from cpmcu.config import EngineConfig
    from cpmcu.serving.app import create_app
    from cpmcu.serving.config import ServerConfig
    from cpmcu.serving.service import Service

    service = Service(EngineConfig(device="cpu", num_threads=1), ServerConfig())
    service.load()
    runner = service.model.llm._runner
    collect, calls = runner._collect, []

    def fail_once() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("a secret")
        collect()

    monkeypatch.setattr(runner, "_collect", fail_once)

    async def run() -> None:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            body = {"prompt": "x = 1\n", "max_tokens": 50, "ignore_eos": True, "stream": stream}
            reply = await client.post("/v1/completions", json=body)
            assert "secret" not in reply.text
            if stream:
                *_, event, done, end = reply.text.split("\n\n")
                error = json.loads(event.removeprefix("data: "))["error"]
                assert (error["type"], done, end) == ("server_error", "data: [DONE]", "")
            else:
                assert error_of(reply, 500)["type"] == "server_error"
            reply = await client.post("/v1/completions", json={**body, "stream": False})
            assert reply.json()["usage"]["completion_tokens"] == 50
            assert (await client.get("/health")).status_code == 200

    asyncio.run(run())
    # The client may have its answer a moment before the engine's thread has counted it.
    deadline = time.monotonic() + 5
    while service.model.llm.engine_load().running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.model.llm.engine_load().running == 0
    service.close()
    assert "a secret" in caplog.text


def test_a_request_that_fails_once_it_is_queued_is_ended(monkeypatch):
    """Nobody would listen to it."""
    from cpmcu.config import EngineConfig
    from cpmcu.serving.app import create_app
    from cpmcu.serving.config import ServerConfig
    from cpmcu.serving.service import Service

    service = Service(EngineConfig(device="cpu", num_threads=1), ServerConfig())
    service.load()
    queued = []

    def fail(*arguments: object) -> None:
        queued.extend(service._running)
        raise OverflowError("a secret")

    monkeypatch.setattr(service.metrics, "started", fail)

    async def run() -> None:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            body = {"prompt": "x = 1\n", "max_tokens": 1900, "ignore_eos": True}
            error_of(await client.post("/v1/completions", json=body), 500)

    asyncio.run(run())
    assert all(request.cancelled for request in queued[0].requests)
    service.close()


def test_the_socket_opens_before_the_model_is_loaded(server):
    lines = server.log.splitlines()
    listening = next(i for i, line in enumerate(lines) if "listening on" in line)
    assert listening < next(i for i, line in enumerate(lines) if ": loading tiny-python" in line)
    assert any("is ready after" in line for line in lines)


def test_loading(tmp_path):
    """503 with Retry-After from everything that needs the model, until it is there."""
    from cpmcu.config import EngineConfig
    from cpmcu.serving.app import create_app
    from cpmcu.serving.config import ServerConfig
    from cpmcu.serving.service import Service

    async def run() -> None:
        service = Service(EngineConfig(device="cpu"), ServerConfig())
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            reply = await client.get("/health")
            assert reply.status_code == 503
            assert reply.json() == {"status": "loading", "model_loaded": False}
            for path, body in ((CHAT, HELLO), ("/tokenize", {"prompt": "x"})):
                reply = await client.post(path, json=body)
                assert error_of(reply, 503)["code"] == "loading"
                assert int(reply.headers["retry-after"]) >= 1
            assert (await client.get("/metrics")).status_code == 200
            await asyncio.to_thread(service.load)
            assert (await client.get("/health")).json()["status"] == "ok"
            service.stop()
            assert (await client.get("/health")).json()["status"] == "stopping"
            assert error_of(await client.post(CHAT, json=HELLO), 503)["code"] == "stopping"
        service.close()

    asyncio.run(run())


def test_an_error_inside_is_not_told(monkeypatch):
    """A 500 says nothing about itself, and the log says all."""
    from cpmcu.config import EngineConfig
    from cpmcu.serving.app import create_app
    from cpmcu.serving.config import ServerConfig
    from cpmcu.serving.service import Service

    service = Service(EngineConfig(device="cpu"), ServerConfig())

    def fail() -> bytes:
        raise RuntimeError("a secret")

    monkeypatch.setattr(service.metrics, "render", fail)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/metrics")

    reply = asyncio.run(run())
    assert error_of(reply, 500)["type"] == "server_error"
    assert "secret" not in reply.text
    assert reply.headers["x-request-id"]


def run_server(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cpmcu.server", *flags]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_files_that_are_not_there():
    found = run_server("--port", "0", "--api-key", "@no/keys")
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1] == "cpmcu.server: no/keys: No such file or directory"
    found = run_server("--port", "0", "--chat-template", "no/x")
    assert found.returncode == 1
    assert "the model cannot be loaded: no/x: No such file or directory\n" in found.stderr


def test_a_model_that_cannot_be_loaded():
    found = run_server("--model", "/nowhere", "--port", "0")
    assert found.returncode == 1
    assert "the model cannot be loaded" in found.stderr
    assert "Traceback" not in found.stderr


def test_wrong_flags(server):
    for flags, message in (
        (["--prot", "1"], "did you mean --port?"),
        (["--port", "70000"], "port is 70000"),
        (["--cors-origin", "example.org"], "cors_origin"),
    ):
        found = run_server(*flags)
        assert found.returncode == 2
        assert message in found.stderr
    found = run_server("--port", str(server.port))
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].startswith("cpmcu.server: cannot listen on 127.0.0.1")


def test_more_outputs_than_the_queue_takes(limited):
    reply = limited.post(
        "/v1/completions", {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 1}, **FIRST
    )
    error = error_of(reply, 400)
    assert (error["param"], error["code"]) == ("prompt", "too_many_outputs")
    assert "6 outputs, but this server takes at most 4" in error["message"]
