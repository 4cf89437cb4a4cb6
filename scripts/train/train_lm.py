"""Train a small MiniCPM language model on a folder of text and write a Hugging Face directory.

    python scripts/train/train_lm.py --corpus FOLDER --tokenizer DIR --out DIR --max-minutes 5

The destination is written whenever the held-out loss has improved, each time as a whole, so an
interrupted run leaves the best model so far.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from corpus import (
    BOS_ID,
    EOS_ID,
    IM_END_ID,
    TokenStream,
    add_corpus_arguments,
    corpus_from_arguments,
    encode,
    plain_stream,
    training_stream,
)
from directory import add_out_arguments, check_out
from model import CausalLM, ModelConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from cpmcu.convert.output import new_directory

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    steps: int = 4000
    max_minutes: float = math.inf  # the schedule ends at `steps` or here, whichever comes first
    batch_size: int = 32  # windows per step
    seq_len: int = 2048
    learning_rate: float = 3e-3
    final_learning_rate: float = 1e-4
    warmup_steps: int = 200
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    eval_every: int = 500
    log_every: int = 50
    seed: int = 0
    compile: bool = False


class Batches:
    """Random windows of a token stream; half of them begin at the start of a document."""

    def __init__(self, stream: TokenStream, config: TrainConfig, device: torch.device) -> None:
        if len(stream.ids) < config.seq_len + 2:
            # A corpus shorter than one window is repeated until it fills one.
            repeats = (config.seq_len + 2) // len(stream.ids) + 1
            starts = [stream.starts + i * len(stream.ids) for i in range(repeats)]
            stream = TokenStream(np.tile(stream.ids, repeats), np.concatenate(starts))
        last = len(stream.ids) - config.seq_len - 1  # the last possible window start
        self.ids = torch.from_numpy(stream.ids.astype(np.int32)).to(device)
        self.starts = torch.from_numpy(stream.starts[stream.starts <= last]).to(device)
        self.last = last
        self.config = config
        self.window = torch.arange(config.seq_len + 1, device=device)
        self.generator = torch.Generator(device).manual_seed(config.seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, [batch_size, seq_len] each."""
        count, device = self.config.batch_size, self.ids.device
        anywhere = torch.randint(self.last + 1, (count,), generator=self.generator, device=device)
        pick = torch.randint(len(self.starts), (count,), generator=self.generator, device=device)
        even = torch.arange(count, device=device) % 2 == 0
        start = torch.where(even, self.starts[pick], anywhere)
        windows = self.ids[start[:, None] + self.window].long()
        return windows[:, :-1], windows[:, 1:]


def autocast(device: torch.device) -> AbstractContextManager:
    if device.type == "cuda":
        return torch.autocast("cuda", torch.bfloat16)
    return nullcontext()


@torch.no_grad()
def evaluate(model: CausalLM, stream: TokenStream, seq_len: int, batch_size: int) -> float:
    """Mean loss in nats per token over consecutive windows of the whole stream."""
    ids = torch.from_numpy(stream.ids.astype(np.int64))
    total, count = 0.0, 0
    step = seq_len * batch_size
    for begin in range(0, len(ids) - 1, step):
        span = ids[begin : begin + step + 1].to(model.device)
        whole = (len(span) - 1) // seq_len
        parts = []
        if whole:
            rows = span[: whole * seq_len].view(whole, seq_len)
            parts.append((rows, span[1 : whole * seq_len + 1].view(whole, seq_len)))
        if whole * seq_len < len(span) - 1:  # the short window at the end
            parts.append((span[None, whole * seq_len : -1], span[None, whole * seq_len + 1 :]))
        for inputs, targets in parts:
            with autocast(model.device):
                loss = model.loss(inputs, targets)
            total += float(loss) * targets.numel()
            count += targets.numel()
    return total / count


def make_optimizer(model: CausalLM, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; norm weights and biases are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = model.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=fused)


