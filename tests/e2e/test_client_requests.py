"""Requests of clients that are not installed here, as the clients send them.

guidance 0.3 (`VLLMModel`), outlines 1.3 (its SGLang back end), open-webui 0.12 and aider 0.86 were
observed.
"""

from __future__ import annotations

import json

import pytest

from tests.e2e.calls import CHAT, HELLO

# Grammars that guidance makes of select, gen(regex), gen(max_tokens) and gen(stop).
SELECT = '%llguidance {}\n\nstart: a\na[capture]: A\n\nA: "yes"\n     | "no"\n'
REGEX = "%llguidance {}\n\nstart: a\na[capture]: A\nA: /[0-9]{3}/\n"
LIMIT = "%llguidance {}\n\nstart: t\nt[capture, max_tokens=8]: T\nT: /(?s:.*)/\n"
STOP = '%llguidance {}\n\nstart: a\na[capture, stop=":"]: A\nA: /(?s:.*)/\n'


def streamed(server, body) -> tuple[str, str, dict]:
    """The text, the finish reason and the usage of a streamed chat."""
    lines = server.post(CHAT, {**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "data: [DONE]" in lines
    assert not any("error" in chunk for chunk in chunks), chunks
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    usage = next((chunk["usage"] for chunk in chunks if chunk.get("usage")), {})
    assert len(reasons) == 1
    return text, reasons[0], usage


@pytest.mark.parametrize("grammar", [SELECT, REGEX, LIMIT, STOP])
def test_guidance(server, grammar):
    """The grammar is sent under two names. Drafts follow it, even if rules have limits."""
    fields = {"guided_decoding_backend": "guidance", "guided_grammar": grammar}
    fields |= {"structured_outputs": {"grammar": grammar}, "max_tokens": 64}
    body = {**HELLO, "logprobs": False, "stream_options": {"include_usage": True}, **fields}
    for temperature in (0, 1.0):
        text, reason, usage = streamed(server, {**body, "temperature": temperature, "seed": 3})
        if grammar == SELECT:
            assert text in ("yes", "no")
        elif grammar == REGEX:
            assert len(text) == 3 and text.isdecimal()
        elif grammar == LIMIT:
            assert text and usage["completion_tokens"] <= 9
        else:  # the token that ends the rule may go on behind the colon
            assert len(text.partition(":")[2]) < 8
        assert reason == "stop" or (grammar == STOP and usage["completion_tokens"] == 64)


def test_outlines_for_sglang(server):
    schema = {"properties": {"ok": {"title": "Ok", "type": "boolean"}}, "required": ["ok"]}
    schema |= {"title": "P", "type": "object", "additionalProperties": False}
    form = {"name": "default", "strict": True, "schema": schema}
    fields = [
        (
            {"response_format": {"type": "json_schema", "json_schema": form}},
            ('{"ok":', '{"ok":true}', '{"ok":false}'),  # a small model may write spaces to the end
        ),
        ({"regex": "(red|blue)"}, ("red", "blue")),
        ({"ebnf": 'root ::= "a" "b"'}, ("ab",)),
    ]
    for given, texts in fields:
        body = {**HELLO, **given, "max_tokens": 40, "temperature": 0}
        answer = server.post(CHAT, body).json()["choices"][0]["message"]["content"]
        assert "".join(answer.split()) in texts
        assert streamed(server, body)[0] == answer


def test_open_webui(server):
    """The list of models, a chat, and the title of a chat, with a key that nothing checks."""
    key = {"Authorization": "Bearer none"}
    (model, *_) = server.get("/v1/models", **key).json()["data"]
    assert model["object"] == "model"
    body = {"model": model["id"], **HELLO, "stream_options": {"include_usage": True}}
    body |= {"temperature": 0, "max_tokens": 12}
    text, _, usage = streamed(server, body)
    assert text and usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    task = {"model": model["id"], **HELLO, "stream": False, "max_completion_tokens": 100}
    reply = server.post(CHAT, task, **key)
    assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["role"] == "assistant"


def test_aider(server):
    """The request has messages of three roles, is streamed, and has no `max_tokens`."""
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": role, "content": f"Say {role}."} for role in roles]
    text, reason, _ = streamed(server, {"messages": messages, "temperature": 0})
    assert text and reason in ("stop", "length")
