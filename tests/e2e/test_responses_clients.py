"""Clients of /v1/responses: Codex's requests as it sends them, and libraries for agents.

Each library is skipped where it is missing (`pip install 'cpmcu[clients]'`).
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.e2e.calls import node_modules
from tests.e2e.conftest import SCRIPTS
from tests.e2e.harness import cue

MODEL = "tiny-python-minicpm"


class Switch(BaseModel):
    """A thing that is on or off."""

    # A model of this size may generate white space without end.
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"x-guidance": {"whitespace_flexible": False}}
    )

    on: bool


# ---- openai


def test_openai_parses_text_and_tools(server):
    client = server.client()
    fields = {"model": MODEL, "input": "x", "temperature": 0, "max_output_tokens": 100}
    reply = client.responses.parse(text_format=Switch, **fields)
    assert isinstance(reply.output_parsed, Switch)
    tool = openai.pydantic_function_tool(Switch)["function"]
    tools = [{"type": "function", **tool}]
    reply = client.responses.parse(tools=tools, tool_choice="required", **fields)
    assert set(json.loads(reply.output[0].arguments)) == {"on"}
    with client.responses.stream(text_format=Switch, **fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Switch)
    assert {"response.output_text.delta", "response.output_text.done"} <= kinds


def test_openai_without_waiting(scripted):
    async def run():
        async with scripted.async_client() as client:
            stream = await client.responses.create(
                model="scripted", input=cue("think"), temperature=0, stream=True
            )
            return [event async for event in stream]

    events = asyncio.run(run())
    thought = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    assert thought == "So, 🤔 two\nand two."
    assert events[-1].response.output_text == "Four, 四."


# ---- Codex 0.169: its first request, shortened texts


def text(role, words):
    return {
        "type": "message",
        "id": "msg_01a20f50-30ad-77e2-996d-361bf8c11363",
        "role": role,
        "content": [{"type": "input_text", "text": words}],
    }


SHELL = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command in a PTY, returning output or a session ID.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string", "description": "Shell command to execute."}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
CODEX = {
    "model": "scripted",
    "input": [
        text("developer", "You are a coding agent. "),
        text("developer", "<skills_instructions>\n## Skills\n</skills_instructions>"),
        text("user", "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>"),
        text("user", cue("think")),
    ],
    "tools": [
        SHELL,
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Tools for spawning and managing sub-agents.",
            "tools": [{**SHELL, "name": "close_agent"}],
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a20f50-2fef-7412-a255-12ed05cade96",
    "client_metadata": {"x-codex-window-id": "01a20f50:0", "x-codex-turn-metadata": "{}"},
}
# What Codex reads of an item in response.output_item.done; it ignores an item without these.
READ_BY_CODEX = {
    "message": {"role", "content"},
    "reasoning": {"summary", "encrypted_content"},
    "function_call": {"name", "arguments", "call_id"},
}


def codex(scripted, body):
    """Returns (the items that Codex keeps, the last event). It reads only some of the events."""
    items, last = [], None
    headers = {"accept": "text/event-stream", "originator": "codex_exec"}
    url = f"{scripted.url}/v1/responses"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if not line.startswith("data: "):
                continue
            event = last = json.loads(line[6:])
            if event["type"] == "response.output_item.done":
                assert READ_BY_CODEX[event["item"]["type"]] <= set(event["item"])
                items.append(event["item"])
    assert last["type"] == "response.completed"
    usage = last["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 0
    assert usage["output_tokens_details"]["reasoning_tokens"] >= 0
    return items, last


def test_the_first_requests_of_codex(scripted):
    items, _ = codex(scripted, CODEX)
    assert [item["type"] for item in items] == ["reasoning", "message"]
    assert items[1]["content"][0]["text"] == "Four, 四."

    asked = copy.deepcopy(CODEX)
    asked["input"][-1] = text("user", cue("call"))
    items, _ = codex(scripted, asked)
    assert [item["type"] for item in items] == ["message", "function_call", "function_call"]
    # The next turn: Codex sends the items back, each with the output of its call.
    asked["input"] += items
    for item in items[1:]:
        output = f"Process exited with code 0\nOutput:\n{cue('story')}"
        asked["input"].append(
            {
                "type": "function_call_output",
                "id": "fco_01a20f50",
                "call_id": item["call_id"],
                "output": output,
            }
        )
    (item,), last = codex(scripted, asked)
    assert item["content"][0]["text"] == SCRIPTS["story"]
    assert last["response"]["store"] is False


def test_codex_tells_the_skipped_tools(scripted):
    codex(scripted, CODEX)
    for kind in ("namespace", "web_search", "custom"):
        assert scripted.log.count(f"tools of type '{kind}' are skipped") == 1


# ---- libraries for agents


def test_openai_agents(scripted):
    """The tools are called, and their outputs lead to the final answer."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    seen = []

    @agents.function_tool
    def add(a: int, b: str) -> str:
        """Adds."""
        seen.append((a, b))
        return "1"

    @agents.function_tool
    def sub() -> str:
        """Subtracts."""
        return cue("story")

    async def run():
        model = agents.OpenAIResponsesModel(model="scripted", openai_client=scripted.async_client())
        settings = agents.ModelSettings(temperature=0)
        agent = agents.Agent(name="a", model=model, tools=[add, sub], model_settings=settings)
        whole = await agents.Runner.run(agent, cue("call"))
        streamed = agents.Runner.run_streamed(agent, cue("call"))
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds
        return whole, streamed

    whole, streamed = asyncio.run(run())
    assert whole.final_output == streamed.final_output == SCRIPTS["story"]
    assert seen == [(1, "你")] * 2
    usage = whole.context_wrapper.usage
    assert usage.requests == 2 and usage.output_tokens > 20


