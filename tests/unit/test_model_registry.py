"""The registry of model families: scanning, unknown names, registration from outside."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cpmcu.models import registry
from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.names import Piece, canonical_names
from cpmcu.models.registry import find_model, register_model, registered_models
from tests.reference.tiny_checkpoints import tiny_config


@pytest.fixture(autouse=True)
def keep_registry() -> Iterator[None]:
    registered_models()
    before = dict(registry._families)
    yield
    registry._families.clear()
    registry._families.update(before)


def build_toy(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    return read_spec(config, options, embed_scale=3.0)


def test_families_are_found_in_files_of_their_own() -> None:
    sources = registered_models()
    assert set(sources) >= {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MiniCPMForCausalLM",
    }
    assert sources["Qwen2ForCausalLM"].endswith("cpmcu/models/qwen2.py")
    assert list(sources) == sorted(sources)


@pytest.mark.parametrize(
    ("architecture", "block"),
    [
        ("DeepseekV3ForCausalLM", "latent attention (MLA)"),
        ("Glm4MoeLiteForCausalLM", "latent attention (MLA)"),
        ("Mistral4ForConditionalGeneration", "latent attention (MLA)"),
        ("Qwen4ExpForCausalLM", "hyper-connections"),
        ("JambaForCausalLM", "Mamba-1"),
        ("Cohere2ForCausalLM", "LayerNorm"),
    ],
)
def test_a_missing_block_is_named(architecture: str, block: str) -> None:
    with pytest.raises(ValueError) as error:
        find_model({"architectures": [architecture]})
    words = f"architecture {architecture!r} is not supported: it needs {block}, expected one of"
    assert words in str(error.value)


def test_unknown_architecture_is_named_with_the_supported() -> None:
    with pytest.raises(ValueError) as error:
        find_model({"architectures": ["XGLMForCausalLM"]})
    assert "'XGLMForCausalLM'" in str(error.value)
    families = {name.removesuffix("ForCausalLM") for name in registered_models()}
    assert all(name in str(error.value) for name in families if "For" not in name)
    assert "the nearest name is " in str(error.value)


@pytest.mark.parametrize("name", ["DFlashDraftModel", "Qwen3DSparkModel", "LlamaForCausalLMEagle3"])
def test_a_draft_is_no_model(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.* of a draft.* --draft-model-path"):
        find_model({"architectures": [name]})


@pytest.mark.parametrize("found", [None, [], "LlamaForCausalLM", [3]])
def test_invalid_architectures(found: object) -> None:
    with pytest.raises(ValueError, match=r"architectures is .* expected a list"):
        find_model({"architectures": found})


def test_registers_from_outside() -> None:
    register_model("OutsiderForCausalLM", "OutsiderForQA")(build_toy)
    assert registered_models()["OutsiderForCausalLM"] == __file__
    family = find_model({"architectures": ["OutsiderForQA"]})
    fields = family.build(tiny_config("llama"), BuildOptions())
    assert fields.embed_scale == 3.0 and family.names is canonical_names


def test_first_known_architecture_wins() -> None:
    assert find_model({"architectures": ["X", "Qwen3ForCausalLM"]}).build.__name__ == "build_qwen3"


def test_refuses_a_second_function() -> None:
    with pytest.raises(ValueError, match=r"'LlamaForCausalLM' is registered twice: .*llama\.py"):
        register_model("LlamaForCausalLM")(build_toy)


def test_the_same_function_may_register_again() -> None:
    register_model("OutsiderForCausalLM")(build_toy)
    register_model("OutsiderForCausalLM")(build_toy)


def test_needs_an_architecture() -> None:
    with pytest.raises(ValueError, match="at least one architecture"):
        register_model()


def test_fused_tensors_are_split_by_rows() -> None:
    fields = find_model(tiny_config("llama")).build(tiny_config("llama"), BuildOptions())
    prefix = "model.layers.1."
    assert list(canonical_names(prefix + "self_attn.qkv_proj.weight", fields)) == [
        Piece(prefix + "self_attn.q_proj.weight", 0, 64),
        Piece(prefix + "self_attn.k_proj.weight", 64, 32),
        Piece(prefix + "self_attn.v_proj.weight", 96, 32),
    ]
    assert list(canonical_names(prefix + "mlp.gate_up_proj.weight", fields)) == [
        Piece(prefix + "mlp.gate_proj.weight", 0, 96),
        Piece(prefix + "mlp.up_proj.weight", 96, 96),
    ]
    assert [p.name for p in canonical_names(prefix + "self_attn.qkv_proj.bias", fields)] == [
        f"{prefix}self_attn.{part}_proj.bias" for part in "qkv"
    ]


def test_rotary_buffers_are_known_and_not_needed() -> None:
    fields = find_model(tiny_config("llama")).build(tiny_config("llama"), BuildOptions())
    assert not canonical_names("model.layers.0.self_attn.rotary_emb.inv_freq", fields)
    assert not canonical_names("model.rotary_emb.inv_freq", fields)


def test_needs_neither_extension_nor_torch() -> None:
    code = (
        "import sys; from cpmcu.models.registry import registered_models as r;"
        "from cpmcu.quant.registry import registered_quants as q; from cpmcu.loading import loader;"
        "assert r() and q(); assert not {'torch', 'cpmcu.C', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
