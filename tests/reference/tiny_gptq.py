"""Writes tiny GPTQ checkpoints: models of every family, and draft heads.

tiny = write_gptq(tmp_path, "qwen2", group_size=128, shards=2)
tiny.directory, tiny.config, tiny.tensors, tiny.linears   # linears: module -> q, scales

The packing follows the definition of the format and uses no function of the package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.reference.tiny_checkpoints import random_weights, tiny_config, to_bits

Array = npt.NDArray[Any]

# Heads of 32: q has 128 outputs, k and v have 32 each, so no part alone fills a tile.
SIZES: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
_CODES = {"float16": "F16", "uint16": "BF16", "int32": "I32", "int64": "I64", "bool": "BOOL"}


@dataclass(frozen=True, slots=True)
class TinyGptq:
    """The file holds `tensors` (bfloat16 as uint16). `linears`: module -> q [K, N], scales [G,
    N]."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, Array]
    linears: dict[str, tuple[Array, Array]]


def write_gptq(
    directory: Path,
    family: str = "llama",
    *,
    group_size: int = 128,
    shards: int = 1,
    dtype: str = "float16",
    quant: Mapping[str, Any] | None = None,
    seed: int = 0,
    **overrides: Any,
) -> TinyGptq:
    """A model of one of `tiny_checkpoints.FAMILIES`; `quant` changes quantization_config."""
    config = tiny_config(family, dtype, **{**SIZES, **overrides})
    return write(directory, config, random_weights(config, seed), group_size, shards, dtype, quant)


def write_gptq_eagle(
    directory: Path,
    vocab_size: int = 203,
    seed: int = 0,
    hidden_size: int = 128,
    **settings: Any,
) -> TinyGptq:
    """A MiniCPM4 EAGLE head from QAT: names begin with `model.`, and fc is quantised."""
    config, weights = _head("minicpm", 2, vocab_size, seed, hidden_size)
    for name in ("model.input_norm1.weight", "model.input_norm2.weight"):
        norm = np.random.default_rng(len(name)).uniform(0.5, 1.5, hidden_size)
        weights[name] = norm.astype(np.float32)
    return write(directory, config, weights, **{**DEFAULTS, **settings})


def write_gptq_eagle3(
    directory: Path, vocab_size: int = 203, seed: int = 0, **settings: Any
) -> TinyGptq:
    """An EAGLE-3 head whose draft vocabulary is every second token."""
    config, weights = _head("llama", 3, vocab_size, seed)
    drafted = vocab_size // 2
    config |= {"draft_vocab_size": drafted, "architectures": ["LlamaForCausalLMEagle3"]}
    rng = np.random.default_rng(seed + 5)
    layer = "model.layers.0."
    for part in "qkv":  # over [norm(embedding) | norm(hidden)]
        name = f"{layer}self_attn.{part}_proj.weight"
        weights[name] = np.concatenate([weights[name], weights[name][:, ::-1]], axis=1)
    weights = {name.replace(layer, "midlayer."): array for name, array in weights.items()}
    del weights["model.embed_tokens.weight"]
    weights["midlayer.hidden_norm.weight"] = np.ones(128, np.float32)
    weights["norm.weight"] = np.ones(128, np.float32)
    weights["lm_head.weight"] = rng.standard_normal((drafted, 128)).astype(np.float32)
    weights["fc.weight"] = weights.pop("model.fc.weight")
    weights["d2t"] = np.arange(drafted, dtype=np.int64)  # draft id i is token 2 i
    weights["t2d"] = np.arange(vocab_size) % 2 == 0
    return write(directory, config, weights, **{**DEFAULTS, **settings})


DEFAULTS: dict[str, Any] = {"group_size": 128, "shards": 1, "dtype": "float16", "quant": None}


def _head(
    family: str, features: int, vocab_size: int, seed: int, hidden_size: int = 128
) -> tuple[dict[str, Any], dict[str, Array]]:
    sizes = {**SIZES, "num_hidden_layers": 1, "vocab_size": vocab_size, "hidden_size": hidden_size}
    sizes["num_attention_heads"] = hidden_size // sizes["head_dim"]
    config = tiny_config(family, "float16", **sizes)
    weights = random_weights(config, seed)
    del weights["model.norm.weight"], weights["lm_head.weight"]
    shape = (hidden_size, features * hidden_size)
    fc = np.random.default_rng(seed + 9).standard_normal(shape) / 16
    weights["model.fc.weight"] = fc.astype(np.float32)
    return config, weights


def write(
    directory: Path,
    config: dict[str, Any],
    weights: Mapping[str, Array],
    group_size: int,
    shards: int,
    dtype: str,
    quant: Mapping[str, Any] | None,
) -> TinyGptq:
    """Quantises the projections of all layers and `fc` to the nearest of 16 levels."""
    settings = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size,
        "desc_act": False,
        "static_groups": True,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        **(quant or {}),
    }
    config = {**config, "quantization_config": settings}
    version = 2 if settings["checkpoint_format"] == "gptq_v2" else 1
    tensors: dict[str, Array] = {}
    linears: dict[str, tuple[Array, Array]] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") and module.rpartition(".")[2] != "fc":
            floating = np.issubdtype(weight.dtype, np.floating)
            tensors[name] = to_bits(weight, dtype) if floating else weight
            continue
        q, scales = quantise(weight, group_size)
        linears[module] = q, to_bits(scales, dtype)
        tensors |= {
            f"{module}.qweight": words(q.T).T,
            f"{module}.qzeros": words(np.full(scales.shape, 6 + version, np.uint8)),
            f"{module}.scales": to_bits(scales, dtype),
            f"{module}.g_idx": (np.arange(len(q)) * len(scales) // len(q)).astype(np.int32),
        }
    save(directory, config, tensors, shards)
    return TinyGptq(directory, config, tensors, linears)


def quantise(weight: Array, group_size: int) -> tuple[Array, Array]:
    """Rounds W [N, K] to q uint8 [K, N] and scales float32 [G, N], w ~ (q - 8) * scale."""
    n, k = weight.shape
    groups = 1 if group_size == -1 else k // group_size
    parts = weight.T.reshape(groups, -1, n)
    scales = np.abs(parts).max(axis=1) / 7
    q = np.clip(np.rint(parts / scales[:, None]) + 8, 0, 15).astype(np.uint8)
    return q.reshape(k, n), scales


def words(values: Array) -> Array:
    """Packs eight of 0..15 into a word, the first in the lowest bits: [R, C] becomes [R, C / 8]."""
    parts = values.reshape(len(values), -1, 8).astype(np.uint32)
    packed = np.zeros(parts.shape[:2], np.uint32)
    for i in range(8):
        packed |= parts[:, :, i] << np.uint32(4 * i)
    return packed.view(np.int32)


def save(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Array], shards: int = 1
) -> None:
    """Writes config.json and the tensors, distributed over `shards` files in turn."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    if shards == 1:
        _write_file(directory / "model.safetensors", tensors)
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        _write_file(directory / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)


def _write_file(path: Path, tensors: Mapping[str, Array]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        code = _CODES[array.dtype.name]
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
