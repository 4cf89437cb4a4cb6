"""MiniCPM to Llama: equal logits, rounding, and refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.convert.__main__ import main
from cpmcu.convert.minicpm_to_llama import (
    from_float32,
    llama_config,
    minicpm_to_llama,
    to_float32,
)
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.registry import find_model
from tests.reference.hf_model import fold_minicpm
from tests.reference.numpy_model import NumpyModel
from tests.reference.tiny_checkpoints import Array, from_bits, to_bits, write_tiny

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "cpmcu" / "assets" / "tiny-python-minicpm"
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "original_max_position_embeddings": 128,
}


def read(directory: Path) -> dict[str, Array]:
    """Returns all tensors as float32."""
    checkpoint = open_checkpoint(directory)
    return {
        name: to_float32(np.array(checkpoint.read(name)), stored.meta.dtype)
        for name, stored in checkpoint.tensors.items()
    }


def fields(config: dict[str, Any], length: int = 0) -> SpecFields:
    return find_model(config).build(config, BuildOptions(max_model_len=length))


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_the_products_rounded_once(
    tmp_path: Path, dtype: str, tied: bool, shards: int
) -> None:
    tiny = write_tiny(
        tmp_path / "in", "minicpm", dtype=dtype, shards=shards, tie_word_embeddings=tied
    )
    minicpm_to_llama(str(tmp_path / "in"), tmp_path / "out")
    _, folded = fold_minicpm(tiny.config, tiny.weights)
    found = read(tmp_path / "out")
    assert set(found) == set(folded)
    steps = {"float32": 2.0**-22, "float16": 2.0**-11, "bfloat16": 2.0**-8}
    smallest = {"float32": 0.0, "float16": 2.0**-25, "bfloat16": 0.0}
    for name, array in folded.items():
        allowed = np.abs(array) * steps[dtype] * 1.001 + smallest[dtype]
        assert np.all(np.abs(found[name] - array) <= allowed), name
    metas = open_checkpoint(tmp_path / "out").tensors.values()
    assert {stored.meta.dtype for stored in metas} == {dtype}


@pytest.mark.parametrize(
    "rope",
    [
        None,
        {"type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        LONGROPE,
        {**LONGROPE, "attention_factor": 1.0},
        {**LONGROPE, "factor": 8.0},
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_config_describes_the_same_model(
    tmp_path: Path, key: str, rope: dict[str, Any] | None
) -> None:
    overrides = {} if rope is None else {key: rope}
    if rope and key == "rope_parameters":
        overrides[key] = {"rope_theta": 5000.0, **rope}
    tiny = write_tiny(
        tmp_path / "in",
        "minicpm",
        sparse_config={"block_size": 64},
        mup_denominator=2,
        auto_map={"AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"},
        **overrides,
    )
    done = minicpm_to_llama(str(tmp_path / "in"), tmp_path / "out")
    assert any("sparse_config is left out" in note for note in done.notes)
    llama = config_of(tmp_path / "out")
    assert llama["architectures"] == ["LlamaForCausalLM"] and llama["model_type"] == "llama"
    gone = {"scale_emb", "scale_depth", "dim_model_base", "sparse_config", "auto_map"}
    assert not gone & set(llama)
    ones = {"embed_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0}
    for length in (0, 100, 128, 129, 512):
        assert fields(llama, length) == replace(fields(tiny.config, length), **ones)
    if rope and rope.get("rope_type") == "longrope":
        written = llama[key]
        assert written["factor"] == rope.get("factor", 4.0)
        assert llama["original_max_position_embeddings"] == 128 and "type" not in written


def test_length_of_longrope_from_the_top_level() -> None:
    config = config_of(SHIPPED) | {"original_max_position_embeddings": 512}
    factors = {"long_factor": [2.0] * 32, "short_factor": [1.0] * 32}
    config["rope_scaling"] = {"type": "longrope", **factors}
    llama = llama_config(config, fields(config))
    assert llama["rope_scaling"]["original_max_position_embeddings"] == 512
    for length in (512, 2048):
        assert fields(llama, length).rope_inv_freq == fields(config, length).rope_inv_freq


@pytest.mark.parametrize("tied", [False, True])
def test_same_logits(tmp_path: Path, tied: bool) -> None:
    """Computed by the numpy model, which is also the engine's oracle."""
    tiny = write_tiny(tmp_path / "in", "minicpm", tie_word_embeddings=tied, rope_scaling=LONGROPE)
    minicpm_to_llama(str(tmp_path / "in"), tmp_path / "out")
    ids = [1, 5, 7, 200, 3]
    before = NumpyModel(fields(tiny.config), tiny.weights).logits(ids)
    after = NumpyModel(fields(config_of(tmp_path / "out")), read(tmp_path / "out")).logits(ids)
    np.testing.assert_allclose(after, before, rtol=0, atol=2e-5 * np.abs(before).max())


