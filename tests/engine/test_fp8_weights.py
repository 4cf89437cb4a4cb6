"""FP8 checkpoints of each tool give the logits of their dequantised weights, and exact drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engine.drafted import FOUR_DRAFTS, TREES, Models, check_draft
from tests.engine.harness import DEVICES, SMALL
from tests.engine.test_moe_w4 import tiny_moe
from tests.engine.test_w4 import dense, logits, tolerance
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_fp8 import KINDS, write_fp8
from tests.tolerances import assert_close

extension_or_skip()

on_devices = pytest.mark.parametrize("device", DEVICES)


@on_devices
@pytest.mark.parametrize("kind", ["qwen", "modelopt"] if SMALL else list(KINDS))
def test_every_tool(tmp_path: Path, device: str, kind: str) -> None:
    """K of down_proj and N of gate_up_proj are no block multiples; a layer's o_proj is dense."""
    tiny = dense(tmp_path, "qwen3")
    kept = ("layers.1.self_attn.o_proj",)
    twin = write_fp8(
        tmp_path / "twin", tiny.config, tiny.weights, kind, dequantised=True, keep=kept
    )
    found = write_fp8(tmp_path / "fp8", tiny.config, tiny.weights, kind, keep=kept)
    assert_close(logits(found, device), logits(twin, device), tolerance(device))


@on_devices
@pytest.mark.parametrize("kind", ["qwen", "ct_channel"])
def test_experts(tmp_path: Path, device: str, kind: str) -> None:
    tiny = tiny_moe(tmp_path)
    twin = write_fp8(tmp_path / "twin", tiny.config, tiny.weights, kind, dequantised=True)
    found = write_fp8(tmp_path / "fp8", tiny.config, tiny.weights, kind)
    assert_close(logits(found, device), logits(twin, device), tolerance(device))


@on_devices
def test_chunks(tmp_path: Path, device: str) -> None:
    tiny = dense(tmp_path, "llama")
    directory = write_fp8(tmp_path / "fp8", tiny.config, tiny.weights, "qwen")
    whole = logits(directory, device)
    for chunk_length in (1, 17, 70):
        assert np.array_equal(logits(directory, device, chunk_length=chunk_length), whole)


@pytest.mark.parametrize(("kind", "tree"), FOUR_DRAFTS)
def test_speculation_changes_no_token(models: Models, kind: str, tree: str) -> None:
    """Target and draft have FP8 weights."""
    check_draft(models, kind, "llama_fp8", TREES[tree])


def test_a_weight_without_its_scale(tmp_path: Path) -> None:
    tiny = dense(tmp_path, "llama")
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    directory = write_fp8(tmp_path / "fp8", tiny.config, tiny.weights, "qwen", drop=(name,))
    with pytest.raises(
        ValueError, match=r"up_proj.weight is float8_e4m3fn and has no weight_scale"
    ):
        logits(directory, "cpu")


def test_scales_of_two_kinds(tmp_path: Path) -> None:
    tiny = dense(tmp_path, "llama")
    import torch
    from safetensors.torch import load_file, save_file

    directory = write_fp8(tmp_path / "fp8", tiny.config, tiny.weights, "ct_channel")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight_scale"] = torch.ones(1)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match="expected scales of one kind in the whole file"):
        logits(directory, "cpu")


@on_devices
def test_not_a_number(tmp_path: Path, device: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tiny = dense(tmp_path, "llama")
    directory = write_fp8(tmp_path / "fp8", tiny.config, tiny.weights, "qwen")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"o_proj.weight.* holds nan at \[3, 5\]"):
        logits(directory, device)
