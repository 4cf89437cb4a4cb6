"""NVFP4, MXFP4 and MXFP8 of each tool: logits of the dequantised twin, and exact drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.drafted import FOUR_DRAFTS, TREES, Models, check_draft
from tests.engine.harness import DEVICES
from tests.engine.test_mixed import check, compressed, group, refused
from tests.engine.test_moe_w4 import tiny_moe
from tests.engine.test_w4 import dense, logits, tolerance
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_mixed import write_mixed
from tests.tolerances import assert_close

extension_or_skip()

on_devices = pytest.mark.parametrize("device", DEVICES)


def float_group(targets: list[str], form: str) -> dict[str, Any]:
    """A group of compressed-tensors. It names quantised activations, which the engine ignores."""
    stated = "mxfp8-quantized" if form == "mxfp8" else f"{form}-pack-quantized"
    weights = {"num_bits": 8 if form == "mxfp8" else 4, "type": "float", "symmetric": True}
    strategy = {"strategy": "tensor_group", "group_size": 16} if form == "nvfp4" else {
        "strategy": "group", "group_size": 32
    }  # fmt: skip
    made = {"targets": targets, "weights": weights | strategy, "format": stated}
    return {**made, "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local"}}


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm}


FORMS = {
    "nvfp4": compressed(float_group(["Linear"], "nvfp4")),
    "nvfp4mo": modelopt("NVFP4"),
    "mxfp4": compressed(float_group(["Linear"], "mxfp4")),
    "mxfp4mo": modelopt("mxfp4"),
    "mxfp4 of AutoRound": {
        "quant_method": "auto-round", "bits": 4, "data_type": "mx_fp", "group_size": 32,
        "packing_format": "auto_round:llm_compressor",
    },
    "mxfp8": compressed(float_group(["Linear"], "mxfp8")),
}  # fmt: skip


@on_devices
@pytest.mark.parametrize("form", FORMS)
def test_every_tool(tmp_path: Path, device: str, form: str) -> None:
    """K of down_proj and N of gate_up_proj are no block multiples; a layer's o_proj is dense."""
    forms = {"layers.1.self_attn.o_proj": "dense", "": form.partition(" ")[0]}
    check(tmp_path, dense(tmp_path, "qwen3"), forms, FORMS[form], device)


@on_devices
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4mo", "mxfp8"])
def test_experts(tmp_path: Path, device: str, form: str) -> None:
    tiny = tiny_moe(tmp_path, moe_intermediate_size=160)
    check(tmp_path, tiny, {"": form}, FORMS[form], device)


