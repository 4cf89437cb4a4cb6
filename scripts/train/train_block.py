"""Trains a block drafter of a target model on folders of text: DSpark, DFlash or JetSpec.

    python scripts/train/train_block.py --target DIR --text FOLDER --out DIR

Each window of text has several anchors. From each of them the drafter predicts a whole block in
one pass, and learns the target's next-token distribution of every position. The Markov head of
DSpark reads the text's own previous tokens. Each time the held-out loss improves, the program
writes all files of the destination again.
"""

from __future__ import annotations

import argparse

import processes
import torch
import torch.nn.functional as F
from block_head import KINDS, Block
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
from head_files import load_head, write_head
from measure_acceptance import Acceptance, held_out_prompts, measure_all, table
from model import Target
from torch import Tensor, nn
from trainer import Report, TrainConfig, stop_on_signals, train


class BlockDistillation(nn.Module):
    """The drafter in training. `parameters()` has only the drafter's own parameters."""

    def __init__(
        self,
        head: Block,
        target: Target,
        anchors: int = 128,
        position_weight: float = 0.8,
        label_temperature: float = 1.0,
    ) -> None:
        """A window has `anchors` anchors. The draft learns the target at `label_temperature`.

        The loss of the j-th drafted token has weight position_weight^j.
        """
        super().__init__()
        self.head = head
        self.frozen = (target,)  # a tuple, so that it is not a submodule
        self.anchors = anchors
        self.position_weight = position_weight
        self.label_temperature = label_temperature

    def choose_anchors(self, count: int, device: torch.device) -> Tensor:
        """Anchors in 1 .. count, one in each of equal parts: random in training, else middles."""
        number = min(self.anchors, count)
        bounds = torch.arange(number + 1, device=device) * count // number
        inside = torch.rand(number, device=device) if self.training else 0.5
        return 1 + bounds[:-1] + (inside * bounds.diff()).long()

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of ids and targets [B, T]; targets are one token later.

        The j-th token of the block at p is that of position p + j + 1, so its label is the
        target's distribution at p + j. Positions after the window have no label.
        """
        (target,), head = self.frozen, self.head
        whole = torch.cat((ids, targets[:, -1:]), dim=1)  # [B, T + 1]
        count = ids.shape[1]
        anchors = self.choose_anchors(count, ids.device)
        places = anchors[:, None] + torch.arange(head.longest, device=ids.device)
        known = places <= count  # [A, longest]
        places = places.clamp(max=count)
        with torch.no_grad():
            output = target(whole, aux_layers=head.aux_layers)
            logits = output.logits.float() / self.label_temperature
            wanted = torch.softmax(logits, dim=-1)[:, places]
        x = head.run(anchors, whole, output.aux_hidden, target)
        logits = head.block_logits(x, whole[:, places], target).float()
        loss = -(wanted * F.log_softmax(logits, dim=-1)).sum(-1).mean(0)  # [A, longest]
        weight = known * self.position_weight ** torch.arange(head.longest, device=ids.device)
        return (weight * loss).sum() / weight.sum()


def build_block(
    target: Target, kind: str, layers: int, tokens: int, rank: int, seed: int, **shape: int
) -> Block:
    """Creates a block drafter for training."""
    head = Block(target.source, kind, layers, tokens, rank, **shape)
    head.initialise(seed)
    head.initialise_from(target, seed)
    return head


def card(
    name: str,
    head: Block,
    target_name: str,
    corpus: str,
    config: TrainConfig,
    report: Report,
    hardware: str,
    results: dict[float, Acceptance],
) -> str:
    parameters = sum(p.numel() for p in head.parameters())
    layout = {"dspark": "DSpark", "dflash": "DFlash", "jetspec": "JetSpec"}[head.kind]
    read = ", ".join(map(str, head.aux_layers))
    return f"""# {name}

{layout} draft for `{target_name}`: {parameters / 1e6:.2f} M parameters, bf16.
One pass of its {len(head.layers)} layers drafts {head.longest} tokens. It reads the residual \
stream entering
layers {read} (counted from 0) of the target; embedding and output head are the target's.

- Data: {corpus}
- Training: {report.steps} steps, {report.tokens / 1e6:.1f} M tokens in windows of \
{config.seq_len}, {report.minutes:.1f} minutes on {hardware}.
- Recipe: `scripts/train/train_block.py` in the cpmcu repository.
{table(results)}"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_draft_arguments(parser)
    parser.add_argument("--kind", choices=KINDS, default="dspark")
    parser.add_argument("--anchors", type=int, default=128, help="blocks in each window")
    parser.add_argument(
        "--position-weight", type=float, default=0.8, help="loss of the j-th drafted token: this^j"
    )
    shape = add_shape_arguments(parser)
    shape.add_argument("--layers", type=int, default=2, help="layers of the draft")
    shape.add_argument("--tokens", type=int, default=5, help="tokens that a block predicts")
    shape.add_argument("--rank", type=int, default=48, help="of dspark's Markov head")
    add_training_arguments(parser)
    return parser.parse_args()


def main() -> None:
    rank = processes.join()
    args = parse_arguments()
    if rank == 0:
        check_out(args, args.target, *args.generated)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed + rank)
    target, tokenizer, form = load_target(args)
    config = training_config(args, target.hidden_size, rank)
    train_documents, held_out = corpus_from_arguments(args)
    stream = draft_stream(args, tokenizer, train_documents, form)
    validation = plain_stream(tokenizer, held_out, form) if held_out else None
    try:
        head = build_block(
            target,
            args.kind,
            args.layers,
            args.tokens,
            args.rank,
            args.seed,
            **given_shape(args),
        )
    except ValueError as error:
        raise SystemExit(str(error)) from error
    head.to(target.device)
    model = BlockDistillation(
        head, target, args.anchors, args.position_weight, args.label_temperature
    )
    hardware = hardware_of(target)
    parameters = sum(p.numel() for p in head.parameters())
    print(f"{args.kind}: {parameters / 1e6:.2f} M parameters on {hardware}", flush=True)

    # The card names the last folder only: the whole path may be private.
    target_name = args.target.resolve().name
    corpus = args.corpus_note or f"{len(train_documents)} text files."

    def save(report: Report, trained: Block, results: dict[float, Acceptance]) -> None:
        text = card(args.out.name, trained, target_name, corpus, config, report, hardware, results)
        write_head(trained, args.out, text, {}, None)

    report = train(
        model,
        model.loss,
        stream,
        validation if rank == 0 else None,
        config,
        (lambda report: save(report, head, {})) if rank == 0 else lambda report: None,
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
    assert isinstance(final, Block)
    prompts = held_out_prompts(tokenizer, held_out, form, 96, 48, config.seed)
    save(report, final, measure_all(final, target, prompts, form.eos))


if __name__ == "__main__":
    main()
