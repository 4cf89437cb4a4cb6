"""Trains an EAGLE head or MTP modules of a target model on folders of text.

    python scripts/train/train_head.py --target DIR --text FOLDER --out DIR --kind eagle2

At every position of the text the head learns the target's next-token distribution, for `--depth`
steps. From the second step on it reads its own outputs, as in an engine. If the held-out loss
improves, the whole destination is written again.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import processes
import torch
import torch.nn.functional as F
from continue_text import load_target
from corpus import corpus_from_arguments, plain_stream
from directory import check_out
from draft_run import (
    add_draft_arguments,
    add_shape_arguments,
    add_training_arguments,
    draft_stream,
    given_shape,
    hardware_of,
    summary,
    training_config,
)
from drafts import Eagle2, Eagle3, Head
from head_files import load_head, write_head
from measure_acceptance import Acceptance, held_out_prompts, measure_all, table
from model import Target
from mtp_head import Mtp
from torch import Tensor, nn
from trainer import Report, TrainConfig, stop_on_signals, train


class Distillation(nn.Module):
    """The head in training. `parameters()` has only the head's own parameters."""

    def __init__(
        self,
        head: Head,
        target: Target,
        depth: int = 5,
        step_weight: float = 0.8,
        feature_weight: float = 0.0,
        label_temperature: float = 1.0,
    ) -> None:
        """Step s has weight step_weight^s. `feature_weight`: factor of the states' smooth L1.

        The head learns the target's distribution at `label_temperature`.
        """
        super().__init__()
        if feature_weight and head.kind != "eagle2":
            raise ValueError("only an eagle2 head imitates the target's hidden states")
        self.head = head
        self.frozen = (target,)  # a tuple, so that it is not a submodule
        self.depth = depth
        self.step_weight = step_weight
        self.feature_weight = feature_weight
        self.label_temperature = label_temperature

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of ids and targets [B, T]; targets are one token later.

        Row p predicts token p + 2, so its label is the target's distribution at p + 1. The loss
        of a step is the mean cross-entropy to that distribution. Tokens outside the draft
        vocabulary add 0, so a row has the weight of the probability that can be accepted.
        """
        (target,), head = self.frozen, self.head
        whole = torch.cat((ids, targets[:, -1:]), dim=1)  # [B, T + 1]
        with torch.no_grad():
            output = target(whole, aux_layers=head.aux_layers)
            logits = output.logits[:, 1:].float() / self.label_temperature
            wanted = torch.softmax(logits, dim=-1)
            wanted = head.in_draft_vocabulary(wanted)
            later = output.hidden[:, 1:]
            now = replace(
                output,
                hidden=output.hidden[:, :-1],
                aux_hidden=[state[:, :-1] for state in output.aux_hidden],
            )
            cos, sin = target.rope(0, ids.shape[1])
            embeddings = target.embed(whole[:, 1:])
        depth = min(self.depth, ids.shape[1])
        total = torch.zeros((), device=ids.device)
        weights = 0.0
        steps = head.training_steps(head.start(now), embeddings, cos, sin, depth)
        for step, x in steps:
            logits = head.logits(x, target)[:, step:].float()
            loss = -(wanted[:, step:] * F.log_softmax(logits, dim=-1)).sum(-1).mean()
            if self.feature_weight:
                distance = F.smooth_l1_loss(x[:, step:].float(), later[:, step:].float())
                loss = loss + self.feature_weight * distance
            total = total + self.step_weight**step * loss
            weights += self.step_weight**step
        return total / weights


def draft_vocabulary(counts: np.ndarray, size: int) -> list[int]:
    """Returns the `size` most frequent tokens (ties: the smaller id) in ascending order."""
    order = np.argsort(-counts, kind="stable")
    return sorted(order[:size].tolist())


def build_head(
    kind: str,
    target: Target,
    counts: np.ndarray,
    draft_vocab_size: int,
    seed: int,
    modules: int = 1,
    chained: bool = False,
    own_head: bool = True,
    **shape: int,
) -> Head:
    """Creates a head for training. `modules` and `chained` are for mtp, `own_head` for eagle3."""
    if kind == "mtp":
        mtp = Mtp(target, modules, chained, **shape)
        mtp.initialise(seed)
        mtp.initialise_from(target)
        return mtp
    if kind == "eagle2":
        head: Head = Eagle2(target.source, **shape)
        head.initialise(seed)
        return head
    tokens = draft_vocabulary(counts, min(draft_vocab_size, target.vocab_size))
    third = Eagle3(target.source, tokens, own_head, **shape)
    third.initialise(seed)
    third.copy_head(target)
    return third


def card(
    name: str,
    head: Head,
    target_name: str,
    corpus: str,
    config: TrainConfig,
    report: Report,
    hardware: str,
    results: dict[float, Acceptance],
    alone: dict[float, Acceptance],
) -> str:
    """`alone`: results of the first of several MTP modules."""
    parameters = sum(p.numel() for p in head.parameters())
    layout = {
        "eagle2": f"EAGLE-2 head{' (MiniCPM4 layout)' if head.scaled else ''}",
        "eagle3": "EAGLE-3 head",
        "mtp": "MTP modules (DeepSeek's layout)",
    }[head.kind]
    if isinstance(head, Mtp):
        detail = _describe_modules(head)
    elif isinstance(head, Eagle3):
        layers = ", ".join(map(str, head.aux_layers))
        whose = "the target's" if head.lm_head is None else "its own"
        detail = (
            f"It reads the residual stream entering layers {layers} (counted from 0) of the\n"
            f"target and has a draft vocabulary of {len(head.d2t)} tokens with {whose} output head."
        )
    else:
        detail = (
            "It reads the target's hidden state after the final norm; embedding and output head\n"
            "are the target's. `token_counts.npy` counts the tokens of the training text (for\n"
            "a pruned output head)."
        )
    measured = table(results)
    if alone:
        measured += "\nThe first module alone:\n" + table(alone)
    return f"""# {name}