@on_devices
def test_experts_of_gpt_oss(tmp_path: Path, device: str) -> None:
    """All experts of a layer are one tensor of blocks; rows of gate and up alternate."""
    tiny = tiny_moe(tmp_path, moe_intermediate_size=160)
    forms = {".experts.": "mxfp4"}
    twin = write_mixed(tmp_path / "twin", tiny.config, tiny.weights, forms, None)
    found = write_mixed(tmp_path / "x", tiny.config, tiny.weights, forms, {"quant_method": "mxfp4"})
    tensors = load_file(found / "model.safetensors")
    for layer in range(tiny.config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        for kind, suffix in (("blocks", "weight_packed"), ("scales", "weight_scale")):
            gate, up, down = (
                torch.stack([tensors.pop(f"{prefix}{i}.{leaf}.{suffix}") for i in range(3)])
                for leaf in ("gate_proj", "up_proj", "down_proj")
            )
            both = torch.stack([gate, up], 2).flatten(1, 2)
            if kind == "blocks":
                both, down = both.unflatten(-1, (-1, 16)), down.unflatten(-1, (-1, 16))
            tensors |= {f"{prefix}gate_up_proj_{kind}": both, f"{prefix}down_proj_{kind}": down}
    save_file({k: v.contiguous() for k, v in tensors.items()}, found / "model.safetensors")
    assert_close(logits(found, device), logits(twin, device), tolerance(device))


@on_devices
def test_minimax_mxfp8(tmp_path: Path, device: str) -> None:
    quant = {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}
    check(tmp_path, dense(tmp_path, "llama"), {"": "mxfp8"}, quant, device)


@on_devices
def test_fp8_beside_nvfp4_in_one_file(tmp_path: Path, device: str) -> None:
    """MLPs in NVFP4, attention in FP8, a layer's MLP in MXFP8: `mixed-precision`."""
    quant = compressed(
        group([r"re:.*self_attn\..*", "re:.*layers.1.mlp.down_proj"], "fp8"),
        float_group([r"re:.*mlp\.(gate|up|down)_proj$"], "nvfp4"),
    )
    forms = {"self_attn": "fp8", "layers.1.mlp.down": "fp8", "": "nvfp4"}
    check(tmp_path, dense(tmp_path, "llama"), forms, quant, device)


@on_devices
@pytest.mark.parametrize("beside", [False, True])
def test_modelopt_mixed(tmp_path: Path, device: str, beside: bool) -> None:
    """MIXED_PRECISION: the tensors tell each layer's algorithm. It may stand beside config.json."""
    forms = {"self_attn": "fp8", "layers.1.mlp.down": "mxfp8", "": "nvfp4mo"}
    stated = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"model.layers.0.mlp": {"quant_algo": "NVFP4", "group_size": 16}},
    }
    tiny = dense(tmp_path, "llama")
    quant = {"quant_method": "modelopt", **stated}
    if not beside:
        return check(tmp_path, tiny, forms, quant, device)
    named = write_mixed(tmp_path / "named", tiny.config, tiny.weights, forms, quant)
    found = write_mixed(tmp_path / "found", tiny.config, tiny.weights, forms, quant)
    config = json.loads((found / "config.json").read_text())
    del config["quantization_config"]
    (found / "config.json").write_text(json.dumps(config))
    (found / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
    assert np.array_equal(logits(found, device), logits(named, device))


@on_devices
def test_chunks(tmp_path: Path, device: str) -> None:
    tiny = dense(tmp_path, "llama")
    directory = write_mixed(tmp_path, tiny.config, tiny.weights, {"": "nvfp4"}, FORMS["nvfp4"])
    whole = logits(directory, device)
    for chunk_length in (1, 17, 70):
        assert np.array_equal(logits(directory, device, chunk_length=chunk_length), whole)


@pytest.mark.parametrize(("kind", "tree"), FOUR_DRAFTS)
def test_speculation_changes_no_token(models: Models, kind: str, tree: str) -> None:
    """Target and draft have NVFP4 weights."""
    check_draft(models, kind, "llama_nvfp4mo", TREES[tree])


# ---- refused


def change(root: Path, name: str, tensor: torch.Tensor | None) -> str:
    """The complaint about a NVFP4 file with another tensor `name`."""
    tiny = dense(root, "llama")
    directory = write_mixed(root, tiny.config, tiny.weights, {"": "nvfp4mo"}, FORMS["nvfp4mo"])
    tensors = load_file(directory / "model.safetensors")
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError) as error:
        logits(directory, "cpu")
    return str(error.value)


O_PROJ = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("weight_scale_2", torch.tensor(0.0), "expected one positive number"),
        ("weight_scale_2", None, f"missing that config.json asks for: {O_PROJ}.weight_scale_2"),
        ("weight_scale", torch.zeros(4096, dtype=torch.uint8), "has shape [4096], expected"),
        ("weight_scale", torch.zeros(256, 2), "expected float8_e4m3fn [N, K / 16] (NVFP4) or"),
        ("pre_quant_scale", torch.ones(256), "scales activations (AWQ or SVD of ModelOpt)"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    assert message in change(tmp_path, f"{O_PROJ}.{name}", tensor)


def test_q_k_and_v_of_different_forms(tmp_path: Path) -> None:
    forms = {"k_proj": "fp8", "": "nvfp4mo"}
    message = refused(tmp_path, dense(tmp_path, "llama"), forms, modelopt("MIXED_PRECISION"))
    assert "has NVFP4" in message and "they are one matrix here" in message
