"""Holds a short conversation: python examples/chat.py MODEL (a directory or a repository id).

Without MODEL it is the model that ships with cpmcu, which only knows Python code.
"""

import sys

import sentences  # noqa: F401  # errors are one sentence

# isort: split
from cpmcu import LLM, SamplingParams

with LLM(*sys.argv[1:2]) as llm:
    messages = []
    for question in ("What is a token?", "And how long is one?"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, SamplingParams(max_tokens=200))[0].text
        messages.append({"role": "assistant", "content": answer})
        print(f"> {question}\n{answer}\n")
