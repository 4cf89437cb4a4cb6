"""config.json -> SpecFields: values of real models, and errors for values out of range."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.minicpm4_factors import LONGROPE_FACTORS
from cpmcu.models.registry import find_model
from tests.reference.tiny_checkpoints import tiny_config

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_7B_V03: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
}
MINICPM4_8B: dict[str, Any] = {
    "architectures": ["MiniCPMForCausalLM"],
    "model_type": "minicpm",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 73440],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "max_position_embeddings": 32768,
    "mup_denominator": 32,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "torch_dtype": "bfloat16",
    "vocab_size": 73448,
    "sparse_config": {"kernel_size": 32, "kernel_stride": 16, "topk": 64, "dense_len": 8192},
}
MINICPM4_05B = MINICPM4_8B | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "tie_word_embeddings": True,
}


def build(config: dict[str, Any], **options: Any) -> SpecFields:
    return find_model(config).build(config, BuildOptions(**options))


def shape(fields: SpecFields) -> tuple[int, ...]:
    return (
        fields.num_hidden_layers,
        fields.hidden_size,
        fields.num_attention_heads,
        fields.num_key_value_heads,
        fields.head_dim,
        fields.intermediate_size,
        fields.vocab_size,
        fields.max_position_embeddings,
    )


# ---- real models


def test_llama_31_8b() -> None:
    fields = build(LLAMA_31_8B, device="cuda")
    assert shape(fields) == (32, 4096, 32, 8, 128, 14336, 128256, 131072)
    assert fields.rms_norm_eps == 1e-5
    assert not (fields.qkv_bias or fields.qk_norm or fields.tie_word_embeddings)
    assert (fields.embed_scale, fields.residual_scale, fields.logit_scale) == (1, 1, 1)
    assert len(fields.rope_inv_freq) == 64 and fields.rope_attention_scaling == 1
    assert fields.rope_inv_freq[0] == 1.0
    assert fields.rope_inv_freq[-1] == pytest.approx(500000 ** (-126 / 128) / 8, rel=1e-6)


def test_qwen25_7b() -> None:
    fields = build(QWEN25_7B, device="cuda")
    assert shape(fields) == (28, 3584, 28, 4, 128, 18944, 152064, 32768)
    assert fields.qkv_bias and not fields.qk_norm and fields.rms_norm_eps == 1e-6


def test_qwen3_8b() -> None:
    fields = build(QWEN3_8B, device="cuda")
    assert shape(fields) == (36, 4096, 32, 8, 128, 12288, 151936, 40960)
    assert fields.qk_norm and not fields.qkv_bias


def test_qwen3_head_dim_is_not_hidden_over_heads() -> None:
    small = QWEN3_8B | {"hidden_size": 1024, "num_attention_heads": 16}
    assert build(small, device="cuda").head_dim == 128
    del small["head_dim"]
    assert build(small, device="cuda").head_dim == 128


def test_mistral_7b() -> None:
    fields = build(MISTRAL_7B_V03, device="cuda")
    assert shape(fields) == (32, 4096, 32, 8, 128, 14336, 32768, 32768)


def test_minicpm4_8b() -> None:
    fields = build(MINICPM4_8B, device="cuda")
    assert shape(fields) == (32, 4096, 32, 2, 128, 16384, 73448, 32768)
    assert fields.embed_scale == 12
    assert fields.residual_scale == pytest.approx(0.24748737, rel=1e-6)
    assert fields.logit_scale == 1 / 16
    assert not fields.tie_word_embeddings


def test_minicpm4_05b() -> None:
    fields = build(MINICPM4_05B, device="cuda", has_lm_head=False)
    assert shape(fields) == (24, 1024, 16, 2, 64, 4096, 73448, 32768)
    assert fields.residual_scale == pytest.approx(1.4 / math.sqrt(24))
    assert fields.logit_scale == 0.25 and fields.tie_word_embeddings


def test_new_transformers_spelling() -> None:
    config = QWEN3_8B | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "layer_types": ["full_attention"] * 36,
    }
    del config["rope_theta"], config["rope_scaling"]
    assert build(config) == build(QWEN3_8B)


# ---- choices


@pytest.mark.parametrize("has_lm_head", [False, True])
def test_without_the_key_the_file_decides_tying(has_lm_head: bool) -> None:
    config = tiny_config("llama")
    del config["tie_word_embeddings"]
    assert build(config, has_lm_head=has_lm_head).tie_word_embeddings is not has_lm_head


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("has_lm_head", [False, True])
def test_the_config_decides_tying(tied: bool, has_lm_head: bool) -> None:
    fields = build(tiny_config("llama", tie_word_embeddings=tied), has_lm_head=has_lm_head)
    assert fields.tie_word_embeddings is tied


def test_missing_kv_heads_are_as_many_as_heads() -> None:
    config = tiny_config("llama", num_key_value_heads=None)
    assert build(config).num_key_value_heads == 4


def test_longrope_follows_the_maximum_length_of_the_engine() -> None:
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 64,
        "long_factor": [2.0] * 64,
        "original_max_position_embeddings": 65536,
    }
    config = MINICPM4_8B | {"max_position_embeddings": 65536, "rope_scaling": scaling}
    assert build(config).rope_inv_freq[0] == 1.0
    assert build(config, max_model_len=65537).rope_inv_freq[0] == 0.5


def test_minicpm4_yarn_applies_the_published_factors() -> None:
    plain, far = build(MINICPM4_8B), build(MINICPM4_8B, minicpm4_yarn=True)
    ratios = [a / b for a, b in zip(plain.rope_inv_freq, far.rope_inv_freq)]
    assert ratios == pytest.approx(LONGROPE_FACTORS, rel=1e-6)
    assert far.rope_attention_scaling == 1.0
    assert far.max_position_embeddings == 131072


def test_minicpm4_yarn_keeps_factors_of_the_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    own = {
        "rope_type": "longrope",
        "long_factor": [1.5] * 64,
        "short_factor": [1.5] * 64,
        "original_max_position_embeddings": 65536,
    }
    config = MINICPM4_8B | {"rope_scaling": own}
    assert build(config, minicpm4_yarn=True) == build(config)
    assert "has other factors" in caplog.text


def test_minicpm4_yarn_needs_the_heads_of_the_8b() -> None:
    with pytest.raises(ValueError, match=r"head_dim 128, config\.json has head_dim 64"):
        build(MINICPM4_05B, minicpm4_yarn=True)


def test_a_window_as_long_as_the_context_is_dropped() -> None:
    config = MISTRAL_7B_V03 | {"sliding_window": 4096}
    assert build(config, max_model_len=4096) == build(MISTRAL_7B_V03)
    assert build(QWEN25_7B | {"use_sliding_window": True}) == build(QWEN25_7B)


def test_layers_without_a_window() -> None:
    window = {"use_sliding_window": True, "sliding_window": 64}
    for family in ("qwen2", "qwen3"):
        expected = build(tiny_config(family))
        assert build(tiny_config(family, **window, max_window_layers=2)) == expected
        assert build(tiny_config(family, **window)) == expected  # layers from 28 on have windows
        full = ["full_attention"] * 2
        assert build(tiny_config(family, **window, max_window_layers=0, layer_types=full))


def windows(fields: SpecFields) -> list[int]:
    """The window of each layer's attention; 0: no window."""
    return [layer[0][1].get("window", 0) for layer in fields.layers]


