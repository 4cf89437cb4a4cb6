"""All request fields with the official client, on the shipped model with its EAGLE head."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import openai
import pytest

from cpmcu import LLM, SamplingParams
from tests.e2e.harness import ROOT
from tests.missing import missing
from tests.reference.engines import prompt_logits

PROMPT = "def fibonacci(n):\n"
CHUNK = 192  # tokens of a prefill step: as many as the trees of eight slots have nodes
CHAT = [{"role": "user", "content": "import os\n\ndef walk(root):"}]


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def llm():
    """The same model in this process, without speculation: the expected answers."""
    speculation = {"no_speculation": True}
    with LLM(device="cpu", num_threads=1, speculative_config=speculation) as llm:
        yield llm


def complete(client, prompt=PROMPT, **fields):
    fields.setdefault("seed", 0)
    return client.completions.create(model="tiny-python-minicpm", prompt=prompt, **fields)


def chat(client, **fields):
    fields.setdefault("seed", 0)
    return client.chat.completions.create(model="tiny-python-minicpm", messages=CHAT, **fields)


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny-python-minicpm", "model")
    assert client.models.retrieve(model.id).max_model_len == 2048
    for call in (lambda: client.models.retrieve("other"), lambda: complete(client, model="x")):
        with pytest.raises((openai.NotFoundError, TypeError)):
            call()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.1, "seed": 3, "top_p": 0.9},
        {"temperature": 0.8, "seed": -2, "extra_body": {"top_k": 20, "min_p": 0.02}},
        {"temperature": 0, "extra_body": {"repetition_penalty": 1.3}},
        {"temperature": 0.9, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"temperature": 1.0, "seed": 2**63 - 1, "logit_bias": {"48": -100, "99": 5.5}},
    ],
    ids=["greedy", "sampled", "filters", "repetition", "penalties", "bias"],
)
def test_server_texts_equal_engine_texts(client, llm, fields):
    """The text over HTTP with speculation equals that of LLM without it."""
    known = {**fields, **fields.get("extra_body", {})}
    known.pop("extra_body", None)
    if "logit_bias" in known:
        known["logit_bias"] = {int(k): v for k, v in known["logit_bias"].items()}
    known["seed"] = known.get("seed", 0) % 2**64
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=30, **known))[0]
    choice = complete(client, max_tokens=30, **fields).choices[0]
    assert choice.text == expected.text
    assert choice.finish_reason == expected.outputs[0].finish_reason
    answer = llm.chat(CHAT, SamplingParams(max_tokens=30, **known))[0]
    reply = chat(client, max_completion_tokens=30, **fields)
    assert reply.choices[0].message.content == answer.text
    assert reply.choices[0].message.role == "assistant"
    assert reply.usage.prompt_tokens == len(answer.prompt_token_ids)


def test_streams_join_to_the_whole(client):
    fields = {"max_tokens": 50, "seed": 7, "temperature": 0.8}
    whole = chat(client, **fields)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **fields))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert set(reasons[:-1]) <= {None}
    assert reasons[-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])

    whole = complete(client, **fields)
    chunks = list(complete(client, stream=True, **fields))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_is_exact(client):
    for limit in (1, 2, 7):
        body = {"return_token_ids": True}
        reply = complete(client, max_tokens=limit, temperature=0, extra_body=body)
        choice = reply.choices[0]
        assert len(choice.token_ids) == reply.usage.completion_tokens == limit
        assert reply.usage.prompt_tokens == len(choice.prompt_token_ids)
        assert reply.usage.total_tokens == limit + reply.usage.prompt_tokens
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(complete(client, max_tokens=limit, stream=True, extra_body=body))
        assert chunks[-1].usage.completion_tokens == limit
        assert sum(len(c.token_ids) for chunk in chunks for c in chunk.choices) == limit


def test_choices(client):
    reply = complete(client, n=3, max_tokens=8, temperature=1, seed=1)
    texts = [choice.text for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert reply.usage.completion_tokens == 24
    streamed = ["", "", ""]
    for chunk in chat(client, n=3, max_tokens=8, temperature=1, seed=1, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    whole = chat(client, n=3, max_tokens=8, temperature=1, seed=1)
    assert streamed == [choice.message.content for choice in whole.choices]


def test_without_a_seed_texts_differ(client):
    fields = {"max_tokens": 30, "temperature": 1.5, "seed": None}
    assert len({complete(client, **fields).choices[0].text for _ in range(3)}) == 3
    assert len({choice.text for choice in complete(client, [PROMPT] * 3, **fields).choices}) == 3


def test_several_prompts_and_token_ids(client, server):
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    text = complete(client, max_tokens=6, temperature=0).choices[0].text
    assert complete(client, ids, max_tokens=6, temperature=0).choices[0].text == text
    other = complete(client, "import ", max_tokens=6, temperature=0).choices[0].text
    reply = complete(client, [PROMPT, "import "], max_tokens=6, temperature=0, n=2)
    assert [choice.text for choice in reply.choices] == [text, text, other, other]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.usage.completion_tokens == 24
    reply = complete(client, [ids, ids], max_tokens=6, temperature=0)
    assert [choice.text for choice in reply.choices] == [text, text]
    assert reply.usage.prompt_tokens == 2 * len(ids)
    # An empty text is a valid prompt if the tokenizer adds BOS.
    empty = complete(client, "", max_tokens=6, temperature=0).choices[0].text
    reply = complete(client, ["", ""], max_tokens=6, temperature=0)
    assert [choice.text for choice in reply.choices] == [empty, empty]


@pytest.mark.parametrize("echo", [False, True])
def test_token_ids_of_a_stream_are_those_of_the_whole(client, server, echo):
    """Only the first chunk of each choice has the prompt's log-probabilities."""
    more = {"max_tokens": 5, "temperature": 0, "n": 2, "extra_body": {"return_token_ids": True}}
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    prompts = {0: [], 1: []}
    for chunk in complete(client, stream=True, echo=echo, **more):
        for choice in chunk.choices:
            prompts[choice.index].append(getattr(choice, "prompt_token_ids", None))
    assert [found[0] for found in prompts.values()] == [ids, ids]
    assert not any(any(found[1:]) for found in prompts.values())
    whole = chat(client, **more)
    chunks = [chunk for chunk in chat(client, stream=True, **more) if chunk.choices]
    first = [chunk for chunk in chunks if chunk.choices[0].delta.role]
    assert [chunk.prompt_token_ids for chunk in first] == [whole.prompt_token_ids] * 2
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks if chunk not in first)


