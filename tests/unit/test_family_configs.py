"""config.json -> SpecFields of the families that are one file each (test_families.py)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.reference.tiny_checkpoints import tiny_config
from tests.unit.test_model_configs import build, shape

SEED_OSS_36B: dict[str, Any] = {
    "architectures": ["SeedOssForCausalLM"],
    "attention_bias": True,
    "attention_out_bias": False,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 155136,
}
GRANITE_33_8B: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49159,
}


def test_seed_oss_36b() -> None:
    fields = build(SEED_OSS_36B, device="cuda")
    assert shape(fields) == (64, 5120, 80, 8, 128, 27648, 155136, 524288)
    assert fields.qkv_bias and not build(SEED_OSS_36B | {"attention_bias": False}).qkv_bias
    unstated = ("attention_bias", "num_key_value_heads")
    short = {key: value for key, value in SEED_OSS_36B.items() if key not in unstated}
    assert build(short, device="cuda") == fields


def test_granite_33_8b() -> None:
    fields = build(GRANITE_33_8B, device="cuda")
    assert shape(fields) == (40, 4096, 32, 8, 128, 12800, 49159, 131072)
    assert (fields.embed_scale, fields.residual_scale, fields.logit_scale) == (12, 0.22, 1 / 16)
    assert fields.rope_attention_scaling == 1  # a model-wide factor would be a draft head's, too
    for layer in fields.layers:
        params = layer[0][1]
        assert params["rope_inv_freq"] == fields.rope_inv_freq
        scale = params["rope_attention_scaling"] ** 2 / math.sqrt(128)
        assert scale == pytest.approx(0.0078125)


# ---- refusals: key, found, expected

REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("granite", {"attention_bias": True}, ["attention_bias is True", "false"]),
    ("granite", {"mlp_bias": True}, ["mlp_bias is True", "false"]),
    ("granite", {"logits_scaling": 0}, ["logits_scaling is 0", "a positive number"]),
    ("granite", {"partial_rotary_factor": 0.5}, ["RoPE rotates 8 of head_dim=16 elements"]),
    ("granite4", {"num_local_experts": 8}, ["num_local_experts is 8", "0: experts"]),
    (
        "granite4",
        {"layer_types": ["mamba", "attention"]},
        ["layer_types is ['mamba', 'attention']", "Mamba-2 is not supported"],
    ),
    (
        "granite4",
        {"position_embedding_type": "alibi"},
        ["position_embedding_type is 'alibi'", "'rope' or null"],
    ),
    ("seedoss", {"attention_out_bias": True}, ["attention_out_bias is True", "false"]),
    ("seedoss", {"mlp_bias": True}, ["mlp_bias is True", "false"]),
]


@pytest.mark.parametrize(("family", "changes", "words"), REFUSED)
def test_refuses(family: str, changes: dict[str, Any], words: list[str]) -> None:
    config = tiny_config(family, **changes)
    with pytest.raises(ValueError) as error:
        build(config)
    message = str(error.value)
    assert "\n" not in message
    for word in ["config.json", "expected", *words]:
        assert word in message
