"""Logits of whole prompts against float32 references, for every family, shape and RoPE kind.

transformers is the reference of Llama, Mistral, Qwen2 and Qwen3; MiniCPM is checked against a
Llama with the scales folded into its weights. Without torch the numpy model is the reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference.engines import (
    engine_logits,
    extension_or_skip,
    load_tiny,
    prompt_logits,
    random_ids,
)
from tests.reference.hf_model import fold_minicpm, hf_logits
from tests.reference.numpy_model import NumpyModel
from tests.reference.tiny_checkpoints import FAMILIES, TinyCheckpoint, fuse_rows, write_tiny
from tests.tolerances import LOGITS, LOGITS_CUDA, assert_close

C = extension_or_skip()

LENGTH = 2 * C.PAGE_SIZE + 5  # three pages, the last one nearly empty


def hf_reference(tiny: TinyCheckpoint, ids: list[int]) -> Any:
    pytest.importorskip("transformers", reason="the reference needs transformers")
    config, weights = tiny.config, tiny.weights
    if config["model_type"] == "minicpm":
        config, weights = fold_minicpm(config, weights)
    return hf_logits(config, weights, ids)


# ---- against transformers, float32


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, tied: bool, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, family, tie_word_embeddings=tied)
    ids = random_ids(203, LENGTH)
    assert_close(engine_logits(tmp_path, ids), hf_reference(tiny, ids), LOGITS["float32"])


WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 20},
    "qwen2": {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
    },
}


@pytest.mark.parametrize("family", WINDOWS)
def test_sliding_windows(family: str, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, family, **WINDOWS[family])
    ids = random_ids(203, LENGTH)
    logits = engine_logits(tmp_path, ids)
    assert_close(logits, hf_reference(tiny, ids), LOGITS["float32"])
    chunked = engine_logits(tmp_path, ids, chunk_length=17)
    assert_close(chunked, logits, LOGITS["float32"])


SHAPES: dict[str, dict[str, Any]] = {
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8},
    "one layer": {"num_hidden_layers": 1},
    "many layers": {"num_hidden_layers": 7},
    "no sharing of keys": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
    "three key heads": {
        "hidden_size": 120,
        "num_attention_heads": 15,
        "num_key_value_heads": 3,
        "head_dim": 24,
    },
    "16 queries a key": {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 32},
    "head_dim 64": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "head_dim 128": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
    "head_dim 256": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256},
    "heads wider than the model": {"num_attention_heads": 8, "head_dim": 40},
    "smallest": {
        "hidden_size": 8,
        "intermediate_size": 8,
        "vocab_size": 2,
        "head_dim": 8,
        "eos_token_id": 1,
    },
    "prime vocabulary": {"vocab_size": 1009},
    "odd multiples of 8": {"hidden_size": 136, "intermediate_size": 328, "head_dim": 16},
    "wide MLP": {"intermediate_size": 1024},
    "large eps": {"rms_norm_eps": 0.1},
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shape(family: str, shape: str, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, family, seed=len(shape), **SHAPES[shape])
    ids = random_ids(tiny.config["vocab_size"], 70)
    assert_close(engine_logits(tmp_path, ids), hf_reference(tiny, ids), LOGITS["float32"])


@pytest.mark.parametrize("length", [1, 2, 31, 63, 64, 65, 127, 128, 129, 300])
def test_length(length: int, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path)
    ids = random_ids(203, length)
    assert_close(engine_logits(tmp_path, ids), hf_reference(tiny, ids), LOGITS["float32"])


@pytest.mark.parametrize("chunk_length", [1, 7, 64, 65, 512])
def test_chunks(chunk_length: int, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, "qwen3")
    ids = random_ids(203, LENGTH)
    logits = engine_logits(tmp_path, ids, chunk_length=chunk_length)
    assert_close(logits, hf_reference(tiny, ids), LOGITS["float32"])


# max_position_embeddings is 512, head_dim 16
ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("kind", ROPE)
def test_rope(kind: str, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, rope_scaling=ROPE[kind])
    ids = random_ids(203, 200)  # beyond the original lengths
    assert_close(engine_logits(tmp_path, ids), hf_reference(tiny, ids), LOGITS["float32"])


def test_longrope_of_a_short_engine(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, rope_scaling=ROPE["longrope"])
    ids = random_ids(203, 100)
    logits = engine_logits(tmp_path, ids, max_model_len=128)
    assert_close(logits, hf_reference(tiny, ids), LOGITS["float32"])


def test_rope_theta(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, rope_theta=500000.0)
    ids = random_ids(203, LENGTH)
    assert_close(engine_logits(tmp_path, ids), hf_reference(tiny, ids), LOGITS["float32"])


# ---- files


@pytest.mark.parametrize("shards", [1, 4])
def test_shards_change_nothing(shards: int, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, "minicpm", shards=shards)
    ids = random_ids(203, 20)
    logits = engine_logits(tmp_path, ids)
    assert_close(logits, NumpyModel(tiny.fields(), tiny.weights).logits(ids), LOGITS["float32"])


def test_fused_checkpoint(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "split")
    fused = dict(tiny.weights)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        fuse_rows(fused, prefix + "self_attn.", "qkv_proj", ("q", "k", "v"))
        fuse_rows(fused, prefix + "mlp.", "gate_up_proj", ("gate", "up"))
    write_tiny(tmp_path / "fused", weights=fused)
    ids = random_ids(203, 20)
    np.testing.assert_array_equal(
        engine_logits(tmp_path / "fused", ids), engine_logits(tmp_path / "split", ids)
    )


def test_torch_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="writing .bin files needs torch")
    tiny = write_tiny(tmp_path, "qwen2", dtype="bfloat16")
    ids = random_ids(203, 20)
    before = engine_logits(tmp_path, ids)
    (tmp_path / "model.safetensors").unlink()
    state = {k: torch.from_numpy(np.array(v)).bfloat16() for k, v in tiny.weights.items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    np.testing.assert_array_equal(engine_logits(tmp_path, ids), before)


# ---- half precision on the CPU, against the numpy model with the same rounded weights


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_dtype(family: str, dtype: str, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, family, dtype=dtype)
    ids = random_ids(203, LENGTH)
    reference = NumpyModel(tiny.fields(), tiny.weights).logits(ids)
    assert_close(engine_logits(tmp_path, ids), reference, LOGITS[dtype])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversion_while_loading(dtype: str, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "exact", "llama", dtype=dtype)
    write_tiny(tmp_path / "float32", "llama", weights=tiny.weights)  # the same values in float32
    ids = random_ids(203, 40)
    exact = engine_logits(tmp_path / "exact", ids)
    np.testing.assert_array_equal(engine_logits(tmp_path / "float32", ids, dtype=dtype), exact)
    widened = engine_logits(tmp_path / "exact", ids, dtype="float32")
    reference = NumpyModel(tiny.fields(), tiny.weights).logits(ids)
    assert_close(widened, reference, LOGITS["float32"])


def test_threads_change_nothing(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3")
    ids = random_ids(203, LENGTH)
    one = engine_logits(tmp_path, ids, num_threads=1)
    np.testing.assert_array_equal(engine_logits(tmp_path, ids, num_threads=2), one)


def test_prompt_logits_twice(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    engine = load_tiny(tmp_path).engine
    ids, other = random_ids(203, LENGTH), random_ids(203, 90, seed=5)
    first = prompt_logits(engine, ids)
    prompt_logits(engine, other)
    np.testing.assert_array_equal(prompt_logits(engine, ids), first)


# ---- CUDA against the CPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda(family: str, dtype: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, family, dtype=dtype, head_dim=64)
    ids = random_ids(203, LENGTH)
    on_cpu = engine_logits(tmp_path, ids)
    assert_close(engine_logits(tmp_path, ids, device="cuda"), on_cpu, LOGITS_CUDA[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 64, "num_attention_heads": 1, "num_key_value_heads": 1},
        {"head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 1},
        {"head_dim": 128, "num_attention_heads": 15, "num_key_value_heads": 3},
        {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
        {"head_dim": 64, "hidden_size": 136, "intermediate_size": 328, "vocab_size": 1009},
    ],
)
def test_cuda_shape(shape: dict[str, Any], tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, "llama", dtype="float16", **shape)
    ids = random_ids(tiny.config["vocab_size"], LENGTH)
    on_cpu = engine_logits(tmp_path, ids)
    for chunk_length in (16, 256):
        logits = engine_logits(tmp_path, ids, device="cuda", chunk_length=chunk_length)
        assert_close(logits, on_cpu, LOGITS_CUDA["float16"])


@pytest.mark.gpu
def test_float32_checkpoint_on_cuda(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny(tmp_path, head_dim=64)
    ids = random_ids(203, 20)
    logits = engine_logits(tmp_path, ids, device="cuda")
    assert "to bfloat16 while loading" in caplog.text
    reference = engine_logits(tmp_path, ids, dtype="bfloat16")
    assert_close(logits, reference, LOGITS_CUDA["bfloat16"])
