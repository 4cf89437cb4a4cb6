"""Training over windows of a token stream with transformers' Trainer: batches, schedule, report.

A model is a module with parameters. Its loss is a function of inputs and targets, [B, T] each.
"""

from __future__ import annotations

import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import processes
import torch
from corpus import TokenStream
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    steps: int = 4000
    max_minutes: float = math.inf  # the schedule ends at `steps` or at this time
    batch_size: int = 32  # windows per step, of each process
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


class Batches(IterableDataset):
    """Batches of random windows of a token stream. Half of the windows begin at a document.

    A batch has `input_ids` and `labels`, [batch_size, seq_len] each. Labels are one token later.
    """

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
        """Returns inputs and targets, [batch_size, seq_len] each."""
        count, device = self.config.batch_size, self.ids.device
        anywhere = torch.randint(self.last + 1, (count,), generator=self.generator, device=device)
        pick = torch.randint(len(self.starts), (count,), generator=self.generator, device=device)
        even = torch.arange(count, device=device) % 2 == 0
        start = torch.where(even, self.starts[pick], anywhere)
        windows = self.ids[start[:, None] + self.window].long()
        return windows[:, :-1], windows[:, 1:]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            inputs, targets = self.next()
            yield {"input_ids": inputs, "labels": targets}


def autocast(device: torch.device) -> AbstractContextManager:
    if device.type == "cuda":
        return torch.autocast("cuda", torch.bfloat16)
    return nullcontext()


@torch.no_grad()
def evaluate(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    stream: TokenStream,
    seq_len: int,
    batch_size: int,
    device: torch.device,
) -> float:
    """Returns the mean loss in nats per token over consecutive windows of the whole stream."""
    ids = torch.from_numpy(stream.ids.astype(np.int64))
    total, count = 0.0, 0
    step = seq_len * batch_size
    for begin in range(0, len(ids) - 1, step):
        span = ids[begin : begin + step + 1].to(device)
        whole = (len(span) - 1) // seq_len
        parts = []
        if whole:
            rows = span[: whole * seq_len].view(whole, seq_len)
            parts.append((rows, span[1 : whole * seq_len + 1].view(whole, seq_len)))
        if whole * seq_len < len(span) - 1:  # the short window at the end
            parts.append((span[None, whole * seq_len : -1], span[None, whole * seq_len + 1 :]))
        for inputs, targets in parts:
            with autocast(device):
                loss = loss_of(inputs, targets)
            total += float(loss) * targets.numel()
            count += targets.numel()
    return total / count


@dataclass(slots=True)
class Report:
    """Measurements of a run for the model card."""

    best_validation_loss: float = math.inf
    steps: int = 0
    tokens: int = 0
    minutes: float = 0.0
    losses: list[float] = field(default_factory=list)  # training loss at each log line

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (60 * self.minutes) if self.minutes else 0.0


def stop_on_signals() -> Callable[[], bool]:
    """Returns a function that is true after SIGINT or SIGTERM. A second signal ends the process."""
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        if stopped:
            sys.exit(f"stopped by signal {number}")
        stopped = True

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    return lambda: stopped


