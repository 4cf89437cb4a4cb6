"""Client libraries with their usual programs: the server accepts all their requests.

Each is skipped where it is missing (`pip install 'cpmcu[clients]'`). npm's packages are
installed into build/node.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Annotated, Literal

import openai
import pytest
from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.calls import node_modules
from tests.e2e.conftest import SCRIPTS
from tests.e2e.harness import cue

os.environ.setdefault(
    "LITELLM_LOCAL_MODEL_COST_MAP", "True"
)  # otherwise litellm uses the network at import

MODEL = "tiny-python-minicpm"
ASK = [{"role": "user", "content": "name = "}]


Side = Literal["left", "right"]


class Point(BaseModel):
    """A place."""

    model_config = ConfigDict(extra="forbid")

    x: Annotated[int, Ge(0), Le(9)]
    side: Side


# A model of this size may generate white space without end.
COMPACT = {"x-guidance": {"whitespace_flexible": False}}


class Line(BaseModel):
    """A line between two points: its schema has $defs and $ref."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=COMPACT)

    start: Point
    end: Point


class Dot(BaseModel):
    """One place."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=COMPACT)

    at: Point


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: Annotated[int, Ge(0), Le(9)]

    model_config = ConfigDict(extra="forbid")


class Square(BaseModel):
    kind: Literal["square"]
    side: Annotated[int, Ge(0), Le(9)]

    model_config = ConfigDict(extra="forbid")


class Drawing(BaseModel):
    """A circle or a square: the schema has oneOf and a discriminator."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=COMPACT)

    form: Annotated[Circle | Square, Field(discriminator="kind")]


# ---- openai


def test_openai_parses_tools_and_formats_made_of_pydantic_models(server):
    parse = server.client().chat.completions.parse
    fields = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 150}
    tools = [openai.pydantic_function_tool(each) for each in (Line, Dot)]
    for given in (tools, tools[1:]):
        reply = parse(tools=given, tool_choice="required", parallel_tool_calls=False, **fields)
        (call,) = reply.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, (Line, Dot))
    reply = parse(response_format=Line, **fields)
    assert isinstance(reply.choices[0].message.parsed, Line)
    with server.client().chat.completions.stream(response_format=Line, **fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == reply.choices[0].message.parsed
    assert {"content.delta", "content.done"} <= kinds


# ---- instructor


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor(server, mode):
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(server.client(), mode=getattr(instructor.Mode, mode))
    fields = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 150}
    found = client.chat.completions.create(response_model=Line, max_retries=0, **fields)
    assert isinstance(found, Line)
    *_, last = client.chat.completions.create_partial(response_model=Line, max_retries=0, **fields)
    assert last.model_dump() == found.model_dump()


# ---- pydantic-ai


@pytest.fixture
def agent(server):
    """Makes an agent of pydantic-ai for an output type."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    settings = {"temperature": 0, "max_tokens": 300, "parallel_tool_calls": False}

    def make(output_type):
        model = OpenAIChatModel(MODEL, provider=provider)
        return pydantic_ai.Agent(model, output_type=output_type, model_settings=settings)

    return make


def test_pydantic_ai(agent):
    """pydantic-ai's output types are tools, of which one must be called."""
    assert isinstance(agent(Line).run_sync("name = ").output, Line)
    assert isinstance(agent([Line, Dot]).run_sync("name = ").output, (Line, Dot))
    assert isinstance(agent(Drawing).run_sync("name = ").output, Drawing)
    from pydantic_ai import NativeOutput

    assert isinstance(agent(NativeOutput(Line)).run_sync("name = ").output, Line)
    assert agent(str).run_sync("name = ").usage.output_tokens > 0


def test_pydantic_ai_calls_a_tool(agent):
    made = agent(Dot)
    seen = []

    @made.tool_plain
    def look(side: Side) -> str:
        """Looks at a side."""
        seen.append(side)
        return "nothing"

    from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
    from pydantic_ai.usage import UsageLimits

    try:  # a model of this size may call it again and again
        output = made.run_sync("name = ", usage_limits=UsageLimits(request_limit=3)).output
        assert isinstance(output, Dot)
    except UsageLimitExceeded:
        assert len(seen) == 3
    except UnexpectedModelBehavior as error:
        pytest.fail(f"it does not understand the server: {error}")


