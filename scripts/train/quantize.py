"""Quantises a model or its EAGLE head to 4 bits and writes a GPTQ checkpoint.

    python scripts/train/quantize.py --target DIR --text FOLDER --out DIR-w4
    python scripts/train/quantize.py --target DIR-w4 --draft HEAD --text FOLDER --out HEAD-w4

Linear layers get 4 bits. Embedding, output head, norms and biases are unchanged. The layers are
quantised in forward order, each with the inputs that the quantised earlier layers produce. The
inputs come from windows of the training files; held-out files are only for evaluation. A head is
calibrated on the hidden states of --target, so pass the quantised model. From the second step of a
chain on, it is calibrated on its own outputs.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from continue_text import add_target_arguments, load_target
from corpus import corpus_from_arguments, plain_stream, training_stream
from directory import add_out_arguments, check_out
from drafts import Head
from head_files import load_head
from model import Target, load_pretrained, read_state
from safetensors.torch import save_file
from torch import Tensor, nn
from trainer import Batches, TrainConfig, evaluate

from cpmcu.convert.output import new_directory
from cpmcu.convert.rounding import Quantized, gptq, output_error, round_to_nearest
from cpmcu.loading.index import read_json

# Matrices of a layer in forward order, grouped by common input.
STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)

Batch = Callable[[], object]  # one forward pass over some of the calibration text


@dataclass(frozen=True, slots=True)
class Settings:
    group_size: int = 128  # -1: one scale for all inputs of an output
    damping: float = 0.01

    def group(self, linear: nn.Linear) -> int:
        return linear.in_features if self.group_size == -1 else self.group_size

    def to_hf(self) -> dict[str, Any]:
        """Returns the quantization_config."""
        return {
            "bits": 4,
            "checkpoint_format": "gptq",
            "damp_percent": self.damping,
            "desc_act": False,
            "group_size": self.group_size,
            "lm_head": False,
            "quant_method": "gptq",
            "static_groups": True,
            "sym": True,
            "true_sequential": True,
        }


def collect_gram(linear: nn.Linear, batches: Iterable[Batch]) -> Tensor:
    """Returns X^T X [K, K] in float64 over the inputs X of `linear` in all batches.

    Only `Head.unroll` calls a layer several times in a batch. In its i-th call the first i rows
    belong to no chain and are skipped.
    """
    gram = torch.zeros(linear.in_features, linear.in_features, dtype=torch.float64)
    gram = gram.to(linear.weight.device)
    call = 0

    def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal call
        rows = inputs[0][:, call:].flatten(0, -2).float()
        gram.add_((rows.T @ rows).double())
        call += 1

    handle = linear.register_forward_pre_hook(add)
    try:
        for batch in batches:
            call = 0
            batch()
    finally:
        handle.remove()
    return gram


@torch.no_grad()
def quantize_stage(
    linears: Mapping[str, nn.Linear], batches: Iterable[Batch], settings: Settings
) -> dict[str, Quantized]:
    """Quantises matrices with a common input, in place. `linears`: by checkpoint name."""
    gram = collect_gram(next(iter(linears.values())), batches)
    done = {}
    for name, linear in linears.items():
        done[name] = gptq(linear.weight, gram, settings.group(linear), settings.damping)
        rounded = done[name].dequantize().to(linear.weight)
        print(f"{name}: output error {output_error(linear.weight, rounded, gram):.2e}", flush=True)
        linear.weight.copy_(rounded)
    return done


def _stages(layer: nn.Module, prefix: str) -> Iterator[dict[str, nn.Linear]]:
    for names in STAGES:
        yield {f"{prefix}.{name}": layer.get_submodule(name) for name in names}


@torch.no_grad()
def quantize_model(
    model: Target, ids: Tensor, settings: Settings, batch_size: int = 4
) -> dict[str, Quantized]:
    """Quantises every layer of `model` in place. ids [windows, T]: the calibration text."""
    rope = model.rope(0, ids.shape[1])
    parts = [model.embed(part.to(model.device)) for part in ids.split(batch_size)]
    done: dict[str, Quantized] = {}
    for index, layer in enumerate(model.layers):
        batches = [partial(layer, part, position_embeddings=rope) for part in parts]
        for linears in _stages(layer, f"model.layers.{index}"):
            done |= quantize_stage(linears, batches, settings)
        parts = [batch() for batch in batches]
    return done


@torch.no_grad()
def quantize_head(
    head: Head,
    target: Target,
    ids: Tensor,
    settings: Settings,
    depth: int = 5,
    batch_size: int = 4,
) -> dict[str, Quantized]:
    """Quantises an EAGLE head in place, without its output head. ids [windows, T].

    The calibration runs chains of `depth` steps from every token of the text.
    """

    def batch(part: Tensor) -> None:
        output = target(part[:, :-1], aux_layers=head.aux_layers, with_logits=False)
        cos, sin = target.rope(0, part.shape[1] - 1)
        head.unroll(head.start(output), target.embed(part[:, 1:]), cos, sin, depth)

    parts = ids.to(target.device).split(batch_size)
    batches = [lambda part=part: batch(part) for part in parts]
    name = "layers.0" if head.kind == "eagle2" else "midlayer"
    done = quantize_stage({"fc": head.fc}, batches, settings)
    for linears in _stages(head.get_submodule(name), name):
        done |= quantize_stage(linears, batches, settings)
    return done


@torch.no_grad()
def round_model(model: Target, settings: Settings) -> None:
    """Rounds every layer to nearest, in place: the baseline of GPTQ."""
    for layer in model.layers:
        for linears in _stages(layer, ""):
            for linear in linears.values():
                rounded = round_to_nearest(linear.weight, settings.group(linear))
                linear.weight.copy_(rounded.dequantize())


# ---- files


def check_shapes(module: nn.Module, settings: Settings) -> None:
    """Raises SystemExit if the format cannot store a matrix."""
    stages = {name.rpartition(".")[2] for names in STAGES for name in names} | {"fc"}
    for name, linear in module.named_modules():
        if not isinstance(linear, nn.Linear) or name.rpartition(".")[2] not in stages:
            continue
        inputs, outputs = linear.in_features, linear.out_features
        if inputs % 8 or outputs % 8:
            raise SystemExit(
                f"{name} is {outputs} x {inputs}, but 8 weights share a word: expected multiples "
                "of 8"
            )
        if inputs % settings.group(linear):
            raise SystemExit(
                f"{name} has {inputs} inputs, expected a multiple of {settings.group_size}; "
                "--group-size -1 gives each output one scale"
            )


def write_quantized(
    source: Path,
    destination: Path,
    done: Mapping[str, Quantized],
    settings: Settings,
    card: str,
) -> None:
    """Writes `source` with the matrices of `done` in 4 bits. Copies other tensors and files."""
    state = read_state(source)
    for name, matrix in done.items():
        del state[f"{name}.weight"]
        state |= {f"{name}.{suffix}": tensor for suffix, tensor in matrix.tensors().items()}
    config = read_json(source / "config.json")
    config["quantization_config"] = settings.to_hf()
    weights = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt")
    with new_directory(destination) as directory:
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.endswith(weights):
                shutil.copyfile(path, directory / path.name)
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "model.safetensors").chmod(0o644)
        text = json.dumps(config, indent=2) + "\n"
        (directory / "config.json").write_text(text, encoding="utf-8")
        (directory / "README.md").write_text(card, encoding="utf-8")


def card(
    name: str, original: str, what: str, corpus: str, args: argparse.Namespace, results: str
) -> str:
    scales = "one scale for an output" if args.group_size == -1 else "groups of 128 inputs"
    return f"""# {name}