class Schedule:
    """The progress of a run, 0 to 1, by steps or by time, and the learning rate there."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.begin = config, time.perf_counter()
        self.minutes = 0.0  # at the end of the last step, by the first process's clock
        self.stopped = False

    def end_step(self, should_stop: bool, device: torch.device) -> None:
        minutes = (time.perf_counter() - self.begin) / 60
        seen = processes.from_first(-minutes if should_stop else minutes, device)
        self.minutes, self.stopped = abs(seen), seen < 0

    def done(self, step: int) -> float:
        return max(step / self.config.steps, self.minutes / self.config.max_minutes)

    def factor(self, step: int) -> float:
        """Returns the factor of the peak rate: linear warm-up, then a cosine of the progress."""
        config = self.config
        warm = min((step + 1) / max(config.warmup_steps, 1), 1.0)
        low = config.final_learning_rate / config.learning_rate
        cosine = 0.5 * (1 + math.cos(math.pi * min(self.done(step), 1.0)))
        return warm * (low + (1 - low) * cosine)


class Reporter(TrainerCallback):
    """Ends a run after its time or a signal, and saves the best model."""

    def __init__(
        self,
        config: TrainConfig,
        schedule: Schedule,
        save: Callable[[Report], None],
        should_stop: Callable[[], bool],
        device: torch.device,
    ) -> None:
        self.config, self.schedule, self.device = config, schedule, device
        self.save, self.should_stop = save, should_stop
        self.report = Report()

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        self.schedule.end_step(self.should_stop(), self.device)
        each = self.config.batch_size * self.config.seq_len
        self.report.steps = state.global_step
        self.report.tokens = state.global_step * each * processes.count()
        self.report.minutes = self.schedule.minutes
        if self.schedule.done(state.global_step) >= 1 or self.schedule.stopped:
            control.should_training_stop = control.should_evaluate = control.should_log = True

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **rest: Any
    ) -> None:
        if "loss" not in logs:
            return
        report = self.report
        report.losses.append(float(logs["loss"]))
        remaining = report.minutes * (1 / max(self.schedule.done(report.steps), 1e-9) - 1)
        print(
            f"step {report.steps:5d}  loss {report.losses[-1]:.3f}  lr {logs['learning_rate']:.2e}"
            f"  {report.tokens_per_second / 1e3:7.0f}K tok/s  {report.minutes:5.2f} min"
            f"  ETA {max(remaining, 0):5.2f} min",
            flush=True,
        )

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, float], **rest: Any
    ) -> None:
        value = metrics["eval_loss"]
        better = value < self.report.best_validation_loss
        print(f"validation loss {value:.4f}{' (best)' if better else ''}", flush=True)
        if better:
            self.report.best_validation_loss = value
            self.save(self.report)


class WindowTrainer(Trainer):
    """transformers' Trainer over `Batches`. Evaluation covers every token of a held-out stream."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        batches: IterableDataset,
        validation: TokenStream | None,
        config: TrainConfig,
        **rest: Any,
    ) -> None:
        super().__init__(model, train_dataset=batches, eval_dataset=[], **rest)
        self.loss, self.batches, self.validation = loss, batches, validation
        self.config = config

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], *rest: Any, **options: Any
    ) -> Tensor:
        with autocast(inputs["labels"].device):
            return self.loss(inputs["input_ids"], inputs["labels"])

    def evaluate(self, *rest: Any, **options: Any) -> dict[str, float]:
        if self.validation is None:
            return {}
        config, model = self.config, self.model
        model.eval()
        device = next(model.parameters()).device
        value = evaluate(self.loss, self.validation, config.seq_len, config.batch_size, device)
        model.train()
        metrics = {"eval_loss": value}
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def make_optimizer(model: nn.Module, config: TrainConfig, fused: bool) -> torch.optim.AdamW:
    """Returns AdamW without weight decay of norm weights and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=fused)


def train(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    data: TokenStream | IterableDataset,
    validation: TokenStream | None,
    config: TrainConfig,
    save: Callable[[Report], None] = lambda report: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Trains `model` in place on `loss` of inputs and targets.

    `data`: a stream, or batches like those of `Batches`, of `config.batch_size` * `config.seq_len`
    tokens each.

    `save` is called after every improvement of the validation loss, or once at the end without
    validation.
    """
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    model.train()
    optimizer = make_optimizer(model, config, fused=on_gpu)
    schedule = Schedule(config)
    processes.average_gradients(model.parameters())
    reporter = Reporter(config, schedule, save, should_stop, device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = WindowTrainer(
            model,
            torch.compile(loss) if config.compile else loss,
            data if isinstance(data, IterableDataset) else Batches(data, config, device),
            validation,
            config,
            args=TrainingArguments(
                folder,
                max_steps=config.steps,
                max_grad_norm=config.clip_norm,
                logging_steps=config.log_every,
                eval_strategy="no" if validation is None else "steps",
                eval_steps=config.eval_every,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=not on_gpu,
                seed=config.seed,
            ),
            callbacks=[reporter],
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if validation is None:
        save(reporter.report)
    return reporter.report
