"""Refused requests with their error messages, and fields that are accepted and ignored."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.e2e.calls import CHAT, FIRST, HELLO, error_of
from tests.e2e.harness import start


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b"[" * 10_000, b'{"messages": 1e999}', b"\0"],
    ids=range(9),
)
def test_malformed_bodies(limited, body):
    headers = {**FIRST, "Content-Type": "application/json"}
    for path in (CHAT, "/v1/completions", "/tokenize"):
        error = error_of(
            httpx.post(limited.url + path, content=body, headers=headers, timeout=60), 400
        )
        assert error["type"] == "invalid_request_error"
        if body in (b"{", b"\xff\xfe", b"[" * 10_000, b"\0"):
            assert error["code"] == "invalid_json"


def test_a_body_of_another_type(limited):
    body, kind = b'{"prompt": "a"}', "application/x-www-form-urlencoded"  # as curl -d sends it
    headers = {**FIRST, "Content-Type": kind}
    reply = httpx.post(f"{limited.url}/v1/completions", content=body, headers=headers, timeout=60)
    expected = f"The header Content-Type is '{kind}', but must be 'application/json'."
    assert error_of(reply, 400)["message"] == expected


def test_what_a_tool_choice_may_be(limited):
    fields = {**HELLO, "tool_choice": {"type": "function"}}
    error = error_of(limited.post(CHAT, fields, **FIRST), 400)
    assert "'required' or an object like" in error["message"]


def test_parts_of_a_message(server):
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No, never."}]}
    text = {"role": "assistant", "content": "No, never."}
    counts = [
        server.post("/tokenize", {"messages": [*HELLO["messages"], message]}).json()["count"]
        for message in (refusal, text)
    ]
    assert counts[0] == counts[1]
    fields = {"messages": [{"role": "user", "content": [{"type": "text"}]}]}
    error = error_of(server.post(CHAT, fields), 400)
    assert (
        error["message"]
        == "messages[0].content has a part of type 'text', but its text is missing."
    )


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
        ({"min_tokens": -1}, "min_tokens"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": None}, "stream": False}, "stream_options"),
        ({"suffix": "x"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_refused_fields_are_named(limited, fields, param):
    content = json.dumps({**HELLO, "max_tokens": 2, **fields})
    headers = {**FIRST, "Content-Type": "application/json"}
    reply = httpx.post(limited.url + CHAT, content=content, headers=headers, timeout=60)
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
        (CHAT, {**HELLO, "n": "5"}, "n is '5', but must be an integer."),
        (CHAT, {"messages": []}, "messages is [], but must have at least 1 item."),
        (
            CHAT,
            {**HELLO, "logit_bias": {"5": "a"}},
            "logit_bias holds 'a', but must be a number.",
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
            '{"type": "function", "function": {"name": "f"}} or an object like '
            '{"type": "allowed_tools", "allowed_tools": {...}}.',
        ),
        (
            CHAT,
            {**HELLO, "tools": "a" * 100},
            f"tools is '{'a' * 29}...{'a' * 30}', but must be a list.",
        ),
    ],
)
def test_errors_name_the_value_found(limited, path, fields, message):
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
        {"stream_options": {"include_usage": None}, "stream": True, "verbosity": "low"},
        {"logprobs": 0, "echo": None, "min_tokens": None, "prompt_logprobs": None},
        {"chat_template_kwargs": {"self": 1, "messages": 2, "args": 3}, "n_predict": 10**400},
    ],
    ids=range(9),
)
def test_harmless_fields_are_accepted(limited, fields):
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
    error = error_of(httpx.post(limited.url + path, content=body, headers=headers, timeout=60), 400)
    assert param in (None, error["param"])


def test_paths_and_methods(limited):
    assert "'/v1/nothing'" in error_of(limited.get("/v1/nothing", **FIRST), 404)["message"]
    error = error_of(limited.get(CHAT, **FIRST), 405)
    assert "does not take GET" in error["message"]
    assert limited.get("/version", **FIRST).json().keys() == {"version"}


def test_structured_output_without_the_extra(monkeypatch):
    from cpmcu.serving import request_grammar as grammar
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


@pytest.mark.parametrize(
    ("path", "field", "words"),
    [
        (CHAT, "max_tokens", "max_tokens or max_completion_tokens is"),
        (CHAT, "max_completion_tokens", "max_tokens or max_completion_tokens is"),
        ("/v1/completions", "max_tokens", "max_tokens or max_completion_tokens is"),
        ("/v1/responses", "max_output_tokens", "max_output_tokens is"),
    ],
)
def test_a_limit_above_the_context_is_refused(limited, path, field, words):
    prompt = {CHAT: HELLO, "/v1/completions": {"prompt": "x"}}.get(path, {"input": "x"})
    error = error_of(limited.post(path, {**prompt, field: 129, "temperature": 0}, **FIRST), 400)
    expected = f"{words} too large: 129. The model's context has 128 tokens, for prompt and output"
    assert error["message"].startswith(expected) and error["param"] == field
    body = {**prompt, field: 128, "temperature": 0, "min_tokens": 129}
    error = error_of(limited.post(path, body, **FIRST), 400)
    expected = f"min_tokens is 129, but must be at most {field}, which is 128."
    assert (error["message"], error["param"]) == (expected, "min_tokens")
    reply = limited.post(path, {**prompt, field: 128, "temperature": 0}, **FIRST)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path", ["/v1/messages", "/completion", CHAT])
def test_a_limit_of_agents_and_of_llama_cpp_is_cut(limited, path):
    fields = {"max_tokens": 32000} if path == "/v1/messages" else {"n_predict": 32000}
    prompt = {"prompt": "x"} if path == "/completion" else HELLO
    reply = limited.post(path, {**prompt, **fields, "temperature": 0}, **FIRST)
    assert reply.status_code == 200, reply.text


def test_limits_are_cut_on_request():
    with start("--max-model-len", "64", "--cut-max-tokens", "yes") as running:
        body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}
        found = running.post("/v1/completions", body).json()
        assert found["usage"]["total_tokens"] == 64
        assert found["choices"][0]["finish_reason"] == "length"
