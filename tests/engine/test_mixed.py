"""8-bit integers, and modules of different forms in one file: logits of the dequantised twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.harness import DEVICES
from tests.engine.test_moe_w4 import tiny_moe
from tests.engine.test_w4 import dense, logits, tolerance
from tests.reference.engines import extension_or_skip
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_mixed import split_form, write_mixed
from tests.tolerances import assert_close

extension_or_skip()

on_devices = pytest.mark.parametrize("device", DEVICES)


def gptq(**changes: Any) -> dict[str, Any]:
    base = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    return {**base, **changes}


def group(targets: list[str], form: str, **changes: Any) -> dict[str, Any]:
    """A group of compressed-tensors for a form of tiny_mixed."""
    kind, size = split_form(form)
    by_row = size == 0 or form in ("int8", "fp8")
    weights = {
        "num_bits": 4 if kind.endswith("4") else 8,
        "type": "float" if kind == "fp8" else "int",
        "strategy": "channel" if by_row else "group",
        "group_size": None if by_row else size,
        "symmetric": True,
    }
    formats = {"fp8": "float-quantized", "int8": "int-quantized"}
    activations = {"num_bits": 8, "strategy": "token"} if kind == "int8" else None
    return {
        "targets": targets,
        "weights": {**weights, **changes},
        "input_activations": activations,
        "format": formats.get(kind, "pack-quantized"),
    }


def compressed(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    named = {f"group_{i}": each for i, each in enumerate(groups)}
    stated = groups[0]["format"] if len(groups) == 1 else "mixed-precision"
    quant = {"quant_method": "compressed-tensors", "format": stated, "config_groups": named}
    return {**quant, "ignore": ["lm_head"], **changes}


def check(
    root: Path,
    tiny: TinyCheckpoint,
    forms: dict[str, str],
    quant: dict[str, Any],
    device: str,
    **settings: Any,
) -> None:
    config, weights = tiny.config, tiny.weights
    found = write_mixed(root / "found", config, weights, forms, quant, **settings)
    twin = write_mixed(root / "twin", config, weights, forms, None, **settings)
    assert_close(logits(found, device), logits(twin, device), tolerance(device))


GROUPS = {
    "gptq4_g32": gptq(group_size=32),
    "gptq4_g16": gptq(group_size=16),
    "gptq8_g64": gptq(bits=8, group_size=64),
    "ct4_g64": compressed(group(["Linear"], "ct4_g64")),
    "ct4_g16": compressed(group(["Linear"], "ct4_g16")),
    "ct8_g32": compressed(group(["Linear"], "ct8_g32")),
    "awq4_g64": {
        "quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
    },
}  # fmt: skip


@on_devices
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", GROUPS)
def test_small_groups(tmp_path: Path, device: str, form: str, scale_dtype: str) -> None:
    tiny = dense(tmp_path, "qwen2")
    forms = {"layers.1.self_attn.o_proj": "dense", "": form}
    check(tmp_path, tiny, forms, GROUPS[form], device, scale_dtype=scale_dtype)


@on_devices
@pytest.mark.parametrize(
    "form", ["gptq4_g32", "ct4_g16", "ct8_g32", "awq4_g64", "gptq8", "int8", "ct8z"]
)
def test_experts_of_integers(tmp_path: Path, device: str, form: str) -> None:
    check(tmp_path, tiny_moe(tmp_path), {"": form}, (GROUPS | EIGHT_BITS)[form], device)


LATENT: dict[str, Any] = {
    "hybrid_override_pattern": "ME*E",
    "hidden_size": 256,
    "head_dim": 64,
    "moe_latent_size": 128,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 256,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 1,
}


@on_devices
@pytest.mark.parametrize("form", ["gptq4", "gptq4_g32", "ct4_g64", "int8"])
def test_experts_of_a_latent_width(tmp_path: Path, device: str, form: str) -> None:
    """The MTP head stays dense, as in published files."""
    tiny = write_tiny(tmp_path / "dense", "nemotron", **LATENT)
    quant = ({"gptq4": gptq()} | GROUPS | EIGHT_BITS)[form]
    forms = {"mtp.": "dense", "": form}
    if device == "cpu":
        return check(tmp_path, tiny, forms, quant, device)
    # In 16 bits a router whose scores nearly tie may choose other experts, for one position and
    # those after it.
    config, weights = tiny.config, tiny.weights
    found, twin = (
        logits(write_mixed(tmp_path / name, config, weights, forms, of), device, dtype="float16")
        for name, of in (("found", quant), ("twin", None))
    )
    errors = np.abs(found - twin).max(axis=1) / np.abs(twin).max()
    assert np.mean(errors < tolerance(device).max_abs) >= 0.8, np.sort(errors)


@on_devices
def test_nemotron_3_super_of_modelopt(tmp_path: Path, device: str) -> None:
    """Experts in NVFP4, Mamba-2 and the latent projections in FP8, the rest in 16 bits."""
    tiny = write_tiny(tmp_path / "dense", "nemotron", **LATENT)
    forms = {"mtp.": "dense", "expert": "nvfp4mo", "in_proj": "fp8", "out_proj": "fp8"}
    quant = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["mtp*"]}
    check(tmp_path, tiny, {**forms, "latent": "fp8"}, quant, device)


EIGHT_BITS = {
    "gptq8": gptq(bits=8),
    "gptq8c": gptq(bits=8, group_size=-1),
    "ct8": compressed(group(["Linear"], "ct8")),
    "ct8c": compressed(group(["Linear"], "ct8c")),
    "int8": compressed(group(["Linear"], "int8")),
    "gptq8z": gptq(bits=8, sym=False),
    "ct8z": compressed(group(["Linear"], "ct8z", symmetric=False)),
}


@on_devices
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", EIGHT_BITS)
def test_8_bits(tmp_path: Path, device: str, form: str, scale_dtype: str) -> None:
    """K of down_proj and N of gate_up_proj are no block multiples; a layer's o_proj is dense."""
    tiny = dense(tmp_path, "qwen2")
    forms = {"layers.1.self_attn.o_proj": "dense", "": form}
    check(tmp_path, tiny, forms, EIGHT_BITS[form], device, scale_dtype=scale_dtype)


