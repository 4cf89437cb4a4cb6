"""Checkpoints whose modules are stored in different forms, and their dequantised twins.

    forms = {"down_proj": "gptq8", "self_attn": "dense", "": "gptq4"}     # part of a name -> form
    write_mixed(tmp_path / "mixed", tiny.config, tiny.weights, forms, quant)
    write_mixed(tmp_path / "twin", tiny.config, tiny.weights, forms, None)

The first part that a module's name contains decides. Names that do not end in "_proj" are dense,
unless a part is the last word of the name. Each form decodes its own tensors by the
formula of the library that defines the format, so the twin depends on the stored bits only:

| form | formula |
|---|---|
| gptq4, gptq8 | scales[g_idx[k], n] * (qweight >> bits * i & mask - (qzeros + 1)) |
| awq4 | scales[k // group] * (qweight - qzeros), in AutoAWQ's order |
| ct4, ct8 | weight_scale[n, k // group] * ((weight_packed >> bits * i & mask) - 2^(bits - 1)) |
| gptq8z, ct8z | the same with zero points in qzeros, weight_zero_point |
| int8, fp8 | weight * weight_scale |
| nvfp4, mxfp4, mxfp8 | that of float_groups.py; nvfp4mo and mxfp4mo have ModelOpt's names |

A form ends in "c" for a scale for each whole row, or in "_g32" or "_g64"; else groups have 128.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.reference import float_groups
from tests.reference.tiny_checkpoints import Array

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# form -> (kind of float_groups, name of the codes, of the scale of the matrix)
FLOAT_GROUPS = {
    "nvfp4": ("nvfp4", "weight_packed", "weight_global_scale"),
    "nvfp4mo": ("nvfp4", "weight", "weight_scale_2"),
    "mxfp4": ("mxfp4", "weight_packed", ""),
    "mxfp4mo": ("mxfp4", "weight", ""),
    "mxfp8": ("mxfp8", "weight", ""),
}


def write_mixed(
    directory: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Array],
    forms: Mapping[str, str],
    quant: Mapping[str, Any] | None,
    *,
    scale_dtype: str = "float16",
) -> Path:
    """Writes config.json and one file. `quant` None: the dequantised numbers in float32."""
    tensors: dict[str, torch.Tensor] = {}
    for name, array in weights.items():
        module = name.removesuffix(".weight")
        form = form_of(module, forms) if module != name else "dense"
        if form == "dense":
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            tensors[name] = tensor.half().float() if tensor.is_floating_point() else tensor
            continue
        stored = encode(form, array, getattr(torch, scale_dtype))
        if quant is None:
            tensors[name] = torch.from_numpy(decode(form, stored).astype(np.float32))
        else:
            tensors |= {f"{module}.{part}": tensor for part, tensor in stored.items()}
    made = dict(config) | {"torch_dtype": "float32"}
    if quant is not None:
        made["quantization_config"] = dict(quant)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(made))
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    return directory


def form_of(module: str, forms: Mapping[str, str]) -> str:
    leaf = module.rpartition(".")[2]
    if not leaf.endswith("_proj") and leaf not in forms:
        return "dense"
    return next((form for part, form in forms.items() if part in module), "dense")


def encode(form: str, weight: Array, scale_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a module for W [N, K]; all levels of the format occur."""
    n, k = weight.shape
    kind, group = split_form(form)
    if kind == "fp8":
        scale = torch.from_numpy(np.abs(weight).max(1, keepdims=True) / 448).to(scale_dtype)
        codes = (torch.from_numpy(weight) / scale.float()).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale}
    if kind in FLOAT_GROUPS:
        return encode_float_groups(kind, weight)
    bits = 4 if kind.endswith("4") else 8
    half = 1 << bits - 1
    group_of = np.zeros(k, np.int64) if kind == "int8" else np.arange(k) // (group or k)
    groups = int(group_of[-1]) + 1
    peaks = np.stack([np.abs(weight[:, group_of == g]).max(1) for g in range(groups)])
    scales = torch.from_numpy(peaks / half + 1e-8).to(scale_dtype)  # [G, N]
    wide = scales.double().numpy()[group_of].T
    q = np.clip(np.rint(weight / wide), -half, half - 1).astype(np.int64)
    if kind == "int8":
        return {"weight": torch.from_numpy(q.astype(np.int8)), "weight_scale": scales.T}
    biased, zeros = q + half, np.full((groups, n), half)
    if kind.endswith("z"):
        zeros = np.random.default_rng(n).integers(96, 160, (groups, n))
        biased = np.clip(q + zeros[group_of].T, 0, 255)
    if kind.startswith("gptq"):
        return {
            "qweight": words(biased, bits).T,
            "qzeros": words(zeros - 1, bits),
            "scales": scales,
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
    if kind == "awq4":
        zeros = np.random.default_rng(n).integers(6, 10, (groups, n))
        shifted = np.clip(q.T + zeros[group_of], 0, 15)
        return {
            "qweight": words(in_awq_order(shifted), 4),
            "qzeros": words(in_awq_order(zeros), 4),
            "scales": scales,
        }
    stored = {
        "weight_packed": words(biased, bits),
        "weight_scale": scales.T,
        "weight_shape": torch.tensor([n, k]),
    }
    return stored | ({"weight_zero_point": words(zeros, bits).T} if kind.endswith("z") else {})


def encode_float_groups(form: str, weight: Array) -> dict[str, torch.Tensor]:
    kind, name, of_matrix = FLOAT_GROUPS[form]
    factor = np.float32(np.abs(weight).max() / (6 * 448)) if of_matrix else np.float32(1)
    codes, scales = float_groups.quantise(kind, weight, float(factor))
    stored = {name: torch.from_numpy(codes), "weight_scale": torch.from_numpy(scales)}
    if kind == "nvfp4":
        stored["weight_scale"] = stored["weight_scale"].view(torch.float8_e4m3fn)
    if kind == "mxfp8":
        stored[name] = stored[name].view(torch.float8_e4m3fn)
    if of_matrix == "weight_global_scale":
        stored |= {of_matrix: torch.tensor([1 / factor]), "input_global_scale": torch.ones(1)}
    elif of_matrix:
        stored |= {of_matrix: torch.tensor(factor), "input_scale": torch.ones(())}
    return stored


def decode_float_groups(form: str, stored: Mapping[str, torch.Tensor]) -> Array:
    kind, name, of_matrix = FLOAT_GROUPS[form]
    codes, scales = (stored[part].view(torch.uint8).numpy() for part in (name, "weight_scale"))
    factor = float(stored[of_matrix]) if of_matrix else 1.0
    return float_groups.dequantise(kind, codes, scales, 1 / factor if form == "nvfp4" else factor)


def split_form(form: str) -> tuple[str, int]:
    """Returns (kind, group size); 0: a group is a whole row."""
    kind, _, group = form.partition("_g")
    if kind in FLOAT_GROUPS or kind.endswith("c"):
        return kind.removesuffix("c"), 0
    return kind, int(group or 128)


def in_awq_order(values: Array) -> Array:
    return values.reshape(len(values), -1, 8)[:, :, AWQ_ORDER].reshape(values.shape)


def words(values: Array, bits: int) -> torch.Tensor:
    """Packs numbers [R, C] into int32 [R, C * bits / 32], the first one in the lowest bits."""
    parts = values.reshape(len(values), -1, 32 // bits).astype(np.uint64)
    packed = sum(parts[:, :, i] << np.uint64(bits * i) for i in range(32 // bits))
    return torch.from_numpy(np.asarray(packed).astype(np.uint32).view(np.int32))


def split(packed: torch.Tensor, bits: int) -> Array:
    """The inverse of `words`, by shifts of each word."""
    raw = packed.numpy().view(np.uint32).astype(np.int64)
    numbers = [raw >> bits * i & (1 << bits) - 1 for i in range(32 // bits)]
    return np.stack(numbers, -1).reshape(len(raw), -1)


def decode(form: str, stored: Mapping[str, torch.Tensor]) -> Array:
    """Returns W [N, K] in float64."""
    kind, group = split_form(form)
    if kind in FLOAT_GROUPS:
        return decode_float_groups(kind, stored)
    bits = 4 if kind.endswith("4") else 8
    if "weight" in stored:
        return (stored["weight"].double() * stored["weight_scale"].double()).numpy()
    if kind.startswith("gptq"):
        q = split(stored["qweight"].T.contiguous(), bits)  # [N, K]
        zeros = split(stored["qzeros"], bits) + 1
        group_of = stored["g_idx"].numpy()
        return stored["scales"].double().numpy()[group_of].T * (q - zeros[group_of].T)
    if kind == "awq4":
        place = np.argsort(AWQ_ORDER)
        q, zeros = (
            (lambda raw: raw.reshape(len(raw), -1, 8)[:, :, place].reshape(raw.shape))(
                split(stored[part], 4)
            )
            for part in ("qweight", "qzeros")
        )
        group_of = np.arange(len(q)) // (group or len(q))
        return (stored["scales"].double().numpy()[group_of] * (q - zeros[group_of])).T
    q = split(stored["weight_packed"], bits)
    scales = stored["weight_scale"].double().numpy()
    zeros = np.full(scales.shape, 1 << bits - 1)
    if kind.endswith("z"):
        zeros = split(stored["weight_zero_point"].T.contiguous(), bits).T
    group_of = np.arange(q.shape[1]) // (group or q.shape[1])
    return scales[:, group_of] * (q - zeros[:, group_of])
