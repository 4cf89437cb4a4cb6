"""A tiny gpt-oss in MXFP4 as in published files, and its twin with the same numbers as floats.

twin, found = write_mxfp4(tmp_path, num_hidden_layers=2, intermediate_size=64)
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.reference.tiny_checkpoints import (
    TinyCheckpoint,
    random_weights,
    tiny_config,
    write_tiny,
)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def write_mxfp4(root: Path, **config: Any) -> tuple[TinyCheckpoint, TinyCheckpoint]:
    """Writes both in folders of `root`. The experts' matrices alone are quantised."""
    weights = random_weights(tiny_config("gptoss", **config))
    stored, rng = dict(weights), np.random.default_rng(3)
    for name, stack in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, inputs, outputs = stack.shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(121, 125, blocks.shape[:3], np.uint8)
        codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
        values = np.where(codes & 8, -1, 1) * E2M1[codes & 7]
        matrix = values * np.exp2(scales.astype(np.float32) - 127)[..., None]
        weights[name] = matrix.reshape(experts, outputs, inputs).swapaxes(1, 2).astype(np.float32)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    twin = write_tiny(root / "twin", "gptoss", weights=weights, **config)
    found = root / "found"
    shutil.copytree(twin.directory, found)
    save_file(stored, found / "model.safetensors")
    quantised = {**twin.config, "quantization_config": {"quant_method": "mxfp4"}}
    (found / "config.json").write_text(json.dumps(quantised))
    return twin, TinyCheckpoint(found, quantised, twin.weights)
