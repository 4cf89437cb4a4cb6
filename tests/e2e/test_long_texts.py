"""Long texts and large bodies are refused early or processed without delaying other requests."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import ROOT, Server

SOURCE = (ROOT / "scripts" / "soak.py").read_text("utf-8")
MILLION = (SOURCE * (1_000_000 // len(SOURCE) + 1))[:1_000_000]


def refused(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text[:500]
    error: dict[str, Any] = reply.json()["error"]
    return error


def resident_mib(server: Server) -> float:
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def test_a_text_above_the_context_is_refused_by_its_length(server):
    chat = {"messages": [{"role": "user", "content": MILLION * 3}]}
    for path, body, field in (
        ("/v1/completions", {"prompt": MILLION * 3}, "prompt"),
        ("/v1/chat/completions", chat, "messages"),
    ):
        error = refused(server.post(path, body), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert re.fullmatch(
            r"The prompt has 3000\d* characters, which are at least 96\d+ tokens, but prompt and "
            r"output together can have 2048: it is longer than the model's context length and "
            r"exceeds the available context size\.",
            error["message"],
        )


def test_others_go_on_while_a_long_text_is_tokenised(server):
    """Streams and /health are not blocked meanwhile: all gaps are short."""
    begin = threading.Event()
    ended = threading.Event()
    times: list[float] = []

    def stream() -> None:
        body = {"prompt": "x = 1\n", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        url = server.url + "/v1/completions"
        while not ended.is_set():
            with httpx.stream("POST", url, json=body, timeout=60) as reply:
                for _ in reply.iter_lines():
                    times.append(time.monotonic())
                    begin.set()
                    if ended.is_set():
                        return

    def ask() -> None:
        while not ended.is_set():
            assert server.get("/health").status_code == 200
            healthy.append(time.monotonic())

    healthy: list[float] = []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(stream), pool.submit(ask)]
        try:
            assert begin.wait(60)
            sent = time.monotonic()
            found = server.post("/tokenize", {"prompt": MILLION * 2}).json()
            done = time.monotonic()
        finally:
            ended.set()
        for job in jobs:
            job.result()
    assert found["count"] == len(found["tokens"]) > 400_000
    for each in (times, healthy):
        within = [sent, *(at for at in each if sent < at < done), done]
        assert max(b - a for a, b in itertools.pairwise(within)) < (done - sent) / 2


def test_a_client_that_leaves_while_its_long_text_waits(server):
    """If the client disconnects, its queued text is dropped and not tokenised."""
    before = server.log.count("/tokenize 499")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.post, "/tokenize", {"prompt": MILLION * 2})
        with pytest.raises(httpx.ReadTimeout):
            timeout = httpx.Timeout(60, read=0.2)
            httpx.post(server.url + "/tokenize", json={"prompt": MILLION * 2}, timeout=timeout)
        end = time.monotonic() + 60
        while server.log.count("/tokenize 499") == before and time.monotonic() < end:
            time.sleep(0.02)
        assert server.log.count("/tokenize 499") == before + 1
        assert long.result().status_code == 200


def test_memory_of_long_texts_is_returned_to_the_system(server):
    server.post("/tokenize", {"prompt": MILLION[:1000]})
    before = resident_mib(server)
    assert server.post("/tokenize", {"prompt": MILLION * 2}).status_code == 200
    end = time.monotonic() + 60
    while (kept := resident_mib(server) - before) > 60 and time.monotonic() < end:
        time.sleep(0.1)
    assert kept < 60


def test_long_texts_come_back_the_same(server):
    text = MILLION[:200_000].encode("ascii", "ignore").decode()
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    first, *pieces = found["token_strs"]  # spelled as in the vocabulary
    spelt = "".join(pieces).replace("Ġ", " ").replace("Ċ", "\n")
    assert first == "<s>" and spelt == text
    reply = server.post("/detokenize", {"tokens": found["tokens"][1:]})
    assert reply.json() == {"prompt": text, "content": text}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": [' + b"1," * 300_000 + b"1]}", "262144 JSON values"),
        (b'{"prompt": [' + b"[]," * 60_000 + b"[]]}", "49152 JSON lists, objects and members"),
        (b'{"x": {' + b'"a":1,' * 60_000 + b'"a":1}}', "49152 JSON lists, objects and members"),
    ],
    ids=["ids", "lists", "members"],
)
def test_a_body_of_too_many_values_is_not_parsed(server, body, message):
    headers = {"Content-Type": "application/json"}
    for content in (body, iter([body[:100_000], body[100_000:]])):
        reply = httpx.post(
            server.url + "/v1/completions", content=content, headers=headers, timeout=60
        )
        assert refused(reply, 413)["message"] == f"The request body has more than {message}."


def test_punctuation_in_a_string_is_not_counted(server):
    text = '[{"a": 1}, "b"],' * 40_000
    assert server.post("/tokenize", {"prompt": text}).status_code == 200
    call = {"function": {"name": "f", "arguments": json.dumps([1] * 100_000)}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    error = refused(server.post("/v1/chat/completions", body), 400)
    assert error["message"] == "messages[0].tool_calls has more than 65536 JSON values in a text."


def test_only_the_first_wrong_element_is_looked_for(server):
    """Validation stops at the first error: one error per element would take seconds."""
    for prompt in ([7] * 200_000 + ["x"], ["x"] * 200_000 + [7]):
        error = refused(server.post("/v1/completions", {"prompt": prompt}), 400)
        assert error["param"] == "prompt"
    error = refused(
        server.post(
            "/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(4097)}}
        ),
        400,
    )
    assert "but must have at most 4096 token ids" in error["message"]


def test_a_long_response_is_written_whole(server):
    """A long response is serialised in pieces on another thread."""
    body = {"prompt": ["x = 1\n", "y"], "max_tokens": 40, "logprobs": 3, "return_token_ids": True}
    found = server.post("/v1/completions", {**body, "temperature": 0, "ignore_eos": True}).json()
    assert [len(choice["token_ids"]) for choice in found["choices"]] == [40, 40]
    assert [len(choice["logprobs"]["tokens"]) for choice in found["choices"]] == [40, 40]
    assert found["usage"]["completion_tokens"] == 80
