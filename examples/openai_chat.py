"""A conversation with a running server (python -m cpmcu.server), through the openai package.

OPENAI_BASE_URL and OPENAI_API_KEY say where the server is and what key it wants.
"""

import os

import sentences  # noqa: F401  # errors are one sentence

# isort: split
from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id

messages = []
for question in ("What is a token?", "And how long is one?"):
    messages.append({"role": "user", "content": question})
    reply = client.chat.completions.create(
        model=model, messages=messages, max_completion_tokens=60, seed=1
    )
    answer = reply.choices[0].message.content
    messages.append({"role": "assistant", "content": answer})
    print(f"> {question}\n{answer}")
    print(f"--- {reply.usage.completion_tokens} tokens, {reply.choices[0].finish_reason}\n")
