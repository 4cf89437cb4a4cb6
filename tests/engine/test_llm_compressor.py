"""Whole directories of llm-compressor: every key of its config.json, and its other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_w4 import dense, logits, tolerance
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_mixed import write_mixed
from tests.tolerances import assert_close

extension_or_skip()

INTEGERS = {"type": "int", "scale_dtype": None, "zp_dtype": None}
FLOATS = {"type": "float", "zp_dtype": None}
# form of tiny_mixed -> format, weights
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ct4": ("pack-quantized", {**INTEGERS, "num_bits": 4, "strategy": "group", "group_size": 128}),
    "ct8z": ("pack-quantized", {**INTEGERS, "num_bits": 8, "strategy": "group", "group_size": 128}),
    "int8": ("int-quantized", {**INTEGERS, "num_bits": 8, "strategy": "channel"}),
    "fp8": ("float-quantized", {**FLOATS, "num_bits": 8, "strategy": "channel"}),
    "nvfp4": ("nvfp4-pack-quantized", {**FLOATS, "num_bits": 4, "strategy": "tensor_group"}),
    "mxfp4": ("mxfp4-pack-quantized", {**FLOATS, "num_bits": 4, "strategy": "group"}),
}
ACTIVATIONS = {
    "int8": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    "fp8": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"},
}
RECIPE = """default_stage:
  default_modifiers:
    QuantizationModifier:
      targets: [Linear]
      ignore: [lm_head]
      scheme: W4A16
"""


def config_of(form: str) -> dict[str, Any]:
    """quantization_config as llm-compressor 0.14 writes it."""
    stated, weights = FORMS[form]
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None,
        "observer": "memoryless_minmax", "observer_kwargs": {}, "symmetric": form != "ct8z",
        **weights,
    }  # fmt: skip
    group = {
        "format": stated,
        "input_activations": ACTIVATIONS.get(form),
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": stated,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.0",
    }


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("form", FORMS)
def test_directory(tmp_path: Path, form: str, key: str) -> None:
    tiny = dense(tmp_path, "qwen3")
    forms = {"": form}
    found = write_mixed(tmp_path / "found", tiny.config, tiny.weights, forms, config_of(form))
    twin = write_mixed(tmp_path / "twin", tiny.config, tiny.weights, forms, None)
    (found / "recipe.yaml").write_text(RECIPE)
    path = found / "config.json"
    config = json.loads(path.read_text())
    config[key] = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    assert_close(logits(found, "cpu"), logits(twin, "cpu"), tolerance("cpu"))
