"""Quantised synthetic checkpoints have the dense matrices' standard deviation, load and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cpmcu.config import EngineConfig
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.loading.loader import load_model
from scripts.synthetic.formats import FORMATS
from tests.engine.harness import generate
from tests.reference import float_groups, fp8
from tests.unit.test_synthetic_checkpoint import write

Tensors = dict[str, npt.NDArray[Any]]
MODULES = {
    "tiny-llama": "self_attn.o_proj",
    "tiny-qwen3-moe": "mlp.experts.3.down_proj",
    "tiny-qwen3.5": "linear_attn.in_proj_qkv",
}


def arrays(directory: Path) -> Tensors:
    """The tensors; those of bfloat16 as float32."""
    checkpoint = open_checkpoint(directory)
    made = {}
    for name, stored in checkpoint.tensors.items():
        made[name] = checkpoint.read(name)
        if stored.meta.dtype == "bfloat16":
            made[name] = (made[name].astype(np.uint32) << 16).view(np.float32)
    return made


def dequantised(form: str, tensors: Tensors, module: str) -> npt.NDArray[np.float64]:
    def part(name: str) -> npt.NDArray[Any]:
        return tensors[f"{module}.{name}"]

    if form == "fp8":
        scales = part("weight_scale_inv").repeat(128, 0).repeat(128, 1)
        values = fp8.values_of(part("weight"))
        return values * scales[: values.shape[0], : values.shape[1]]
    if form == "nvfp4":
        codes, scales = part("weight_packed"), part("weight_scale")
        return float_groups.dequantise("nvfp4", codes, scales, 1 / part("weight_global_scale")[0])
    packed = part("weight_packed").view(np.uint8).astype(np.float64)
    return (packed - 128) * part("weight_scale")


@pytest.mark.parametrize("preset", MODULES)
@pytest.mark.parametrize("form", [form for form in FORMATS if not form.startswith("gptq")])
def test_formats(preset: str, form: str, tmp_path: Path) -> None:
    out = write(preset, tmp_path / form, "--quant", form)
    module = f"model.layers.0.{MODULES[preset]}"
    weight = dequantised(form, arrays(out), module)
    dense = arrays(write(preset, tmp_path / "dense"))[f"{module}.weight"]
    assert weight.shape == dense.shape
    assert abs(weight.std() / dense.std() - 1) < 0.1
    assert abs(weight.mean()) < 0.03 * dense.std()
    config = EngineConfig(device="cpu", num_threads=1, max_model_len=256)
    loaded = load_model(str(out), config=config)
    assert loaded.spec.linear_method == "packed"
    assert len(set(generate(loaded.engine, [5, 900, 17], 12))) > 1


@pytest.mark.parametrize(
    "flags",
    [
        ["tiny-gpt-oss"],
        ["tiny-gemma4"],
        ["tiny-gemma4", "--quant", "gptq", "--set", "intermediate_size=1024"],
        ["tiny-gemma4", "--quant", "fp8"],
        ["tiny-nemotron"],
        ["tiny-nemotron", "--quant", "gptq-g64"],
        ["tiny-nemotron", "--quant", "nvfp4"],
        ["tiny-nemotron-super"],
        ["tiny-nemotron-super", "--quant", "gptq"],
        ["ministral-8b", "--set", "hidden_size=256", "--set", "vocab_size=4096"],
    ],
)
def test_other_families(flags: list[str], tmp_path: Path) -> None:
    """Checkpoints of these families load and run. A tied random head would repeat one token."""
    preset, *more = flags
    if preset == "ministral-8b":
        more += ["--num-hidden-layers", "2", "--set", "intermediate_size=512"]
        more += ["--set", "num_attention_heads=4", "--set", "num_key_value_heads=2"]
    more += ["--set", "tie_word_embeddings=false"]
    out = write(preset, tmp_path / "model", *more)
    config = EngineConfig(device="cpu", num_threads=1, max_model_len=256)
    engine = load_model(str(out), config=config).engine
    texts = [generate(engine, ids, 12) for ids in ([5, 900, 17], [5, 900, 18])]
    assert len(set(texts[0])) > 1 and texts[0] != texts[1]


def test_presets_of_experts_in_mxfp4_are_quantised(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="tiny-gpt-oss is quantised itself"):
        write("tiny-gpt-oss", tmp_path / "model", "--quant", "gptq")
    flags = ["--acceptance", "0.8", "--draft-out", str(tmp_path / "draft")]
    with pytest.raises(SystemExit, match="--acceptance is not written for tiny-gemma4"):
        write("tiny-gemma4", tmp_path / "model", *flags)


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3-moe"])
def test_gguf(preset: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    sizes = ["--set", "moe_intermediate_size=256"]
    out = write(preset, tmp_path / "gguf", "--quant", "q4_k_m", *sizes) / "model.gguf"
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    kinds = {
        name: found[name + ".weight"].tensor_type.name
        for name in ("blk.0.attn_v", "blk.1.attn_v", "output", "blk.1.attn_norm", "token_embd")
    }
    assert list(kinds.values()) == ["Q4_K", "Q6_K", "Q6_K", "F32", "F16"]
    theirs, ours = "ffn_down", "mlp.down_proj"
    if preset == "tiny-qwen3-moe":
        theirs, ours = "ffn_down_exps", "mlp.experts.15.down_proj"
        assert list(found["blk.1.ffn_down_exps.weight"].shape) == [256, 256, 16]
    dense = arrays(write(preset, tmp_path / "dense", *sizes))
    for layer in range(2):
        tensor = found[f"blk.{layer}.{theirs}.weight"]
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        expected = dense[f"model.layers.{layer}.{ours}.weight"]
        assert weight.shape[-2:] == expected.shape
        assert abs(weight.std() / expected.std() - 1) < 0.05
        assert abs(weight.mean()) < 0.03 * expected.std()
    config = EngineConfig(device="cpu", num_threads=1, max_model_len=256)
    loaded = load_model(str(out.parent), config=config)
    assert loaded.spec.linear_method == "packed"
    assert len(set(generate(loaded.engine, [5, 900, 17], 12))) > 1


def test_gguf_with_a_known_text(tmp_path: Path) -> None:
    """The head of synthetic acceptance is not quantised, so the text is that of 16 bits."""
    texts = []
    for form in ("gguf", "dense"):
        out, draft = tmp_path / form, tmp_path / f"{form}-draft"
        quant = ["--quant", "q4_k_m"] if form == "gguf" else []
        write("tiny-llama", out, "--acceptance", "0.8", "--draft-out", str(draft), *quant)
        config = EngineConfig(device="cpu", num_threads=1, max_model_len=256)
        engine = load_model(str(out), config=config).engine
        texts.append(generate(engine, [5, 900, 17], 24))
    assert texts[0] == texts[1]


def test_gguf_refuses_other_families(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="models of type qwen3_5_text are not written as GGUF"):
        write("tiny-qwen3.5", tmp_path / "gguf", "--quant", "q4_k_m")
    with pytest.raises(SystemExit, match="has 128 inputs, expected a multiple of 256"):
        write("tiny-qwen3-moe", tmp_path / "gguf", "--quant", "q4_k_m")
