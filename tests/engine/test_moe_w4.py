"""4-bit experts: every layout gives the same bits, close to those of the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.harness import DEVICES
from tests.engine.test_w4 import check_layouts, logits
from tests.reference.engines import extension_or_skip, load_tiny
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_w4 import SIZES, quantise, write_w4

extension_or_skip()

LAYOUTS = ("gptq", "gptq_v2", "awq", "compressed")
# 136 is no multiple of 256 rows or 128 k. All experts are chosen, so rounding changes no choice.
EXPERTS = {"moe_intermediate_size": 136, "num_experts": 3, "num_experts_per_tok": 3}

on_devices = pytest.mark.parametrize("device", DEVICES)


def tiny_moe(root: Path, family: str = "qwen3moe", **settings: Any) -> TinyCheckpoint:
    return write_tiny(root / "dense", family, **(SIZES | EXPERTS | settings))


VARIANTS: dict[str, dict[str, Any]] = {
    "groups": {},
    "channel-wise": {"group_size": -1},
    "zeros": {"has_zeros": True},
    "bfloat16 scales": {"scale_dtype": "bfloat16"},
}


@on_devices
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout(tmp_path: Path, device: str, variant: str) -> None:
    check_layouts(tmp_path, tiny_moe(tmp_path), LAYOUTS, device, **VARIANTS[variant])


@on_devices
def test_shared_expert(tmp_path: Path, device: str) -> None:
    tiny = tiny_moe(tmp_path, "qwen2moe", shared_expert_intermediate_size=272)
    check_layouts(tmp_path, tiny, ("gptq", "compressed"), device)


def test_chosen_experts_and_chunks(tmp_path: Path) -> None:
    tiny = tiny_moe(tmp_path, num_experts=11, num_experts_per_tok=2)
    directory = write_w4(tmp_path / "awq", tiny.config, quantise(tiny.weights), "awq")
    whole = logits(directory, "cpu")
    for chunk_length in (1, 17):
        assert np.array_equal(logits(directory, "cpu", chunk_length=chunk_length), whole)


def test_dense_experts_of_one_layer(tmp_path: Path) -> None:
    """Layer 1 is not quantised, as some quantisers leave layers out."""
    tiny = tiny_moe(tmp_path)
    dense = tuple(
        name.removesuffix(".weight").removeprefix("model.")
        for name in tiny.weights
        if "layers.1.mlp.experts" in name
    )
    weights = quantise(tiny.weights, keep=dense)
    mixed = logits(write_w4(tmp_path / "mixed", tiny.config, weights, "gptq"), "cpu")
    expected = logits(write_w4(tmp_path / "plain", tiny.config, weights, "dense"), "cpu")
    np.testing.assert_allclose(mixed, expected, atol=1e-4)


def test_one_dense_expert(tmp_path: Path) -> None:
    tiny = tiny_moe(tmp_path)
    keep = ("layers.1.mlp.experts.2.gate_proj", "layers.1.mlp.experts.2.up_proj")
    weights = quantise(tiny.weights, keep=keep)
    directory = write_w4(tmp_path / "bad", tiny.config, weights, "gptq")
    with pytest.raises(ValueError, match=r"missing .*experts.2.gate_proj.qweight.*not used were"):
        load_tiny(directory)


def test_missing_expert(tmp_path: Path) -> None:
    tiny = tiny_moe(tmp_path)
    kept = {n: w for n, w in tiny.weights.items() if "layers.0.mlp.experts.1." not in n}
    directory = write_w4(tmp_path / "bad", tiny.config, quantise(kept), "compressed")
    with pytest.raises(ValueError, match=r"6 tensors are missing .*layers.0.mlp.experts.1.down"):
        load_tiny(directory)


def test_many_tensors_load_quickly(tmp_path: Path) -> None:
    """The load of more than ten thousand tensors has no part that takes quadratic time."""
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 8}
    tiny = tiny_moe(tmp_path, num_hidden_layers=7, hidden_size=64, head_dim=16, **sizes)
    weights = quantise(tiny.weights)
    assert len(weights.linears) * 4 > 10_000
    directory = write_w4(tmp_path / "gptq", tiny.config, weights, "gptq")
    (tmp_path / "dense" / "model.safetensors").unlink()
    assert load_tiny(directory).engine.num_pages > 0