# ---- litellm


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_litellm(server, provider):
    litellm = pytest.importorskip("litellm")
    fields = {
        "model": f"{provider}/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": ASK,
        "temperature": 0,
        "max_tokens": 150,
    }
    whole = litellm.completion(**fields)
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **fields))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    reply = litellm.completion(response_format=Line, **fields)
    Line.model_validate_json(reply.choices[0].message.content)
    tools = [openai.pydantic_function_tool(each) for each in (Line, Dot)]
    reply = litellm.completion(tools=tools, tool_choice="required", **fields)
    call = reply.choices[0].message.tool_calls[0].function
    {"Line": Line, "Dot": Dot}[call.name].model_validate_json(call.arguments)
    reply = litellm.completion(logprobs=True, top_logprobs=2, **{**fields, "max_tokens": 3})
    assert len(reply.choices[0].logprobs.content) == 3
    if provider == "hosted_vllm":
        more = {"min_tokens": 5, "guided_regex": "[a-z]+", "max_tokens": 9}
        reply = litellm.completion(**{**fields, **more})
        assert 5 <= reply.usage.completion_tokens <= 9


def test_litellm_responses(scripted):
    litellm = pytest.importorskip("litellm")
    fields = {
        "model": "openai/scripted",
        "api_base": f"{scripted.url}/v1",
        "api_key": "none",
        "input": cue("story"),
        "temperature": 0,
    }
    reply = litellm.responses(**fields)
    assert reply.output[0].content[0].text == SCRIPTS["story"]
    events = list(litellm.responses(stream=True, **fields))
    assert events[-1].response.output[0].content[0].text == SCRIPTS["story"]


# ---- node

PROGRAM = """
const OpenAI = require("openai");
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const ask = { model: process.argv[3], messages: [{ role: "user", content: "name = " }],
              temperature: 0, max_tokens: 100 };
const parameters = JSON.parse(process.argv[4]);
(async () => {
  const found = {};
  found.models = (await client.models.list()).data.map((model) => model.id);
  found.whole = (await client.chat.completions.create(ask)).choices[0].message.content;
  const stream = await client.chat.completions.create(
    { ...ask, stream: true, stream_options: { include_usage: true } });
  found.streamed = "";
  for await (const chunk of stream) {
    found.streamed += chunk.choices[0]?.delta?.content ?? "";
    found.usage = chunk.usage?.completion_tokens;
  }
  const tools = [{ type: "function", function: { name: "Line", parameters, strict: true } }];
  const runner = client.chat.completions.stream({ ...ask, tools, tool_choice: "required",
                                                  parallel_tool_calls: false });
  found.call = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function;
  found.reason = (await runner.finalChatCompletion()).choices[0].finish_reason;
  const completion = await client.completions.create(
    { model: ask.model, prompt: "x = ", max_tokens: 4, logprobs: 1, temperature: 0 });
  found.tokens = completion.choices[0].logprobs.tokens.length;
  try {
    await client.chat.completions.create({ ...ask, stream_options: { include_usage: true } });
  } catch (error) {
    found.refused = [error.status, error.param, error instanceof OpenAI.BadRequestError];
  }
  console.log(JSON.stringify(found));
})();
"""


def test_node(server, tmp_path):
    """The `openai` package of npm: whole, streamed, a tool with $ref, an error."""
    modules = node_modules("openai")
    program = tmp_path / "client.js"
    program.write_text(PROGRAM)
    schema = json.dumps(Line.model_json_schema())
    done = subprocess.run(
        ["node", str(program), f"{server.url}/v1", MODEL, schema],
        env={**os.environ, "NODE_PATH": modules},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["models"] == [MODEL]
    assert found["streamed"] == found["whole"] != ""
    assert 0 < found["usage"] <= 100
    assert found["call"]["name"] == "Line"
    Line.model_validate_json(found["call"]["arguments"])
    assert found["reason"] == "tool_calls"
    assert found["tokens"] == 4
    assert found["refused"] == [400, "stream_options", True]
