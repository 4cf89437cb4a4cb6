"""Writes a tiny checkpoint with 4-bit linear layers, in each layout that the package reads.

tiny = write_tiny(tmp_path / "dense", "qwen2")
weights = quantise(tiny.weights)                     # the same numbers in every layout
write_w4(tmp_path / "awq", tiny.config, weights, "awq")
write_w4(tmp_path / "dequantised", tiny.config, weights, "dense")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpmcu.quant import packing
from tests.reference import packing as layouts
from tests.reference.tiny_checkpoints import Array, TinyCheckpoint, from_bits, to_bits, write_tiny

LAYOUTS = ("gptq", "gptq_v2", "awq", "compressed", "marlin")
STACKS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Sizes valid in all layouts. K of down_proj and N of gate_up_proj are no block multiples.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # the smallest on CUDA
}


@dataclass(frozen=True, slots=True)
class Linear:
    """w = (q - z) * scale; scales are the bits of `scale_dtype`."""

    q: Array  # uint8 [K, N]
    scales: Array  # [G, N]
    zeros: Array | None  # uint8 [G, N]
    scale_dtype: str

    @property
    def dense(self) -> Array:
        """The dequantised weights, float32 [N, K]."""
        group = np.arange(len(self.q)) // (128 if len(self.scales) > 1 else len(self.q))
        z = 8 if self.zeros is None else self.zeros.astype(np.int64)[group]
        scales = from_bits(self.scales, self.scale_dtype)
        return np.ascontiguousarray(((self.q.astype(np.int64) - z) * scales[group]).T, np.float32)


@dataclass(frozen=True, slots=True)
class W4Weights:
    """Dense tensors by name, and quantised modules by name."""

    dense: dict[str, Array]
    linears: dict[str, Linear]


def quantise(
    weights: Mapping[str, Array],
    *,
    group_size: int = 128,
    has_zeros: bool = False,
    scale_dtype: str = "float16",
    extra: tuple[str, ...] = (),
    keep: tuple[str, ...] = (),
) -> W4Weights:
    """Quantises projections, `fc` and modules named in `extra`, except names that end in `keep`."""
    dense: dict[str, Array] = {}
    linears: dict[str, Linear] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        leaf = module.rpartition(".")[2]
        taken = leaf.endswith("_proj") or leaf == "fc" or module in extra
        if not name.endswith(".weight") or not taken or module.endswith(keep or ("-",)):
            dense[name] = weight
            continue
        k, n = weight.shape[1], weight.shape[0]
        step = k if group_size == -1 else 128
        groups = -(-k // step)
        padded = np.zeros((groups * step, n), np.float32)
        padded[:k] = weight.T
        parts = padded.reshape(groups, step, n)
        if has_zeros:
            low, high = parts.min(axis=1), parts.max(axis=1)
            real = (high - low) / 15 + 1e-8
            zeros = np.clip(np.rint(-low / real), 0, 15).astype(np.uint8)
        else:
            real = np.abs(parts).max(axis=1) / 7 + 1e-8
            zeros = np.full((groups, n), 8, np.uint8)
        scales = to_bits(real, scale_dtype)
        used = from_bits(scales, scale_dtype)
        q = np.clip(np.rint(parts / used[:, None]) + zeros[:, None], 0, 15).astype(np.uint8)
        q = q.reshape(groups * step, n)[:k]
        linears[module] = Linear(q, scales, zeros if has_zeros else None, scale_dtype)
    return W4Weights(dense, linears)


def write_w4(
    directory: Path,
    config: Mapping[str, Any],
    weights: W4Weights,
    layout: str,
    *,
    dtype: str = "float16",
    file: str = "model.safetensors",
    quant: Mapping[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    change: Mapping[str, Array] | None = None,
) -> Path:
    """Writes config.json and one file; layout "dense" is the dequantised weights in float32.

    `quant` changes quantization_config, `drop` and `change` the tensors.
    """
    has_zeros = any(linear.zeros is not None for linear in weights.linears.values())
    group_size = _group_size(weights)
    tensors: dict[str, tuple[Array, str]] = {}
    for name, array in weights.dense.items():
        if not np.issubdtype(array.dtype, np.floating):
            tensors[name] = array, array.dtype.name
            continue
        bits = to_bits(array, dtype)
        dequantised = layout == "dense"
        tensors[name] = (from_bits(bits, dtype), "float32") if dequantised else (bits, dtype)
    linears = weights.linears
    if layout == "marlin":
        linears = _stacked(linears)
    for module, linear in linears.items():
        for name, array in _tensors(layout, linear, group_size, config, module).items():
            floating = name.endswith("scale") or name.endswith("scales")
            kind = linear.scale_dtype if floating else array.dtype.name
            tensors[f"{module}.{name}"] = array, kind
    for name in drop:
        del tensors[name]
    for name, array in (change or {}).items():
        tensors[name] = array, array.dtype.name
    made = {key: value for key, value in config.items() if key != "torch_dtype"}
    made["torch_dtype"] = "float32" if layout == "dense" else dtype
    if layout != "dense":
        made["quantization_config"] = {**_config(layout, group_size, has_zeros), **(quant or {})}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(made))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    _write(directory / file, tensors)
    return directory


HYBRID_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "mtp_num_hidden_layers": 1,
}
HYBRID_DENSE = ("in_proj_a", "in_proj_b", "in_proj_ba", "mtp")  # as in published files


def quantise_hybrid(
    weights: Mapping[str, Array], dense: tuple[str, ...] = HYBRID_DENSE, **settings: Any
) -> W4Weights:
    """Quantises a model of gated delta nets, except modules with a part of their name in `dense`.

    A module may also be named as a whole. `in_proj_a` and `in_proj_b` always stay dense.
    """
    modules = [name.removesuffix(".weight") for name in weights]
    taken = tuple(module for module in modules if ".in_proj_" in module)
    parts = {*dense, *HYBRID_DENSE[:3]}
    kept = tuple(m for m in modules if set(m.split(".")) & parts or m in dense)
    return quantise(weights, extra=taken, keep=kept, **settings)


def write_hybrid_w4(
    directory: Path,
    family: str,
    layout: str,
    dense: tuple[str, ...] = HYBRID_DENSE,
    quant: Mapping[str, Any] | None = None,
) -> TinyCheckpoint:
    """Writes a tiny 4-bit model of gated delta nets with an MTP head."""
    tiny = write_tiny(directory / "dense", family, **HYBRID_SIZES)
    weights = quantise_hybrid(tiny.weights, dense)
    write_w4(directory / "w4", tiny.config, weights, layout, quant=quant)
    return TinyCheckpoint(directory / "w4", tiny.config, tiny.weights)


def _group_size(weights: W4Weights) -> int:
    sizes = [(len(linear.q), len(linear.scales)) for linear in weights.linears.values()]
    return -1 if any(k > 128 and groups == 1 for k, groups in sizes) else 128


def _stacked(linears: Mapping[str, Linear]) -> dict[str, Linear]:
    """Concatenates q, k, v and gate, up."""
    made: dict[str, Linear] = {}
    for module, linear in linears.items():
        prefix, _, leaf = module.rpartition(".")
        stack = next((stack for stack, parts in STACKS.items() if leaf in parts), None)
        if stack is None:
            made[module] = linear
        elif leaf == STACKS[stack][0]:
            parts = [linears[f"{prefix}.{part}"] for part in STACKS[stack]]
            q = np.concatenate([part.q for part in parts], axis=1)
            scales = np.concatenate([part.scales for part in parts], axis=1)
            made[f"{prefix}.{stack}"] = Linear(q, scales, None, linear.scale_dtype)
    return made


def _tensors(
    layout: str, linear: Linear, group_size: int, config: Mapping[str, Any], module: str
) -> dict[str, Array]:
    q, scales = linear.q, linear.scales
    zeros = np.full(scales.shape, 8, np.uint8) if linear.zeros is None else linear.zeros
    if layout == "dense":
        return {"weight": linear.dense}
    if layout == "awq":
        return {
            "qweight": layouts.pack_awq(q),
            "qzeros": layouts.pack_awq(zeros),
            "scales": scales,
        }
    if layout == "compressed":
        made = {
            "weight_packed": layouts.pack_compressed(q),
            "weight_scale": np.ascontiguousarray(scales.T),
            "weight_shape": np.array(q.shape[::-1]),
        }
        if linear.zeros is not None:
            made["weight_zero_point"] = layouts.pack_compressed_zeros(zeros)
        return made
    if layout == "marlin":
        channel_wise = group_size == -1
        halves = [slice(None)]
        if module.rpartition(".")[2] == "fc" and len(q) == 2 * config["hidden_size"]:
            halves = [slice(0, len(q) // 2), slice(len(q) // 2, None)]
            of_scales = [slice(0, len(scales) // 2), slice(len(scales) // 2, None)]
        else:
            of_scales = halves
        return {
            "qweight": np.concatenate([packing.pack_marlin(q[half]) for half in halves], axis=1),
            "scales": np.concatenate(
                [packing.marlin_scales(scales[s], channel_wise=channel_wise) for s in of_scales],
                axis=1,
            ),
        }
    step = len(q) if group_size == -1 else 128
    return {
        "qweight": packing.pack_gptq(q),
        "qzeros": packing.pack_gptq_zeros(zeros, 2 if layout == "gptq_v2" else 1),
        "scales": scales,
        "g_idx": (np.arange(len(q)) // step).astype(np.int32),
    }


def _config(layout: str, group_size: int, has_zeros: bool) -> dict[str, Any]:
    if layout == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    if layout == "compressed":
        channel = group_size == -1
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": not has_zeros,
            "strategy": "channel" if channel else "group",
            "group_size": None if channel else group_size,
            "actorder": None,
            "dynamic": False,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": None,
                    "output_activations": None,
                }
            },
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }
    # CPM.cu's converter does not change GPTQ's config.
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size,
        "desc_act": False,
        "sym": not has_zeros,
        "checkpoint_format": "gptq_v2" if layout == "gptq_v2" else "gptq",
        "static_groups": True,
        "lm_head": False,
    }


_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64"}
_CODES |= {"bool": "BOOL"}


def _write(path: Path, tensors: Mapping[str, tuple[Array, str]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, end = [], 0
    for name, (array, dtype) in tensors.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _CODES[dtype], "shape": array.shape, "data_offsets": [begin, end]}
        chunks.append(np.ascontiguousarray(array).tobytes())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))
