"""Disconnecting clients, and prefill of a prompt while other requests get tokens."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest

from tests.e2e.calls import CHAT, HELLO


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
        server.wait_left()
        assert server.metric("vllm:generation_tokens_total") - before < 1000


def test_a_client_that_leaves_a_whole_response_frees_its_slot(server):
    body = {"prompt": "x = 1\n", "max_tokens": 1900, "ignore_eos": True, "n": 3}
    aborts = server.metric(
        'vllm:request_success_total{engine="0",finished_reason="abort",'
        'model_name="tiny-python-minicpm"}'
    )
    server.leave("/v1/completions", body, running=3)
    server.wait_left()
    after = server.metric(
        'vllm:request_success_total{engine="0",finished_reason="abort",'
        'model_name="tiny-python-minicpm"}'
    )
    assert after == aborts + 3


@pytest.mark.parametrize("scored", [False, True])
def test_a_client_that_leaves_during_prefill_frees_its_slot(server, scored):
    """The client disconnects at the first chunk of prefill, which then stops."""
    body = {"prompt": [[7 + i % 4000 for i in range(1950)]] * 4, "max_tokens": 40, "stream": True}
    body |= {"return_progress": True, "echo": scored, "logprobs": 1 if scored else None}
    read = server.metric("vllm:prompt_tokens_total")
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line)
        for done in (0, 192):
            progress = json.loads(next(lines).removeprefix("data: "))["prompt_progress"]
            assert progress["processed"] == done
    server.wait_left()
    assert server.metric("vllm:prompt_tokens_total") == read  # no prompt gave a token
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_client_that_leaves_the_queue(server):
    """A disconnect ends waiting and running requests."""
    body = {"prompt": ["x = 1\n"] * 40, "max_tokens": 1900, "ignore_eos": True}
    server.leave("/v1/completions", body, running=1)
    server.wait_left()
    assert server.metric("vllm:num_requests_waiting") == 0


def test_a_long_prompt_does_not_stop_the_others(server):
    """During the chunked prefill of a prompt, another request continues to get tokens."""
    events: list[tuple[float, str]] = []

    def decode() -> None:
        body = {"prompt": "x = 1\n", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    events.append((time.monotonic(), "token"))

    def prefill() -> None:
        prompt = [7 + i % 4000 for i in range(1950)]
        body = {"prompt": prompt, "max_tokens": 1, "stream": True, "return_progress": True}
        body["cache_salt"] = "no other request's"
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
    # Beside decoding, each pass of 64 tokens is alone; one chunk came before the first pass.
    assert between.count("chunk") == 32
    assert between.count("token") >= 8
