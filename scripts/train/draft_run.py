"""Code shared by the training programs of drafts: flags, training text, summary."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import processes
import torch
from continue_text import add_target_arguments
from corpus import Document, TextFormat, TokenStream, training_stream
from directory import add_out_arguments
from model import Target
from tokenizers import Tokenizer
from trainer import Report, TrainConfig

from cpmcu.loading.index import check_file

DEFAULTS = TrainConfig(
    steps=3000,
    batch_size=16,
    seq_len=1024,
    warmup_steps=100,
    weight_decay=0.1,
    eval_every=250,
)


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    add_out_arguments(parser)
    parser.add_argument(
        "--generated",
        type=Path,
        nargs="+",
        default=[],
        help="token files of continue_text.py or chat_text.py, added to the training text",
    )
    parser.add_argument("--corpus-note", default="", help="one sentence on the data, for the card")
    parser.add_argument(
        "--label-temperature",
        type=float,
        default=1.0,
        help="of the target's distribution that is learnt; lower: more of its first choice",
    )


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("training")
    run.add_argument("--learning-rate", type=float, help="peak; default 0.5 / hidden size")
    run.add_argument("--final-learning-rate", type=float, help="default: a thirtieth of the peak")
    for name in TrainConfig.__slots__:
        flag, default = f"--{name.replace('_', '-')}", getattr(DEFAULTS, name)
        if name.endswith("learning_rate"):
            continue
        if isinstance(default, bool):
            run.add_argument(flag, action="store_true")
        else:
            run.add_argument(flag, type=type(default), default=default)


SHAPE = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def add_shape_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    shape = parser.add_argument_group("head (default: as the target's layers)")
    for name in SHAPE:
        shape.add_argument(f"--{name.replace('_', '-')}", type=int)
    return shape


def given_shape(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in SHAPE if getattr(args, name)}


def training_config(args: argparse.Namespace, hidden_size: int, rank: int) -> TrainConfig:
    """The flags of `add_training_arguments`. Processes have different seeds."""
    rate = args.learning_rate or 0.5 / hidden_size
    values = {name: getattr(args, name) for name in TrainConfig.__slots__}
    values |= {
        "seed": args.seed + rank,
        "learning_rate": rate,
        "final_learning_rate": args.final_learning_rate or rate / 30,
    }
    return TrainConfig(**values)


def draft_stream(
    args: argparse.Namespace,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    form: TextFormat,
) -> TokenStream:
    """The training text: that of `documents` and the files of --generated."""
    stream = training_stream(tokenizer, documents, args.seed, form=form)
    print(f"{len(documents)} files, {len(stream.ids) / 1e6:.2f} M training tokens", flush=True)
    for path in args.generated:
        check_file(path)
        rows = np.load(path)
        starts = np.arange(len(rows), dtype=np.int64) * rows.shape[1]
        stream = stream + TokenStream(rows.reshape(-1).astype(np.uint32), starts)
        print(f"{rows.size / 1e6:.2f} M tokens that the target wrote", flush=True)
    return stream


def hardware_of(target: Target) -> str:
    if target.device.type != "cuda":
        return "a CPU"
    each = torch.cuda.get_device_name(target.device)
    return f"{processes.count()} x {each}" if processes.count() > 1 else f"one {each}"


def summary(report: Report) -> str:
    best = report.best_validation_loss
    loss = f", best held-out loss {best:.4f}" if math.isfinite(best) else ""
    return (
        f"{report.steps} steps, {report.tokens / 1e6:.1f} M tokens, {report.minutes:.2f} min, "
        f"{report.tokens_per_second / 1e3:.0f}K tok/s{loss}"
    )