`{original}` with its linear layers, but for the output head, in 4 bits:
GPTQ, symmetric, {scales}, desc_act false. All else is as in `{original}`.

- Calibration: {args.windows} windows of {args.seq_len} tokens of the training text, seed \
{args.seed}{what}.
- Data: {corpus}
- Recipe: `scripts/train/quantize.py` in the cpmcu repository.
{results}"""


# ---- program


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_target_arguments(parser)
    parser.add_argument("--draft", type=Path, help="quantise this EAGLE head of the target instead")
    add_out_arguments(parser)
    parser.add_argument(
        "--group-size", type=int, choices=(128, -1), default=128, help="inputs per scale; -1: all"
    )
    parser.add_argument(
        "--damping", type=float, default=0.01, help="added to diag(H), times its mean"
    )
    parser.add_argument("--windows", type=int, default=32, help="windows of calibration text")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--depth", type=int, default=5, help="steps of the head's chains")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of windows")
    parser.add_argument("--corpus-note", default="", help="one sentence on the data, for the card")
    args = parser.parse_args()
    args.target_dtype = args.target_dtype or "float32"
    return args


def main() -> None:
    args = parse_arguments()
    source = args.draft or args.target
    check_out(args, args.target, args.draft)
    if "quantization_config" in read_json(source / "config.json"):
        raise SystemExit(f"{source} is already quantised, expected the original")
    torch.set_float32_matmul_precision("highest")
    target, tokenizer, form = load_target(args)
    documents, held_out = corpus_from_arguments(args)
    stream = training_stream(tokenizer, documents, args.seed, form=form)
    config = TrainConfig(batch_size=args.windows, seq_len=args.seq_len, seed=args.seed)
    ids, _ = Batches(stream, config, torch.device("cpu")).next()
    corpus = args.corpus_note or f"{len(documents)} text files."
    settings = Settings(args.group_size, args.damping)
    name, original = args.out.name, source.resolve().name
    if args.draft:
        head = load_head(args.draft, target)
        if head is None or head.kind not in ("eagle2", "eagle3"):
            raise SystemExit(f"{args.draft} is not an EAGLE head; pass a draft model as --target")
        check_shapes(head, settings)
        done = quantize_head(head, target, ids, settings, args.depth)
        what = f",\n  chains of {args.depth} steps on `{args.target.resolve().name}`"
        text = card(name, original, what, corpus, args, "")
        write_quantized(source, args.out, done, settings, text)
        print(f"written to {args.out}; measure its acceptance with measure_acceptance.py")
        return

    check_shapes(target.model, settings)
    nearest = load_pretrained(args.target, args.device, getattr(torch, args.target_dtype))
    validation = plain_stream(tokenizer, held_out, form) if held_out else None

    def report(label: str, model: Target) -> str:
        if validation is None:
            return ""
        loss = evaluate(model.loss, validation, args.seq_len, 4, model.device)
        line = f"| {label} | {loss:.4f} | {math.exp(loss):.3f} |"
        print(line, flush=True)
        return line + "\n"

    results = report("before", target)
    round_model(nearest, settings)
    results += report("rounded to nearest", nearest)
    done = quantize_model(target, ids, settings)
    results += report("GPTQ", target)
    if results:
        results = (
            f"\nOn {len(held_out)} held-out files, in windows of {args.seq_len} tokens:\n\n"
            "| weights | loss (nats per token) | perplexity |\n|---|---|---|\n" + results
        )
    text = card(name, original, "", corpus, args, results)
    write_quantized(source, args.out, done, settings, text)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
