"""The model calls a function of this program, which sends the result back.

`tool_choice="required"` holds any model to a call, and needs the extra `grammar` on the server;
leave it out for a model that decides by itself. OPENAI_BASE_URL and OPENAI_API_KEY say where the
server is and what key it wants.
"""

import json
import os

import sentences  # noqa: F401  # errors are one sentence

# isort: split
from openai import OpenAI


def add(a: int, b: int) -> int:
    """Returns the sum of two numbers."""
    return a + b


number = {"type": "integer", "minimum": 0, "maximum": 999}
schema = {
    "type": "object",
    "properties": {"a": number, "b": number},
    "required": ["a", "b"],
    "additionalProperties": False,
}
tools = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": schema}}
]
client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is 2 + 40?"}]

reply = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=tools,
    tool_choice="required",
    parallel_tool_calls=False,
    max_completion_tokens=100,
    seed=1,
)
message = reply.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls or []:
    arguments = json.loads(call.function.arguments)
    result = {"add": add}[call.function.name](**arguments)
    print(f"{call.function.name}({arguments}) = {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})

reply = client.chat.completions.create(
    model=model, messages=messages, max_completion_tokens=60, seed=1
)
print(reply.choices[0].message.content)
