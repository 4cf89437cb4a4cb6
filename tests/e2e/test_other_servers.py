"""Fields and routes of vLLM, llama.cpp and SGLang beyond OpenAI's."""

from __future__ import annotations

import json

import pytest

from tests.e2e.calls import CHAT, HELLO, error_of

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
