"""Loading with a fake extension: each tensor is loaded once under the engine's name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu import _extension
from cpmcu.config import EngineConfig
from cpmcu.loading.cublas import cublas_paths
from cpmcu.loading.loader import LoadedModel, choose_dtype, load_model
from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant import registry as quant_registry
from cpmcu.quant.registry import LinearOptions, QuantPlan, Repack, register_quant
from tests.reference.fake_extension import FakeEngine, fake_extension
from tests.reference.tiny_checkpoints import (
    FAMILIES,
    TinyCheckpoint,
    from_bits,
    random_weights,
    tiny_config,
    to_bits,
    write_tiny,
)


@pytest.fixture(autouse=True)
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extension, "load", fake_extension)


def load(directory: Path, progress: Any = None, **config: Any) -> LoadedModel:
    return load_model(str(directory), config=EngineConfig(**config), progress=progress)


def assert_loaded(model: LoadedModel, tiny: TinyCheckpoint, dtype: str) -> None:
    engine: Any = model.engine
    assert engine.finished
    names = set(tiny.weights)
    if model.spec.tie_word_embeddings:
        names.discard("lm_head.weight")
    assert set(engine.loaded) == names
    for name in names:
        found_dtype, bits = engine.loaded[name]
        assert found_dtype == dtype
        np.testing.assert_array_equal(from_bits(bits, dtype), tiny.weights[name])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loads_every_family(
    family: str, dtype: str, shards: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = write_tiny(tmp_path, family, dtype=dtype, shards=shards)
    model = load(tmp_path)
    assert_loaded(model, tiny, dtype)
    assert model.spec.dtype == dtype and model.spec.linear_method == "dense"
    assert model.hf_config == tiny.config and model.generation_config == {"eos_token_id": [2]}
    assert model.directory == tmp_path
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_files(tmp_path: Path, dtype: str, shards: int) -> None:
    torch = pytest.importorskip("torch", reason="writing .bin files needs torch")
    tiny = write_tiny(tmp_path, "qwen2", dtype=dtype)
    (tmp_path / "model.safetensors").unlink()
    state = {
        name: torch.nn.Parameter(torch.from_numpy(np.array(array)).to(getattr(torch, dtype)))
        for name, array in tiny.weights.items()
    }
    names = list(state)
    state[names[0]] = torch._neg_view(-state[names[0]].detach())  # a lazy negation
    files = [f"pytorch_model-{i}.bin" for i in range(shards)] if shards > 1 else ["any.bin"]
    weight_map = {}
    for i, file in enumerate(files):
        torch.save({name: state[name] for name in names[i::shards]}, tmp_path / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    if shards > 1:
        index = json.dumps({"weight_map": weight_map})
        (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    assert_loaded(load(tmp_path), tiny, dtype)


@pytest.mark.parametrize("container", ["safetensors", "torch"])
def test_fused_checkpoints_are_split(tmp_path: Path, container: str) -> None:
    config = tiny_config("qwen2")
    weights = random_weights(config)
    fused = dict(weights)
    for layer in range(2):
        for leaf in ("weight", "bias"):
            parts = [fused.pop(f"model.layers.{layer}.self_attn.{p}_proj.{leaf}") for p in "qkv"]
            fused[f"model.layers.{layer}.self_attn.qkv_proj.{leaf}"] = np.concatenate(parts)
        parts = [fused.pop(f"model.layers.{layer}.mlp.{p}_proj.weight") for p in ("gate", "up")]
        fused[f"model.layers.{layer}.mlp.gate_up_proj.weight"] = np.concatenate(parts)
    write_tiny(tmp_path, "qwen2", weights=fused, dtype="bfloat16")
    if container == "torch":
        torch = pytest.importorskip("torch", reason="writing .bin files needs torch")
        (tmp_path / "model.safetensors").unlink()
        state = {k: torch.from_numpy(v).bfloat16() for k, v in fused.items()}
        torch.save(state, tmp_path / "pytorch_model.bin")
    engine: Any = load(tmp_path).engine
    assert set(engine.loaded) == set(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(engine.loaded[name][1], to_bits(array, "bfloat16"))


# ---- tied heads, unused tensors


def test_tied_head_that_the_file_repeats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = random_weights(tiny_config("llama"))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    tiny = write_tiny(tmp_path, weights=weights, tie_word_embeddings=True)
    assert_loaded(load(tmp_path), tiny, "float32")
    assert "1 tensors are not used: lm_head.weight (tie_word_embeddings is true" in caplog.text


def test_another_head_than_the_table_is_not_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    weights = random_weights({**config, "tie_word_embeddings": False})
    tiny = write_tiny(tmp_path, weights=weights, tie_word_embeddings=True)
    loaded = load(tmp_path)
    assert not loaded.spec.tie_word_embeddings
    assert_loaded(loaded, tiny, "float32")
    assert "lm_head.weight is not the embedding table: not tied" in caplog.text


def test_missing_key_and_missing_head_mean_tied(tmp_path: Path) -> None:
    write_tiny(tmp_path, tie_word_embeddings=True)
    config = tiny_config("llama", tie_word_embeddings=None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).spec.tie_word_embeddings


def test_unused_tensors_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = random_weights(tiny_config("llama"))
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    weights["model.vision.weight"] = np.ones(8, np.float32)
    weights["model.layers.2.mlp.up_proj.weight"] = np.ones((96, 64), np.float32)
    write_tiny(tmp_path, weights=weights)
    load(tmp_path)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("2 tensors are not used: ") and "rotary" not in line
    assert "model.vision.weight (not part of this model)" in line
    assert "model.layers.2.mlp.up_proj.weight" in line


# ---- dtypes and devices


def test_conversion_of_dtypes_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = write_tiny(tmp_path, dtype="bfloat16")
    model = load(tmp_path, dtype="float16")
    assert model.spec.dtype == "float16"
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    count = len(tiny.weights)
    assert f"converting {count} tensors to float16 while loading: {count} from bfloat16" in line


def metas(**counts: int) -> dict[str, TensorMeta]:
    return {dtype: TensorMeta(dtype, dtype, (count,)) for dtype, count in counts.items()}


@pytest.mark.parametrize(
    ("asked", "config", "device", "expected"),
    [
        (None, {"torch_dtype": "bfloat16"}, "cpu", "bfloat16"),
        ("auto", {"dtype": "float16"}, "cuda", "float16"),
        ("auto", {"torch_dtype": "torch.float16"}, "cuda", "float16"),
        ("auto", {"torch_dtype": "float32"}, "cpu", "float32"),
        ("auto", {"torch_dtype": "float32"}, "cuda", "bfloat16"),
        ("float32", {"torch_dtype": "bfloat16"}, "cpu", "float32"),
        ("auto", {}, "cpu", "float16"),
    ],
)
def test_choice_of_dtype(asked: Any, config: Any, device: str, expected: str) -> None:
    tensors = metas(float16=1000, float32=10, int32=5000)
    assert choose_dtype(asked, config, tensors, device)[0] == expected


def test_float32_is_for_the_cpu() -> None:
    with pytest.raises(ValueError, match="dtype is 'float32', expected 'bfloat16' or 'float16'"):
        choose_dtype("float32", {}, {}, "cuda")
    with pytest.raises(ValueError, match=r"config\.json: dtype is 'float64'"):
        choose_dtype(None, {"torch_dtype": "float64"}, {}, "cpu")


def test_device_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path, dtype="bfloat16", head_dim=64)
    assert load(tmp_path).engine.config.device == "cpu"  # type: ignore[attr-defined]
    monkeypatch.setattr(_extension, "load", lambda: fake_extension(num_devices=1))
    assert load(tmp_path).engine.config.device == "cuda"  # type: ignore[attr-defined]


def test_unavailable_device(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    with pytest.raises(RuntimeError, match="device is 'cuda' but no CUDA device was found"):
        load(tmp_path, device="cuda")


def test_runtime_config_is_passed_on(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    model = load(tmp_path, chunk_length=17, max_num_seqs=3, max_model_len=100, num_threads=2)
    config = model.engine.config  # type: ignore[attr-defined]
    assert (config.chunk_length, config.max_num_seqs, config.max_model_len) == (17, 3, 100)
    assert config.num_threads == 2 and config.memory_limit == 0.9


def test_context_beyond_the_model_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny(tmp_path)
    load(tmp_path, max_model_len=1000)
    assert "max_model_len is 1000 but config.json has max_position_embeddings 512" in caplog.text


def test_rope_if_memory_limits_the_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """longrope has other factors if the maximum length is at most the original length."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    write_tiny(tmp_path, rope_scaling=rope)
    long, short = load(tmp_path), load(tmp_path, max_model_len=100)
    assert long.spec.rope_inv_freq != short.spec.rope_inv_freq

    class Shortened(FakeEngine):
        num_made = 0

        def __init__(self, spec: Any, config: Any) -> None:
            super().__init__(spec, config)
            Shortened.num_made += 1

        @staticmethod
        def planned_model_len(spec: Any, config: Any, draft: Any = None) -> int:
            return 100

    extension = fake_extension()
    extension.Engine = Shortened
    monkeypatch.setattr(_extension, "load", lambda: extension)
    loaded = load(tmp_path)
    assert loaded.spec.rope_inv_freq == short.spec.rope_inv_freq
    assert loaded.engine.spec.rope_inv_freq == short.spec.rope_inv_freq  # type: ignore[attr-defined]
    assert loaded.engine.max_model_len == 100 and Shortened.num_made == 1
    # max_model_len stays 0: the free memory may have become smaller since planning.
    assert loaded.engine.config.max_model_len == 0  # type: ignore[attr-defined]


