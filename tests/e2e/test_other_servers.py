"""Fields and routes of vLLM, llama.cpp and SGLang beyond OpenAI's."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.calls import CHAT, HELLO, error_of
from tests.e2e.harness import start, write_scripted

COMPLETIONS = "/v1/completions"
TEXT = {"prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0}


def complete(server, **fields):
    reply = server.post(COMPLETIONS, {**TEXT, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_allowed_and_bad_tokens(server):
    plain = complete(server, return_token_ids=True)["choices"][0]
    ids = list(dict.fromkeys(plain["token_ids"]))[:3]
    found = complete(server, allowed_token_ids=ids, return_token_ids=True)["choices"][0]
    assert set(found["token_ids"]) <= set(ids)
    word = plain["text"].split()[0]
    assert word not in complete(server, bad_words=[word])["choices"][0]["text"].split()
    for fields in ({"allowed_token_ids": []}, {"bad_words": []}):
        assert complete(server, **fields)["choices"][0]["text"] == plain["text"]
    message = error_of(server.post(COMPLETIONS, {**TEXT, "allowed_token_ids": [1 << 30]}), 400)
    assert message["param"] == "allowed_token_ids"


def test_the_stop_text_is_shown_on_request(server):
    stop = complete(server)["choices"][0]["text"][3:6]
    fields = {"stop": stop, "include_stop_str_in_output": True}
    choice = complete(server, **fields)["choices"][0]
    assert choice["text"].endswith(stop)
    assert choice["stop_reason"] == choice["matched_stop"] == stop


def test_a_prompt_is_cut_to_its_last_tokens(server):
    ids = server.post("/tokenize", {"prompt": TEXT["prompt"]}).json()["tokens"]
    cut = complete(server, truncate_prompt_tokens=3, return_token_ids=True)
    assert cut["choices"][0]["prompt_token_ids"] == ids[-3:] and cut["usage"]["prompt_tokens"] == 3
    same = complete(server, prompt=ids[-3:])
    assert same["choices"][0]["text"] == cut["choices"][0]["text"]
    long = {"prompt": "a b c " * 4000, "truncate_prompt_tokens": -1, "max_tokens": 2}
    assert complete(server, **long)["usage"]["completion_tokens"] == 2
    reply = server.post(CHAT, {**HELLO, "max_tokens": 2, "truncate_prompt_tokens": 4})
    assert reply.json()["usage"]["prompt_tokens"] == 4
    for side, kept in (("right", ids[:3]), ("left", ids[-3:])):
        fields = {"truncate_prompt_tokens": 3, "truncation_side": side, "return_token_ids": True}
        assert complete(server, **fields)["choices"][0]["prompt_token_ids"] == kept
    for most in (0, len(ids) + 5):
        reply = server.post(COMPLETIONS, {**TEXT, "truncate_prompt_tokens": most})
        assert reply.status_code == (200 if most else 400)


def test_prompt_logprobs_of_minus_one_are_the_most(server):
    scores = complete(server, prompt_logprobs=-1)["choices"][0]["prompt_logprobs"]
    assert scores[0] is None and all(20 <= len(score) <= 21 for score in scores[1:])


def test_an_echo_begins_with_the_prompts_own_tokens(server):
    ids = server.post("/tokenize", {"prompt": TEXT["prompt"]}).json()["tokens"]
    special = server.get("/tokenizer_info").json()["bos_token"]
    found = complete(server, prompt=ids, echo=True, logprobs=2)["choices"][0]
    logprobs = found["logprobs"]
    assert found["text"].startswith(special + TEXT["prompt"])
    assert logprobs["tokens"][0] == special
    for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:]):
        assert next(iter(top)) == token


GRAMMARS = [
    ({"regex": "[0-9]{3}"}, "digits"),
    ({"json_schema": {"type": "integer", "minimum": 100, "maximum": 999}}, "digits"),
    ({"grammar": "root ::= digit digit digit\ndigit ::= [0-9]"}, "digits"),
    ({"ebnf": "root ::= [0-9] [0-9] [0-9]"}, "digits"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("fields", "kind"), GRAMMARS)
def test_grammars_under_other_servers_names(server, path, fields, kind):
    body = {**TEXT, **fields} if path == COMPLETIONS else {**HELLO, "max_tokens": 12, **fields}
    choice = server.post(path, body).json()["choices"][0]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert len(text) == 3 and text.isdecimal()
    assert choice["finish_reason"] == "stop"


def test_wrong_grammars(server):
    message = error_of(server.post(COMPLETIONS, {**TEXT, "grammar": "root ::= ("}), 400)
    assert message["param"] == "grammar" and "GBNF" in message["message"]
    both = {**TEXT, "regex": "a", "ebnf": 'root ::= "a"'}
    assert "exclude each other" in error_of(server.post(COMPLETIONS, both), 400)["message"]
    beams = error_of(server.post(COMPLETIONS, {**TEXT, "use_beam_search": True}), 400)
    assert "ask for n outputs" in beams["message"]
    empty = error_of(server.post(COMPLETIONS, {**TEXT, "structured_outputs": {"grammar": ""}}), 400)
    assert empty["param"] == "structured_outputs.grammar"
    assert (
        complete(server, grammar="")["choices"][0]["text"] == complete(server)["choices"][0]["text"]
    )


def test_a_full_context_has_its_code_and_the_words_that_clients_read(server):
    for text in ("a b c " * 1000, "a b c " * 9000):
        error = error_of(server.post(CHAT, {"messages": [{"role": "user", "content": text}]}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "is longer than the model's context length" in error["message"]
        assert "exceeds the available context size" in error["message"]
        most = server.get("/props").json()["default_generation_settings"]["n_ctx"]
        assert error["n_ctx"] == most < error["n_prompt_tokens"]


def test_the_rendered_prompt_is_shown_on_request(server):
    prompt = server.post("/apply-template", HELLO).json()["prompt"]
    body = {**HELLO, "max_tokens": 2, "verbose": True}
    assert server.post(CHAT, body).json()["__verbose"] == {"prompt": prompt}
    lines = server.post(CHAT, {**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [chunk.pop("__verbose", None) for chunk in chunks][:2] == [{"prompt": prompt}, None]
    assert "__verbose" not in server.post(CHAT, {**body, "verbose": False}).json()


def test_every_wrong_key_of_a_bias_is_named(server):
    bias = {"a": 1, "5": 1, "b": 1}
    message = error_of(server.post(CHAT, {**HELLO, "logit_bias": bias}), 400)["message"]
    assert "'a', 'b'" in message


def test_latencies_with_vllms_names(server):
    metrics = complete(server, max_tokens=1, return_metrics=True)["metrics"]
    names = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "tokens_per_second"}
    assert names <= set(metrics) and "mean_itl_ms" not in metrics
    metrics = complete(server, max_tokens=4, ignore_eos=True, return_metrics=True)["metrics"]
    assert metrics["generation_time_ms"] == pytest.approx(3 * metrics["mean_itl_ms"])


def test_system_fingerprint(server):
    whole = complete(server)["system_fingerprint"]
    assert whole.startswith("cpmcu-")
    assert server.post(CHAT, {**HELLO, "max_tokens": 1}).json()["system_fingerprint"] == whole
    stream = server.post(COMPLETIONS, {**TEXT, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in stream if line.startswith("data: {")]
    assert {chunk["system_fingerprint"] for chunk in chunks} == {whole}


def test_token_strings_are_null_unless_requested(server):
    assert server.post("/tokenize", {"prompt": "a"}).json()["token_strs"] is None


def test_waiting_by_reason(server):
    for reason in ("capacity", "deferred"):
        assert f'reason="{reason}"}} 0.0' in server.get("/metrics").text


# ---- routes


def test_a_batch_of_conversations(server):
    texts = ("import os", "def add(a, b):", "class Stack:")
    conversations = [[{"role": "user", "content": text}] for text in texts]
    fields = {"max_tokens": 9, "temperature": 0}
    found = server.post(f"{CHAT}/batch", {"messages": conversations, **fields}).json()
    alone = [server.post(CHAT, {"messages": each, **fields}).json() for each in conversations]
    answers = [choice["message"]["content"] for choice in found["choices"]]
    assert answers == [each["choices"][0]["message"]["content"] for each in alone]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][name] == sum(each["usage"][name] for each in alone)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"temperature": "hot"}, "temperature"),
        ({"messages": [[{"role": "user"}]]}, "messages[0][0].content"),
        (
            {"messages": [HELLO["messages"], [{"role": "user", "content": "x = " * 9999}]]},
            "messages[1]",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_wrong_batches(server, fields, param):
    body = {"messages": [HELLO["messages"]], "max_tokens": 1, **fields}
    assert error_of(server.post(f"{CHAT}/batch", body), 400)["param"] == param


def test_invocations(server):
    chat = server.post("/invocations", {**HELLO, "max_tokens": 3}).json()
    assert chat["object"] == "chat.completion"
    assert server.post("/invocations", TEXT).json()["object"] == "text_completion"
    assert (
        "neither messages nor prompt" in error_of(server.post("/invocations", {}), 400)["message"]
    )
    wrong = server.post("/invocations", {**TEXT, "top_p": 2})
    assert error_of(wrong, 400)["param"] == "top_p"


def test_props_and_slots(server):
    props = server.get("/props").json()
    assert props["model_alias"] == server.get("/v1/models").json()["data"][0]["id"]
    slots = server.get("/slots").json()
    assert len(slots) == props["total_slots"] and not any(slot["is_processing"] for slot in slots)
    assert props["default_generation_settings"]["n_ctx"] == slots[0]["n_ctx"]


def test_embeddings_are_refused_with_the_reason(server):
    reply = server.post("/v1/embeddings", {"input": "a"})
    assert "hidden states" in error_of(reply, 400)["message"]


@pytest.fixture(scope="module")
def filling(tmp_path_factory):
    """A model that was trained to fill gaps: after the middle token comes the filling."""
    scripts = {"fim_prefix": "", "fim_suffix": "", "fim_middle": "return a + b"}
    directory = write_scripted(tmp_path_factory.mktemp("filling"), scripts, "{{ messages }}")
    with start("--model", str(directory), "--served-model-name", "filling") as running:
        yield running


def test_a_gap_is_filled(filling):
    body = {
        "input_prefix": "def add(a, b):\n    ",
        "input_suffix": "\n\nadd(1, 2)\n",
        "n_predict": 20,
    }
    found = filling.post("/infill", body).json()
    assert (found["content"], found["stop_type"]) == ("return a + b", "eos")
    tokens = filling.post("/infill", {**body, "return_tokens": True}).json()["tokens"]
    assert found["tokens_predicted"] == len(tokens) and found["tokens"] == []
    lines = filling.post("/infill", {**body, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert "".join(event["content"] for event in events) == "return a + b"
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert filling.post("/infill", {**body, "n_predict": 1}).json()["stop_type"] == "limit"
    extra = [{"filename": "a.py", "text": "x = 1"}]
    more = filling.post("/infill", {**body, "input_extra": extra, "prompt": "  "}).json()
    assert more["content"] == "return a + b"
    assert more["tokens_evaluated"] > found["tokens_evaluated"]
    completion = {"prompt": body["input_prefix"], "suffix": body["input_suffix"], "max_tokens": 20}
    reply = filling.post(COMPLETIONS, {**completion, "return_token_ids": True}).json()["choices"][0]
    assert reply["text"] == "return a + b"
    prompt = filling.post("/detokenize", {"tokens": reply["prompt_token_ids"]}).json()["prompt"]
    assert prompt.endswith("<|fim_middle|>")
    assert prompt.index("<|fim_prefix|>") < prompt.index("def add") < prompt.index("<|fim_suffix|>")


def test_a_model_that_fills_no_gaps(server):
    body = {"input_prefix": "a", "input_suffix": "b"}
    message = error_of(server.post("/infill", body), 400)["message"]
    assert "no tokens such as <|fim_prefix|>" in message
    assert error_of(server.post("/infill", {"input_prefix": "a"}), 400)["param"] == "input_suffix"


def test_tokens_under_llama_cpps_names(server):
    known = server.post(
        "/tokenize", {"prompt": "caf\u00e9 \u5a9a", "add_special_tokens": False}
    ).json()
    found = server.post("/tokenize", {"content": "caf\u00e9 \u5a9a"}).json()
    assert found["tokens"] == known["tokens"]
    special = server.post("/tokenize", {"content": "a", "add_special": True}).json()["tokens"]
    assert special == server.post("/tokenize", {"prompt": "a"}).json()["tokens"]
    pieces = server.post("/tokenize", {"content": "caf\u00e9 \u5a9a", "with_pieces": True}).json()
    raw = b""
    for token in pieces["tokens"]:
        piece = token["piece"]
        raw += piece.encode() if isinstance(piece, str) else bytes(piece)
    assert raw.decode().strip() == "caf\u00e9 \u5a9a"
    text = server.post("/detokenize", {"tokens": found["tokens"]}).json()["content"]
    assert text.strip() == "caf\u00e9 \u5a9a"
    both = server.post("/tokenize", {"content": "a", "prompt": "a"})
    assert "one of prompt, content and messages" in error_of(both, 400)["message"]


def test_a_completion_in_llama_cpps_shape(server):
    body = {"prompt": TEXT["prompt"], "n_predict": 12, "temperature": 0}
    found = server.post("/completion", body).json()
    known = complete(server)["choices"][0]
    assert found["content"] == known["text"]
    assert (found["tokens_predicted"], found["stop_type"]) == (12, "limit")
    stop = known["text"][3:6]
    word = server.post("/completion", {**body, "stop": [stop]}).json()
    assert (word["stop_type"], word["stopping_word"]) == ("word", stop)
    several = server.post("/completion", {**body, "n": 2}).json()
    assert [each["content"] for each in several] == [found["content"]] * 2


def continued(server, prompt, **fields):
    body = {"prompt": prompt, "n_predict": 8, "temperature": 0, **fields}
    reply = server.post("/completion", body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_prompts_in_llama_cpps_forms(server):
    text = TEXT["prompt"]
    ids = server.post("/tokenize", {"content": text, "add_special": True}).json()["tokens"]
    found = continued(server, text)
    several = continued(server, [text, ids, {"prompt_string": text}])
    assert [each["content"] for each in several] == [found["content"]] * 3
    assert continued(server, [text])["content"] == found["content"]
    mixed = continued(server, [*ids, text])
    assert mixed["tokens_evaluated"] > found["tokens_evaluated"]
    for wrong in ([], [[]], [1, [2]], {"prompt_string": text, "multimodal_data": "a"}):
        reply = server.post("/completion", {"prompt": wrong, "n_predict": 1})
        assert error_of(reply, 400)["message"].startswith("prompt")


def test_the_members_of_a_completion(server):
    found = continued(server, TEXT["prompt"], seed=7, stop=["never"])
    assert found["prompt"].endswith(TEXT["prompt"])
    settings = found["generation_settings"]
    assert (settings["seed"], settings["n_predict"], settings["stop"]) == (7, 8, ["never"])
    assert found["has_new_line"] is ("\n" in found["content"])
    paths = ["content", "generation_settings/n_predict", "absent/x"]
    few = continued(server, TEXT["prompt"], response_fields=paths)
    assert few == {"content": found["content"], "generation_settings/n_predict": 8}


def test_n_predict_limits_all_routes(server):
    text = complete(server, max_tokens=5)["choices"][0]["text"]
    body = {name: TEXT[name] for name in ("prompt", "temperature")}
    found = server.post(COMPLETIONS, {**body, "n_predict": 5}).json()
    assert found["choices"][0]["text"] == text and found["usage"]["completion_tokens"] == 5
    both = server.post(COMPLETIONS, {**body, "n_predict": 5, "max_tokens": 3}).json()
    assert both["usage"]["completion_tokens"] == 3
    chat = server.post(CHAT, {**HELLO, "n_predict": 5}).json()
    assert chat["usage"]["completion_tokens"] == 5
    native = server.post("/completion", {**body, "max_tokens": 5}).json()
    assert native["content"] == text and native["tokens_predicted"] == 5
    whole = {**body, "n_predict": -1, "ignore_eos": True}
    size = server.get("/props").json()["default_generation_settings"]["n_ctx"]
    assert server.post(COMPLETIONS, whole).json()["usage"]["total_tokens"] == size


def test_a_completion_that_fills_the_context_is_truncated(server):
    body = {"prompt": TEXT["prompt"], "temperature": 0, "ignore_eos": True}
    found = server.post("/completion", body).json()
    size = server.get("/props").json()["default_generation_settings"]["n_ctx"]
    assert found["tokens_evaluated"] + found["tokens_predicted"] == size
    assert found["truncated"] is True and found["stop_type"] == "limit"
    assert continued(server, TEXT["prompt"])["truncated"] is False


def test_the_progress_of_a_completion(server):
    text = " ".join(f"x{i} = {i}" for i in range(40))
    fields = {"return_progress": True, "timings_per_token": True, "stream": True}
    body = {"prompt": text, "n_predict": 2, "temperature": 0, **fields}
    lines = server.post("/completion", body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    found = [event for event in events if "prompt_progress" in event]
    assert len(found) > 1 and events[: len(found)] == found
    first, last = found[0], found[-1]
    assert first["prompt_progress"]["processed"] == first["prompt_progress"]["cache"]
    assert (first["timings"]["prompt_n"], first["timings"]["prompt_ms"]) == (0, 0)
    assert last["prompt_progress"]["processed"] == last["prompt_progress"]["total"]
    assert last["timings"]["prompt_n"] > 0 and last["timings"]["prompt_ms"] > 0
    assert all(event["content"] == "" and event["stop"] is False for event in found)
    assert server.post("/completion", {**body, "stream": False}).json()["tokens_predicted"] == 2


def test_probabilities_of_a_completion(server):
    found = continued(server, TEXT["prompt"], n_probs=3, return_tokens=True)
    scores = found["completion_probabilities"]
    assert [score["id"] for score in scores] == found["tokens"]
    for score in scores:
        assert score["logprob"] <= 0 and len(score["top_logprobs"]) == 3
        tops = [top["logprob"] for top in score["top_logprobs"]]
        assert tops == sorted(tops, reverse=True) and score["logprob"] <= tops[0]
    body = {"prompt": TEXT["prompt"], "n_predict": 8, "n_probs": 3, "temperature": 0}
    lines = server.post("/completion", {**body, "stream": True}).text.splitlines()
    *parts, end = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert "".join(part["content"] for part in parts) == found["content"] and not end["content"]
    assert [s["id"] for part in parts for s in part["completion_probabilities"]] == found["tokens"]
    refusal = server.post("/completion", {**body, "post_sampling_probs": True})
    assert error_of(refusal, 400)["param"] == "post_sampling_probs"


def test_biases_in_llama_cpps_forms(server):
    found = continued(server, TEXT["prompt"], return_tokens=True)
    token = found["tokens"][0]
    for bias in ([[token, False]], [[token, -100]], {str(token): False}):
        other = continued(server, TEXT["prompt"], logit_bias=bias, return_tokens=True)
        assert token not in other["tokens"]
    word = server.post("/detokenize", {"tokens": [token]}).json()["content"]
    other = continued(server, TEXT["prompt"], logit_bias=[[word, False]], return_tokens=True)
    assert token not in other["tokens"]
    reply = server.post("/completion", {"prompt": "a", "logit_bias": [["a", "b"]]})
    assert error_of(reply, 400)["param"].startswith("logit_bias")


def test_a_rendered_conversation(scripted):
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert scripted.post("/apply-template", body).json() == {"prompt": "Hi"}


def test_the_tokens_of_a_conversation_are_counted(server):
    counted = server.post(f"{CHAT}/input_tokens", HELLO).json()["input_tokens"]
    answer = server.post(CHAT, {**HELLO, "max_tokens": 1}).json()
    assert counted == answer["usage"]["prompt_tokens"]
    error_of(server.post(f"{CHAT}/input_tokens", {"messages": []}), 400)


def test_deltas_of_a_chat_have_reasoning_content(server):
    body = {**HELLO, "max_tokens": 4, "stream": True}
    lines = server.post(CHAT, body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas and all(delta["reasoning_content"] is None for delta in deltas)
    first, *others = deltas
    assert (first["role"], first["content"]) == ("assistant", None)
    assert all(delta["content"] for delta in others if "content" in delta)


def test_timings(server):
    timings = complete(server, timings_per_token=True)["timings"]
    assert timings["predicted_n"] == 12
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 11)
    assert timings["prompt_per_token_ms"] * timings["prompt_n"] == pytest.approx(
        timings["prompt_ms"]
    )
    assert complete(server)["timings"] is None
    stream = {**TEXT, "stream": True, "timings_per_token": True}
    lines = server.post(COMPLETIONS, stream).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["timings"]["predicted_n"] == 12
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks]
    assert counts[0] > 0 and counts == sorted(counts)


STREAMS = [
    ("/completion", {"prompt": TEXT["prompt"], "n_predict": 8}),
    (CHAT, {**HELLO, "max_tokens": 8}),
    ("/v1/responses", {"input": "x = ", "max_output_tokens": 8}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS, ids=[path for path, _ in STREAMS])
def test_timings_and_progress_of_a_stream(server, path, body):
    # The shipped model's default is sampling, and may draw an end of the text before the limit.
    fields = {"temperature": 0, "ignore_eos": True}
    fields |= {"timings_per_token": True, "return_progress": True, "stream": True}
    lines = server.post(path, {**body, **fields}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert progress[-1]["processed"] == progress[-1]["total"] > 0
    counts = [event["timings"]["predicted_n"] for event in events if "timings" in event]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 8
    plain = server.post(path, {**body, "stream": True}).text
    assert "prompt_progress" not in plain and (path == "/completion" or '"timings"' not in plain)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_output_ends_with_a_match_of_stop_regex(server, path):
    body = TEXT if path == COMPLETIONS else {**HELLO, "max_tokens": 24, "temperature": 0}
    pattern = "[^ \n]+[ \n]"

    def answer(**fields):
        choice = server.post(path, {**body, **fields}).json()["choices"][0]
        return choice["text"] if path == COMPLETIONS else choice["message"]["content"], choice

    plain, _ = answer()
    text, choice = answer(stop_regex=pattern)
    assert text == plain[: re.search(pattern, plain).end()]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == choice["matched_stop"] == pattern
    assert answer(stop_regex=["\u0001", pattern])[0] == text
    for neutral in ("", [], None):
        assert answer(stop_regex=neutral)[0] == plain
    for wrong in ("(", [r"(a)\1"], ["a"] * 9, 5):
        error = error_of(server.post(path, {**body, "stop_regex": wrong}), 400)
        assert error["param"].startswith("stop_regex")
    hostile = {"stop_regex": "(?s:.{1,200}){1,200}zz", "max_tokens": 400, "ignore_eos": True}
    error = error_of(server.post(path, {**body, **hostile}), 400)
    assert "too complex" in error["message"]


CONST = {"type": "const_string", "value": "The capital of France is Berlin."}
CALL = {"begin": "<f=a>", "schema": {"type": "boolean"}, "end": "</f>"}
FORCED = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [{**CALL, "content": {"type": "json_schema", "json_schema": {"type": "boolean"}}}],
    "at_least_one": True,
    "stop_after_first": True,
}
BOOLEANS = {"<f=a>true</f>", "<f=a>false</f>"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_structural_tags(server, path):
    body = {**TEXT, "max_tokens": 60}
    if path == CHAT:
        body = {**HELLO, "max_tokens": 60, "temperature": 0}

    def answer(**fields):
        reply = server.post(path, {**body, **fields})
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        return choice["text"] if path == COMPLETIONS else choice["message"]["content"]

    def tag(**fields):
        return {"type": "structural_tag", **fields}

    assert answer(response_format=tag(format=CONST)) == CONST["value"]
    assert answer(response_format=tag(format=FORCED)) in BOOLEANS
    for given in (tag(format=FORCED), json.dumps(tag(format=FORCED))):
        assert answer(structured_outputs={"structural_tag": given}) in BOOLEANS
    old = tag(structures=[CALL], triggers=["<f="])
    assert answer(response_format=old) == answer()  # no tag begins in the text
    for wrong, param in (
        ({"response_format": tag()}, "response_format"),
        ({"response_format": tag(format={"type": "audio"})}, "response_format"),
        ({"response_format": tag(structures=[CALL])}, "response_format"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
    ):
        assert error_of(server.post(path, {**body, **wrong}), 400)["param"] == param


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/completion"])
def test_tags_that_are_special_tokens(special, path):
    """The output has the tokens of the tags, and not their spelling."""
    digits = {"type": "regex", "pattern": "[0-9]{3}"}
    tag = {"type": "tag", "begin": "<|other|>", "content": digits, "end": "</think>"}
    fields = {"structured_outputs": {"structural_tag": {"format": tag}}, "max_tokens": 30}
    prompt = HELLO if path == CHAT else {"prompt": "tell"}
    body = {**prompt, **fields, "skip_special_tokens": False}
    body |= {"return_token_ids": True, "return_tokens": True}
    found = special.post(path, body).json()
    if path == "/completion":
        ids, text = found["tokens"], found["content"]
    else:
        choice = found["choices"][0]
        ids = choice["token_ids"]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert re.fullmatch(r"<\|other\|>[0-9]{3}</think>", text), text
    tokens = special.post("/tokenize", {"prompt": "<|other|></think>"}).json()["tokens"]
    assert [token for token in ids if token in tokens] == tokens[-2:]


def test_the_tokens_of_a_prompt_are_handed_over(server):
    """vLLM's kv_transfer_params: the token ids are the prompt, whatever the messages are."""
    fields = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
    first = server.post(CHAT, {**HELLO, **fields}).json()
    other = {"messages": [{"role": "user", "content": "import os"}], **fields}
    transfer = {"prompt_token_ids": first["prompt_token_ids"], "remote_port": 5}
    found = server.post(CHAT, {**other, "kv_transfer_params": transfer}).json()
    for reply in (first, found):
        del reply["id"], reply["created"], reply["usage"]
    assert found == first
    for none in (None, {}, {"prompt_token_ids": None, "do_remote_prefill": True}):
        reply = server.post(CHAT, {**other, "kv_transfer_params": none}).json()
        assert reply["prompt_token_ids"] != first["prompt_token_ids"]
    for wrong in ([], [1 << 30], [-1], ["a"]):
        reply = server.post(CHAT, {**other, "kv_transfer_params": {"prompt_token_ids": wrong}})
        assert error_of(reply, 400)["param"].startswith("kv_transfer_params.prompt_token_ids")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"seed": -(1 << 63) - 1}, "greater_than_equal"),
        ({"seed": 1 << 64}, "less_than"),
        ({"n": "a"}, "int_type"),
        ({"messages": None}, "list_type"),
        ({"top_p": 2}, "less_than_equal"),
        ({"stop": ["a", 5]}, "invalid_value"),
    ],
)
def test_the_code_of_an_error_tells_the_kind(server, fields, code):
    error = error_of(server.post(CHAT, {**HELLO, **fields}), 400)
    assert (error["code"], error["param"]) == (code, next(iter(fields)))