def test_shipped_model_writes_the_same_text(tmp_path: Path) -> None:
    """The engine runs float32 weights, whose rounding does not change the text."""
    from cpmcu import LLM, SamplingParams

    minicpm_to_llama(str(SHIPPED), tmp_path / "out", dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=48, logprobs=1)
    prompts = ["def fibonacci(n):\n", "class Stack:\n"]
    outputs = []
    for directory in (SHIPPED, tmp_path / "out"):
        with LLM(
            str(directory),
            dtype="float32",
            device="cpu",
            max_model_len=128,
            speculative_config={"no_speculation": True},
        ) as llm:
            outputs.append([output.outputs[0] for output in llm.generate(prompts, params)])
    for before, after in zip(*outputs):
        assert after.token_ids == before.token_ids and after.text == before.text
        pairs = zip(after.logprobs or [], before.logprobs or [])
        np.testing.assert_allclose(
            *zip(*((a.logprob, b.logprob) for a, b in pairs)), rtol=0, atol=1e-4
        )


def test_dtype(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "in", "minicpm", dtype="bfloat16")
    done = minicpm_to_llama(str(tmp_path / "in"), tmp_path / "out", dtype="float16")
    config = config_of(tmp_path / "out")
    assert config["torch_dtype"] == "float16"
    stored = open_checkpoint(tmp_path / "out").tensors
    assert {tensor.meta.dtype for tensor in stored.values()} == {"float16"}
    norm = "model.norm.weight"  # not scaled; float16 has more mantissa bits than bfloat16
    np.testing.assert_array_equal(read(tmp_path / "out")[norm], tiny.weights[norm])
    assert [note.split(":")[0] for note in done.notes] == [
        "the embedding table × 12",
        "o_proj and down_proj × 0.989949",
        "lm_head × 0.25",
    ]


def test_notes_report_rounding(tmp_path: Path) -> None:
    """12 times 129/128 needs more than 8 bits of mantissa. All other numbers stay exact."""
    overrides = {"scale_depth": 2.0, "num_hidden_layers": 4}
    tiny = write_tiny(tmp_path / "in", "minicpm", dtype="bfloat16", **overrides)
    table = np.ones((203, 64), np.float32)
    table[0, :32] = 129 / 128  # × 12 is 12.09375, between 12.0625 and 12.125
    weights = tiny.weights | {"model.embed_tokens.weight": table}
    write_tiny(tmp_path / "in", "minicpm", dtype="bfloat16", weights=weights, **overrides)
    done = minicpm_to_llama(str(tmp_path / "in"), tmp_path / "out")
    assert done.notes == (
        "the embedding table × 12: 0.2% of the numbers were rounded, by at most 0.26%",
        "o_proj and down_proj × 1: exact",
        "lm_head × 0.25: exact",
    )
    single = minicpm_to_llama(str(SHIPPED), tmp_path / "single", dtype="float32").notes
    assert single[0].endswith(": exact") and single[2].endswith(": exact")
    assert re.match(
        r"o_proj.* × 0.7: \d\d.\d% of the numbers were rounded, .* [\d.]+e-06%", single[1]
    )