# ---- progress


class Recorder:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, total_bytes: int, what: str) -> None:
        self.calls.append(("start", total_bytes, what))

    def update(self, done_bytes: int) -> None:
        self.calls.append(done_bytes)

    def finish(self) -> None:
        self.calls.append("finish")


def test_progress_counts_bytes(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "tiny", shards=3, dtype="float16")
    total = sum(array.size for array in tiny.weights.values()) * 2
    recorder = Recorder()
    load(tmp_path / "tiny", progress=recorder)
    assert recorder.calls[0] == ("start", total, "tiny") and recorder.calls[-1] == "finish"
    done = recorder.calls[1:-1]
    assert done == sorted(done) and done[-1] == total


@pytest.mark.parametrize("method", ["start", "update"])
def test_progress_finishes_after_an_error(tmp_path: Path, method: str) -> None:
    write_tiny(tmp_path)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    recorder = Recorder()
    setattr(recorder, method, interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, progress=recorder)
    assert recorder.calls[-1] == "finish"


# ---- quantisation from outside


def test_scheme_from_outside_repacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quant_registry.registered_quants()
    monkeypatch.setattr(quant_registry, "_schemes", dict(quant_registry._schemes))

    @register_quant("halved")
    class Halved:
        """Stores the doubled embedding table in two tensors."""

        def matches(self, quant_config: Any, tensors: Any) -> bool:
            return quant_config.get("quant_method") == "halved"

        def plan(self, config: Any, tensors: Any) -> QuantPlan:
            inputs = ("embed.codes", "embed.scale")
            name = "model.embed_tokens.weight"
            output = TensorMeta(name, "float32", tensors["embed.codes"].shape)
            repack = Repack(inputs, (output,), lambda t: {name: t[inputs[0]] * t[inputs[1]]})
            return QuantPlan("halved", "dense", LinearOptions(group_size=4), repacks=(repack,))

    weights = random_weights(tiny_config("llama"))
    embedding = weights.pop("model.embed_tokens.weight")
    stored = {"embed.codes": embedding * 2, "embed.scale": np.full(1, 0.5, np.float32)}
    write_tiny(tmp_path, weights=weights | stored, quantization_config={"quant_method": "halved"})
    model = load(tmp_path)
    loaded = model.engine.loaded  # type: ignore[attr-defined]
    np.testing.assert_array_equal(loaded["model.embed_tokens.weight"][1], embedding)
    assert model.spec.linear_options == LinearOptions(group_size=4).to_dict()


def test_cublas_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, cuda, site = tmp_path / "own", tmp_path / "cuda", tmp_path / "site"
    for folder in (home, cuda / "lib64", site / "nvidia/cu13/lib", site / "nvidia/cublas/lib"):
        folder.mkdir(parents=True)
    monkeypatch.setenv("CPMCU_CUBLAS_HOME", str(home))
    monkeypatch.setenv("CUDA_HOME", str(cuda))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr("sys.path", ["", str(site)])
    assert cublas_paths() == [
        str(home),
        str(cuda / "lib64"),
        str(site / "nvidia/cu13/lib"),
        str(site / "nvidia/cublas/lib"),
    ]
