"""Writes a checkpoint directory: configuration, tokenizer, weights."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from cpmcu.convert.output import NewTensor, check_destination, new_directory, write_safetensors
from cpmcu.loading.tensors import TensorMeta
from scripts.synthetic.formats import quantisation_config, quantised
from scripts.synthetic.gguf import GGUF, GGUF_FILE, gguf_specs, write_gguf
from scripts.synthetic.hybrid import wrapped_config, wrapped_tensors
from scripts.synthetic.layouts import token_counts
from scripts.synthetic.presets import Preset
from scripts.synthetic.sources import Source, make_source
from scripts.synthetic.tensors import Config, TensorSpec, tensor_seed

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_TOKENIZER = ROOT / "cpmcu" / "assets" / "tiny-python-minicpm"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "draft_vocab_size"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "full_attention_interval"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "shared_expert_intermediate_size",
)
SCALES = ("scale_emb", "scale_depth", "dim_model_base")


def new_tensor(spec: TensorSpec, dtype: str, seed: int, source: Source) -> NewTensor:
    kind = spec.dtype or dtype
    number = tensor_seed(seed, spec.name)
    return NewTensor(
        TensorMeta(spec.name, kind, spec.shape),
        lambda: spec.fill(source, number, spec.count, kind),
    )


def shard(tensors: Iterable[NewTensor], limit: int) -> list[list[NewTensor]]:
    """Splits tensors in order into files of `limit` bytes. A larger tensor gets its own file."""
    shards: list[list[NewTensor]] = [[]]
    used = 0
    for tensor in tensors:
        size = tensor.meta.nbytes
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size
    return shards


class Progress:
    """Progress as one rewritten line on a terminal; no output elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.begin = total, 0, time.perf_counter()
        self.live = sys.stderr.isatty()

    def of_file(self) -> Callable[[int], None]:
        """Returns a callback for the bytes written so far of the next file."""
        before = self.done

        def update(done: int) -> None:
            self.done = before + done
            if self.live:
                print(f"\r{self.text()}", end="", file=sys.stderr, flush=True)

        return update

    def text(self) -> str:
        elapsed = max(time.perf_counter() - self.begin, 1e-9)
        return (
            f"{self.done / 1e9:6.2f} / {self.total / 1e9:.2f} GB  "
            f"{self.done / 1e9 / elapsed:.2f} GB/s  {elapsed:.0f} s"
        )


def write_weights(tensors: Iterable[NewTensor], directory: Path, shard_bytes: int) -> Progress:
    """Writes model.safetensors, or shards and their index."""
    shards = shard(tensors, shard_bytes)
    total = sum(tensor.meta.nbytes for part in shards for tensor in part)
    progress = Progress(total)
    weight_map: dict[str, str] = {}
    for index, part in enumerate(shards, start=1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / name, part, progress.of_file())
        weight_map |= dict.fromkeys((tensor.meta.name for tensor in part), name)
    if len(shards) > 1:
        index_content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / "model.safetensors.index.json", index_content)
    if progress.live:
        print(file=sys.stderr)
    return progress


def write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, destination: Path) -> None:
    if not (source / "tokenizer.json").is_file() and not (source / "tokenizer.model").is_file():
        raise SystemExit(f"{source} has neither tokenizer.json nor tokenizer.model")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def check_config(config: Config) -> None:
    """Raises SystemExit for invalid sizes and scales."""
    for key in (*SIZES, *SCALES):
        value, kind = config.get(key, 1), int if key in SIZES else (int, float)
        if key == "head_dim" and value is None:  # hidden_size / num_attention_heads
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
            expected = "integer" if key in SIZES else "number"
            raise SystemExit(f"{key} is {value!r}, but must be a positive {expected}")


def check_out(
    out: Path, force: bool, tokenizer: Path | None = None, holds: str = "config.json"
) -> None:
    sources = [] if tokenizer is None else [tokenizer]
    try:
        check_destination(out, sources, overwrite=force, flag="--force", holds=holds)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def check_apart(out: Path, draft_out: Path) -> None:
    out, draft_out = out.expanduser().resolve(), draft_out.expanduser().resolve()
    if out.is_relative_to(draft_out) or draft_out.is_relative_to(out):
        raise SystemExit(
            f"--out {out} and --draft-out {draft_out} must be two folders, neither inside the other"
        )


def write_checkpoint(
    preset: Preset,
    out: Path,
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
    shard_bytes: int = 5_000_000_000,
    tokenizer: Path | None = None,
    device: str = "auto",
    force: bool = False,
    quant: str | None = None,
) -> Progress:
    """Writes the directory under a temporary name next to `out`, then renames it.

    `quant`: the format of projections, one of FORMATS or GGUF's. A preset may store some itself.
    """
    if quant == GGUF:
        return write_gguf_model(preset, out, seed, device, force)
    config = {**preset.config, "torch_dtype": dtype}
    if quant:
        config["quantization_config"] = quantisation_config(config, quant)
    if preset.draft:
        tokenizer = None
    elif tokenizer is None and config["vocab_size"] >= 4096 and DEFAULT_TOKENIZER.is_dir():
        tokenizer = DEFAULT_TOKENIZER
    check_out(out, force, tokenizer)
    source = make_source(device)
    with new_directory(out) as directory:
        write_json(
            directory / "config.json", wrapped_config(config) if preset.with_vision else config
        )
        if preset.draft or config.get("mtp_num_hidden_layers"):
            np.save(directory / "token_counts.npy", token_counts(config["vocab_size"]))
        if not preset.draft:
            write_json(directory / "generation_config.json", preset.generation)
        for name, content in preset.files.items():
            (directory / name).write_bytes(content)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, directory)
        specs = list(preset.tensors(config))
        if quant and not preset.quantised:
            specs = list(quantised(specs, quant))
        if preset.with_vision:
            specs = list(wrapped_tensors(specs))
        tensors = [new_tensor(spec, dtype, seed, source) for spec in specs]
        return write_weights(tensors, directory, shard_bytes)


def write_gguf_model(preset: Preset, out: Path, seed: int, device: str, force: bool) -> Progress:
    """Writes one GGUF file in the directory `out`, named after it."""
    check_out(out, force, holds=GGUF_FILE)
    source = make_source(device)
    specs = gguf_specs(preset.tensors(preset.config), preset.config)
    progress = Progress(sum(spec.nbytes for spec in specs))
    with new_directory(out) as directory:
        write_gguf(
            directory / GGUF_FILE,
            specs,
            preset.config,
            lambda spec: spec.fill(source, tensor_seed(seed, spec.name)),
            progress.of_file(),
        )
    return progress
