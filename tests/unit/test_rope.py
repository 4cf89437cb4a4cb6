"""RoPE parameters compared with transformers, for all kinds and both spellings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cpmcu.models.rope import rope_from_config

HEAD_DIM = 64
RNG = np.random.default_rng(0)
SHORT = [1.0 + 0.01 * i for i in range(HEAD_DIM // 2)]
LONG = [1.0 + 0.7 * i for i in range(HEAD_DIM // 2)]

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3.2": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn_without_original": {"rope_type": "yarn", "factor": 4.0},
    "yarn_all_keys": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
        "truncate": False,
    },
    "yarn_truncate_null": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "truncate": None,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 32768,
    },
    "longrope_factor": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
    },
    "longrope_attention_factor": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "attention_factor": 1.19,
        "original_max_position_embeddings": 4096,
    },
}


def old_config(scaling: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 4 * HEAD_DIM,
        "num_attention_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": dict(scaling) if scaling else None,
        **more,
    }


def reference(config: dict[str, Any], seq_len: int | None) -> tuple[np.ndarray, float]:
    transformers = pytest.importorskip("transformers", reason="the reference needs transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf_config = transformers.LlamaConfig(**config)
    kind = hf_config.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind) or LlamaRotaryEmbedding.compute_default_rope_parameters
    arguments = {} if kind == "default" else {"seq_len": seq_len}
    inv_freq, attention_scaling = compute(hf_config, device="cpu", **arguments)
    return inv_freq.numpy(), attention_scaling


def assert_same(config: dict[str, Any], max_length: int) -> None:
    rope = rope_from_config(config, HEAD_DIM, max_length)
    inv_freq, attention_scaling = reference(config, max_length)
    assert rope.inv_freq.dtype == np.float32 and rope.inv_freq.shape == (HEAD_DIM // 2,)
    # Tolerance: two units in the last place of float32.
    np.testing.assert_allclose(rope.inv_freq, inv_freq, rtol=2.5e-7, atol=0)
    assert rope.attention_scaling == pytest.approx(attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("max_length", [2048, 131072])
def test_matches_transformers(name: str, max_length: int) -> None:
    assert_same(old_config(SCALINGS[name]), max_length)


@pytest.mark.parametrize("name", SCALINGS)
def test_new_spelling(name: str) -> None:
    config = old_config(None)
    del config["rope_scaling"], config["rope_theta"]
    config["rope_parameters"] = {**SCALINGS[name], "rope_theta": 500000.0}
    rope = rope_from_config(config, HEAD_DIM, 131072)
    old = rope_from_config(old_config(SCALINGS[name]), HEAD_DIM, 131072)
    np.testing.assert_array_equal(rope.inv_freq, old.inv_freq)
    assert rope.attention_scaling == old.attention_scaling
    assert_same(config, 131072)


@pytest.mark.parametrize("name", SCALINGS)
def test_old_type_key(name: str) -> None:
    scaling = dict(SCALINGS[name])
    scaling["type"] = scaling.pop("rope_type")
    rope = rope_from_config(old_config(scaling), HEAD_DIM, 2048)
    expected = rope_from_config(old_config(SCALINGS[name]), HEAD_DIM, 2048)
    assert rope.kind == expected.kind
    np.testing.assert_array_equal(rope.inv_freq, expected.inv_freq)


def test_top_level_original_length() -> None:
    scaling = dict(SCALINGS["longrope"])
    del scaling["original_max_position_embeddings"]
    config = old_config(scaling, original_max_position_embeddings=4096)
    assert_same(config, 2048)
    assert_same(config, 8192)


def test_theta_defaults_to_ten_thousand() -> None:
    config = old_config(None)
    del config["rope_theta"]
    inv_freq = rope_from_config(config, HEAD_DIM, 2048).inv_freq
    expected = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(inv_freq, expected, rtol=3e-7)


def test_longrope_chooses_by_the_maximum_length() -> None:
    config = old_config(SCALINGS["longrope"])
    up_to_original = rope_from_config(config, HEAD_DIM, 32768)
    beyond = rope_from_config(config, HEAD_DIM, 32769)
    plain = rope_from_config(old_config(None), HEAD_DIM, 1).inv_freq
    np.testing.assert_allclose(up_to_original.inv_freq, plain / np.float32(SHORT), rtol=3e-7)
    np.testing.assert_allclose(beyond.inv_freq, plain / np.float32(LONG), rtol=3e-7)
    scale = math.sqrt(1 + math.log(4) / math.log(32768))
    assert up_to_original.attention_scaling == beyond.attention_scaling == pytest.approx(scale)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, ["dynamic", "not supported"]),
        ({"rope_type": ["linear"]}, ["rope_type ['linear'] is not supported"]),
        ({"rope_type": "default", "rope_theta": 1e300}, ["inverse frequency 0.0", "finite"]),
        (
            {"rope_type": "linear", "factor": 1e300},
            ["frequency 0.0", "rope_theta 500000.0"],
        ),
        ({"rope_type": "linear", "factor": 1e-300}, ["inverse frequency inf"]),
        ({"rope_type": "mrope"}, ["'mrope'", "default, linear, llama3, yarn, longrope"]),
        ({"rope_type": "linear"}, ["factor is missing", "positive number"]),
        ({"rope_type": "linear", "factor": -1}, ["factor is -1", "positive number"]),
        ({"rope_type": "linear", "factor": "4"}, ["factor is '4'", "positive number"]),
        ({**SCALINGS["llama3"], "high_freq_factor": 0.5}, ["high_freq_factor is 0.5"]),
        ({**SCALINGS["yarn"], "beta_fast": 1}, ["beta_fast is 1", "beta_slow=1"]),
        ({**SCALINGS["longrope"], "long_factor": [1.0]}, ["long_factor has 1 entries", "32"]),
        (
            {**SCALINGS["longrope"], "short_factor": [0.0] * 32},
            ["short_factor contains 0.0", "positive"],
        ),
        (
            {"rope_type": "default", "partial_rotary_factor": 1.5},
            ["partial_rotary_factor is 1.5", "an even number, 2 to head_dim=64"],
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.05}, ["factor is 0.05", "even"]),
        ({"rope_type": "default", "partial_rotary_factor": -1}, ["factor is -1", "positive"]),
        (
            {**SCALINGS["longrope"], "partial_rotary_factor": 0.5},
            ["short_factor has 32 entries", "rotary_dim / 2 = 16"],
        ),
        ({"full_attention": {"rope_type": "default"}}, ["full_attention", "one set"]),
        ({"rope_type": "default", "rope_theta": 0}, ["rope_theta is 0", "positive"]),
    ],
)
def test_refuses(scaling: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        rope_from_config(old_config(scaling), HEAD_DIM, 131072)
    for word in ["config.json", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("name", SCALINGS)
def test_rotation_of_a_part_of_each_head(name: str, factor: float) -> None:
    """The frequencies are those of a head with as many elements as are rotated."""
    part = int(factor * HEAD_DIM)
    scaling = {
        key: value[: part // 2] if isinstance(value, list) else value
        for key, value in SCALINGS[name].items()
    }
    config = old_config(scaling, partial_rotary_factor=factor)
    rope = rope_from_config(config, HEAD_DIM, 131072)
    assert rope.inv_freq.shape == (part // 2,)
    smaller = old_config(scaling) | {"hidden_size": 4 * part}
    inv_freq, attention_scaling = reference(smaller, 131072)
    # llama3 subtracts nearly equal numbers between its two wavelengths.
    np.testing.assert_allclose(rope.inv_freq, inv_freq, rtol=1e-6, atol=0)
    assert rope.attention_scaling == pytest.approx(attention_scaling, rel=1e-12)


def test_the_factor_in_rope_parameters_precedes_that_of_the_config() -> None:
    config = old_config(None, partial_rotary_factor=0.5)
    nested = {"rope_parameters": {"rope_theta": 500000.0, "partial_rotary_factor": 0.25}}
    assert rope_from_config(config, HEAD_DIM, 1).inv_freq.size == 16
    assert rope_from_config(config | nested, HEAD_DIM, 1).inv_freq.size == 8


def test_sections_of_mrope_change_nothing_for_text() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    sections = plain | {"mrope_interleaved": True, "mrope_section": [3, 3, 2]}
    expected = rope_from_config({"rope_parameters": plain}, HEAD_DIM, 64)
    found = rope_from_config({"rope_parameters": sections}, HEAD_DIM, 64)
    np.testing.assert_array_equal(found.inv_freq, expected.inv_freq)
