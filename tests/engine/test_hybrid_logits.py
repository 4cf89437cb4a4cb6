"""Logits of Qwen3-Next and Qwen3.5 against transformers, as text models and with vision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.harness import generate, make_engine
from tests.reference.engines import (
    engine_logits,
    extension_or_skip,
    load_tiny,
    prompt_logits,
    random_ids,
)
from tests.reference.hf_model import hf_logits
from tests.reference.tiny_checkpoints import TinyCheckpoint, write_tiny
from tests.reference.tiny_hybrid import CUDA_SIZES, HYBRIDS
from tests.reference.tiny_w4 import HYBRID_DENSE, HYBRID_SIZES, quantise_hybrid, write_w4
from tests.tolerances import LOGITS_HYBRID, assert_close

C = extension_or_skip()
pytest.importorskip("transformers", reason="the reference needs transformers")

LENGTH = 2 * C.PAGE_SIZE + 5


def reference(tiny: TinyCheckpoint, ids: list[int]) -> Any:
    return hf_logits(tiny.config, tiny.weights, ids)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", HYBRIDS)
def test_family(family: str, tied: bool, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, family, tie_word_embeddings=tied)
    ids = random_ids(203, LENGTH)
    assert_close(engine_logits(tmp_path, ids), reference(tiny, ids), LOGITS_HYBRID["float32"])


SHAPES: dict[str, dict[str, Any]] = {
    "one head": {"linear_num_key_heads": 1, "linear_num_value_heads": 1},
    "a key head for each value head": {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
    "16 value heads a key": {"linear_num_key_heads": 1, "linear_num_value_heads": 16},
    "smallest heads": {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "wide keys": {"linear_key_head_dim": 128, "linear_value_head_dim": 40},
    "wide values": {"linear_key_head_dim": 24, "linear_value_head_dim": 128},
    "published heads": {
        "hidden_size": 128,
        "head_dim": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "delta nets alone": {"num_hidden_layers": 3},
    "attention alone": {"full_attention_interval": 1, "num_hidden_layers": 2},
    "attention first": {
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "num_hidden_layers": 3,
    },
    "all of a head rotates": {"partial_rotary_factor": 1.0, "rope_parameters": None},
    "half of a head rotates": {
        "rope_parameters": {
            "rope_theta": 1e7,
            "rope_type": "default",
            "partial_rotary_factor": 0.5,
        },
    },
    "large eps": {"rms_norm_eps": 0.1},
}


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shape(family: str, shape: str, tmp_path: Path) -> None:
    changes = dict(SHAPES[shape])
    if "partial_rotary_factor" in changes:
        changes["rope_theta"] = 10000.0
    tiny = write_tiny(tmp_path, family, seed=len(shape), **changes)
    ids = random_ids(203, 70)
    assert_close(engine_logits(tmp_path, ids), reference(tiny, ids), LOGITS_HYBRID["float32"])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 63, 64, 65, 128, 131, 300])
def test_length(length: int, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, "qwen3_5")
    ids = random_ids(203, length)
    assert_close(engine_logits(tmp_path, ids), reference(tiny, ids), LOGITS_HYBRID["float32"])


@pytest.mark.slow
def test_a_long_prompt_does_not_drift(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path, "qwen3_5", max_position_embeddings=16384)
    ids = random_ids(203, 8192)
    found, expected = engine_logits(tmp_path, ids), reference(tiny, ids)
    for begin in (0, 4096, 8192 - 256):
        part = slice(begin, begin + 256)
        assert_close(found[part], expected[part], LOGITS_HYBRID["float32"])


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_chunks_change_no_bit(family: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, family)
    ids = random_ids(203, LENGTH)
    whole = engine_logits(tmp_path, ids)
    for chunk_length in (1, 2, 3, 7, 64, 65, 512):
        chunked = engine_logits(tmp_path, ids, chunk_length=chunk_length)
        np.testing.assert_array_equal(chunked, whole, err_msg=str(chunk_length))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_dtype(family: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A_log and dt_bias of a 16-bit file are widened, which is no conversion of the weights."""
    tiny = write_tiny(tmp_path, family, dtype=dtype)
    ids = random_ids(203, LENGTH)
    assert_close(engine_logits(tmp_path, ids), reference(tiny, ids), LOGITS_HYBRID[dtype])
    assert "converting" not in caplog.text


def test_a_slot_is_reset(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3_5")
    engine = load_tiny(tmp_path).engine
    ids, other = random_ids(203, LENGTH), random_ids(203, 90, seed=5)
    first = prompt_logits(engine, ids)
    prompt_logits(engine, other)
    np.testing.assert_array_equal(prompt_logits(engine, ids), first)


@pytest.mark.parametrize("family", HYBRIDS)
def test_decoded_tokens(family: str, tmp_path: Path) -> None:
    """Each token is the most likely one of transformers after the tokens before it."""
    tiny = write_tiny(tmp_path, family)
    engine = make_engine(tmp_path, num_threads=1, max_num_seqs=1, chunk_length=64)
    for length in (1, 3, 70):
        ids = random_ids(203, length)
        tokens = generate(engine, ids, 40)
        logits = reference(tiny, ids + tokens[:-1])[length - 1 :]
        assert logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("layouts", [("gptq", "awq", "compressed")])
@pytest.mark.parametrize("family", HYBRIDS)
def test_4_bits(family: str, layouts: tuple[str, ...], tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "tiny", family, **HYBRID_SIZES)
    weights = quantise_hybrid(tiny.weights)
    ids = random_ids(203, LENGTH)

    def logits(layout: str) -> Any:
        directory = write_w4(tmp_path / layout, tiny.config, weights, layout)
        return engine_logits(directory, ids, dtype="float32")

    expected = logits("dense")
    first = logits(layouts[0])
    assert_close(first, expected, LOGITS_HYBRID["float32"])
    for layout in layouts[1:]:
        np.testing.assert_array_equal(logits(layout), first, err_msg=layout)


def test_4_bits_in_the_mlps_alone(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "tiny", "qwen3_5_vl", **HYBRID_SIZES)
    weights = quantise_hybrid(tiny.weights, (*HYBRID_DENSE, "linear_attn", "self_attn"))
    ids = random_ids(203, LENGTH)
    found, expected = (
        engine_logits(
            write_w4(tmp_path / layout, tiny.config, weights, layout), ids, dtype="float32"
        )
        for layout in ("gptq", "dense")
    )
    assert_close(found, expected, LOGITS_HYBRID["float32"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_cuda(family: str, dtype: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, family, dtype=dtype, **CUDA_SIZES)
    ids = random_ids(203, LENGTH)
    on_cpu = engine_logits(tmp_path, ids)
    for chunk_length in (16, 256):
        logits = engine_logits(tmp_path, ids, device="cuda", chunk_length=chunk_length)
        assert_close(logits, on_cpu, LOGITS_HYBRID[dtype])
