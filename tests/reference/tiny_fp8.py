"""Writes a tiny checkpoint with FP8 linear layers, with the scales of each tool.

tiny = write_tiny(tmp_path / "dense", "qwen3")
write_fp8(tmp_path / "fp8", tiny.config, tiny.weights, "qwen")
write_fp8(tmp_path / "dequantised", tiny.config, tiny.weights, "qwen", dequantised=True)

torch rounds to e4m3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.reference.tiny_checkpoints import Array

# kind -> rows and k of a scale, name and dtype of the scales, quantization_config
_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def _compressed(strategy: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**_WEIGHTS, "strategy": strategy}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }


def _modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm}


KINDS: dict[str, tuple[int, int, str, torch.dtype, dict[str, Any]]] = {
    "qwen": (
        128, 128, "weight_scale_inv", torch.bfloat16,
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    ),
    "ministral": (0, 0, "weight_scale", torch.float32, {"quant_method": "fp8"}),
    "ct_block": (128, 128, "weight_scale", torch.bfloat16, _compressed("block")),
    "ct_channel": (1, 0, "weight_scale", torch.bfloat16, _compressed("channel")),
    "ct_tensor": (0, 0, "weight_scale", torch.bfloat16, _compressed("tensor")),
    "modelopt": (0, 0, "weight_scale", torch.float32, _modelopt("FP8")),
    "modelopt_channel": (
        1, 0, "weight_scale", torch.float32, _modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    ),
    "modelopt_block": (128, 128, "weight_scale", torch.float32, _modelopt("fp8_pb_wo")),
}  # fmt: skip


def quantise(weight: Array, rows: int, columns: int, dtype: torch.dtype) -> Any:
    """Codes [N, K] and scales [ceil(N / rows), ceil(K / columns)]; 0: the whole dimension."""
    n, k = weight.shape
    rows, columns = rows or n, columns or k
    padded = np.zeros((-(-n // rows) * rows, -(-k // columns) * columns), np.float32)
    padded[:n, :k] = weight
    largest = np.abs(padded).reshape(-1, rows, padded.shape[1] // columns, columns).max((1, 3))
    scales = torch.from_numpy(largest / 448 + 1e-8).to(dtype)
    wide = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n, :k]
    codes = (torch.from_numpy(weight.astype(np.float32)) / wide).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * wide


def write_fp8(
    directory: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Array],
    kind: str,
    *,
    dtype: str = "float16",
    dequantised: bool = False,
    keep: tuple[str, ...] = (),
    drop: tuple[str, ...] = (),
    extra: tuple[str, ...] = (),
) -> Path:
    """Writes config.json and one file. Modules whose names end in `keep` stay dense.

    `extra`: last words of names that are quantised beside those that end in "_proj".
    """
    rows, columns, suffix, scale_dtype, quant = KINDS[kind]
    stored = getattr(torch, dtype)
    tensors: dict[str, torch.Tensor] = {}
    for name, array in weights.items():
        module = name.removesuffix(".weight")
        leaf = module.rpartition(".")[2]
        taken = leaf.endswith("_proj") or leaf in ("fc", *extra)
        taken = taken and name.endswith(".weight") and not module.endswith(keep or ("-",))
        if not taken:
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            tensors[name] = tensor.to(stored) if tensor.is_floating_point() else tensor
            if dequantised and tensor.is_floating_point():
                tensors[name] = tensors[name].float()
            continue
        codes, scales, values = quantise(array, rows, columns, scale_dtype)
        if dequantised:
            tensors[name] = values.contiguous()
            continue
        tensors[name] = codes
        if kind == "modelopt_channel":
            scales = scales[:, 0]
        elif kind == "modelopt_block":
            scales = scales[:, None, :, None]
        elif not rows:
            scales = scales.reshape(() if kind == "modelopt" else (1,))
            tensors[f"{module}.input_scale"] = torch.ones(())
        tensors[f"{module}.{suffix}"] = scales.contiguous()
    for name in drop:
        del tensors[name]
    made = dict(config) | {"torch_dtype": "float32" if dequantised else dtype}
    if not dequantised:
        made["quantization_config"] = quant
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(made))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    save_file(tensors, directory / "model.safetensors")
    return directory