def test_layers_with_a_window() -> None:
    """The window applies to all layers, to layers from an index on, or by layer_types.

    Default: 4096.
    """
    assert windows(build(tiny_config("mistral", sliding_window=64))) == [64, 64]
    window = {"use_sliding_window": True, "sliding_window": 64}
    for family in ("qwen2", "qwen3"):
        assert windows(build(tiny_config(family, **window, max_window_layers=1))) == [0, 64]
    kinds = ["sliding_attention", "full_attention"]
    config = tiny_config("mistral", sliding_window=64, layer_types=kinds)
    assert windows(build(config)) == [64, 0]
    long = {"max_position_embeddings": 8192}
    config = tiny_config("mistral", sliding_window=None, **long)  # removes the key
    assert windows(build(config)) == [4096, 4096]
    config = tiny_config("qwen3", use_sliding_window=True, max_window_layers=0, **long)
    assert windows(build(config)) == [4096, 4096]


def test_only_null_is_no_window() -> None:
    config = tiny_config("mistral", max_position_embeddings=8192, sliding_window=None)
    assert "sliding_window" not in config
    assert build(config | {"sliding_window": None}) == build(config, max_model_len=4096)


# ---- refusals: key, found, expected

REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama", {"num_attention_heads": -4}, ["num_attention_heads is -4", "positive integer"]),
    ("llama", {"num_attention_heads": 0}, ["num_attention_heads is 0", "positive integer"]),
    ("llama", {"hidden_size": 0}, ["hidden_size is 0"]),
    ("llama", {"hidden_size": "64"}, ["hidden_size is '64'", "positive integer"]),
    ("llama", {"hidden_size": True}, ["hidden_size is True"]),
    ("llama", {"hidden_size": 68}, ["hidden_size is 68", "multiple of 8"]),
    ("llama", {"intermediate_size": 97}, ["intermediate_size is 97", "multiple of 8"]),
    ("llama", {"vocab_size": 2**40}, ["vocab_size is 1099511627776"]),
    ("llama", {"num_hidden_layers": 10**6}, ["num_hidden_layers is 1000000", "at most 1024"]),
    ("llama", {"hidden_size": 10**9}, ["hidden_size is 1000000000", "at most 16384"]),
    ("llama", {"num_hidden_layers": None}, ["num_hidden_layers is missing"]),
    ("llama", {"max_position_embeddings": None}, ["max_position_embeddings is missing"]),
    ("llama", {"rms_norm_eps": 0.0}, ["rms_norm_eps is 0.0", "positive number"]),
    ("llama", {"rms_norm_eps": math.nan}, ["rms_norm_eps is nan"]),
    ("llama", {"rms_norm_eps": 5}, ["rms_norm_eps is 5", "between 0 and 1"]),
    ("llama", {"num_key_value_heads": 3}, ["num_key_value_heads is 3", "num_attention_heads=4"]),
    (
        "llama",
        {"num_attention_heads": 5, "num_key_value_heads": 5},
        ["num_attention_heads is 5", "divisor of hidden_size=64"],
    ),
    ("llama", {"head_dim": 12}, ["head_dim", "is 12", "multiple of 8 up to 512"]),
    ("llama", {"head_dim": 520}, ["head_dim", "is 520", "multiple of 8 up to 512"]),
    ("llama", {"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "'silu'"]),
    ("llama", {"attention_bias": True}, ["attention_bias is True", "false"]),
    ("llama", {"mlp_bias": True}, ["mlp_bias is True", "false"]),
    ("llama", {"tie_word_embeddings": "yes"}, ["tie_word_embeddings is 'yes'", "true or false"]),
    ("mistral", {"sliding_window": -4}, ["sliding_window is -4", "a positive integer"]),
    (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": "all"},
        ["max_window_layers is 'all'", "a number of layers"],
    ),
    ("qwen3", {"attention_bias": True}, ["attention_bias is True"]),
    (
        "mistral",
        {"sliding_window": 64, "layer_types": ["full_attention"]},
        ["layer_types", "a list of 2 layer types"],
    ),
    (
        "mistral",
        {"sliding_window": 64, "layer_types": ["full_attention", "linear_attention"]},
        ["layer_types has linear_attention"],
    ),
    ("minicpm", {"scale_depth": None}, ["scale_depth is missing", "positive number"]),
    ("minicpm", {"scale_emb": -12}, ["scale_emb is -12"]),
    ("minicpm", {"num_experts": 8}, ["num_experts is 8"]),
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


def test_cuda_has_four_head_dims() -> None:
    with pytest.raises(ValueError, match=r"is 80, expected one of 64, 128, 256, 512 on CUDA"):
        build(tiny_config("llama", head_dim=80), device="cuda")
    assert build(tiny_config("llama", head_dim=80)).head_dim == 80
