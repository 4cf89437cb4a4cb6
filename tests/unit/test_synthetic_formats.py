"""Quantised synthetic checkpoints have the dense matrices' standard deviation, load and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cpmcu.config import EngineConfig
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.loading.loader import load_model
from scripts.synthetic.formats import FORMATS
from tests.engine.harness import generate
from tests.reference import float_groups, fp8
from tests.unit.test_synthetic_checkpoint import write

Tensors = dict[str, npt.NDArray[Any]]
MODULES = {
    "tiny-llama": "self_attn.o_proj",
    "tiny-qwen3-moe": "mlp.experts.3.down_proj",
    "tiny-qwen3.5": "linear_attn.in_proj_qkv",
}


def arrays(directory: Path) -> Tensors:
    """The tensors; those of bfloat16 as float32."""
    checkpoint = open_checkpoint(directory)
    made = {}
    for name, stored in checkpoint.tensors.items():
        made[name] = checkpoint.read(name)
        if stored.meta.dtype == "bfloat16":
            made[name] = (made[name].astype(np.uint32) << 16).view(np.float32)
    return made


def dequantised(form: str, tensors: Tensors, module: str) -> npt.NDArray[np.float64]:
    def part(name: str) -> npt.NDArray[Any]:
        return tensors[f"{module}.{name}"]

    if form == "fp8":
        scales = part("weight_scale_inv").repeat(128, 0).repeat(128, 1)
        values = fp8.values_of(part("weight"))
        return values * scales[: values.shape[0], : values.shape[1]]
    if form == "nvfp4":
        codes, scales = part("weight_packed"), part("weight_scale")
        return float_groups.dequantise("nvfp4", codes, scales, 1 / part("weight_global_scale")[0])
    packed = part("weight_packed").view(np.uint8).astype(np.float64)
    return (packed - 128) * part("weight_scale")


@pytest.mark.parametrize("preset", MODULES)
@pytest.mark.parametrize("form", [form for form in FORMATS if form != "gptq"])
def test_formats(preset: str, form: str, tmp_path: Path) -> None:
    out = write(preset, tmp_path / form, "--quant", form)
    module = f"model.layers.0.{MODULES[preset]}"
    weight = dequantised(form, arrays(out), module)
    dense = arrays(write(preset, tmp_path / "dense"))[f"{module}.weight"]
    assert weight.shape == dense.shape
    assert abs(weight.std() / dense.std() - 1) < 0.1
    assert abs(weight.mean()) < 0.03 * dense.std()
    config = EngineConfig(device="cpu", num_threads=1, max_model_len=256)
    loaded = load_model(str(out), config=config)
    assert loaded.spec.linear_method == "packed"
    assert len(set(generate(loaded.engine, [5, 900, 17], 12))) > 1
