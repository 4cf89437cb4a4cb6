"""Structured output over HTTP parses, validates, and is equal with and without drafts."""

from __future__ import annotations

import json
import re

import jsonschema
import openai
import pytest

from cpmcu import LLM, Grammar, SamplingParams

MODEL = "tiny-python-minicpm"
CHAT = [{"role": "user", "content": "name = "}]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["function", "class", "关键字"]},
        "lines": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["kind", "lines", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def ask(client, **fields):
    fields = {"max_tokens": 120, "temperature": 1, "seed": 3, **fields}
    return client.chat.completions.create(model=MODEL, messages=CHAT, **fields)


def test_a_schema(client):
    with LLM(device="cpu", num_threads=1, speculative_config={"no_speculation": True}) as llm:
        for seed in range(4):
            choice = ask(client, seed=seed, response_format=FORMAT).choices[0]
            text = choice.message.content
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(text), SCHEMA)
            stream = ask(client, seed=seed, response_format=FORMAT, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
            grammar = Grammar.json_schema(SCHEMA)
            params = SamplingParams(max_tokens=120, temperature=1, seed=seed, grammar=grammar)
            assert llm.chat(CHAT, params)[0].text == text


def test_other_grammars(client):
    found = ask(client, response_format={"type": "json_object"}, max_tokens=40).choices[0]
    if found.finish_reason == "stop":
        assert isinstance(json.loads(found.message.content), dict)
    assert found.message.content.startswith("{")
    for body, pattern in (
        ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"guided_choice": ["yes", "no", "vielleicht"]}, "yes|no|vielleicht"),
        ({"guided_grammar": 'start: "a" ("b" | "c") "d"'}, "a[bc]d"),
        ({"guided_json": json.dumps({"type": "boolean"})}, "true|false"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "a|b"),
        ({"structured_outputs": {"regex": "[xy]{4}"}}, "[xy]{4}"),
    ):
        text = ask(client, extra_body=body).choices[0].message.content
        assert re.fullmatch(pattern, text), text
        reply = client.completions.create(model=MODEL, prompt="x", max_tokens=40, extra_body=body)
        assert re.fullmatch(pattern, reply.choices[0].text)


def tool(name: str, **properties: dict) -> dict:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    schema["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("count", n={"type": "integer", "maximum": 99, "minimum": 0}), tool("stop")]


def test_forced_calls(client):
    # A response_format is the form of texts. Agents send it with every turn, forced or not.
    for fields in ({"response_format": FORMAT}, {"stream": True}):
        fields = {"parallel_tool_calls": False, **fields}
        reply = ask(client, tools=TOOLS, tool_choice="required", **fields)
        if fields.get("stream"):
            chunks = [chunk.choices[0] for chunk in reply]
            deltas = [c.delta.tool_calls[0] for c in chunks if c.delta.tool_calls]
            calls = deltas[:1]
            for delta in deltas[1:]:
                calls[0].function.arguments += delta.function.arguments
            assert not any(chunk.delta.content for chunk in chunks)
            finish = chunks[-1].finish_reason
        else:
            calls, finish = reply.choices[0].message.tool_calls, reply.choices[0].finish_reason
            assert reply.choices[0].message.content is None
        (call,) = calls
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
        assert finish == "tool_calls"
    named = {"type": "function", "function": {"name": "count"}}
    (call,) = ask(client, tools=TOOLS, tool_choice=named).choices[0].message.tool_calls
    assert call.function.name == "count"
    assert 0 <= json.loads(call.function.arguments)["n"] <= 99


PAIR = {  # pydantic's schema of nested models and of a recursive model
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/Side"}, "rest": {"$ref": "#/definitions/Rest"}},
    "required": ["left", "rest"],
    "additionalProperties": False,
    "$defs": {"Side": {"enum": ["a", "b"]}},
    "definitions": {"Rest": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
}


ENDLESS = {"name": "endless", "schema": {"$ref": "#"}}


def pair_tool(name: str, **changes: object) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {**PAIR, **changes}}}


