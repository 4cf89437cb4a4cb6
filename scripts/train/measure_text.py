"""Measures a draft's accept length on held-out text, continued by the engine.

    python scripts/train/measure_text.py --target DIR --draft DIR --text FOLDER --topk 8

The prompts are those of measure_acceptance.py, which measures the chains of a head without the
engine. This program also measures trees. Sampling has no top-p and no penalties.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from continue_text import add_target_arguments, eos_id
from corpus import TextFormat, corpus_from_arguments, read_tokenizer
from measure_acceptance import held_out_prompts
from measure_chat import accept_length, add_draft_shape_arguments, drafting

from cpmcu import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_target_arguments(parser)
    parser.add_argument("--draft", type=Path, nargs="+", required=True)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    add_draft_shape_arguments(parser)
    args = parser.parse_args()
    tokenizer = read_tokenizer(args.target)
    form = TextFormat.of(tokenizer, eos_id(args.target), args.special_text)
    _, documents = corpus_from_arguments(args)
    prompts = held_out_prompts(
        tokenizer, documents, form, args.prompts, args.prompt_tokens, args.seed
    ).tolist()
    for draft in args.draft:
        with drafting(args, str(args.target), str(draft)) as llm:
            for temperature in args.temperatures:
                sampling = SamplingParams(
                    temperature=temperature,
                    top_p=1,
                    repetition_penalty=1,
                    seed=args.seed,
                    max_tokens=args.new_tokens,
                )
                length = accept_length(llm.generate(prompts, sampling))
                print(f"{draft.name}, temperature {temperature:g}: {length}", flush=True)


if __name__ == "__main__":
    main()