def test_numbers_beyond_the_range_of_float16(tmp_path: Path, capsys: Any) -> None:
    tiny = write_tiny(tmp_path / "in", "minicpm", dtype="float16")
    tiny.weights["model.embed_tokens.weight"][3, 5] = 6000
    write_tiny(tmp_path / "in", "minicpm", dtype="float16", weights=tiny.weights)
    arguments = ["minicpm-to-llama", "--src", str(tmp_path / "in"), "--dst", str(tmp_path / "out")]
    assert main(arguments) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "model.embed_tokens.weight has 72000 once 12 is folded in, expected" in error
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert main([*arguments, "--dtype", "bfloat16"]) == 0
    assert read(tmp_path / "out")["model.embed_tokens.weight"][3, 5] == 72192


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rounding_is_to_nearest_even(dtype: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(4096).astype(np.float32) * np.float32(2) ** rng.integers(
        -30, 12, 4096
    )
    values[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1 + 2.0**-8]
    values = values.astype(np.float32)
    stored = from_float32(values, dtype)
    np.testing.assert_array_equal(
        to_float32(stored, dtype), from_bits(to_bits(values, dtype), dtype)
    )


def test_nan_stays_nan() -> None:
    worst = np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(to_float32(from_float32(worst, "bfloat16"), "bfloat16")).all()


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {}, r"architectures \['LlamaForCausalLM'\], expected \['MiniCPMForCausalLM'\]"),
        ("minicpm", {"scale_depth": None}, "scale_depth is missing, expected a positive number"),
        ("minicpm", {"scale_emb": -1}, "scale_emb is -1, expected a positive number"),
        ("minicpm", {"num_experts": 8}, "num_experts is 8, expected 0"),
        ("minicpm", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' changes with"),
        ("minicpm", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq .4 bits."),
        ("minicpm", {"architectures": ["MiniCPM3ForCausalLM"]}, "'MiniCPM3ForCausalLM'"),
    ],
)
def test_refusals(tmp_path: Path, family: str, overrides: dict[str, Any], message: str) -> None:
    write_tiny(tmp_path / "in", family)
    path = tmp_path / "in" / "config.json"
    config = json.loads(path.read_text()) | overrides
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(ValueError, match=message):
        minicpm_to_llama(str(tmp_path / "in"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_missing_head(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "in", "minicpm")
    del tiny.weights["lm_head.weight"]
    write_tiny(tmp_path / "in", "minicpm", weights=tiny.weights)
    with pytest.raises(ValueError, match=r"1 tensors are missing .*: lm_head\.weight"):
        minicpm_to_llama(str(tmp_path / "in"), tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.1.self_attn.q_proj.weight", None, "1 tensors are missing .*1.self_attn.q_"),
        ("model.norm.weight", np.ones(32), r"norm.weight has shape \[32\], expected \[64\]"),
        (
            "model.layers.0.mlp.gate_up_proj.weight",
            np.ones((190, 64)),
            r"up_proj.weight has shape \[94, 64\], expected \[96, 64\] by config.json",
        ),
        ("model.layers.0.mlp.down_proj.weight", np.full((64, 96), np.nan), "has nan, expected fin"),
    ],
)
def test_incomplete_or_wrong_weights(tmp_path: Path, name: str, change: Any, message: str) -> None:
    tiny = write_tiny(tmp_path / "in", "minicpm")
    if "gate_up" in name:
        for part in ("gate", "up"):
            del tiny.weights[name.replace("gate_up", part)]
    tiny.weights.pop(name, None)
    more = {} if change is None else {name: change.astype(np.float32)}
    write_tiny(tmp_path / "in", "minicpm", weights={**tiny.weights, **more})
    with pytest.raises(ValueError, match=message):
        minicpm_to_llama(str(tmp_path / "in"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_script(tmp_path: Path) -> None:
    write_tiny(tmp_path / "in", "minicpm")
    for name in ("modeling_minicpm.py", "configuration_minicpm.py", "tokenizer_config.json"):
        (tmp_path / "in" / name).write_text("{}")
    script = [sys.executable, str(ROOT / "scripts" / "minicpm2llama.py")]
    done = subprocess.run(
        [*script, "--src", "in", "--dst", "out"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "the embedding table × 12: " in done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json")
    }