{layout} for `{target_name}`: {parameters / 1e6:.2f} M parameters, bf16.
{detail}

- Data: {corpus}
- Training: {report.steps} steps, {report.tokens / 1e6:.0f} M tokens in windows of \
{config.seq_len}, {report.minutes:.1f} minutes on {hardware}.
- Recipe: `scripts/train/train_head.py` in the cpmcu repository.
{measured}"""


def _describe_modules(head: Mtp) -> str:
    shared = "Embedding and output head are the target's."
    if len(head.parts) == 1:
        return f"One module, which drafts a chain with its own outputs. {shared}"
    read = "the output of the module before" if head.chained else "the target's hidden state"
    return (
        f"{len(head.parts)} modules; module m drafts the token at depth m + 1 and reads {read}.\n"
        f"The first one can also draft a chain alone. {shared}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_draft_arguments(parser)
    parser.add_argument("--kind", choices=("eagle2", "eagle3", "mtp"), default="eagle2")
    parser.add_argument("--depth", type=int, default=5, help="steps of the unrolled training")
    parser.add_argument("--step-weight", type=float, default=0.8, help="loss of step s: this^s")
    parser.add_argument(
        "--feature-weight", type=float, default=0.0, help="smooth L1 to the hidden states (eagle2)"
    )
    shape = add_shape_arguments(parser)
    shape.add_argument("--draft-vocab-size", type=int, default=32000, help="eagle3")
    shape.add_argument(
        "--share-head", action="store_true", help="eagle3: use the target's output head"
    )
    shape.add_argument(
        "--modules", type=int, default=1, help="mtp: each drafts one token; a single one, all"
    )
    shape.add_argument(
        "--chained", action="store_true", help="mtp: a module reads the output of the one before"
    )

    add_training_arguments(parser)
    return parser.parse_args()


def main() -> None:
    rank = processes.join()
    args = parse_arguments()
    if rank == 0:
        check_out(args, args.target, *args.generated)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    target, tokenizer, form = load_target(args)
    config = training_config(args, target.hidden_size, rank)

    train_documents, held_out = corpus_from_arguments(args)
    stream = draft_stream(args, tokenizer, train_documents, form)
    validation = plain_stream(tokenizer, held_out, form) if held_out else None
    counts = np.bincount(stream.ids, minlength=target.vocab_size)

    try:
        head = build_head(
            args.kind,
            target,
            counts,
            args.draft_vocab_size,
            args.seed,
            args.modules,
            args.chained,
            not args.share_head,
            **given_shape(args),
        )
    except ValueError as error:
        raise SystemExit(str(error)) from error
    head.to(target.device)
    model = Distillation(
        head,
        target,
        args.depth,
        args.step_weight,
        args.feature_weight,
        args.label_temperature,
    )
    hardware = hardware_of(target)
    parameters = sum(p.numel() for p in head.parameters())
    print(f"{args.kind}: {parameters / 1e6:.2f} M parameters on {hardware}", flush=True)

    # The card names the last folder only: the whole path may be private.
    target_name = args.target.resolve().name
    corpus = args.corpus_note or f"{len(train_documents)} text files."
    eos = {} if form.eos is None else {"eos_token_id": form.eos}
    bos = {} if form.bos is None else {"bos_token_id": form.bos}
    kept = counts if args.kind == "eagle2" else None

    def save(
        report: Report,
        trained: Head,
        results: dict[float, Acceptance],
        alone: dict[float, Acceptance],
    ) -> None:
        text = card(
            args.out.name,
            trained,
            target_name,
            corpus,
            config,
            report,
            hardware,
            results,
            alone,
        )
        write_head(trained, args.out, text, {**bos, **eos}, kept)

    report = train(
        model,
        model.loss,
        stream,
        validation if rank == 0 else None,
        config,
        (lambda report: save(report, head, {}, {})) if rank == 0 else lambda report: None,
        stop_on_signals(),
    )
    processes.leave()
    if rank > 0:
        return
    print(f"{summary(report)}, written to {args.out}", flush=True)
    if not held_out:
        return
    torch.set_float32_matmul_precision("highest")
    target.model.float()
    final = load_head(args.out, target)  # the best head, as stored in bf16
    assert final is not None
    prompts = held_out_prompts(tokenizer, held_out, form, 96, 48, config.seed)

    def measured(draft: Head) -> dict[float, Acceptance]:
        return measure_all(draft, target, prompts, form.eos)

    several = isinstance(final, Mtp) and final.longest is not None
    save(report, final, measured(final), measured(final.alone()) if several else {})


if __name__ == "__main__":
    main()