def test_schemas_of_tools_that_refer_to_themselves(client, server):
    """Each schema keeps its own root within a composed grammar."""
    body = {"prompt": "n", "add_special_tokens": False}
    (n,) = server.post("/tokenize", body).json()["tokens"]
    ends = {str(n): 50}  # ends a recursive value with null
    other = {"Side": {"enum": [1, 2]}}
    tools = [pair_tool("first"), pair_tool('second "@tool_0"', **{"$defs": other})]
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
    named = {"type": "function", "function": {"name": "first"}}
    for given, choice in ((tools, "required"), (tools[1:], "required"), (tools, named)):
        fields = {"tools": given, "tool_choice": choice, "parallel_tool_calls": False}
        reply = ask(client, temperature=0, logit_bias=ends, **fields)
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name in {t["function"]["name"] for t in given}
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},  # llama.cpp, Together
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_object", "json_schema": {"schema": SCHEMA}},
    ],
)
def test_a_schema_is_never_dropped(client, form):
    expected = ask(client, response_format=FORMAT).choices[0].message.content
    jsonschema.validate(json.loads(expected), SCHEMA)
    assert ask(client, response_format=form).choices[0].message.content == expected


@pytest.mark.parametrize("schema", [{}, True])
def test_a_json_object_is_an_object_whatever_its_schema_leaves_open(client, schema):
    form = {"type": "json_object", "schema": schema}
    expected = ask(client, response_format={"type": "json_object"}, max_tokens=30)
    found = ask(client, response_format=form, max_tokens=30).choices[0].message.content
    assert found == expected.choices[0].message.content
    assert found.startswith("{")


def test_a_grammar_that_fails_later_ends_its_request_with_a_sentence(client, server):
    """The grammar exceeds its limits only after many tokens: other requests continue."""
    body = {"guided_regex": "(x|y){40}((a{0,100}){0,100}){50,100}"}
    for stream in (False, True):
        with pytest.raises(openai.APIError) as error:
            for _ in ask(client, extra_body=body, stream=stream, max_tokens=100):
                pass
        assert re.fullmatch(r"The grammar cannot be followed: .*\.", error.value.body["message"])
        assert error.value.code == "grammar_failed"
        assert stream or error.value.status_code == 400
    assert "Traceback" not in server.log
    assert ask(client, extra_body=body, max_tokens=5).usage.completion_tokens == 5
    assert ask(client, max_tokens=3).usage.completion_tokens == 3
    server.wait_idle()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "has a schema, but type text"),
        ({"extra_body": {"guided_regex": "a{1000000}"}}, "regex cannot be used: it forces"),
        (
            {"extra_body": {"guided_regex": "xa{100000}"}},
            "regex cannot be used: it forces 100001 bytes",
        ),
        ({"extra_body": {"guided_json": {"type": "string", "pattern": "^a{1000000}$"}}}, "schema"),
        ({"extra_body": {"guided_grammar": 'start: "a"{1000000}'}}, "lark cannot be used"),
        (
            {
                "tools": [pair_tool("f"), pair_tool("g", definitions={})],
                "tool_choice": "required",
            },
            "Tool 'g' has an invalid 'parameters' schema: .*/definitions/Rest",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": ENDLESS}},
            "json schema cannot be used: a .* is .*#.*, which leads back to itself, expected a",
        ),
        ({"extra_body": {"guided_regex": "a("}}, "regex cannot be used"),
        ({"extra_body": {"guided_regex": ""}}, "guided_regex"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice"),
        ({"extra_body": {"guided_grammar": "start: nothing"}}, "lark"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json"),
        ({"extra_body": {"guided_json": "{}", "guided_regex": "a"}}, "exclude each other"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "json": "{}"}}}, "exclude each"),
        (
            {"extra_body": {"structured_outputs": {"json": {}, "json_object": True}}},
            "structured_outputs.json and structured_outputs.json_object exclude each",
        ),
        ({"extra_body": {"structured_outputs": {"whitespace_pattern": " "}}}, "whitespace_pattern"),
        ({"response_format": FORMAT, "extra_body": {"guided_regex": "a"}}, "exclude each other"),
        (
            {
                "extra_body": {"guided_regex": "a"},
                "tools": TOOLS,
                "tool_choice": "required",
            },
            "A forced tool_choice and guided_regex exclude each other",
        ),
        ({"extra_body": {"guided_json": {"type": "object", "not": {"x": 1}}}}, "json schema"),
    ],
)
def test_invalid_grammars_are_refused(client, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, **fields)
