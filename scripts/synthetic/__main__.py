"""Write a checkpoint of true shapes with seeded random weights, for benchmarks and tests.

    python -m scripts.synthetic --preset minicpm4-8b --out DIR

The result is an ordinary Hugging Face directory: config.json, generation_config.json,
model.safetensors (or shards with an index), and a tokenizer. Weights are normally distributed,
never zero, and scaled so that activations stay finite. A matrix has standard deviation
1/sqrt(fan_in), the last matrix of a residual branch a smaller one; norm weights are near 1. The
values of a tensor depend only on the seed, its name and the kind of device. So two runs on one kind
of device write equal files, and a model with fewer layers has the same first layers.

Each tensor is generated and written before the next one, so an 8B model is never in memory as a
whole. If there is a GPU, torch generates the tensors on it, else numpy does.

Presets whose names end in -eagle, -eagle3, -dspark, -dflash, -jetspec or -dflash2 are draft heads
(layouts.py, blocks.py). Their directories and those of models with an MTP head also have
token_counts.npy: token frequencies like those of natural text, for FR-Spec.

    python -m scripts.synthetic --preset minicpm4-8b --acceptance 0.8 --out DIR --draft-out DIR2

writes a target and a draft with synthetic acceptance (acceptance.py). With --draft-only it writes
another draft of the same target, whatever its acceptance. The draft of a preset with an
MTP head is that head (mtp_acceptance.py):

    python -m scripts.synthetic --preset qwen3.5-9b --acceptance 0.8 --out DIR

With --draft-kind dspark or dflash2 the draft is a block drafter with the shapes of a published head
(block_acceptance.py); --draft-set changes its config.json:

    python -m scripts.synthetic --preset qwen3-8b --quant gptq --acceptance 0.94 --out DIR \\
        --draft-kind dspark --draft-quant gptq --draft-out DIR2

--quant (--draft-quant for the draft) stores the layers' projections and a head's fc quantised:
random bits, with scales that give the same standard deviation. An MTP head and the projections
that published files leave dense stay dense. So does the fc of a draft with synthetic acceptance,
except in gptq, and the matrices of the last layer's attention in a block drafter.

    gptq   4 bits with groups of 128; gptq-g64: of 64, for nemotron-3-nano
    fp8    e4m3 with blocks of 128 x 128
    nvfp4  e2m1 with groups of 16 (compressed-tensors)
    int8   8 bits with one scale for a row (compressed-tensors)
    q4_k_m a GGUF file, DIR/model.gguf, with a tokenizer of bytes and without RoPE scaling

The experts of qwen3-30b-a3b, qwen3.5-35b-a3b and qwen3.5-122b-a10b are chosen about equally often.
With --set common_experts=2 nearly every token chooses experts 0 and 1, a quarter of its eight, so
neighbours share them.

To add a model, add a row to PRESETS (presets.py). To add another kind of tensor, write a Fill
(tensors.py).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.synthetic.acceptance import pair_presets
from scripts.synthetic.block_acceptance import KINDS, block_pair
from scripts.synthetic.formats import FORMATS
from scripts.synthetic.gguf import GGUF, GGUF_FILE
from scripts.synthetic.hybrid import hybrid_tensors
from scripts.synthetic.layouts import decoder_tensors
from scripts.synthetic.mtp_acceptance import mtp_preset
from scripts.synthetic.presets import PRESETS, Preset
from scripts.synthetic.tensors import Config
from scripts.synthetic.writer import check_apart, check_config, check_out, write_checkpoint

DTYPES = ("bfloat16", "float16", "float32")


def parse_override(text: str) -> tuple[str, Any]:
    """Parses KEY=VALUE. The value is JSON or, if it is not valid JSON, a string."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.synthetic", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--preset", required=True, help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16, with gptq float16")
    parser.add_argument(
        "--quant", choices=[*FORMATS, GGUF], help="store projections in this format"
    )
    of_draft = [form for form in FORMATS if form != "gptq-g64"]
    parser.add_argument("--draft-quant", choices=of_draft, help="the same for the draft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-size-gb", type=float, default=5.0)
    parser.add_argument("--num-hidden-layers", type=int, help="default: the model's")
    parser.add_argument(
        "--set",
        type=parse_override,
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="replace a value of config.json; shapes follow it",
    )
    parser.add_argument(
        "--acceptance",
        type=float,
        metavar="P",
        help="synthetic acceptance: the target's text is known, and each token of the EAGLE head "
        "in --draft-out, or of the MTP head, is accepted with probability P",
    )
    parser.add_argument("--draft-out", type=Path, help="folder of the draft")
    parser.add_argument(
        "--draft-kind",
        choices=KINDS,
        help="kind of the draft in --draft-out (default: an EAGLE head)",
    )
    parser.add_argument(
        "--draft-set",
        type=parse_override,
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="replace a value of a block drafter's config.json",
    )
    parser.add_argument(
        "--second",
        type=float,
        default=0.0,
        metavar="S",
        help="share of the wrong drafted tokens for which the draft's second choice is right, so "
        "that trees gain over chains (default: 0)",
    )
    parser.add_argument(
        "--draft-only", action="store_true", help="write the draft of a pair, not the target"
    )
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        help="size of the draft vocabulary (default: 32768, at most half of all tokens)",
    )
    parser.add_argument("--tokenizer", type=Path, help="copy tokenizer files from this folder")
    parser.add_argument("--device", default="auto", help="auto, cpu (numpy), cuda, cuda:1 …")
    parser.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    return parser