def test_pydantic_ai(scripted):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(openai_client=scripted.async_client())
    model = OpenAIResponsesModel("scripted", provider=provider)
    agent = pydantic_ai.Agent(model, model_settings={"temperature": 0})

    @agent.tool_plain
    def add(a: int, b: str) -> str:
        return "1"

    @agent.tool_plain
    def sub() -> str:
        return cue("story")

    result = agent.run_sync(cue("call"))
    assert result.output == SCRIPTS["story"]
    assert result.usage.requests == 2
    thinking = agent.run_sync(cue("think")).all_messages()[-1]
    assert [part.part_kind for part in thinking.parts] == ["thinking", "text"]


# ---- node

PROGRAM = """
const { generateText, streamText, stepCountIs, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { z } = require("zod");
const [url, call, think, story] = process.argv.slice(2);
const provider = createOpenAI({ baseURL: url, apiKey: "none" });
const model = provider.responses("scripted");
const tools = {
  add: tool({ inputSchema: z.object({ a: z.number(), b: z.string() }), execute: async () => "1" }),
  sub: tool({ inputSchema: z.object({}), execute: async () => story }),
};
(async () => {
  const found = {};
  const ask = { model, temperature: 0 };
  const agent = { ...ask, tools, stopWhen: stepCountIs(3) };
  found.agent = (await generateText({ ...agent, prompt: call })).text;
  const stream = streamText({ ...ask, prompt: think });
  found.streamed = "";
  for await (const piece of stream.textStream) found.streamed += piece;
  // The answer goes back as references to stored items.
  const messages = [{ role: "user", content: think }, ...(await stream.response).messages,
                    { role: "user", content: story }];
  found.second = (await generateText({ ...ask, messages })).text;
  found.reason = (await generateText({ ...ask, prompt: think, maxOutputTokens: 5 })).finishReason;
  const chat = { model: provider.chat("scripted"), temperature: 0 };
  found.chat = (await generateText({ ...agent, ...chat, prompt: call })).text;
  const told = streamText({ ...chat, prompt: think });
  found.told = await told.text;
  found.thought = (await told.usage).outputTokenDetails.reasoningTokens;
  console.log(JSON.stringify(found));
})();
"""


def test_ai_sdk(scripted, tmp_path):
    modules = node_modules("ai", "@ai-sdk/openai", "zod")
    program = tmp_path / "client.js"
    program.write_text(PROGRAM)
    cues = [cue(name) for name in ("call", "think", "story")]
    done = subprocess.run(
        ["node", str(program), f"{scripted.url}/v1", *cues],
        env={**os.environ, "NODE_PATH": modules},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 10 < found.pop("thought") < 60
    assert found == {
        "agent": SCRIPTS["story"],
        "streamed": "Four, 四.",
        "second": SCRIPTS["story"],
        "reason": "length",
        "chat": SCRIPTS["story"],
        "told": "Four, 四.",
    }
