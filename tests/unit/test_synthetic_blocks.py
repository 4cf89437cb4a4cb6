"""Synthetic block drafters: published shapes, 4-bit form, text that a draft does not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.config import EngineConfig, SpeculativeConfig
from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.loading.loader import LoadedModel, load_model
from scripts.synthetic.blocks import layers_read
from scripts.synthetic.presets import PRESETS
from tests.engine.harness import generate
from tests.unit.test_synthetic_checkpoint import write

# Numbers of parameters of published heads, without their copies of the target's tables.
PARAMETERS = {
    "qwen3-8b-dspark": 2.37e9 - 2 * 151936 * 4096,
    "qwen3-8b-dflash": 1.05e9,
    "qwen3-8b-jetspec": 1.05e9,
    "qwen3.8-27b-dflash2": 1_924_404_480,
}
METHODS = {name: name.rpartition("-")[2].replace("jetspec", "dflash") for name in PARAMETERS}
SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def flags_of(keys: dict[str, Any], flag: str = "--set") -> list[str]:
    return [text for key, value in keys.items() for text in (flag, f"{key}={json.dumps(value)}")]


def small(preset: str) -> list[str]:
    """Flags for a small draft of tiny-qwen3, which has two layers."""
    config, of_target = PRESETS[preset].config, {"mask_token_id": 4095, "target_layer_ids": [0]}
    keys = SMALL | {"num_target_layers": 2}
    if "dflash_config" in config:
        keys["dflash_config"] = config["dflash_config"] | of_target
    else:
        keys |= of_target
    if "layer_types" in config:
        keys["layer_types"] = config["layer_types"][:2]
    return flags_of(keys)


def load(target: Path, draft: Path | None, **speculation: Any) -> LoadedModel:
    path = None if draft is None else str(draft)
    config = EngineConfig(
        model=str(target),
        device="cpu",
        max_num_seqs=1,
        max_model_len=512,
        speculative_config=SpeculativeConfig(draft_model_path=path, **speculation),
    )
    return load_model(str(target), config=config)


@pytest.mark.parametrize("preset", PARAMETERS)
def test_parameter_counts_of_published_heads(preset: str) -> None:
    row = PRESETS[preset]
    count = sum(spec.count for spec in row.tensors(row.config))
    exact = preset == "qwen3.8-27b-dflash2"
    assert count == pytest.approx(PARAMETERS[preset], rel=0 if exact else 0.005)


def test_layers_that_published_heads_read() -> None:
    assert layers_read(36, 1) == [1, 9, 17, 25, 33]
    assert layers_read(64, 5) == [5, 19, 33, 47, 61]
    assert layers_read(2, 5) == [0]


@pytest.mark.parametrize("quant", ["gptq", None])
@pytest.mark.parametrize("preset", PARAMETERS)
def test_small_heads_load_and_leave_the_text_alone(
    preset: str, quant: str | None, tmp_path: Path
) -> None:
    target = write("tiny-qwen3", tmp_path / "target")
    more = [] if quant is None else ["--quant", quant]
    draft = write(preset, tmp_path / "draft", *small(preset), *more)
    tensors = open_checkpoint(draft).tensors
    packed = {name.rpartition(".")[0] for name in tensors if name.endswith(".qweight")}
    projections = {name.rpartition(".")[0] for name in tensors if "_proj." in name}
    assert packed == (projections | {"fc"} if quant else set())
    assert np.load(draft / "token_counts.npy").shape == (SMALL["vocab_size"],)

    loaded = load(target, draft, frspec_vocab_size=1024, spec_num_iter=4)
    assert loaded.draft is not None and loaded.draft.method == METHODS[preset]
    assert loaded.draft.model.linear_method == ("packed" if quant else "dense")
    assert len(loaded.draft.options["vocab_ids"]) == 1024
    text = generate(loaded.engine, [5, 900, 17], 8)
    assert text[:8] == generate(load(target, None).engine, [5, 900, 17], 8)


def test_fewer_layers_of_a_head(tmp_path: Path) -> None:
    keys = {key: value for key, value in SMALL.items() if key != "num_hidden_layers"}
    flags = [*flags_of(keys), "--num-hidden-layers", "1"]
    out = write("qwen3-8b-dflash", tmp_path / "draft", *flags)
    assert json.loads((out / "config.json").read_text())["layer_types"] == ["full_attention"]


def test_missing_sizes_are_refused(tmp_path: Path) -> None:
    keys = SMALL | {"target_layer_ids": None}
    with pytest.raises(SystemExit, match="target_layer_ids is None, but must be a list"):
        write("qwen3-8b-dspark", tmp_path / "draft", *flags_of(keys))
    with pytest.raises(SystemExit, match=r"markov_rank is 0\.5, but must be a positive integer"):
        write("qwen3-8b-dspark", tmp_path / "draft", *flags_of(SMALL | {"markov_rank": 0.5}))
