"""Streams an answer of a running server and prints the acceptance of speculation.

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
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "class Stack:"}],
    max_completion_tokens=80,
    seed=1,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"return_metrics": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:  # the last chunk
        metrics = chunk.metrics
        print(f"\n--- {chunk.usage.completion_tokens} tokens", end="")
        print(f", {metrics['timings']['predicted_per_second']:.0f} tokens/s", end="")
        speculation = metrics.get("speculative_decoding")
        if speculation and speculation["num_spec_steps"]:  # 0: no step had a draft
            print(f", mean accept length {speculation['mean_acceptance_length']:.2f}", end="")
        print()
