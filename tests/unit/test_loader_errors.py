"""Errors before and during the planning of a load: one sentence each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu import _extension
from cpmcu.config import EngineConfig
from cpmcu.loading import hub
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.loading.hub import resolve_model
from cpmcu.loading.loader import load_model
from tests.reference.fake_extension import fake_extension
from tests.reference.tiny_checkpoints import (
    random_weights,
    tiny_config,
    write_safetensors,
    write_tiny,
)


@pytest.fixture(autouse=True)
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extension, "load", fake_extension)


def complaint(directory: Path, kind: type[Exception] = ValueError, **config: Any) -> str:
    with pytest.raises(kind) as error:
        load_model(str(directory), config=EngineConfig(**config))
    message = str(error.value)
    assert "\n" not in message
    return message


# ---- the model's name


@pytest.mark.parametrize("name", ["/no/such/dir", "./missing", "a/b/c", "~/none", "C:\\x"])
def test_neither_directory_nor_repo_id(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="neither a directory nor a Hugging Face repo id"):
        resolve_model(name)


def test_empty_name() -> None:
    with pytest.raises(ValueError, match="model is ''"):
        resolve_model("")


def test_shipped_models_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tiny-python-eagle2"
    shipped = resolve_model(name)
    assert shipped.is_absolute() and (shipped / "model.safetensors").is_file()
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    assert resolve_model(name) == Path(name)  # an existing directory takes precedence
    with pytest.raises(ValueError, match=r"revision is 'v1' but .* is a local directory"):
        resolve_model("tiny-python-minicpm", "v1")


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    with pytest.raises(ValueError, match=r"is a file, expected a GGUF file or the directory"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_revision_needs_a_repo(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"revision is 'main' but .* is a local directory"):
        resolve_model(str(tmp_path), "main")


def test_offline_and_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError) as error:
        resolve_model("nobody/nothing", "v1")
    message = str(error.value)
    assert "'nobody/nothing' at revision 'v1'" in message and "HF_HUB_OFFLINE is set" in message


def test_offline_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--some--model"
    write_tiny(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert resolve_model("some/model") == repo / "snapshots" / commit


def test_hub_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RuntimeError, match="pip install huggingface_hub"):
        resolve_model("some/model")


def test_torch_files_are_fetched_only_without_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("huggingface_hub")
    asked: list[list[str]] = []

    def snapshot_download(repo_id: str, **arguments: Any) -> str:
        asked.append(arguments["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setattr(module, "snapshot_download", snapshot_download)
    hub.resolve_model("some/model")
    assert "*.bin" not in asked[0] and "*.bin" in asked[1] and len(asked) == 2
    (tmp_path / "adapter.safetensors").write_bytes(b"")
    hub.resolve_model("some/model")
    assert len(asked) == 4
    write_tiny(tmp_path)
    hub.resolve_model("some/model")
    assert len(asked) == 5


def test_of_subfolders_only_templates_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("huggingface_hub")
    wanted = ["additional_chat_templates/tool_use.jinja", "chat_template.jinja", "config.json"]
    others = ["onnx/config.json", "original/model.safetensors", "original/a.pt", "gguf/a.txt"]
    others += ["consolidated.00.pth", "README.md", "original/tokenizer.model", "a/b/model.bin"]
    fetched: list[str] = []

    def snapshot_download(
        repo_id: str, allow_patterns: list[str], ignore_patterns: list[str], **_: Any
    ) -> str:
        fetched[:] = module.utils.filter_repo_objects(
            wanted + others, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        return str(tmp_path)

    monkeypatch.setattr(module, "snapshot_download", snapshot_download)
    hub.resolve_model("some/model")
    assert fetched == wanted


# ---- the directory


def test_no_config(tmp_path: Path) -> None:
    assert "has no config.json" in complaint(tmp_path, FileNotFoundError)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_config_is_not_json(tmp_path: Path, text: str) -> None:
    write_tiny(tmp_path)
    (tmp_path / "config.json").write_text(text)
    message = complaint(tmp_path)
    assert "config.json" in message and "expected an object" in message


def test_no_weights(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    message = complaint(tmp_path, FileNotFoundError)
    assert "has no weights" in message and "model.safetensors.index.json" in message


def test_ambiguous_weights(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    message = complaint(tmp_path)
    assert "2 files that may be the weights (a.safetensors, b.safetensors)" in message
    (tmp_path / "b.safetensors").unlink()
    assert open_checkpoint(tmp_path).tensors


def test_standard_names_take_precedence(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    whole = tmp_path / "model.safetensors"
    expected = open_checkpoint(tmp_path).tensors
    # transformers leaves both if a model is saved in shards and then as a single file.
    index = {
        "metadata": {},
        "weight_map": dict.fromkeys(expected, "model-00001-of-00002.safetensors"),
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "other.safetensors").write_bytes(b"damaged")
    assert open_checkpoint(tmp_path).tensors == expected
    whole.rename(tmp_path / "model_gptq.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert open_checkpoint(tmp_path).tensors.keys() == expected.keys()


def test_safetensors_take_precedence_over_torch_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="writes a torch file")
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "adapter.safetensors").write_bytes(b"damaged")
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]
    write_tiny(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-128g.safetensors")
    assert "a" not in open_checkpoint(tmp_path).tensors


def test_other_files_are_not_weights(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for name in ("training_args.bin", "optimizer.pt", "freq_32768.pt"):
        (tmp_path / name).write_bytes(b"")
    assert "has no weights" in complaint(tmp_path, FileNotFoundError)


# ---- torch files


def test_torch_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    message = complaint(tmp_path, RuntimeError)
    assert "pytorch_model.bin" in message and "torch, which is not installed" in message


def test_torch_file_is_damaged_or_holds_code(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    write_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"not a pickle")
    assert "pytorch_model.bin" in complaint(tmp_path)
    torch.save({"a": Path("x")}, path)
    assert "expected tensors only" in complaint(tmp_path)
    torch.save([1, 2], path)
    assert "holds a list, expected a state dict" in complaint(tmp_path)
    torch.save({"model": {"a": torch.ones(1)}}, path)
    assert "entry 'model' is a dict" in complaint(tmp_path)
    torch.save({"a": torch.ones(4).to_sparse()}, path)
    assert "a is torch.sparse_coo, expected a dense tensor" in complaint(tmp_path)
    torch.save({"a": torch.ones(4, device="meta")}, path)
    assert "a has no data (device meta), expected a dense tensor" in complaint(tmp_path)
    torch.save({"a": torch.ones(1000)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    for length in (*range(0, len(whole) - 4000, 7), len(whole) - 500):
        path.write_bytes(whole[:length])
        assert "pytorch_model.bin" in complaint(tmp_path)
    torch.save({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:-500])
    assert "damaged" in complaint(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("stated", [2.0, "2", {"a": 2}, [2, "3"], True, [[2]]])
def test_ends_of_sequences(tmp_path: Path, file: str, stated: Any) -> None:
    write_tiny(tmp_path)
    config = json.loads((tmp_path / file).read_text()) | {"eos_token_id": stated}
    (tmp_path / file).write_text(json.dumps(config))
    assert f"{file}: eos_token_id is {stated!r}, expected an integer or a list" in complaint(
        tmp_path
    )


# ---- schemes and architectures


def test_unknown_architecture(tmp_path: Path) -> None:
    write_tiny(tmp_path, architectures=["MambaForCausalLM"])
    message = complaint(tmp_path)
    assert "'MambaForCausalLM' is not supported" in message and "Llama, " in message


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quantization_config": {"quant_method": "gptqx", "bits": 3}}, "gptqx (3 bits)"),
        ({"compression_config": {"quant_method": "somepacked"}}, "somepacked"),
        ({"quantization_config": {"w": 1}}, "an unnamed method"),
    ],
)
def test_unknown_quantisation(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    write_tiny(tmp_path, **config)
    message = complaint(tmp_path)
    assert f"is quantised with {name}, which is not supported" in message and "dense" in message


def test_quantised_tensors_without_quantization_config(tmp_path: Path) -> None:
    weights = random_weights(tiny_config("llama"))
    weights["model.layers.0.mlp.up_proj.weight_packed"] = np.ones((8, 96), np.int32)
    write_tiny(tmp_path, weights=weights)
    message = complaint(tmp_path)
    assert "up_proj.weight_packed of int32" in message and "not supported" in message


# ---- tensors


def test_all_mismatches_in_one_message(tmp_path: Path) -> None:
    weights = random_weights(tiny_config("llama"))
    weights["model.norm.weight"] = np.ones(63, np.float32)
    weights["model.layers.0.mlp.up_proj.weight"] = np.ones((64, 96), np.float32)
    weights["model.layers.1.input_layernorm.weight"] = np.ones(64, np.int32)
    del weights["lm_head.weight"], weights["model.layers.1.self_attn.q_proj.weight"]
    weights["model.extra"] = np.ones(1, np.float32)
    write_tiny(tmp_path, weights=weights, tie_word_embeddings=False)
    message = complaint(tmp_path)
    assert message.startswith(f"{tmp_path}: 3 tensors do not fit config.json: ")
    assert "model.norm.weight has shape [63], expected [64]" in message
    assert "up_proj.weight has shape [64, 96], expected [96, 64]" in message
    assert "input_layernorm.weight has dtype int32, expected float32 or float16" in message
    assert "2 tensors are missing" in message and "self_attn.q_proj.weight" in message
    assert "not used were: model.extra" in message


def test_the_first_eight_mismatches_are_listed(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(tiny_config("llama", hidden_size=72, head_dim=16))
    )
    message = complaint(tmp_path)
    assert message.count(" has shape ") == 8 and "more" in message


def test_fused_tensor_of_wrong_size(tmp_path: Path) -> None:
    weights = random_weights(tiny_config("llama"))
    prefix = "model.layers.0.self_attn."
    for part in "qkv":
        del weights[f"{prefix}{part}_proj.weight"]
    weights[f"{prefix}qkv_proj.weight"] = np.ones((96, 64), np.float32)
    write_tiny(tmp_path, weights=weights)
    assert "qkv_proj.weight has shape [96, 64], expected 128 rows" in complaint(tmp_path)


def test_fused_and_split_tensors_together(tmp_path: Path) -> None:
    weights = random_weights(tiny_config("llama"))
    weights["model.layers.0.self_attn.qkv_proj.weight"] = np.ones((128, 64), np.float32)
    write_tiny(tmp_path, weights=weights)
    assert "q_proj.weight is given twice" in complaint(tmp_path)


def test_all_checks_precede_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path)
    weights = random_weights(tiny_config("llama"))
    weights["lm_head.weight"] = np.ones((3, 3), np.float32)
    write_safetensors(tmp_path / "model.safetensors", weights)
    extension = fake_extension()

    def load_file(*_: Any) -> None:
        raise AssertionError("loaded something")

    monkeypatch.setattr(extension.Engine, "load_file", load_file)
    monkeypatch.setattr(_extension, "load", lambda: extension)
    assert "lm_head.weight has shape [3, 3]" in complaint(tmp_path)