def learning_rate(config: TrainConfig, step: int, done: float) -> float:
    """Linear warm-up, then a cosine over the share of the run that is done (0 to 1)."""
    warm = min((step + 1) / max(config.warmup_steps, 1), 1.0)
    low, high = config.final_learning_rate, config.learning_rate
    return warm * (low + (high - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def compiled(
    loss_of: Callable[[Tensor, Tensor], Tensor], ids: Tensor, targets: Tensor, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """torch.compile where it works on this machine, the plain function where it does not."""
    fast = torch.compile(loss_of)
    try:
        with autocast(device):
            fast(ids, targets).backward()
    except Exception as error:  # compilers fail in many ways, and none should end the run
        print(f"torch.compile failed, training goes on without it: {error}", file=sys.stderr)
        return loss_of
    return fast


@dataclass(slots=True)
class Report:
    """What the model card states."""

    best_validation_loss: float = math.inf
    steps: int = 0
    tokens: int = 0
    minutes: float = 0.0
    tokens_per_second: float = 0.0
    losses: list[float] = field(default_factory=list)  # training loss at each log line


def stop_on_signals() -> Callable[[], bool]:
    """Whether SIGINT or SIGTERM came since this was called; the second one ends the process."""
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        if stopped:
            sys.exit(f"stopped by signal {number}")
        stopped = True

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    return lambda: stopped


def train(
    model: CausalLM,
    stream: TokenStream,
    validation: TokenStream | None,
    config: TrainConfig,
    save: Callable[[Report], None] = lambda report: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Train in place; `save` is called after every improvement of the validation loss."""
    device = model.device
    begin = time.perf_counter()
    batches = Batches(stream, config, device)
    optimizer = make_optimizer(model, config)
    loss_of = compiled(model.loss, *batches.next(), device) if config.compile else model.loss
    optimizer.zero_grad(set_to_none=True)
    report = Report()
    timed_from: float | None = None  # the rate leaves out the first steps, which compile
    timed_tokens = 0
    done = 0.0
    step = 0
    while done < 1.0 and not should_stop():
        rate = learning_rate(config, step, done)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with autocast(device):
            loss = loss_of(*batches.next())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1

        # The host may run ahead of the device; looking at the clock must wait for it.
        look = step == 1 or step % 10 == 0 or step >= config.steps or device.type == "cpu"
        if look and device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - begin
        if look:
            done = max(step / config.steps, elapsed / 60 / config.max_minutes)
        if step == 10:
            timed_from, timed_tokens = elapsed, 0
        timed_tokens += 0 if step <= 10 else config.batch_size * config.seq_len

        report.steps = step
        report.tokens = step * config.batch_size * config.seq_len
        report.minutes = elapsed / 60
        if timed_from is not None and elapsed > timed_from:
            report.tokens_per_second = timed_tokens / (elapsed - timed_from)
        if step == 1 or step % config.log_every == 0 or done >= 1.0:
            report.losses.append(float(loss.detach()))
            remaining = max(elapsed * (1 / done - 1), 0.0)
            print(
                f"step {step:5d}  loss {report.losses[-1]:.3f}  lr {rate:.2e}  "
                f"{report.tokens_per_second / 1e3:7.0f}K tok/s  "
                f"{elapsed / 60:5.2f} min  ETA {remaining / 60:5.2f} min",
                flush=True,
            )
        finished = done >= 1.0 or should_stop()
        if step % config.eval_every == 0 or finished:
            if validation is None:
                if finished:
                    save(report)
                continue
            model.eval()
            value = evaluate(model, validation, config.seq_len, config.batch_size)
            model.train()
            better = value < report.best_validation_loss
            print(f"validation loss {value:.4f}{' (best)' if better else ''}", flush=True)
            if better:
                report.best_validation_loss = value
                save(report)
    return report


def write_model(model: CausalLM, tokenizer_dir: Path, destination: Path, card: str) -> None:
    """Write a complete Hugging Face directory, bf16 weights."""
    state = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    generation = {
        "bos_token_id": BOS_ID,
        "eos_token_id": [EOS_ID, IM_END_ID],
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.15,
    }
    with new_directory(destination) as directory:
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "model.safetensors").chmod(0o644)
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer_dir / name, directory / name)
        contents = {"config.json": model.config.to_hf(), "generation_config.json": generation}
        for name, content in contents.items():
            (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (directory / "README.md").write_text(card, encoding="utf-8")


def model_card(
    name: str, model: CausalLM, config: TrainConfig, report: Report, corpus: str, hardware: str
) -> str:
    shape = model.config
    parameters = sum(p.numel() for p in model.parameters())
    loss = "not measured"
    if math.isfinite(report.best_validation_loss):
        loss = f"{report.best_validation_loss:.3f} nats per token"
    return f"""# {name}

A small MiniCPM-architecture language model: {parameters / 1e6:.2f} M parameters,
{shape.num_hidden_layers} layers, hidden size {shape.hidden_size}, \
{shape.num_attention_heads} query and {shape.num_key_value_heads} key/value heads of
{shape.head_dim}, intermediate size {shape.intermediate_size}, vocabulary {shape.vocab_size}, \
context {shape.max_position_embeddings}, bf16, tied embeddings.

- Data: {corpus}
- Training: {report.steps} steps, {report.tokens / 1e6:.0f} M tokens in windows of \
{config.seq_len}, {report.minutes:.1f} minutes on {hardware},
  {report.tokens_per_second / 1e6:.2f} M tokens/s; AdamW, peak learning rate \
{config.learning_rate:g}, cosine schedule, weight decay {config.weight_decay:g},
  dropout {shape.dropout:g}.
- Held-out loss: {loss}.
- Recipe: `scripts/train/` in the cpmcu repository.

The tokenizer puts `<s>` before every encoded text. The chat template is ChatML-like and does not
print `<s>` itself: render it and encode the result as ordinary text with special tokens on.
Generation ends at `</s>` (id 2) or `<|im_end|>` (id 4).

It exists to try and to test the engine. It completes Python-like text; it knows nothing.
"""


def print_samples(model: CausalLM, tokenizer: Tokenizer, prompts: list[str], count: int) -> None:
    for prompt in prompts:
        ids = [BOS_ID, *encode(tokenizer, [prompt])[0]]
        for temperature in (0.0, 0.7):
            with autocast(model.device):
                new = model.generate(ids, count, temperature, stop_ids=(EOS_ID, IM_END_ID))
            text = tokenizer.decode(new, skip_special_tokens=False)
            print(f"---- temperature {temperature}: {prompt!r}\n{prompt}{text}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_corpus_arguments(parser)
    parser.add_argument("--pieces-share", type=float, default=1.0, help="files also cut in pieces")
    parser.add_argument("--corpus-note", default="", help="one sentence on the data, for the card")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the tokenizer")
    add_out_arguments(parser)
    parser.add_argument("--prompt", action="append", default=[], help="complete this at the end")
    parser.add_argument("--sample-tokens", type=int, default=120)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")

    shape = parser.add_argument_group("model")
    for name in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
        "scale_emb",
        "scale_depth",
        "dim_model_base",
        "dropout",
    ):
        default = getattr(ModelConfig(), name)
        flag = f"--{name.replace('_', '-')}"
        shape.add_argument(flag, type=type(default), default=default)

    run = parser.add_argument_group("training")
    defaults = TrainConfig()
    for name in TrainConfig.__slots__:
        default = getattr(defaults, name)
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            run.add_argument(flag, action="store_true")
        else:
            run.add_argument(flag, type=type(default), default=default)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    check_out(args, args.tokenizer)
    config = TrainConfig(**{name: getattr(args, name) for name in TrainConfig.__slots__})
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(config.seed)

    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    train_documents, validation_documents = corpus_from_arguments(args)
    stream = training_stream(tokenizer, train_documents, config.seed, args.pieces_share)
    validation = plain_stream(tokenizer, validation_documents) if validation_documents else None
    held_out = len(validation.ids) if validation else 0
    print(
        f"{len(train_documents)} files, {len(stream.ids) / 1e6:.2f} M training tokens in "
        f"{len(stream.starts)} documents; {len(validation_documents)} files, "
        f"{held_out / 1e6:.2f} M tokens held out",
        flush=True,
    )

    shape = {k: v for k, v in vars(args).items() if k in ModelConfig.__slots__}
    model = CausalLM(ModelConfig(vocab_size=tokenizer.get_vocab_size(), **shape))
    model.initialise(config.seed)
    model.to(device).train()
    hardware = "one GPU" if device.type == "cuda" else "a CPU"
    if device.type == "cuda":
        hardware = f"one {torch.cuda.get_device_name(device)}"
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters on {hardware}", flush=True)

    corpus = args.corpus_note or f"{len(train_documents)} text files."

    def save(report: Report) -> None:
        card = model_card(args.out.name, model, config, report, corpus, hardware)
        write_model(model, args.tokenizer, args.out, card)

    report = train(model, stream, validation, config, save, stop_on_signals())
    print(
        f"{report.steps} steps, {report.tokens / 1e6:.1f} M tokens, {report.minutes:.2f} min, "
        f"{report.tokens_per_second / 1e3:.0f}K tok/s, best validation loss "
        f"{report.best_validation_loss:.4f}, written to {args.out}",
        flush=True,
    )
    model.eval()
    print_samples(model, tokenizer, args.prompt, args.sample_tokens)


if __name__ == "__main__":
    main()
