"""Generates text with a target model from beginnings of a text: training data of draft heads.

    python scripts/train/continue_text.py --target DIR --text FOLDER --out tokens.npy

At run time a draft head reads the target's own text, not the corpus. The file has token ids, int32
[sequences, length], for `train_head.py --generated`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from corpus import (
    TextFormat,
    add_corpus_arguments,
    corpus_from_arguments,
    read_tokenizer,
    training_stream,
)
from model import Target, load_pretrained
from tokenizers import Tokenizer
from torch import Tensor
from trainer import Batches, TrainConfig
from transformers import Cache

from cpmcu.loading.model_files import model_files
from cpmcu.shipped import packaged_model


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Masks logits [B, V] outside the likeliest tokens whose probabilities sum to `top_p`."""
    probabilities, order = torch.softmax(logits, dim=-1).sort(-1, descending=True)
    before = probabilities.cumsum(-1) - probabilities
    dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
    return logits.masked_fill(dropped, -torch.inf)


@torch.no_grad()
def continue_prompts(
    target: Target,
    prompts: Tensor,
    count: int,
    temperatures: Sequence[float],
    seed: int,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """Extends prompts [B, P] to [B, P + count]. Sequence i has temperatures[i % len]; 0: greedy.

    The argmax of logits / temperature + Gumbel noise is a sample at that temperature. For tokens
    already in the sequence, `repetition_penalty` divides positive logits and multiplies negative
    ones.
    """
    device = target.device
    generator = torch.Generator(device).manual_seed(seed)
    cycle = torch.tensor(temperatures, dtype=torch.float32, device=device)
    temperature = cycle[torch.arange(len(prompts), device=device) % len(cycle)][:, None]
    ids = prompts.to(device)
    shape = (len(ids), target.vocab_size)
    seen = torch.zeros(shape, dtype=torch.bool, device=device).scatter(1, ids, True)
    past: Cache | None = None
    chunk = ids
    new = []
    for _ in range(count):
        output = target(chunk, past, with_logits=False)
        past = output.cache
        logits = target.head(output.hidden[:, -1]).float()
        if repetition_penalty != 1:
            factor = torch.where(logits > 0, 1 / repetition_penalty, repetition_penalty)
            logits = torch.where(seen, logits * factor, logits)
        greedy = logits.argmax(-1, keepdim=True)
        logits = logits / temperature.clamp(min=1e-6)
        if top_p < 1:
            logits = nucleus(logits, top_p)
        noise = torch.empty_like(logits).exponential_(generator=generator).log().neg()
        sampled = (logits + noise).argmax(-1, keepdim=True)
        chunk = torch.where(temperature > 0, sampled, greedy)
        seen.scatter_(1, chunk, True)
        new.append(chunk)
    return torch.cat([ids, *new], dim=1)


def eos_id(directory: Path) -> int | None:
    """Returns the first end-of-sequence id of a model's config.json."""
    eos = model_files(directory).json("config.json").get("eos_token_id")
    return eos[0] if isinstance(eos, list) else eos


def model_path(name: str) -> Path:
    """The folder or GGUF file that `name` means: a path, or a package with a GGUF file."""
    return packaged_model(name) or Path(name)


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of programs that read a target and a text."""
    add_corpus_arguments(parser)
    parser.add_argument(
        "--target",
        type=model_path,
        required=True,
        help="folder, GGUF file or package",
    )
    parser.add_argument(
        "--special-text",
        action="store_true",
        help="parse special tokens in the text (for rendered chats)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--target-dtype",
        choices=("float32", "bfloat16"),
        help="default: bfloat16 on a GPU, float32 on a CPU",
    )


def load_target(args: argparse.Namespace) -> tuple[Target, Tokenizer, TextFormat]:
    default = "float32" if args.device == "cpu" else "bfloat16"
    dtype = getattr(torch, args.target_dtype or default)
    target = load_pretrained(args.target, args.device, dtype)
    tokenizer = read_tokenizer(args.target)
    return target, tokenizer, TextFormat.of(tokenizer, eos_id(args.target), args.special_text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_target_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help=".npy file to write")
    parser.add_argument(
        "--tokens", type=int, default=1_000_000, help="approximate number of tokens in the file"
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument(
        "--prompt-tokens", type=int, default=32, help="tokens of each sequence taken from the text"
    )
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 0.8, 1.0])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    target, tokenizer, form = load_target(args)
    documents, _ = corpus_from_arguments(args)
    stream = training_stream(tokenizer, documents, args.seed, form=form)
    config = TrainConfig(batch_size=args.batch_size, seq_len=args.prompt_tokens, seed=args.seed)
    batches = Batches(stream, config, target.device)
    rounds = max(1, round(args.tokens / (args.batch_size * args.length)))
    count = args.length - args.prompt_tokens
    begin = time.perf_counter()
    rows = []
    for index in range(rounds):
        prompts, _ = batches.next()
        whole = continue_prompts(target, prompts, count, args.temperatures, args.seed + index)
        rows.append(whole.cpu().numpy().astype(np.int32))
        done = (index + 1) * args.batch_size * args.length
        seconds = time.perf_counter() - begin
        print(f"{done / 1e6:.2f} M tokens, {done / seconds / 1e3:.0f}K tok/s", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.save(args.out, np.concatenate(rows))


if __name__ == "__main__":
    main()
