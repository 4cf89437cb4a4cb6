"""vLLM's fields, flags and metrics beyond OpenAI's."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import openai
import pytest

from cpmcu import LLM, SamplingParams
from tests.e2e.harness import Server, start

MODEL = "tiny-python-minicpm"
PROMPT = "def fibonacci(n):\n"
CHAT = [{"role": "user", "content": "name = "}]


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def plain():
    """The same model in this process, without speculation."""
    with LLM(device="cpu", num_threads=1, speculative_config={"no_speculation": True}) as llm:
        yield llm


@pytest.fixture(scope="module")
def behind_a_proxy() -> Iterator[Server]:
    flags = ("--root-path", "/llm/a", "--enable-force-include-usage", "--api-key", "k")
    with start(*flags, "--return-tokens-as-token-ids", "--max-logprobs", "3") as found:
        yield found


def complete(client, prompt=PROMPT, **body):
    fields = {name: body.pop(name) for name in ("stream", "echo", "logprobs") if name in body}
    body = {"temperature": 0, "max_tokens": 8, **body}
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=body, **fields)


def chat(client, messages=CHAT, **body):
    stream = body.pop("stream", False)
    body = {"temperature": 0, "max_tokens": 8, **body}
    return client.chat.completions.create(
        model=MODEL, messages=messages, extra_body=body, stream=stream
    )


# ---- min_tokens


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}])
def test_min_tokens_masks_the_end(client, plain, fields):
    """Speculation gives the same tokens as plain decoding."""
    eager = {"logit_bias": {2: 30.0}, "max_tokens": 40, **fields}  # 2 is </s>
    counts = []
    for least in (0, 1, 7, 23, 40):
        expected = plain.generate(PROMPT, SamplingParams(min_tokens=least, **eager))[0].outputs[0]
        wire = {**eager, "logit_bias": {"2": 30.0}, "return_token_ids": True}
        reply = complete(client, min_tokens=least, **wire)
        choice = reply.choices[0]
        assert choice.token_ids == expected.token_ids
        assert choice.finish_reason == expected.finish_reason
        assert 2 not in choice.token_ids[:least]
        counts.append(reply.usage.completion_tokens)
    assert counts == [1, 2, 8, 24, 40]


def test_min_tokens_and_stops(client):
    ids = complete(client, max_tokens=30, return_token_ids=True).choices[0].token_ids
    text = complete(client, max_tokens=30).choices[0].text
    word = re.findall(r"\w{3,}", text)[0]
    early = complete(client, max_tokens=30, stop=[word])
    late = complete(client, max_tokens=30, stop=[word], min_tokens=20)
    assert len(early.choices[0].text) < len(late.choices[0].text)
    assert late.usage.completion_tokens >= 20 > early.usage.completion_tokens
    choice = complete(
        client, max_tokens=30, stop_token_ids=[ids[3]], min_tokens=9, return_token_ids=True
    ).choices[0]
    assert choice.token_ids[:3] == ids[:3]
    assert ids[3] not in choice.token_ids[:9]
    with pytest.raises(openai.BadRequestError, match="min_tokens is 9, but must be at most max"):
        complete(client, max_tokens=8, min_tokens=9)


def test_min_tokens_with_a_grammar(client):
    body = {"guided_regex": "[a-z]+", "logit_bias": {"2": 30}, "max_tokens": 12}
    assert complete(client, **body).usage.completion_tokens == 2
    assert complete(client, min_tokens=6, **body).usage.completion_tokens == 7
    done = complete(client, min_tokens=6, max_tokens=12, guided_choice=["ab"])
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("ab", "stop")


# ---- log-probabilities


def test_prompt_logprobs_are_those_of_an_echo(client, server):
    echo = complete(client, echo=True, logprobs=2).choices[0].logprobs
    for reply in (
        complete(client, prompt_logprobs=2),
        complete(client, prompt_logprobs=2, n=2),
        complete(client, [PROMPT, PROMPT], prompt_logprobs=2, logprobs=0, echo=True),
    ):
        for choice in reply.choices:
            ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
            first, *rest = choice.prompt_logprobs
            assert first is None
            assert [next(iter(entry)) for entry in rest] == [str(token) for token in ids[1:]]
            for i, entry in enumerate(rest, start=1):
                own, *others = entry.values()
                assert own["logprob"] == echo.token_logprobs[i]
                assert own["decoded_token"] == echo.tokens[i]
                assert own["rank"] in (None, 1, 2)
                best = next(e for e in entry.values() if e["rank"] == 1)
                assert best["logprob"] == max(echo.top_logprobs[i].values())
                assert len(others) == (1 if own["rank"] else 2)
    assert complete(client).choices[0].prompt_logprobs is None
    zero = complete(client, prompt_logprobs=0).choices[0].prompt_logprobs
    assert [len(entry) for entry in zero[1:]] == [1] * (len(ids) - 1)


def test_prompt_logprobs_of_a_chat(client):
    reply = chat(client, prompt_logprobs=1, return_token_ids=True)
    first, *rest = reply.prompt_logprobs
    assert first is None
    assert [next(iter(entry)) for entry in rest] == [str(t) for t in reply.prompt_token_ids[1:]]
    assert chat(client).prompt_logprobs is None


def test_logprobs_without_alternatives(client):
    """0 requests the chosen tokens only. Completions also have them as top_logprobs."""
    found = complete(client, logprobs=0).choices[0].logprobs
    pairs = zip(found.tokens, found.token_logprobs)
    assert found.top_logprobs == [{token: value} for token, value in pairs]
    found = chat(client, logprobs=True, top_logprobs=0).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in found] == [[]] * 8
    assert chat(client, logprobs=0).choices[0].logprobs is None
    assert chat(client, logprobs=1).choices[0].logprobs is not None


def test_tokens_as_token_ids(client):
    body = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = complete(client, logprobs=3, **body).choices[0]
    names = [f"token_id:{token}" for token in choice.token_ids]
    assert choice.logprobs.tokens == names
    for name, top in zip(names, choice.logprobs.top_logprobs):
        assert name in top and all(re.fullmatch(r"token_id:\d+", key) for key in top)
    choice = chat(client, logprobs=True, top_logprobs=2, **body).choices[0]
    names = [f"token_id:{token}" for token in choice.token_ids]
    assert [entry.token for entry in choice.logprobs.content] == names
    text = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode()
    assert text == choice.message.content


def test_flags_of_log_probabilities(behind_a_proxy):
    client = behind_a_proxy.client("k")
    choice = complete(client, logprobs=2, return_token_ids=True).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    (entry, *_) = chat(client, logprobs=True).choices[0].logprobs.content
    assert entry.token.startswith("token_id:")
    fields = {"include": ["message.output_text.logprobs"], "max_output_tokens": 4}
    reply = client.responses.create(model=MODEL, input="import os", **fields)
    (entry, *_) = reply.output[0].content[0].logprobs
    assert entry.token.startswith("token_id:")
    words = complete(client, logprobs=2, return_tokens_as_token_ids=False).choices[0]
    assert "".join(words.logprobs.tokens) == words.text
    scores = complete(client, prompt_logprobs=-1).choices[0].prompt_logprobs[1:]
    assert {len(each) for each in scores} <= {3, 4}
    for fields in ({"logprobs": 4}, {"prompt_logprobs": 4}):
        with pytest.raises(openai.BadRequestError, match="at most 3 ") as caught:
            complete(client, **fields)
        assert caught.value.param in fields
    with pytest.raises(openai.BadRequestError, match="asks for 4 likeliest"):
        chat(client, logprobs=True, top_logprobs=4)


def test_named_tokens_in_place_of_the_likeliest(client):
    """A named token has the log-probability that it has among the likeliest tokens."""
    body = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    first = complete(client, logprobs=20, **body).choices[0]
    top = first.logprobs.top_logprobs[0]
    ids = [int(name.split(":")[1]) for name in list(top)[12:15]] + [first.token_ids[0]]
    found = complete(client, logprobs=1, logprob_token_ids=ids, **body).choices[0]
    assert found.token_ids == first.token_ids  # with a draft
    for values in found.logprobs.top_logprobs[:3]:
        assert set(values) >= {f"token_id:{token}" for token in ids}
    for name, value in found.logprobs.top_logprobs[0].items():
        assert value == pytest.approx(top[name], abs=1e-4)
    scored = chat(client, logprobs=True, top_logprobs=-1, **body).choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 20 for entry in scored)
    names = [entry.token for entry in scored[1].top_logprobs]
    ids = [int(name.split(":")[1]) for name in names[5:7]]
    named = chat(client, logprobs=True, logprob_token_ids=ids, **body).choices[0].logprobs.content
    assert [entry.token for entry in named] == [entry.token for entry in scored]
    assert [entry.token for entry in named[1].top_logprobs] == [named[1].token, *names[5:7]]
    for entry, same in zip(named[1].top_logprobs[1:], scored[1].top_logprobs[5:7]):
        assert entry.logprob == pytest.approx(same.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprob_token_ids": [1]}, "need logprobs"),
        ({"logprob_token_ids": [1 << 30], "logprobs": 1}, "logprob_token_ids names token"),
        ({"logprob_token_ids": [-1], "logprobs": 1}, "-1"),
        ({"logprob_token_ids": [1] * 21, "logprobs": 1}, "logprob_token_ids"),
    ],
)
def test_wrong_named_tokens(client, fields, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        complete(client, **fields)
    assert caught.value.param.startswith("logprob_token_ids")


def test_tokens_with_equal_text_have_distinct_names(scripted):
    """Tokens that are parts of characters are written as bytes, each under a unique name."""
    reply = scripted.client().completions.create(
        model="scripted", prompt="<|story|>", temperature=0, max_tokens=60, logprobs=20
    )
    found = reply.choices[0].logprobs
    assert sum(
        re.fullmatch(r"bytes:(\\x[0-9a-f]{2})+", token) is not None for token in found.tokens
    )
    for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs):
        assert "\ufffd" not in "".join(top)
        assert top[token] == value
        assert len(top) in (20, 21)


# ---- streams


@pytest.mark.parametrize("ask", [complete, chat])
def test_usage_in_streams(client, behind_a_proxy, ask):
    continuous = {"continuous_usage_stats": True}
    for options in (None, {}, continuous, {"include_usage": False, **continuous}):
        chunks = list(ask(client, stream=True, stream_options=options))
        assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    *chunks, last = ask(client, stream=True, stream_options={"include_usage": True})
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert (last.choices, last.usage.completion_tokens) == ([], 8)
    # Every chunk has the usage up to this chunk.
    for stream in (
        ask(client, stream=True, n=2, stream_options={"include_usage": True, **continuous}),
        ask(behind_a_proxy.client("k"), stream=True, n=2),
    ):
        *chunks, last = stream
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == last.usage.completion_tokens == 16
        told = [chunk.usage.completion_tokens for chunk in chunks if is_told(chunk.choices[0])]
        assert len(set(told)) == len(told) > 2


def is_told(choice) -> bool:
    """True if a chunk has more than the role."""
    return not hasattr(choice, "delta") or not choice.delta.role


# ---- chat


def test_echo_in_a_chat(client):
    messages = [*CHAT, {"role": "assistant", "content": [{"type": "text", "text": "class A"}]}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    rest = chat(client, messages, **body).choices[0].message.content
    whole = chat(client, messages, echo=True, n=2, **body)
    assert [c.message.content for c in whole.choices] == ["class A" + rest] * 2
    chunks = list(chat(client, messages, echo=True, stream=True, **body))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "class A" + rest
    assert chunks[0].choices[0].delta.role == "assistant"
    # The last message is the user's, so echo prepends nothing.
    assert (
        chat(client, echo=True).choices[0].message.content
        == chat(client).choices[0].message.content
    )


def tool(name: str) -> dict:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def test_allowed_tools(scripted, client):
    tools = [tool("add"), tool("sub"), tool("mul")]
    named = [{"type": "function", "function": {"name": name}} for name in ("sub", "mul")]

    def choice(mode: str, allowed=named) -> dict:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}

    for seed in range(4):
        reply = chat(
            client,
            tools=tools,
            tool_choice=choice("required"),
            temperature=1.5,
            seed=seed,
            max_tokens=60,
            parallel_tool_calls=False,
        )
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name in ("sub", "mul")
    reply = chat(client, tools=tools, tool_choice=choice("auto"))
    assert reply.choices[0].message.tool_calls is None
    wrong = [{"type": "function", "function": {"name": "div"}}]
    with pytest.raises(openai.BadRequestError, match="Tool 'div' not found in tools"):
        chat(client, tools=tools, tool_choice=choice("auto", wrong))


def test_the_refusal_of_suffix_gives_the_reason(client):
    with pytest.raises(openai.BadRequestError, match="suffix needs a model that fills gaps"):
        complete(client, suffix="x")


# ---- the server


def test_tokenizer_endpoints_follow_vllm(server, scripted):
    found = server.post("/tokenize", {"prompt": "x =\n 1", "return_token_strs": True}).json()
    assert "".join(found["token_strs"]).startswith("<s>")
    assert any("Ġ" in piece or "Ċ" in piece for piece in found["token_strs"])
    assert server.post("/tokenize", {"prompt": "x"}).json().get("token_strs") is None
    info = server.get("/tokenizer_info").json()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (info["eos_token"], info["model_max_length"]) == ("</s>", 2048)
    assert info["added_tokens_decoder"]["2"]["content"] == "</s>"
    assert scripted.get("/tokenizer_info").json()["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_root_path_of_a_proxy(behind_a_proxy):
    """The proxy may keep or remove its path prefix."""
    key = {"Authorization": "Bearer k"}
    for root in ("", "/llm/a"):
        url = behind_a_proxy.url + root
        assert (
            httpx.get(f"{url}/v1/models", headers=key, timeout=60).json()["data"][0]["id"] == MODEL
        )
        assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 401
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200  # needs no key, as before
        assert httpx.get(f"{url}/", timeout=60).status_code == 200
        own = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        assert complete(own).usage.completion_tokens == 8
    assert (
        httpx.get(f"{behind_a_proxy.url}/llm/b/health", headers=key, timeout=60).status_code == 404
    )
    assert (
        httpx.get(f"{behind_a_proxy.url}/llm/a", timeout=60).headers["location"].endswith("/llm/a/")
    )
    schema = httpx.get(f"{url}/openapi.json", headers=key, timeout=60).json()
    assert schema["servers"] == [{"url": "/llm/a"}]


def test_metrics_of_steps_and_of_the_cache(server, client):
    before = server.metric("vllm:iteration_tokens_total_sum")
    steps = server.metric("vllm:iteration_tokens_total_count")
    usage = complete(client, max_tokens=9, prompt=PROMPT * 3).usage
    server.wait_idle()
    tokens = server.metric("vllm:iteration_tokens_total_sum") - before
    # Tokens that a step generated beyond the limit are counted.
    assert usage.total_tokens <= tokens <= usage.total_tokens + 4
    assert 2 <= server.metric("vllm:iteration_tokens_total_count") - steps <= 10
    text = server.get("/metrics").text
    (line,) = re.findall(r"^vllm:cache_config_info{(.*)} 1\.0$", text, re.MULTILINE)
    found = dict(re.findall(r'(\w+)="([^"]*)"', line))
    assert found["block_size"] == "64" and int(found["num_gpu_blocks"]) > 10
    size = int(found["block_size"]) * int(found["num_gpu_blocks"])
    assert int(found["kv_cache_size_tokens"]) == size
    assert float(found["kv_cache_max_concurrency"]) > 1
    assert found["model_name"] == MODEL
