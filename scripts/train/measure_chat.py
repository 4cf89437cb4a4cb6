"""Measures a draft's accept length on chat prompts, one a line, answered greedily by the engine.

    python scripts/train/measure_chat.py --target MODEL --draft DIR [--prompts FILE]

The default file has 40 prompts that no recipe here trains on. The accept length is the tokens of
all answers over the speculative steps, the target's own token of each step included.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cpmcu import LLM, SamplingParams
from cpmcu.outputs import RequestOutput
from cpmcu.text.files import read_text

PROMPTS = Path(__file__).with_name("chat_prompts.txt")


def add_draft_shape_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depth", type=int, default=4, help="tokens of the longest draft path")
    parser.add_argument("--topk", type=int, default=1, help="children of a node; 1: a chain")
    parser.add_argument("--tree-size", type=int, help="tokens of a step, the root included")


def drafting(args: argparse.Namespace, target: str, draft: str) -> LLM:
    """The engine with drafts of the shape of `add_draft_shape_arguments`."""
    return LLM(
        target,
        draft_model_path=draft,
        spec_num_iter=args.depth,
        spec_topk_per_iter=args.topk,
        spec_tree_size=args.tree_size,
        spec_auto=False,
    )


def accept_length(outputs: Sequence[RequestOutput]) -> str:
    metrics = [output.outputs[0].spec_decode_metrics for output in outputs]
    counts = [m for m in metrics if m is not None]
    steps = sum(m.num_spec_steps for m in counts)
    accepted = sum(m.num_accepted_draft_tokens for m in counts)
    return (
        f"{len(outputs)} prompts, {steps} speculative steps, mean accept length "
        f"{1 + accepted / steps:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, help="chat model, as for `cpmcu chat`")
    parser.add_argument("--draft", required=True, help="directory of the draft")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="text file, a prompt a line")
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of an answer")
    add_draft_shape_arguments(parser)
    args = parser.parse_args()
    lines = read_text(args.prompts).splitlines()
    prompts = [[{"role": "user", "content": line}] for line in lines if line.strip()]
    with drafting(args, args.target, args.draft) as llm:
        outputs = llm.chat(prompts, SamplingParams(temperature=0, max_tokens=args.tokens))
    print(accept_length(outputs))


if __name__ == "__main__":
    main()
