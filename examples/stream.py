"""Streams a completion of the shipped model, token by token."""

import sentences  # noqa: F401  # errors are one sentence

# isort: split
from cpmcu import LLM, SamplingParams

prompt = "class Stack:\n"
params = SamplingParams(max_tokens=120, temperature=0.8, top_p=0.95, stop="\nclass ")

with LLM() as llm:
    print(prompt, end="")
    for chunk in llm.stream(prompt, params):
        print(chunk.text, end="", flush=True)
        if chunk.result is not None:
            usage = chunk.result.usage
            print(f"\n--- {usage.completion_tokens} tokens, {chunk.finish_reason}")
