"""Measures how many tokens of a draft's greedy chain a target accepts, on held-out text.

    python scripts/train/measure_acceptance.py --target DIR --draft DIR --text FOLDER

Prompts are beginnings and inner parts of held-out files. The target continues them without a
draft, greedily and at several temperatures. A draft token is accepted if the target emitted the
same token there. An engine whose sampling is keyed by position accepts the same tokens. So one
pass over a finished text gives the chain of every position. A walk through the text gives the mean
accept length (tokens per forward pass of the target, including the target's own token).

`--draft` is a head that `train_head.py` wrote, or a language model.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from continue_text import add_target_arguments, continue_prompts, load_target
from corpus import Document, TextFormat, corpus_from_arguments, encode
from drafts import Head
from head_files import load_head
from model import Target, load_pretrained
from tokenizers import Tokenizer
from torch import Tensor


@torch.no_grad()
def chain_matches(draft: Head | Target, target: Target, ids: Tensor, depth: int) -> Tensor:
    """Compares draft tokens with ids [B, T]: returns bool [B, T - 1 - depth, depth].

    Entry (b, t, i) belongs to the chain that starts when tokens up to t + 1 are known, and to its
    token t + 2 + i. The entry is valid only if the chain's earlier tokens matched.
    """
    count = ids.shape[1] - 1 - depth
    if isinstance(draft, Target):
        best = draft(ids).logits.argmax(-1)[:, 1:]
        chains = torch.stack([best[:, i : i + count] for i in range(depth)], dim=-1)
    else:
        chains = draft.chains(ids, target, depth)
    wanted = torch.stack([ids[:, 2 + i : 2 + i + count] for i in range(depth)], dim=-1)
    return chains == wanted


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance over all positions. `at_depth[i]`: share of chains with i + 1 matching tokens."""

    at_depth: list[float]
    mean_length: float  # mean accept length with chains of `chain` tokens
    chain: int
    tokens: int

    def __str__(self) -> str:
        shares = " ".join(f"{share:.3f}" for share in self.at_depth)
        return (
            f"accepted to depth 1..{len(self.at_depth)}: {shares}; mean accept length "
            f"{self.mean_length:.2f} with chains of {self.chain} ({self.tokens} tokens)"
        )


def acceptance(
    matches: Tensor, lengths: Sequence[int], prompt_tokens: int, chain: int
) -> Acceptance:
    """Computes it from `chain_matches`. `lengths[b]`: tokens of text b, with its prompt."""
    depth = matches.shape[-1]
    runs = matches.long().cumprod(-1)  # [B, roots, depth]
    accepted = runs[..., :chain].sum(-1).tolist()
    shares = torch.zeros(depth, dtype=torch.float64)
    roots = cycles = emitted = 0
    for index, length in enumerate(lengths):
        first, last = prompt_tokens - 1, length - 1 - depth
        if last <= first:
            continue
        shares += runs[index, first:last].sum(0).double().cpu()
        roots += last - first
        at = first
        while at < last:
            step = 1 + accepted[index][at]
            cycles += 1
            emitted += step
            at += step
    if not roots:
        raise SystemExit("the continuations are too short for a measurement")
    return Acceptance((shares / roots).tolist(), emitted / cycles, chain, roots)


def held_out_prompts(
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    form: TextFormat,
    prompts: int,
    prompt_tokens: int,
    seed: int,
) -> Tensor:
    """Returns [prompts, prompt_tokens]: the beginning of each file, then places inside it."""
    rng = random.Random(seed)
    texts = encode(tokenizer, [document.text for document in documents], form.special_text)
    framed = [form.frame(ids) for ids in texts]
    long = [ids for ids in framed if len(ids) > prompt_tokens]
    if not long:
        raise SystemExit(f"no held-out file has more than {prompt_tokens} tokens")
    head = [] if form.bos is None else [form.bos]
    rows = []
    for index in range(prompts):
        ids = long[index % len(long)]
        start = 0 if index < len(long) else rng.randrange(len(ids) - prompt_tokens)
        inside = ids[start : start + prompt_tokens]
        rows.append(inside if start == 0 else [*head, *inside][:prompt_tokens])
    return torch.tensor(rows)


@torch.no_grad()
def measure(
    draft: Head | Target,
    target: Target,
    prompts: Tensor,
    new_tokens: int,
    temperature: float,
    eos: int | None,
    depth: int = 5,
    chain: int = 4,
    seed: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
) -> Acceptance:
    prompt_tokens = prompts.shape[1]
    depth = min(depth, getattr(draft, "longest", None) or depth)
    ids = continue_prompts(
        target, prompts, new_tokens, [temperature], seed, top_p, repetition_penalty
    )
    lengths = []
    for row in ids.tolist():
        new = row[prompt_tokens:]
        lengths.append(prompt_tokens + (new.index(eos) + 1 if eos in new else len(new)))
    parts = [chain_matches(draft, target, part, depth) for part in ids.split(16)]
    return acceptance(torch.cat(parts), lengths, prompt_tokens, min(chain, depth))


def measure_all(
    draft: Head | Target, target: Target, prompts: Tensor, eos: int | None
) -> dict[float, Acceptance]:
    """Measures with 160 new tokens at the usual temperatures, and prints."""
    results = {}
    for temperature in (0.0, 0.7, 0.8):
        results[temperature] = measure(draft, target, prompts, 160, temperature, eos)
        print(f"temperature {temperature:g}: {results[temperature]}", flush=True)
    return results


def table(results: dict[float, Acceptance]) -> str:
    """The results by temperature, for a card."""
    if not results:
        return ""
    first = next(iter(results.values()))
    depths = " | ".join(f"depth {i + 1}" for i in range(len(first.at_depth)))
    rule = "---|" * (len(first.at_depth) + 2)
    lines = [f"| temperature | {depths} | mean accept length |", f"|{rule}"]
    for temperature, result in results.items():
        shares = " | ".join(f"{share:.3f}" for share in result.at_depth)
        lines.append(f"| {temperature:g} | {shares} | {result.mean_length:.2f} |")
    return (
        "\nShare of chains accepted to each depth, and mean accept length of chains of "
        f"{first.chain} (the target's\nown token included), while the target continues "
        "held-out files by itself:\n\n" + "\n".join(lines) + "\n"
    )


def load_draft(directory: Path, target: Target) -> Head | Target:
    head = load_head(directory, target)
    if head is not None:
        return head
    draft = load_pretrained(directory, str(target.device))
    if draft.vocab_size != target.vocab_size:
        raise SystemExit(f"{directory} has a different vocabulary than the target")
    return draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_target_arguments(parser)
    parser.add_argument("--draft", type=Path, nargs="+", required=True)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 0.8])
    parser.add_argument("--top-p", type=float, default=1.0, help="top-p of the target's sampling")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="likewise")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--depth", type=int, default=5, help="report acceptance to this depth")
    parser.add_argument("--chain", type=int, default=4, help="draft tokens per speculative step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.target_dtype = args.target_dtype or "float32"

    target, tokenizer, form = load_target(args)
    _, documents = corpus_from_arguments(args)
    prompts = held_out_prompts(
        tokenizer, documents, form, args.prompts, args.prompt_tokens, args.seed
    )
    for directory in args.draft:
        draft = load_draft(directory, target)
        for temperature in args.temperatures:
            result = measure(
                draft,
                target,
                prompts,
                args.new_tokens,
                temperature,
                form.eos,
                args.depth,
                args.chain,
                args.seed,
                args.top_p,
                args.repetition_penalty,
            )
            print(f"{directory.name}, temperature {temperature:g}: {result}", flush=True)


if __name__ == "__main__":
    main()