def list_jobs(args: argparse.Namespace, config: Config) -> list[tuple[Preset, Path, str | None]]:
    """Returns (preset, folder, format) of each checkpoint to write. `config`: with overrides.

    Raises SystemExit for flags that do not go together.
    """
    preset = PRESETS[args.preset]
    if preset.quantised and (args.quant or args.acceptance is not None):
        raise SystemExit(f"{args.preset} is quantised itself: leave out --quant and --acceptance")
    has_mtp = bool(config.get("mtp_num_hidden_layers"))
    if has_mtp and args.draft_out is not None and not args.draft_kind:
        raise SystemExit(
            f"--draft-out: the draft of {args.preset} is its MTP head, in --out, unless "
            "--draft-kind is given"
        )
    in_folder = args.draft_kind or not has_mtp
    if in_folder and (args.acceptance is None) != (args.draft_out is None):
        raise SystemExit("--acceptance and --draft-out go together: give both or neither")
    if args.draft_kind and args.draft_out is None:
        raise SystemExit("--draft-kind is for the draft in --draft-out, which is not given")
    if args.draft_set and not args.draft_kind:
        raise SystemExit("--draft-set needs --draft-kind")
    if args.draft_quant and args.draft_out is None:
        raise SystemExit("--draft-quant is for the draft in --draft-out; use --quant")
    if args.draft_out is None and (args.draft_only or args.second):
        raise SystemExit("--draft-only and --second need --acceptance and --draft-out")
    if args.acceptance is None:
        return [(replace(preset, config=config), args.out, args.quant)]
    if preset.draft:
        raise SystemExit(f"--acceptance needs a target, but {args.preset} is a draft")
    if preset.tensors not in (decoder_tensors, hybrid_tensors):
        raise SystemExit(f"--acceptance is not written for {args.preset}; choose another preset")
    draft_vocab = args.draft_vocab_size or min(32768, config["vocab_size"] // 2)
    pair = (preset, config, args.seed, args.acceptance, draft_vocab)
    if not in_folder:
        return [(mtp_preset(*pair), args.out, args.quant)]
    if args.draft_kind:
        of_draft = (args.draft_kind, dict(args.draft_set), args.draft_quant, args.second)
        target, draft = block_pair(*pair, *of_draft)
    else:
        target, draft = pair_presets(*pair, args.draft_quant, args.second)
    check_apart(args.out, args.draft_out)
    jobs = [(target, args.out, args.quant), (draft, args.draft_out, args.draft_quant)]
    return jobs[args.draft_only :]


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    if args.preset not in PRESETS:
        raise SystemExit(f"unknown preset {args.preset!r}; known: {', '.join(PRESETS)}")
    config = {**PRESETS[args.preset].config, **dict(args.set)}
    if args.num_hidden_layers is not None:
        config["num_hidden_layers"] = args.num_hidden_layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: args.num_hidden_layers]
    check_config(config)
    if not 0 < args.shard_size_gb < math.inf:
        raise SystemExit(f"--shard-size-gb is {args.shard_size_gb}, but must be above 0")
    jobs = list_jobs(args, config)
    for _, out, _ in jobs:  # checked before the tensors are generated
        holds = GGUF_FILE if args.quant == GGUF and out == args.out else "config.json"
        check_out(out, args.force, args.tokenizer, holds)
    dtype = args.dtype or (FORMATS[args.quant].dtype if args.quant in FORMATS else "bfloat16")
    for preset, out, quant in jobs:
        progress = write_checkpoint(
            preset,
            out,
            dtype=dtype,
            seed=args.seed,
            shard_bytes=int(args.shard_size_gb * 1e9),
            tokenizer=args.tokenizer,
            device=args.device,
            force=args.force,
            quant=quant,
        )
        pair = "" if args.acceptance is None else f" of acceptance {args.acceptance}"
        form = f"{args.preset}{pair}, {quant or dtype}, seed {args.seed}"
        print(f"{out}: {form}, {progress.text().strip()}")


if __name__ == "__main__":
    main()
