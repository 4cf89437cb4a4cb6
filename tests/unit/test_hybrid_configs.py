"""config.json of Qwen3-Next and Qwen3.5 -> SpecFields, and the names of their tensors."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.reader import language_config
from cpmcu.models.registry import find_model
from tests.reference.tiny_checkpoints import tiny_config
from tests.reference.tiny_hybrid import EXPERTS as SOME_EXPERTS
from tests.reference.tiny_hybrid import HYBRIDS

TEXT_27B: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": [*(["linear_attention"] * 3), "full_attention"] * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
QWEN35_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": TEXT_27B,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "hidden_size": 1152},
}
DELTA_NET = {
    "num_key_heads": 16,
    "num_value_heads": 48,
    "key_head_dim": 128,
    "value_head_dim": 128,
    "conv_kernel": 4,
    "fused_projections": False,
}


def build(config: dict[str, Any], **options: Any) -> SpecFields:
    return find_model(config).build(config, BuildOptions(**options))


def mixers(fields: SpecFields) -> str:
    """One letter a layer: d for a gated delta net, a for attention."""
    assert all([kind for kind, _ in layer][1:] == ["mlp"] for layer in fields.layers)
    return "".join(layer[0][0].replace("gated_", "")[0] for layer in fields.layers)


def test_qwen35_27b(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fields = build(QWEN35_27B)
    assert [r.getMessage() for r in caplog.records] == [
        "vision_config is ignored: text alone is read, and model.visual.* not loaded"
    ]
    sizes = (fields.hidden_size, fields.intermediate_size, fields.vocab_size, fields.head_dim)
    assert sizes == (5120, 17408, 248320, 256)
    assert (fields.num_attention_heads, fields.num_key_value_heads) == (24, 4)
    assert fields.max_position_embeddings == 262144 and fields.rms_norm_eps == 1e-6
    assert fields.qk_norm and fields.zero_centred_norms and not fields.tie_word_embeddings
    assert len(fields.rope_inv_freq) == 32
    assert fields.rope_inv_freq[1] == pytest.approx(1e7 ** (-2 / 64), rel=1e-6)
    assert mixers(fields) == "ddda" * 16
    assert fields.layers[0][0] == ("gated_delta_net", DELTA_NET)
    assert fields.layers[3][0] == ("attention", {"output_gate": True})


def test_a_text_only_export_is_the_same_model() -> None:
    text = {"architectures": ["Qwen3_5ForCausalLM"], **TEXT_27B}
    assert build(text) == build(QWEN35_27B)
    del text["layer_types"]
    assert build(text) == build(QWEN35_27B)


def test_keys_that_may_be_left_out() -> None:
    """The defaults are those of transformers."""
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    keys += ("num_key_value_heads", "rms_norm_eps", "vocab_size", "max_position_embeddings")
    short = {key: TEXT_27B[key] for key in keys} | {"linear_num_value_heads": 48}
    short |= {"architectures": ["Qwen3_5ForCausalLM"], "rope_theta": 1e7, "head_dim": None}
    assert build(short) == build(QWEN35_27B)


def test_qwen3_next_with_an_mlp_in_each_layer() -> None:
    fields = build(tiny_config("qwen3_next"))
    assert mixers(fields) == "ddda" and fields.layers[0][0][1]["fused_projections"]
    assert len(fields.rope_inv_freq) == 2
    assert build(tiny_config("qwen3_next", mlp_only_layers=[], num_experts=0)) == fields
    assert build(tiny_config("qwen3_next", mlp_only_layers=[], decoder_sparse_step=5)) == fields


def test_other_layer_patterns() -> None:
    assert mixers(build(tiny_config("qwen3_5", full_attention_interval=2))) == "dada"
    assert mixers(build(tiny_config("qwen3_5", num_hidden_layers=7))) == "dddaddd"
    kinds = ["full_attention", "linear_attention"]
    fields = build(tiny_config("qwen3_5", layer_types=kinds, num_hidden_layers=2))
    assert mixers(fields) == "ad"


def test_attention_without_a_gate() -> None:
    fields = build(tiny_config("qwen3_5", attn_output_gate=False))
    assert fields.layers[3][0] == ("attention", {})


@pytest.mark.parametrize("top", [True, False, None])
@pytest.mark.parametrize("text", [True, False, None])
@pytest.mark.parametrize("has_lm_head", [True, False])
def test_tied_heads_of_the_wrapper(top: bool | None, text: bool | None, has_lm_head: bool) -> None:
    """The key of the whole model precedes that of text_config; the file decides without both."""
    config = {**QWEN35_27B, "text_config": {**TEXT_27B, "tie_word_embeddings": text}}
    config["tie_word_embeddings"] = top
    stated = [value for value in (top, text) if value is not None]
    expected = stated[0] if stated else not has_lm_head
    assert build(config, has_lm_head=has_lm_head).tie_word_embeddings is expected


def test_keys_of_text_config_are_raised() -> None:
    quant = {"quantization_config": {"quant_method": "gptq"}}
    flat = language_config({**QWEN35_27B, **quant, "eos_token_id": 1})
    assert flat["eos_token_id"] == 248044 and flat["dtype"] == "bfloat16"
    assert flat["architectures"] == QWEN35_27B["architectures"]
    assert flat["quantization_config"] == {"quant_method": "gptq"}
    assert "text_config" not in flat and language_config(flat) == flat
    with pytest.raises(ValueError, match="text_config is 'none', expected an object"):
        language_config({"text_config": "none"})


@pytest.mark.parametrize("family", HYBRIDS)
def test_names(family: str) -> None:
    config = tiny_config(family)
    found = find_model(config)
    fields = found.build(config, BuildOptions())
    prefix = "model.language_model." if family == "qwen3_5_vl" else "model."
    same = ("layers.0.linear_attn.A_log", "layers.0.linear_attn.conv1d.weight", "norm.weight")
    same += ("layers.3.self_attn.q_proj.weight", "layers.0.linear_attn.in_proj_qkv.qweight")
    for name in same:
        assert [piece.name for piece in found.names(prefix + name, fields)] == [f"model.{name}"]
    assert [piece.name for piece in found.names("lm_head.weight", fields)] == ["lm_head.weight"]
    for name in ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "model.visual.norm.weight"):
        assert found.names(name, fields) == ()


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"attention_bias": True}, ["attention_bias is True", "false"]),
    ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'"]),
    ({"output_gate_type": "sigmoid"}, ["output_gate_type is 'sigmoid'", "'swish'"]),
    ({"attn_output_gate": "yes"}, ["attn_output_gate is 'yes'", "true or false"]),
    ({"linear_conv_kernel_dim": 3}, ["linear_conv_kernel_dim is 3", "4, the only width"]),
    ({"linear_num_value_heads": 3}, ["linear_num_value_heads is 3", "linear_num_key_heads=2"]),
    ({"linear_num_key_heads": 0}, ["linear_num_key_heads is 0", "positive"]),
    ({"linear_num_value_heads": 2**20}, ["linear_num_value_heads is 1048576", "at most 1024"]),
    ({"linear_value_head_dim": 20}, ["linear_value_head_dim is 20", "a multiple of 8"]),
    ({"linear_key_head_dim": 512}, ["linear_key_head_dim is 512", "at most 256"]),
    ({"full_attention_interval": 0}, ["full_attention_interval is 0"]),
    ({"layer_types": ["full_attention"]}, ["layer_types", "a list of 4 layer types"]),
    ({"layer_types": ["mamba"] * 4}, ["layer_types has mamba", "linear_attention or full"]),
    ({"partial_rotary_factor": 3, "rope_parameters": None}, ["partial_rotary_factor is 3"]),
]
EXPERTS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("qwen3_next", {"mlp_only_layers": [0, 1, 3]}, ["num_experts_per_tok is missing"]),
    (
        "qwen3_next",
        {**SOME_EXPERTS, "shared_expert_intermediate_size": 20},
        ["shared_expert_intermediate_size is 20", "a multiple of 8"],
    ),
    ("qwen3_next", {"mlp_only_layers": 7}, ["mlp_only_layers is 7", "a list of layer"]),
    ("qwen3_5", {**SOME_EXPERTS, "num_experts_per_tok": 7}, ["at most num_experts=6"]),
]


@pytest.mark.parametrize(
    ("family", "changes", "words"), [*(("qwen3_5", *row) for row in REFUSED), *EXPERTS]
)
def test_refuses(family: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        build(tiny_config(family, **changes))
    message = str(error.value)
    assert "\n" not in message
    for word in ["config.json", "expected", *words]:
        assert word in message
