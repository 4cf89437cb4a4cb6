"""config.json -> SpecFields of the families that are one file each (test_families.py)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cpmcu.models.registry import find_model
from scripts.synthetic.presets import PRESETS
from tests.reference.tiny_checkpoints import tiny_config
from tests.unit.test_model_configs import build, shape, windows

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
SMOLLM3_3B: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
PHI4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
MINISTRAL_3_8B: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "tie_word_embeddings": False,
    "vision_config": {"hidden_size": 1024},
}
MISTRAL_SMALL_31: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": {
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "vocab_size": 131072,
    },
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


def test_smollm3_3b() -> None:
    fields = build(SMOLLM3_3B, device="cuda")
    assert shape(fields) == (36, 2048, 16, 4, 128, 11008, 128256, 65536)
    assert fields.tie_word_embeddings
    still = ("rope_inv_freq" in layer[0][1] for layer in fields.layers)
    assert [not has for has in still] == [True, True, True, False] * 9
    short = {k: v for k, v in SMOLLM3_3B.items() if k not in ("no_rope_layers", "rope_theta")}
    unstated = build(short)
    assert unstated.layers == fields.layers
    assert unstated.rope_inv_freq == build(SMOLLM3_3B | {"rope_theta": 2e6}).rope_inv_freq


def test_smollm3_windows() -> None:
    window = {"sliding_window": 64, "no_rope_layers": [1, 0]}
    assert windows(build(tiny_config("smollm3", **window))) == [0, 0]
    window |= {"use_sliding_window": True}
    assert windows(build(tiny_config("smollm3", **window))) == [0, 64]
    config = tiny_config("smollm3", **window, max_position_embeddings=8192)
    assert windows(build(config | {"sliding_window": None})) == [0, 0]


def test_ministral_3_8b() -> None:
    fields = build(MINISTRAL_3_8B, device="cuda")
    assert shape(fields) == (34, 4096, 32, 8, 128, 14336, 131072, 262144)
    assert fields.rope_attention_scaling == 1 and not fields.tie_word_embeddings
    scale = {"query_scale_beta": 0.1, "query_scale_length": 16384}
    assert [dict(layer[0][1]) for layer in fields.layers] == [scale] * 34
    text = {**MINISTRAL_3_8B["text_config"], "architectures": ["Ministral3ForCausalLM"]}
    assert build(text | {"tie_word_embeddings": False}, device="cuda") == fields
    del text["rope_parameters"]
    assert build(text | {"tie_word_embeddings": False}, device="cuda") == fields


def test_olmo3_7b() -> None:
    config: dict[str, Any] = {
        "architectures": ["Olmo3ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 65536,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 100278,
    }
    fields = build(config, device="cuda")
    assert shape(fields) == (32, 4096, 32, 32, 128, 11008, 100278, 65536)
    assert windows(fields) == [4096, 4096, 4096, 0] * 8
    first, last = fields.layers[0][0][1], fields.layers[3][0][1]
    assert first["rope_attention_scaling"] == 1 and "rope_inv_freq" not in last
    assert fields.rope_attention_scaling == pytest.approx(1.2079, rel=1e-4)
    assert first["rope_inv_freq"][-1] > 4 * fields.rope_inv_freq[-1]
    scaling = config.pop("rope_scaling")
    theta = {"rope_theta": config.pop("rope_theta")}
    config["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", **theta},
        "full_attention": {**scaling, **theta},
    }
    assert build(config, device="cuda") == fields
    del config["rope_parameters"]["full_attention"]
    with pytest.raises(ValueError, match=r"an object for each of .* also full_attention"):
        build(config)


GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_gpt_oss_20b() -> None:
    fields = build(GPT_OSS_20B, device="cuda")
    assert shape(fields) == (24, 2880, 64, 8, 64, 2880, 201088, 131072)
    assert windows(fields) == [128, 0] * 12 and fields.qkv_bias
    (_, attention), (kind, moe) = fields.layers[0]
    assert attention["sinks"] and attention["o_bias"] and kind == "moe"
    assert (moe["num_experts"], moe["top_k"], moe["norm_topk_prob"]) == (32, 4, True)
    assert (moe["swiglu_alpha"], moe["swiglu_limit"]) == (1.702, 7.0)
    unstated = ("layer_types", "rope_scaling", "rope_theta", "swiglu_limit", "sliding_window")
    short = {key: value for key, value in GPT_OSS_20B.items() if key not in unstated}
    assert build(short, device="cuda") == fields
    names = find_model(GPT_OSS_20B).names
    blocks = names("model.layers.3.mlp.experts.down_proj_blocks", fields)
    assert len(blocks) == 32 and not blocks[0].transposed
    router = names("model.layers.3.mlp.router.bias", fields)
    assert [piece.name for piece in router] == ["model.layers.3.mlp.gate.bias"]
    bias = names("model.layers.3.mlp.experts.down_proj_bias", fields)
    assert [piece.name for piece in bias] == ["model.layers.3.mlp.experts.down_proj_bias"]


GEMMA4_31B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "dtype": "bfloat16",
    "text_config": {
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "sliding_window": 1024,
        "vocab_size": 262144,
    },
}


def test_gemma4_31b() -> None:
    fields = build(GEMMA4_31B)
    assert shape(fields) == (60, 5376, 32, 16, 256, 21504, 262144, 262144)
    assert windows(fields) == ([1024] * 5 + [0]) * 10
    assert (fields.embed_scale, fields.logit_softcap) == (73.5, 30.0)  # rounded to bfloat16
    assert fields.tie_word_embeddings and fields.qk_norm
    full = fields.layers[5][0][1]
    assert (full["head_dim"], full["num_key_value_heads"]) == (512, 4)
    rotated = [frequency > 1e-20 for frequency in full["rope_inv_freq"]]
    assert rotated == [True] * 64 + [False] * 192
    names = find_model(GEMMA4_31B).names
    keys = [
        names(f"model.language_model.layers.{i}.self_attn.k_proj.weight", fields) for i in (4, 5)
    ]
    assert [len(pieces) for pieces in keys] == [1, 2]
    assert keys[1][1].name == "model.layers.5.self_attn.v_proj.weight"
    assert names("model.vision_tower.norm.weight", fields) == ()
    build(GEMMA4_31B, device="cuda")
    with pytest.raises(ValueError, match="global_head_dim is 384, expected one of 64, 128, 256, 5"):
        build(
            {**GEMMA4_31B, "text_config": {**GEMMA4_31B["text_config"], "global_head_dim": 384}},
            device="cuda",
        )


def test_muse_glimmer() -> None:
    fields = build(tiny_config("muse", num_hidden_layers=8))
    assert windows(fields) == [33, 33, 33, 0] * 2
    still = ["rope_inv_freq" in layer[0][1] for layer in fields.layers]
    assert still == [False, False, False, True] * 2
    assert fields.layers[0][0][1]["softmax_scale"] == 2.0 / 4
    assert fields.zero_centred_norms and fields.plain_final_norm and fields.normed_embedding
    thetas = {"layer_rope_theta": [1e4] * 8}
    assert (
        "rope_inv_freq"
        not in build(tiny_config("muse", num_hidden_layers=8, **thetas)).layers[3][0][1]
    )
    names = find_model(tiny_config("muse")).names
    assert names("model.vision_tower.norm.weight", fields) == ()
    pieces = names("model.language_model.layers.0.pre_feedforward_layernorm.weight", fields)
    assert pieces[0].name == "model.layers.0.post_attention_layernorm.weight"


def test_granite_swa() -> None:
    fields = build(tiny_config("graniteswa", num_hidden_layers=4))
    assert windows(fields) == [0, 33, 0, 33]
    starts = [dict(layer[0][1])["rope_inv_freq"][1] for layer in fields.layers]
    assert starts[0] == starts[2] == 1e-30 and starts[1] < starts[3]
    config = tiny_config("graniteswa", num_hidden_layers=4, layer_types=None)
    assert windows(build(config)) == [0, 33, 33, 33]
    assert "rope_inv_freq" not in build(config | {"layer_rope_theta": None}).layers[0][0][1]


def test_mistral_small_31() -> None:
    fields = build(MISTRAL_SMALL_31, device="cuda")
    assert shape(fields) == (40, 5120, 32, 8, 128, 32768, 131072, 131072)
    assert not fields.layers


@pytest.mark.parametrize(
    ("name", "llama"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.patch_conv.weight", None),
        ("model.multi_modal_projector.norm.weight", None),
    ],
)
def test_names_of_mistral_3(name: str, llama: str | None) -> None:
    pieces = find_model(MISTRAL_SMALL_31).names(name, build(MISTRAL_SMALL_31))
    assert [piece.name for piece in pieces] == ([llama] if llama else [])


def test_phi4_mini() -> None:
    fields = build(PHI4_MINI, device="cuda")
    assert shape(fields) == (32, 3072, 24, 8, 128, 8192, 200064, 131072)
    assert len(fields.rope_inv_freq) == 48 and fields.rope_inv_freq[0] == 0.5
    assert fields.rope_attention_scaling == pytest.approx(math.sqrt(1 + 5 / 12))
    assert fields.tie_word_embeddings and not fields.layers
    short = build(PHI4_MINI, device="cuda", max_model_len=4096)
    assert short.rope_inv_freq[0] == 1
    assert short.rope_attention_scaling == fields.rope_attention_scaling


def test_phi3_without_a_window() -> None:
    config = tiny_config("phi3", max_position_embeddings=8192)
    assert "sliding_window" not in config and not build(config).layers


# ---- refusals: key, found, expected

REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("granite", {"attention_bias": True}, ["attention_bias is True", "false"]),
    ("granite", {"mlp_bias": True}, ["mlp_bias is True", "false"]),
    ("granite", {"logits_scaling": 0}, ["logits_scaling is 0", "a positive number"]),
    ("granite", {"partial_rotary_factor": 0.5}, ["RoPE rotates 8 of head_dim=16 elements"]),
    (
        "granite4",
        {"layer_types": ["mamba", "conv"]},
        ["layer_types is ['mamba', 'conv']", "2 of 'attention' or 'mamba'"],
    ),
    (
        "granite4",
        {"position_embedding_type": "alibi"},
        ["position_embedding_type is 'alibi'", "'rope', 'nope' or null"],
    ),
    ("granitehybrid", {"num_experts_per_tok": 9}, ["num_experts_per_tok is 9", "at most"]),
    ("granitehybrid", {"mamba_d_head": 24}, ["mamba_d_head is 24", "/ mamba_n_heads"]),
    (
        "granitehybrid",
        {"mamba_n_heads": 4, "mamba_d_head": 32},
        ["mamba_n_heads is 4", "a multiple of 8"],
    ),
    ("granitehybrid", {"mamba_n_groups": 3}, ["mamba_n_groups is 3", "a divisor of mamba_n_heads"]),
    ("granitehybrid", {"mamba_d_conv": 9}, ["mamba_d_conv is 9", "2 to 8"]),
    ("granitehybrid", {"mamba_proj_bias": True}, ["mamba_proj_bias is True", "biases of proj"]),
    ("granitehybrid", {"time_step_limit": [0.5]}, ["time_step_limit is [0.5]", "0 or more"]),
    ("nemotron", {"mlp_hidden_act": "silu"}, ["mlp_hidden_act is 'silu'", "'relu2'"]),
    ("nemotron", {"hybrid_override_pattern": "MX"}, ["hybrid_override_pattern is 'MX'", "mlp (-)"]),
    ("nemotron", {"n_group": 3}, ["n_group is 3", "a divisor of 8 experts"]),
    ("nemotron", {"n_group": 8}, ["n_group is 8", "with two in each group"]),
    ("nemotron", {"topk_group": 2}, ["topk_group is 2", "at most n_group=1"]),
    (
        "nemotron",
        {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
        ["topk_group is 1", "groups with at least 3 experts"],
    ),
    ("nemotron", {"n_shared_experts": 2}, ["n_shared_experts is 2", "more shared experts"]),
    ("nemotron", {"moe_latent_size": 30}, ["moe_latent_size is 30", "a multiple of 8"]),
    ("nemotron", {"use_bias": True}, ["use_bias is True", "biases of projections"]),
    ("smollm3", {"attention_bias": True}, ["attention_bias is True", "false"]),
    ("smollm3", {"mlp_bias": True}, ["mlp_bias is True", "false"]),
    ("smollm3", {"no_rope_layers": [1]}, ["no_rope_layers is [1]", "a list of 2 numbers"]),
    ("smollm3", {"no_rope_layers": [1, 2]}, ["no_rope_layers is [1, 2]", "1: RoPE, 0: none"]),
    (
        "ministral3",
        {"rope_parameters": {"llama_4_scaling_beta": -1, "original_max_position_embeddings": 64}},
        ["llama_4_scaling_beta is -1", "a positive number"],
    ),
    (
        "ministral3",
        {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
        ["original_max_position_embeddings is missing", "a positive integer"],
    ),
    ("olmo2", {"attention_bias": True}, ["attention_bias is True", "false"]),
    ("olmo3", {"layer_types": ["mamba"] * 2}, ["layer_types has mamba", "full_attention"]),
    ("olmo3", {"sliding_window": 0}, ["sliding_window is 0", "a positive integer"]),
    ("gemma4", {"enable_moe_block": True}, ["top_k_experts is missing", "a positive integer"]),
    ("gemma4", {"hidden_size_per_layer_input": 20}, ["hidden_size_per_layer_input is 20", "of 8"]),
    (
        "gemma4",
        {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 8},
        ["vocab_size_per_layer_input is 8", "vocab_size=203"],
    ),
    ("gemma4", {"num_kv_shared_layers": 1}, ["num_kv_shared_layers is 1", "full_attention before"]),
    ("gemma4", {"num_kv_shared_layers": 2}, ["num_kv_shared_layers is 2", "at most 1"]),
    ("gemma4", {"hidden_activation": "silu"}, ["hidden_activation is 'silu'", "'gelu_pytorch"]),
    (
        "gemma4",
        {"use_bidirectional_attention": "all"},
        ["bidirectional_attention is 'all'", "null"],
    ),
    ("gemma4", {"num_global_key_value_heads": 3}, ["_key_value_heads is 3", "a divisor"]),
    ("muse", {"attention_bias": True}, ["attention_bias is True", "false"]),
    ("muse", {"layer_rope_theta": [0]}, ["layer_rope_theta is [0]", "a list of 2 numbers"]),
    ("muse", {"hidden_activation": "gelu"}, ["hidden_activation is 'gelu'", "'silu'"]),
    ("gptoss", {"num_experts_per_tok": 9}, ["num_experts_per_tok is 9", "at most"]),
    ("gptoss", {"swiglu_limit": 0}, ["swiglu_limit is 0", "a positive number"]),
    ("graniteswa", {"layer_rope_theta": [0]}, ["layer_rope_theta is [0]", "a list of 2 numbers"]),
    ("graniteswa", {"mlp_bias": True}, ["mlp_bias is True", "false"]),
    ("phi3", {"sliding_window": 0}, ["sliding_window is 0", "a positive integer"]),
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


def test_lfm2() -> None:
    config = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 6656,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "conv_bias": False,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "hidden_size": 1024,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-05,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "tie_embedding": True,
        "vocab_size": 65536,
    }
    fields = build(config)
    assert shape(fields) == (16, 1024, 16, 8, 64, 4608, 65536, 128000)
    full = [i for i, layer in enumerate(fields.layers) if layer[0][0] == "attention"]
    assert full == [2, 5, 8, 10, 12, 14]
    assert fields.layers[0][0] == ("short_conv", {"conv_kernel": 3})
    assert fields.tie_word_embeddings
    names = find_model(config).names
    found = [
        names(f"model.{name}.weight", fields)[0].name
        for name in ("layers.0.feed_forward.w3", "layers.2.self_attn.out_proj", "embedding_norm")
    ]
    assert found == [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.2.self_attn.o_proj.weight",
        "model.norm.weight",
    ]
    for key, value in (("conv_bias", True), ("conv_L_cache", 1), ("layer_types", ["mamba"] * 16)):
        with pytest.raises(ValueError, match=f"{key} "):
            build({**config, key: value})


def test_lfm3() -> None:
    config = {
        "architectures": ["Lfm3ForCausalLM"],
        "model_type": "lfm3",
        "conv_L_cache": 7,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "norm_eps": 1e-05,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "vocab_size": 128000,
    }
    fields = build(config)
    assert shape(fields) == (24, 2048, 16, 4, 128, 7680, 128000, 128000)
    kinds = [(kind, "window" in params) for (kind, params), _ in fields.layers[:5]]
    conv, full, sliding = ("short_conv", False), ("attention", False), ("attention", True)
    assert kinds == [conv, conv, full, conv, sliding]
    assert fields.layers[2][0][1] == {"output_norm": True, "head_gate": True}
    frequencies = fields.layers[4][0][1]["rope_inv_freq"]
    assert frequencies[1] == pytest.approx(1e4 ** (-1 / 64))
    assert fields.rope_inv_freq[1] == pytest.approx(1e6 ** (-1 / 64))
    assert fields.rope_inv_freq[32] < 1e-20  # a half of a head does not rotate
    names = find_model(config).names
    found = [
        names(f"model.layers.{name}.weight", fields)[0].name
        for name in ("1.post_operator_norm", "2.post_operator_norm", "2.post_ffn_norm")
    ]
    assert found == [
        "model.layers.1.short_conv_output_norm.weight",
        "model.layers.2.attention_output_norm.weight",
        "model.layers.2.mlp_output_norm.weight",
    ]
    for key, value in (("conv_bias", True), ("attention_bias", True), ("layer_types", ["conv"])):
        with pytest.raises(ValueError, match=f"{key} "):
            build({**config, key: value})


def test_nemotron_3_nano() -> None:
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "attention_bias": False,
        "chunk_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "head_dim": 128,
        "hidden_size": 2688,
        "hybrid_override_pattern": pattern,
        "intermediate_size": 1856,
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 64,
        "mamba_proj_bias": False,
        "max_position_embeddings": 262144,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "model_type": "nemotron_h",
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1,
        "n_groups": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "ssm_state_size": 128,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, math.inf],
        "topk_group": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "vocab_size": 131072,
    }
    fields = build(config)
    assert shape(fields) == (52, 2688, 32, 2, 128, 1856, 131072, 262144)
    letters = {"mamba2": "M", "moe": "E", "attention": "*"}
    assert "".join(letters[kind] for ((kind, _),) in fields.layers) == pattern
    assert fields.layers[0] == (
        (
            "mamba2",
            {
                "num_heads": 64,
                "head_dim": 64,
                "num_groups": 8,
                "state_size": 128,
                "conv_kernel": 4,
                "conv_bias": True,
            },
        ),
    )
    ((_, experts),) = fields.layers[1]
    assert (experts["num_experts"], experts["top_k"], experts["routing_factor"]) == (128, 6, 2.5)
    assert (experts["activation"], experts["shared_intermediate_size"]) == ("relu2", 3712)
    assert "latent_size" not in experts
    names = find_model(config).names
    found = [
        names(f"backbone.{name}", fields)[0].name
        for name in (
            "embeddings.weight",
            "layers.0.mixer.norm.weight",
            "layers.0.norm.weight",
            "layers.1.mixer.gate.e_score_correction_bias",
            "layers.1.mixer.experts.7.up_proj.weight",
            "layers.1.norm.weight",
            "layers.5.mixer.q_proj.weight",
            "norm_f.weight",
        )
    ]
    assert found == [
        "model.embed_tokens.weight",
        "model.layers.0.mamba.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.mlp.gate.correction_bias",
        "model.layers.1.mlp.experts.7.up_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.5.self_attn.q_proj.weight",
        "model.norm.weight",
    ]
    assert names("mtp.layers.0.norm.weight", fields) == ()


def test_nemotron_3_super() -> None:
    config = {**PRESETS["nemotron-3-super"].config, "n_group": 8, "topk_group": 4}
    fields = build(config)
    assert shape(fields) == (88, 4096, 32, 2, 128, 2688, 131072, 262144)
    kinds = [kind for ((kind, _),) in fields.layers]
    assert [kinds.count(kind) for kind in ("mamba2", "moe", "attention")] == [40, 40, 8]
    ((_, experts),) = fields.layers[1]
    assert experts == {
        "num_experts": 512,
        "top_k": 22,
        "intermediate_size": 2688,
        "norm_topk_prob": True,
        "num_expert_groups": 8,
        "top_k_groups": 4,
        "latent_size": 1024,
        "activation": "relu2",
        "scoring": "sigmoid",
        "correction_bias": True,
        "norm_epsilon": 1e-20,
        "routing_factor": 5.0,
        "shared_intermediate_size": 5376,
        "shared_expert_gate": False,
    }
    pieces = find_model(config).names("backbone.layers.1.mixer.experts.down_proj", fields)
    assert len(pieces) == 512 and pieces[1].num_rows == 1024  # a tensor of all experts
    (piece,) = find_model(config).names("backbone.layers.1.mixer.fc1_latent_proj.weight", fields)
    assert piece.name == "model.layers.1.mlp.fc1_latent_proj.weight"


def test_granite_4_h_tiny() -> None:
    kinds = ["mamba"] * 40
    for layer in (5, 15, 25, 35):
        kinds[layer] = "attention"
    config = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 512,
        "layer_types": kinds,
        "logits_scaling": 6,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 48,
        "mamba_proj_bias": False,
        "max_position_embeddings": 131072,
        "model_type": "granitemoehybrid",
        "num_attention_heads": 12,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 40,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "shared_intermediate_size": 1024,
        "tie_word_embeddings": True,
        "vocab_size": 100352,
    }
    fields = build(config)
    full = [i for i, layer in enumerate(fields.layers) if layer[0][0] == "attention"]
    assert full == [5, 15, 25, 35]
    attention = fields.layers[5][0][1]
    assert attention["rope_attention_scaling"] == pytest.approx(128**-0.25)
    assert fields.layers[0][0][1]["num_heads"] == 48
    assert fields.layers[0][1] == (
        "moe",
        {
            "num_experts": 64,
            "top_k": 6,
            "intermediate_size": 512,
            "norm_topk_prob": True,
            "shared_intermediate_size": 1024,
            "shared_expert_gate": False,
        },
    )
    names = find_model(config).names
    stack = "model.layers.0.block_sparse_moe.input_linear.weight"
    assert names(stack, fields)[-1].name == "model.layers.0.mlp.experts.63.up_proj.weight"
    shared = names("model.layers.0.shared_mlp.input_linear.weight", fields)
    assert [piece.name for piece in shared] == [
        "model.layers.0.mlp.shared_expert.gate_proj.weight",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
    ]
