"""Damaged and invalid checkpoints on the real engine: one clear error; the engine stays usable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.harness import DEVICES
from tests.reference.engines import engine_logits, extension_or_skip, load_tiny, prompt_logits
from tests.reference.numpy_model import NumpyModel
from tests.reference.tiny_checkpoints import (
    TinyCheckpoint,
    random_weights,
    tiny_config,
    to_bits,
    write_tiny,
)
from tests.reference.tiny_w4 import LAYOUTS, SIZES, quantise, write_w4
from tests.tolerances import LOGITS, assert_close

C = extension_or_skip()

DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture
def good(tmp_path: Path) -> Iterator[TinyCheckpoint]:
    """A valid checkpoint. It must still load after the test has damaged a copy."""
    tiny = write_tiny(tmp_path / "good")
    yield tiny
    reference = NumpyModel(tiny.fields(), tiny.weights).logits([1, 2, 3])
    assert_close(engine_logits(tiny.directory, [1, 2, 3]), reference, LOGITS["float32"])


@pytest.fixture
def bad(good: TinyCheckpoint, tmp_path: Path) -> Path:
    """A directory to write the bad checkpoint to."""
    return tmp_path / "bad"


def complaint(directory: Path, kind: type[Exception] = ValueError, **config: Any) -> str:
    with pytest.raises(kind) as error:
        load_tiny(directory, **config)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("keep", [0, 4, 100, 3000, -1])
def test_truncated_file(bad: Path, keep: int) -> None:
    write_tiny(bad)
    path = bad / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    message = complaint(bad)
    assert str(path) in message and ("truncated" in message or "expected at least 8" in message)


def test_file_truncated_after_the_check(bad: Path) -> None:
    write_tiny(bad)
    path = bad / "model.safetensors"

    class Shrink:
        def start(self, total_bytes: int, what: str) -> None:
            path.write_bytes(path.read_bytes()[:-1000])

        def update(self, done_bytes: int) -> None:
            pass

        def finish(self) -> None:
            pass

    from cpmcu.config import EngineConfig
    from cpmcu.loading.loader import load_model

    config = EngineConfig(device="cpu", max_num_seqs=1, memory_limit=0.5)
    with pytest.raises(ValueError, match="truncated"):
        load_model(str(bad), config=config, progress=Shrink())


def test_wrong_shape(bad: Path) -> None:
    weights = random_weights(tiny_config("llama"))
    weights["model.layers.1.mlp.down_proj.weight"] = np.ones((96, 64), np.float32)
    write_tiny(bad, weights=weights)
    assert "down_proj.weight has shape [96, 64], expected [64, 96]" in complaint(bad)


def test_wrong_dtype(bad: Path) -> None:
    weights = random_weights(tiny_config("llama"))
    weights["model.norm.weight"] = np.ones(64, np.int32)
    write_tiny(bad, weights=weights)
    assert "model.norm.weight has dtype int32, expected float32 or float16" in complaint(bad)


def test_a_number_beyond_the_dtype(bad: Path) -> None:
    weights = random_weights(tiny_config("llama"))
    weights["model.norm.weight"][3] = -1e6
    write_tiny(bad, weights=weights)
    assert '"model.norm.weight" holds -1e+06, which is beyond float16' in complaint(
        bad, dtype="float16"
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("stored", "dtype"), [*zip(DTYPES, DTYPES), ("float16", "bfloat16")])
def test_a_number_that_is_not_finite(bad: Path, value: float, stored: str, dtype: str) -> None:
    """It is found with and without conversion, at any position of the tensor."""
    weights = random_weights(tiny_config("llama"))
    for name, place in (
        ("model.embed_tokens.weight", (202, 63)),
        ("model.layers.1.mlp.down_proj.weight", (0, 0)),
        ("model.norm.weight", (3,)),
    ):
        damaged = {other: array.copy() for other, array in weights.items()}
        damaged[name][place] = value
        write_tiny(bad, weights=damaged, dtype=stored)
        message = complaint(bad, dtype=dtype)
        assert f'"{name}" holds {value} at {list(place)}, expected finite' in message
        assert message.startswith(str(bad / "model.safetensors"))


def test_largest_finite_numbers_load(bad: Path) -> None:
    weights = random_weights(tiny_config("llama"))
    for dtype, largest in (("float32", 3.4e38), ("bfloat16", 3.38e38), ("float16", 65504.0)):
        weights["model.norm.weight"][:4] = [largest, -largest, 1e-40, -0.0]
        write_tiny(bad, weights=weights, dtype=dtype)
        load_tiny(bad, dtype=dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_a_number_that_is_not_finite_in_a_large_tensor(bad: Path, device: str) -> None:
    """The tensor has several chunks, which several threads read. A GPU checks them itself."""
    config = {"vocab_size": 20_000, "hidden_size": 512, "num_hidden_layers": 1}
    weights = random_weights(tiny_config("llama", **config))
    for row, column in ((19_999, 511), (12_345, 67), (8192, 0)):
        before = weights["lm_head.weight"][row, column]
        weights["lm_head.weight"][row, column] = np.nan
        write_tiny(bad, weights=weights, dtype="bfloat16", **config)
        assert f'"lm_head.weight" holds nan at [{row}, {column}]' in complaint(bad, device=device)
        weights["lm_head.weight"][row, column] = before


def test_a_number_that_is_not_finite_in_a_torch_file(bad: Path) -> None:
    torch = pytest.importorskip("torch", reason="writes a torch file")
    tiny = write_tiny(bad)
    (bad / "model.safetensors").unlink()
    tiny.weights["lm_head.weight"][5, 6] = np.inf
    torch.save(
        {n: torch.from_numpy(np.array(w)) for n, w in tiny.weights.items()},
        bad / "pytorch_model.bin",
    )
    message = complaint(bad)
    assert '"lm_head.weight" holds inf at [5, 6]' in message and "pytorch_model.bin" in message


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
def test_a_scale_that_is_not_finite(bad: Path, layout: str, scale_dtype: str) -> None:
    config = tiny_config("llama", **SIZES, num_hidden_layers=1)
    weights = quantise(random_weights(config), scale_dtype=scale_dtype)
    linear = weights.linears["model.layers.0.mlp.down_proj"]
    linear.scales[0, 5] = to_bits(np.array([np.inf]), scale_dtype)[0]
    message = complaint(write_w4(bad, config, weights, layout))
    assert "down_proj" in message and "finite" in message and str(bad) in message


@pytest.mark.parametrize("ids", [203, -1, -(2**63), 2**31, [2, 203], [1, -2]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_ids_of_end_tokens_outside_the_vocabulary(bad: Path, file: str, ids: Any) -> None:
    write_tiny(bad)
    text = json.loads((bad / file).read_text()) | {"eos_token_id": ids}
    (bad / file).write_text(json.dumps(text))
    assert f"{file}: eos_token_id is {ids}, expected an integer" in complaint(bad)


@pytest.mark.parametrize(
    "fields", [{"temperature": "warm"}, {"top_p": 2.0}, {"top_k": 1.5}, {"min_p": [1]}]
)
def test_invalid_default_sampling(bad: Path, fields: dict[str, Any]) -> None:
    """Invalid values are refused: they would be the defaults of every request."""
    write_tiny(bad)
    (bad / "generation_config.json").write_text(json.dumps(fields))
    message = complaint(bad)
    assert "generation_config.json" in message and f"{next(iter(fields))} is" in message


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.k_proj.weight"],
)
def test_missing_tensor(bad: Path, name: str) -> None:
    weights = random_weights(tiny_config("llama"))
    del weights[name]
    write_tiny(bad, weights=weights)
    assert f"1 tensors are missing that config.json asks for: {name}" in complaint(bad)


def test_missing_bias(bad: Path) -> None:
    weights = random_weights(tiny_config("qwen2"))
    del weights["model.layers.1.self_attn.v_proj.bias"]
    write_tiny(bad, "qwen2", weights=weights)
    assert "model.layers.1.self_attn.v_proj.bias" in complaint(bad)


def test_unknown_architecture(bad: Path) -> None:
    write_tiny(bad, architectures=["MambaForCausalLM"])
    assert "'MambaForCausalLM' is not supported" in complaint(bad)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": -4},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**6},
        {"hidden_size": 10**9},
        {"hidden_size": 2**31 - 8, "head_dim": 16},
        {"vocab_size": 2**31 - 1},
        {"vocab_size": 0},
        {"intermediate_size": 2**30},
        {"head_dim": 512},
        {"head_dim": 20},
        {"num_key_value_heads": 3},
        {"max_position_embeddings": 0},
        {"max_position_embeddings": 2**31 - 1},
        {"rms_norm_eps": -1.0},
        {"rms_norm_eps": "1e-5"},
        {"rope_theta": 0},
        {"rope_scaling": {"rope_type": "yarn", "factor": -2}},
        {"hidden_act": "relu"},
    ],
)
def test_absurd_config(bad: Path, changes: dict[str, Any]) -> None:
    write_tiny(bad)
    (bad / "config.json").write_text(json.dumps(tiny_config("llama") | changes))
    with pytest.raises((ValueError, MemoryError)) as error:
        load_tiny(bad)
    assert "\n" not in str(error.value) and len(str(error.value)) > 20


def test_config_of_another_model(bad: Path) -> None:
    write_tiny(bad)
    config = tiny_config("llama", num_hidden_layers=3, intermediate_size=104)
    (bad / "config.json").write_text(json.dumps(config))
    message = complaint(bad)
    assert "6 tensors do not fit" in message and "9 tensors are missing" in message


def test_engine_repeats_the_checks(good: TinyCheckpoint) -> None:
    """The engine repeats the checks of the loader."""
    spec = C.ModelSpec(**good.fields().to_kwargs(), dtype="float32", linear_method="dense")
    config = C.RuntimeConfig(device="cpu", max_num_seqs=1, chunk_length=16, memory_limit=0.5)
    engine = C.Engine(spec, config)
    with pytest.raises(ValueError, match=r"nothing\.weight"):
        engine.load_tensor("nothing.weight", np.ones(4, np.float32), "float32")
    with pytest.raises(ValueError, match="shape"):
        engine.load_tensor("model.norm.weight", np.ones(4, np.float32), "float32")
    with pytest.raises(ValueError, match="dtype"):
        engine.load_tensor("model.norm.weight", np.ones(64, np.int32), "int32")
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        engine.finish_loading()
    with pytest.raises(RuntimeError, match="no weights yet"):
        prompt_logits(engine, [1, 2])


def test_unknown_settings_are_refused(good: TinyCheckpoint) -> None:
    spec = C.ModelSpec(**good.fields().to_kwargs(), dtype="float32", linear_method="dense")
    with pytest.raises(ValueError, match='device is "tpu", expected cpu or cuda'):
        C.Engine(spec, C.RuntimeConfig(device="tpu", max_num_seqs=1, chunk_length=16))
    limits = {"device": "cpu", "max_num_seqs": 1, "chunk_length": 16, "memory_limit": 0.5}
    with pytest.raises(ValueError, match='verify_strategy is "top", expected target_match, gre'):
        C.Engine(spec, C.RuntimeConfig(**limits, verify_strategy="top"))
    with pytest.raises(ValueError, match="verify_window is -1, expected at least 0"):
        C.Engine(spec, C.RuntimeConfig(**limits, verify_strategy="topp", verify_window=-1))


def test_unused_tensors_are_ignored(bad: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = random_weights(tiny_config("llama"))
    weights["model.extra.weight"] = np.ones((3, 5), np.float32)
    tiny = write_tiny(bad, weights=weights)
    logits = engine_logits(bad, [4, 5, 6])
    assert "model.extra.weight" in caplog.text
    reference = NumpyModel(tiny.fields(), tiny.weights).logits([4, 5, 6])
    assert_close(logits, reference, LOGITS["float32"])
