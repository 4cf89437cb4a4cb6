"""Files of formats that the engine does not read: a refusal names them and the next step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cpmcu import _extension
from cpmcu.config import EngineConfig
from cpmcu.loading.index import check_file
from cpmcu.loading.loader import load_model, read_config
from cpmcu.quant.registry import quant_config_of
from tests.reference.fake_extension import fake_extension
from tests.reference.tiny_checkpoints import write_tiny

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.fixture(autouse=True)
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extension, "load", fake_extension)


def complaint(directory: Path) -> str:
    with pytest.raises(ValueError) as error:
        load_model(str(directory), config=EngineConfig())
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_pointers_of_git_lfs(tmp_path: Path, name: str) -> None:
    write_tiny(tmp_path)
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(ValueError, match=rf"{name}: is a pointer of Git LFS.*`git lfs pull`"):
        check_file(tmp_path / name)
    if name != "tokenizer.json":
        assert "is a pointer of Git LFS" in complaint(tmp_path)


def test_a_gguf_pointer(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text(POINTER)
    assert "is a pointer of Git LFS" in complaint(path)


def test_an_adapter(tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    message = complaint(tmp_path)
    assert "is an adapter ('LORA') of 'org/base', expected a whole model" in message
    assert "merge_and_unload" in message


def test_quantisation_beside_the_config(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    algorithm = {"quantization": {"quant_algo": "W4A8_AWQ", "kv_cache_quant_algo": None}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(algorithm))
    assert "modelopt (W4A8_AWQ), which is not supported" in complaint(tmp_path)
    stated = {"quantization_config": {"quant_method": "fp8"}}
    write_tiny(tmp_path, **stated)
    assert quant_config_of(read_config(tmp_path)) == stated["quantization_config"]


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, "mlx (4 bits)"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ({"quantization_config": {"quant_method": "exl3", "bits": 4.0}}, "exl3 (4.0 bits)"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "torchao"}}, "torchao"),
    ],
)
def test_other_quantisers(tmp_path: Path, config: dict[str, Any], what: str) -> None:
    write_tiny(tmp_path, **config)
    message = complaint(tmp_path)
    assert f"is quantised with {what}, which is not supported" in message
    assert "name the model's 16-bit files" in message


@pytest.mark.parametrize(
    ("stated", "what"),
    [
        ("marlin-24", "4-bit integers with 2:4 sparsity"),
        ("mxfp6-pack-quantized", "MXFP6"),
    ],
)
def test_formats_of_compressed_tensors(tmp_path: Path, stated: str, what: str) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}
    quant = {"quant_method": "compressed-tensors", "format": stated, "config_groups": {"g": group}}
    write_tiny(tmp_path, quantization_config=quant)
    message = complaint(tmp_path)
    assert f"format is '{stated}' ({what}" in message
    assert "name the model's 16-bit files" in message


@pytest.mark.parametrize(
    ("architecture", "nearest"),
    [("Qwen2VLForConditionalGeneration", "Qwen"), ("Lama4ForCausalLM", "LlamaForCausalLM")],
)
def test_another_architecture(tmp_path: Path, architecture: str, nearest: str) -> None:
    write_tiny(tmp_path, architectures=[architecture])
    message = complaint(tmp_path)
    assert f"the nearest name is {nearest}" in message
    assert "Granite" in message and "docs/adding_model.md" in message