@on_devices
@pytest.mark.parametrize("form", ["gptq8", "gptq4_g32"])
def test_chunks(tmp_path: Path, device: str, form: str) -> None:
    tiny, quant = dense(tmp_path, "llama"), (GROUPS | EIGHT_BITS)[form]
    directory = write_mixed(tmp_path, tiny.config, tiny.weights, {"": form}, quant)
    whole = logits(directory, device)
    for length in (1, 17, 70):
        assert np.array_equal(logits(directory, device, chunk_length=length), whole)


MIXED: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "rules of GPTQ": (
        {"layers.1.self_attn": "dense", "down_proj": "gptq8c", "": "gptq4"},
        gptq(
            dynamic={
                r"-:.*layers\.1\.self_attn": {},
                r"+:.*\.down_proj": {"bits": 8, "group_size": -1},
                r".*down": {"bits": 3},  # the first rule that matches counts
            }
        ),
    ),
    "groups of compressed-tensors": (
        {
            "o_proj": "int8",
            "self_attn": "fp8",
            "layers.0.mlp.down": "ct4",
            "down": "ct8c",
            "": "ct4",
        },
        compressed(
            group(["Linear"], "ct4"),
            group([r"re:.*down_proj$"], "ct8c"),
            group([r"re:.*self_attn\.[qkv]_proj"], "fp8"),
            group(["re:.*o_proj"], "int8"),
            group(["model.layers.0.mlp.down_proj"], "ct4"),
        ),
    ),
    "names that AWQ does not convert": (
        {"layers.0.mlp": "dense", "o_proj": "dense", "": "awq4"},
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["layers.0.mlp", "o_proj"],
        },
    ),
    "layers of AutoRound": (
        {"layers.0.mlp.down_proj": "gptq8", "o_proj": "dense", "": "gptq4"},
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {
                "model.layers.0.mlp.down_proj": {"bits": 8},
                ".*o_proj.*": {"bits": 16},
            },
        },
    ),
}


@on_devices
@pytest.mark.parametrize("name", MIXED)
def test_modules_of_different_forms(tmp_path: Path, device: str, name: str) -> None:
    forms, quant = MIXED[name]
    check(tmp_path, dense(tmp_path, "qwen3"), forms, quant, device)


@on_devices
def test_experts_beside_8_bits(tmp_path: Path, device: str) -> None:
    """Experts have 4 bits, attention has 8."""
    quant = gptq(dynamic={r"+:.*self_attn\.": {"bits": 8}})
    check(tmp_path, tiny_moe(tmp_path), {"self_attn": "gptq8", "": "gptq4"}, quant, device)


# ---- refused


def refused(root: Path, tiny: TinyCheckpoint, forms: dict[str, str], quant: dict[str, Any]) -> str:
    directory = write_mixed(root / "bad", tiny.config, tiny.weights, forms, quant)
    with pytest.raises(ValueError) as error:
        logits(directory, "cpu")
    return str(error.value)


def test_q_k_and_v_of_different_bits(tmp_path: Path) -> None:
    forms = {"k_proj": "gptq8", "": "gptq4"}
    message = refused(
        tmp_path, dense(tmp_path, "llama"), forms, gptq(dynamic={".*k_proj": {"bits": 8}})
    )
    assert "q_proj has 4 bits with groups of 128 and" in message
    assert "k_proj has 8 bits" in message and "they are one matrix here" in message


def test_a_module_of_no_group(tmp_path: Path) -> None:
    quant = compressed(group([r"re:.*mlp\."], "ct4"))
    message = refused(tmp_path, dense(tmp_path, "llama"), {"": "ct4"}, quant)
    assert "self_attn" in message and "no group of config_groups with this format" in message


def test_zero_points_of_8_bits(tmp_path: Path) -> None:
    tiny = dense(tmp_path, "llama")
    message = refused(tmp_path, tiny, {"": "gptq8"}, gptq(bits=8, checkpoint_format="gptq_v2"))
    assert "has the zero point 127, expected 128 everywhere" in message
