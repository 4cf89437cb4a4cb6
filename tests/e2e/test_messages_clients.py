"""Other clients of /v1/messages. Each is skipped where it is missing.

`pip install 'cpmcu[clients]'`; npm's packages are installed into build/node.
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.e2e.calls import node_modules
from tests.e2e.conftest import SCRIPTS
from tests.e2e.harness import cue

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no network at import

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_litellm(scripted):
    """litellm sends chat requests of OpenAI's form to /v1/messages, and translates the answers."""
    litellm = pytest.importorskip("litellm")
    function = {"name": "add", "description": "Adds.", "parameters": ADD}

    def ask(script: str, **fields):
        messages = [{"role": "user", "content": cue(script)}]
        fields = {"messages": messages, "max_tokens": 200, "temperature": 0, **fields}
        return litellm.completion(
            model="anthropic/scripted", api_base=scripted.url, api_key="none", **fields
        )

    assert ask("story").choices[0].message.content == SCRIPTS["story"]
    message = ask("think").choices[0].message
    assert (message.reasoning_content, message.content) == ("So, 🤔 two\nand two.", "Four, 四.")
    tools = [{"type": "function", "function": function}]
    choice = ask("call", tools=tools).choices[0]
    assert choice.finish_reason == "tool_calls"
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert [(name, json.loads(given)) for name, given in calls] == [
        ("add", {"a": 1, "b": "你"}),
        ("sub", {}),
    ]
    chunks = list(ask("call", tools=tools, stream=True))
    whole = litellm.stream_chunk_builder(chunks).choices[0]
    assert [call.function.name for call in whole.message.tool_calls] == ["add", "sub"]
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": choice.message.tool_calls},
        *(
            {"role": "tool", "tool_call_id": call.id, "content": cue("story")}
            for call in choice.message.tool_calls
        ),
    ]
    last = ask("", messages=messages, tools=tools)
    assert last.choices[0].message.content == SCRIPTS["story"]


PROGRAM = """
const { createAnthropic } = require("@ai-sdk/anthropic");
const { generateText, streamText, jsonSchema, stepCountIs, tool } = require("ai");
const [url, story, call, think] = process.argv.slice(2);
const model = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("scripted");
const more = { model, maxOutputTokens: 200, temperature: 0, maxRetries: 0 };
(async () => {
  const found = {};
  const told = await generateText({ ...more, prompt: story });
  found.text = told.text;
  found.usage = told.usage.outputTokens;
  const stream = streamText({ ...more, prompt: think });
  found.streamed = "";
  found.reasoning = "";
  for await (const part of stream.fullStream) {
    if (part.type === "text-delta") found.streamed += part.text;
    if (part.type === "reasoning-delta") found.reasoning += part.text;
    if (part.type === "error") throw part.error;
  }
  found.inputs = [];
  const named = (name) => tool({
    inputSchema: jsonSchema({ type: "object" }),
    execute: async (input) => { found.inputs.push([name, input]); return story; },
  });
  const steps = await generateText({
    ...more, prompt: call, tools: { add: named("add"), sub: named("sub") },
    stopWhen: stepCountIs(2),
  });
  found.steps = steps.steps.map((step) => [step.finishReason, step.text]);
  try {
    await generateText({ ...more, prompt: [{ role: "user", content: [
      { type: "image", image: new Uint8Array([137, 80, 78, 71, 13, 10, 26, 10]) }] }] });
  } catch (error) {
    found.refused = [error.statusCode, error.message];
  }
  console.log(JSON.stringify(found));
})();
"""


def test_the_ai_sdk_of_node(scripted, tmp_path):
    modules = node_modules("@ai-sdk/anthropic", "ai")
    program = tmp_path / "client.js"
    program.write_text(PROGRAM)
    done = subprocess.run(
        ["node", str(program), scripted.url, cue("story"), cue("call"), cue("think")],
        env={**os.environ, "NODE_PATH": modules},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["text"], found["streamed"]) == (SCRIPTS["story"], "Four, 四.")
    assert found["reasoning"] == "So, 🤔 two\nand two."
    assert found["usage"] > 10
    assert sorted(found["inputs"]) == [["add", {"a": 1, "b": "你"}], ["sub", {}]]
    assert found["steps"] == [["tool-calls", "Let me see.\n"], ["stop", SCRIPTS["story"]]]
    status, message = found["refused"]
    assert status == 400 and "the model reads text only" in message