def test_stops(client):
    text = complete(client, max_tokens=60, temperature=0).choices[0].text
    word = re.findall(r"\w+", text)[4]
    choice = complete(client, max_tokens=60, temperature=0, stop=[word, "@@@"]).choices[0]
    assert choice.text == text[: text.index(word)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", word)
    chunks = list(complete(client, max_tokens=60, temperature=0, stop=word, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    body = {"return_token_ids": True}
    ids = complete(client, max_tokens=9, temperature=0, extra_body=body).choices[0].token_ids
    last = next(i for i, token in enumerate(ids) if token not in ids[:i] and i >= 4)
    body = {"stop_token_ids": [ids[last]], "return_token_ids": True}
    choice = complete(client, max_tokens=9, temperature=0, extra_body=body).choices[0]
    assert (choice.token_ids, choice.stop_reason) == (ids[: last + 1], ids[last])


def test_end_of_sequence(client):
    """The bias makes the model end at once; ignore_eos prevents that."""
    fields = {"max_tokens": 5, "temperature": 0, "logit_bias": {"2": 100}}
    choice = complete(client, **fields).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", None)
    reply = complete(client, extra_body={"ignore_eos": True}, **fields)
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (5, "length")
    body = {"ignore_eos": True, "skip_special_tokens": False}
    assert complete(client, extra_body=body, **fields).choices[0].text == "</s>" * 5


def test_chat_logprobs(client):
    fields = {"max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    fields["extra_body"] = {"repetition_penalty": 1.0}  # so the likeliest token is the chosen one
    choice = chat(client, **fields).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 12
    assert "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, values[0])
        assert bytes(entry.bytes).decode() == entry.token
    streamed = [
        entry
        for chunk in chat(client, stream=True, **fields)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == entries


def test_echo_gives_the_logprobs_of_the_prompt(client, llm):
    """lm-eval's request: the prompt's log-likelihoods, over several chunks of prefill."""
    text = "import os\n\n\ndef walk(path):\n    for name in os.listdir(path):\n" * 25
    ids = llm.tokenize(text)
    assert len(ids) > 2 * CHUNK
    logits = llm.call_engine(lambda engine: prompt_logits(engine, ids)).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits - logits.max(1)[:, None]).sum(1))[:, None]
    logprobs -= logits.max(1)[:, None]
    expected = [logprobs[i, token] for i, token in enumerate(ids[1:])]
    for body in ({"max_tokens": 1}, {"max_tokens": 0}):
        reply = complete(client, text, echo=True, logprobs=2, temperature=0, **body)
        choice = reply.choices[0]
        found = choice.logprobs
        new = body["max_tokens"]
        assert reply.usage.completion_tokens == new
        assert len(found.tokens) == len(ids) + new
        assert found.token_logprobs[0] is None
        assert found.top_logprobs[0] is None
        np.testing.assert_allclose(found.token_logprobs[1 : len(ids)], expected, atol=1e-4)
        for i in range(1, len(ids)):
            best = max(found.top_logprobs[i].values())
            assert abs(best - logprobs[i - 1].max()) < 1e-4
            assert 2 <= len(found.top_logprobs[i]) <= 3
        assert choice.text.startswith(text)
        assert choice.finish_reason == "length"
        shown = found.tokens[1:]  # all but <s>
        assert [choice.text[i : i + len(t)] for i, t in zip(found.text_offset[1:], shown)] == shown
    chunks = list(complete(client, text, echo=True, logprobs=2, max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks).startswith(text)
    streamed = [v for c in chunks for v in (c.choices[0].logprobs or found).token_logprobs]
    assert streamed[: len(ids)] == found.token_logprobs[: len(ids)]
    assert complete(client, text, echo=True, max_tokens=0).choices[0].text == text
    fields = {"max_tokens": 20, "temperature": 0, "extra_body": {"return_metrics": True}}
    plain = complete(client, text, **fields)
    scored = complete(client, text, echo=True, logprobs=0, **fields)
    assert scored.choices[0].text == text + plain.choices[0].text
    spec = [reply.metrics["speculative_decoding"] for reply in (plain, scored)]
    assert spec[0] == spec[1]  # the draft has processed the whole prompt
    one = complete(client, [[5]], echo=True, max_tokens=0, logprobs=1).choices[0].logprobs
    assert one.token_logprobs == [None]


def test_offsets_of_an_echo_with_special_tokens(client):
    text = "<|im_start|>user\nhi<|im_end|>\nx = 1"
    fields = {"echo": True, "logprobs": 0, "max_tokens": 4, "temperature": 0}
    fields["extra_body"] = {"ignore_eos": True, "skip_special_tokens": False}
    choice = complete(client, text, **fields).choices[0]
    found = choice.logprobs
    assert {"<|im_start|>", "<|im_end|>"} <= set(found.tokens)
    shown = found.tokens[1:]  # all but <s>
    assert [choice.text[i : i + len(t)] for i, t in zip(found.text_offset[1:], shown)] == shown


def test_echo_of_several_choices(client):
    fields = {"max_tokens": 3, "temperature": 1, "seed": 4, "echo": True, "logprobs": 0, "n": 2}
    choices = complete(client, ["a = ", "def g"], **fields).choices
    assert [choice.text.startswith(("a = ", "def g")[i // 2]) for i, choice in enumerate(choices)]
    assert choices[0].logprobs.token_logprobs[:3] == choices[1].logprobs.token_logprobs[:3]
    found = choices[0].logprobs
    pairs = zip(found.tokens[1:], found.token_logprobs[1:])
    assert found.top_logprobs == [None, *({token: value} for token, value in pairs)]


def test_metrics_of_a_request(client):
    reply = chat(client, max_tokens=20, temperature=0, extra_body={"return_metrics": True})
    spec, timings = reply.metrics["speculative_decoding"], reply.metrics["timings"]
    assert timings["predicted_n"] == 20
    assert spec["num_spec_steps"] == sum(spec["acceptance_histogram"]) > 0
    assert timings["draft_n_accepted"] == spec["num_accepted_draft_tokens"]
    assert chat(client, max_tokens=2).metrics is None
    chunks = list(chat(client, max_tokens=5, stream=True, extra_body={"return_metrics": True}))
    assert chunks[-1].metrics["timings"]["predicted_n"] == 5
    reply = chat(client, max_tokens=9, n=2, extra_body={"return_metrics": True})
    assert reply.metrics["speculative_decoding"]["num_spec_steps"] > 2


def test_progress_of_a_long_prompt(client):
    body = {"return_progress": True}
    prompt = "x = 1\n" * 120
    chunks = list(complete(client, prompt, max_tokens=2, stream=True, extra_body=body))
    progress = [c.prompt_progress for c in chunks if hasattr(c, "prompt_progress")]
    done = [each["processed"] for each in progress]
    assert len(done) > 2
    assert done[:-1] == [CHUNK * i for i in range(len(done) - 1)]  # the first precedes all tokens
    assert progress[0]["cache"] == 0
    assert done[-1] == progress[-1]["total"] <= CHUNK * (len(done) - 1)
    assert "".join(c.choices[0].text for c in chunks if c.choices)


def test_raw_stream(server):
    """The bytes of a stream: events, [DONE] at the end, the request's id in the header."""
    body = {"messages": CHAT, "max_tokens": 3, "stream": True}
    reply = server.post("/v1/chat/completions", body, **{"X-Request-Id": "me-17"})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["x-request-id"] == "me-17"
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert json.loads(event.removeprefix("data: "))["id"].startswith("chatcmpl-")
    assert " me-17 " in server.log
    body = {"prompt": "a", "max_tokens": 1}
    reply = server.post("/v1/completions", body, **{"X-Request-Id": "a\tb"})
    assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"])


def test_seeds_do_not_depend_on_the_batch(server):
    """A request gives the same text alone and in a batch of nine."""
    client = server.async_client()
    prompts = ["class Stack:\n", "import re\n", "def main():\n    ", "# Sort\n", "x = [", "try:\n"]
    prompts += ["for i in range(", "with open(", PROMPT]

    async def one(prompt: str, seed: int):
        reply = await client.completions.create(
            model="tiny-python-minicpm",
            prompt=prompt,
            max_tokens=25,
            temperature=1.0,
            seed=seed,
            logprobs=1,
            extra_body={"return_token_ids": True},
        )
        return reply.choices[0].token_ids, reply.choices[0].logprobs.token_logprobs

    async def run():
        alone = await one(PROMPT, 11)
        others = [one(prompt, seed) for seed, prompt in enumerate(prompts)]
        company = await asyncio.gather(*others, one(PROMPT, 11))
        assert company[-1] == alone
        assert company[-2] != alone  # another seed

    asyncio.run(run())


def test_64_clients(server):
    client = server.async_client()

    async def one(i: int):
        stream = await client.chat.completions.create(
            model="tiny-python-minicpm",
            messages=[{"role": "user", "content": f"x{i % 4} = "}],
            max_tokens=4,
            seed=i % 4,
            temperature=1,
            stream=True,
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def run():
        return await asyncio.gather(*(one(i) for i in range(64)))

    texts = asyncio.run(run())
    assert all(texts)
    assert len(set(texts)) == 4, "equal requests differ"
    server.wait_idle()
    assert server.metric("vllm:num_requests_waiting") == 0


@pytest.mark.parametrize("name", ["README.md", "docs/server.md"])
def test_the_programs_of_the_documents(server, name):
    """The openai and curl examples run against this server."""
    text = (ROOT / name).read_text("utf-8").replace("http://localhost:8000", server.url)
    programs = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (program,) = [body for body in programs if "import OpenAI" in body]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 2
    assert ("mean_acceptance_length" in done.stdout) == ("speculative_decoding" in program)
    if shutil.which("curl") is None:
        missing("curl is missing")
    lines = [line for line in text.splitlines() if line.startswith("curl ")]
    assert lines
    for line in lines:
        done = subprocess.run([*shlex.split(line), "-sSf"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert '"id"' in done.stdout
