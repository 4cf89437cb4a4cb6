"""The prefix cache as clients see it: usage, metrics, salts, resets, and the same text."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.calls import CHAT, error_of
from tests.e2e.harness import ROOT, Server, start
from tests.python_path import python_path

MODEL = "tiny-python-minicpm"
PAGE = 64
PROMPT = [5 + i for i in range(2 * PAGE + 10)]
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
PAGES = "cpmcu:prefix_cache_pages"
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch={};\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with start("--api-key", "k", "--chunk-length", "64") as running:
        yield running


@pytest.fixture
def server(served: Server) -> Server:
    """The server, with an empty prefix cache."""
    assert served.post("/reset_prefix_cache", None, Authorization="Bearer k").status_code == 200
    return served


@pytest.fixture
def client(server):
    return server.client("k")


def complete(client, prompt=PROMPT, **fields):
    extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
    fields = {"max_tokens": 6, "temperature": 0, **fields}
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **fields)


def chat(client, messages, **fields):
    fields = {"max_tokens": 20, "temperature": 0, **fields}
    return client.chat.completions.create(model=MODEL, messages=messages, **fields)


def cached(reply) -> int:
    return reply.usage.prompt_tokens_details.cached_tokens


def key_metric(server: Server, name: str) -> float:
    return server.metric(name, Authorization="Bearer k")


def test_usage_says_what_was_cached(client):
    first, second = complete(client), complete(client)
    assert [cached(first), cached(second)] == [0, 2 * PAGE]
    assert first.choices[0].text == second.choices[0].text
    assert first.usage.prompt_tokens == second.usage.prompt_tokens == len(PROMPT)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, stream=True, stream_options=options))
    assert {cached(chunk) for chunk in chunks} == {2 * PAGE}
    (*_, last) = complete(client, stream=True, stream_options={"include_usage": True})
    assert cached(last) == 2 * PAGE
    several = complete(client, prompt=[PROMPT, [9, *PROMPT], PROMPT[: PAGE + 1]], n=2)
    assert cached(several) == 2 * PAGE + 0 + PAGE  # each prompt counts once
    assert cached(complete(client, prompt=PROMPT[:PAGE])) == 0  # the last token is computed


def test_the_second_turn_of_a_chat_is_a_hit(client):
    turns = [{"role": "user", "content": "import os\n\n" + "def walk(root, found):\n" * 20}]
    first = chat(client, turns)
    assert cached(first) == 0
    turns.append({"role": "assistant", "content": first.choices[0].message.content})
    turns.append({"role": "user", "content": "def main():"})
    options = {"include_usage": True}
    (*_, last) = chat(client, turns, stream=True, stream_options=options)
    assert cached(last) == first.usage.prompt_tokens // PAGE * PAGE > 0
    assert last.usage.prompt_tokens > first.usage.prompt_tokens


def test_the_text_is_the_same_without_a_cache(client):
    prompts = [PROMPT, PROMPT + [77, 78], PROMPT[: PAGE + 20], PROMPT]
    fields = ({"temperature": 0}, {"temperature": 1.0, "seed": 3})

    def texts(client):
        return [
            complete(client, prompt, max_tokens=20, **each).choices[0].text
            for prompt in prompts
            for each in fields
        ]

    with start("--no-enable-prefix-caching", "--chunk-length", "64") as off:
        expected = texts(off.client())
        reply = complete(off.client())
        assert cached(reply) == 0
        assert off.post("/reset_prefix_cache", None).status_code == 200
        assert off.metric(QUERIES) == off.metric(HITS) == off.metric(PAGES) == 0
        assert 'enable_prefix_caching="False"' in off.get("/metrics").text
    assert texts(client) == expected


def test_metrics(server, client):
    names = (QUERIES, HITS, "vllm:request_prefill_kv_computed_tokens_sum")
    before = [key_metric(server, name) for name in names]
    complete(client)
    reply = complete(client, extra_body={"return_metrics": True})
    after = [key_metric(server, name) for name in names]
    queries, hits, computed = (b - a for a, b in zip(before, after))
    assert (queries, hits) == (2 * len(PROMPT), 2 * PAGE)
    assert computed == queries - hits
    timings = reply.metrics["timings"]
    assert (timings["cache_n"], timings["prompt_n"]) == (2 * PAGE, len(PROMPT) - 2 * PAGE)
    text = server.get("/metrics", Authorization="Bearer k").text
    assert 'enable_prefix_caching="True"' in text
    for name in ("host_hits_total", "disk_hits_total", "evicted_pages_total"):
        assert key_metric(server, f"cpmcu:prefix_cache_{name}") == 0
    for tier, count in (("device", 2.0), ("host", 0.0), ("disk", 0.0)):
        assert f'tier="{tier}"}} {count}' in text
    for name in (QUERIES.removesuffix("_total"), HITS.removesuffix("_total"), PAGES):
        assert f"# HELP {name}" in text
    assert key_metric(server, "vllm:kv_cache_usage_perc") == 0  # cached pages are free to take
    assert f"{len(PROMPT)} prompt tokens, {2 * PAGE} of them cached" in server.log


def test_progress_begins_behind_what_was_cached(client):
    complete(client)
    body = {"return_progress": True}
    chunks = complete(client, [*PROMPT, *range(900, 1000)], stream=True, extra_body=body)
    found = [c.prompt_progress for c in chunks if hasattr(c, "prompt_progress")]
    assert {progress["cache"] for progress in found} == {2 * PAGE}
    assert [found[0]["processed"], found[-1]["processed"]] == [2 * PAGE, len(PROMPT) + 100]


def test_salts_do_not_share(client):
    for salt, expected in (("a", 0), ("b", 0), ("a", 2 * PAGE), (None, 0), ("b", 2 * PAGE)):
        assert cached(complete(client, extra_body={"cache_salt": salt})) == expected
    turn = [{"role": "user", "content": "x = 1\n" * 60}]
    for salt, hit in (("a", False), ("b", False), ("a", True)):
        assert bool(cached(chat(client, turn, extra_body={"cache_salt": salt}))) == hit


@pytest.mark.parametrize(
    ("salt", "message"),
    [
        ("", "cache_salt is '', but must have at least 1 character."),
        (7, "cache_salt is 7, but must be a text."),
        ("x" * 1025, "but must have at most 1024 characters."),
        ("\ud800", "but must be a text"),
    ],
)
def test_salts_that_cannot_be(server, salt, message):
    for path, body in ((CHAT, {"messages": [{"role": "user", "content": "x"}]}),
                       ("/v1/completions", {"prompt": "x"})):  # fmt: skip
        text = json.dumps({**body, "cache_salt": salt})
        headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
        reply = httpx.post(server.url + path, content=text, headers=headers, timeout=60)
        error = error_of(reply, 400)
        assert message in error["message"]
        assert error["param"] == "cache_salt"


def test_reset(server, client):
    complete(client)
    assert key_metric(server, PAGES) == 2
    assert error_of(server.post("/reset_prefix_cache", None), 401)
    assert cached(complete(client)) == 2 * PAGE
    reply = server.post("/reset_prefix_cache", None, Authorization="Bearer k")
    assert (reply.status_code, reply.content) == (200, b"")
    assert cached(complete(client)) == 0
    assert server.get("/reset_prefix_cache", Authorization="Bearer k").status_code == 405


@pytest.mark.parametrize("parts", [False, True])
def test_a_billing_header_is_left_out(server, client, parts):
    rules = "Answer in Python, and be brief. " * 20

    def messages(header: str):
        content = header + rules
        if parts:
            content = [{"type": "text", "text": text} for text in (header, rules) if text]
        return [{"role": "system", "content": content}, {"role": "user", "content": "x = "}]

    replies = [chat(client, messages(BILLING.format(i))) for i in range(2)]
    plain = chat(client, messages(""))
    assert {reply.usage.prompt_tokens for reply in replies} == {plain.usage.prompt_tokens}
    assert [cached(reply) > 0 for reply in (*replies, plain)] == [False, True, True]
    texts = {reply.choices[0].message.content for reply in (*replies, plain)}
    assert len(texts) == 1
    body = {"messages": messages(BILLING.format(7))}
    count = server.post("/tokenize", body, Authorization="Bearer k").json()["count"]
    assert count == plain.usage.prompt_tokens
    assert server.log.count("x-anthropic-billing-header:") == 1  # whatever ran before


def test_a_billing_header_can_be_kept():
    with start("--keep-billing-header") as server:
        turn = {"role": "user", "content": "x = "}
        with_it = [{"role": "system", "content": BILLING.format(1) + "Be brief."}, turn]
        without = [{"role": "system", "content": "Be brief."}, turn]
        counts = [
            server.post("/tokenize", {"messages": messages}).json()["count"]
            for messages in (with_it, without)
        ]
        assert counts[0] > counts[1]
        assert "billing" not in server.log


def test_a_chat_in_the_terminal_says_what_was_cached():
    lines = "def walk(root, found): return [root, found] + [name for name in found] " * 8
    command = [
        sys.executable,
        "-m",
        "cpmcu",
        "chat",
        "tiny-python-minicpm",
        "--device",
        "cpu",
        "--num-threads",
        "1",
    ]
    command += ["--max-tokens", "8", "--temperature", "0"]
    run = subprocess.run(
        command,
        input=f"{lines}\nx = 1\n",
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    first, second = (line for line in run.stderr.splitlines() if "first after" in line)
    assert "cached" not in first
    found = re.search(r"(\d+) of (\d+) prompt tokens cached, ", second)
    assert found and 0 < int(found[1]) < int(found[2]) and int(found[1]) % PAGE == 0
