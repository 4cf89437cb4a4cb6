"""A model, a quantisation and a drafter from outside the package, with nothing edited in it.

The model is one decorated function; the quantisation and the drafter are one C++ file each (in
tests/plugins, compiled here as plugins) and one Python class.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.registry import (
    DraftFiles,
    DraftPlan,
    TargetModel,
    Tensors,
    register_drafter,
    registered_drafters,
)
from cpmcu.loading.tensors import TensorMeta
from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.registry import register_model, registered_models
from cpmcu.quant.registry import QuantPlan, Repack, register_quant, registered_quants
from tests.engine.harness import generate, make_engine, random_ids
from tests.reference.engines import prompt_logits
from tests.reference.tiny_checkpoints import random_weights, tiny_config, write_safetensors

ROOT = Path(__file__).parents[2]
VOCAB = 96


@register_model("ToyForCausalLM")
def build_toy(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """A Llama whose config calls the width `dim`."""
    renamed = dict(config)
    renamed["hidden_size"] = renamed.pop("dim")
    return read_spec(renamed, options)


@register_quant("toy_ternary")
class Ternary:
    """Codes 0, 1, 2 for -1, 0, 1 as int8 `weight_codes`, and a scale a row; packed at load."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return quant_config.get("quant_method") == "toy_ternary"

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        repacks = []
        for name, meta in tensors.items():
            if name.endswith(".weight_codes"):
                rows, columns = meta.shape
                out = name.replace(".weight_codes", ".packed")
                outputs = (TensorMeta(out, "uint8", (rows, columns // 4)),)
                repacks.append(Repack((name,), outputs, _packer(name, out)))
        return QuantPlan(
            scheme="toy_ternary",
            linear_method="test_ternary",
            linear_overrides={"lm_head": "dense"},
            repacks=repacks,
        )


def _packer(name: str, out: str) -> Any:
    def pack(arrays: Mapping[str, Any]) -> dict[str, Any]:
        codes = arrays[name].astype(np.uint8)
        parts = codes.reshape(codes.shape[0], -1, 4)
        return {out: (parts << np.array([0, 2, 4, 6], np.uint8)).sum(-1).astype(np.uint8)}

    return pack


def write_model(directory: Path, config: dict[str, Any], weights: Mapping[str, Any]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", weights)
    return directory


@register_drafter("repeat")
class Repeat:
    """The last token, again and again."""

    has_checkpoint = False

    def matches(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        return False

    def plan(
        self, draft: DraftFiles | None, target: TargetModel, speculation: SpeculativeConfig
    ) -> DraftPlan:
        return DraftPlan(chain=True)


@pytest.fixture(scope="module")
def ternary_plugin(tmp_path_factory: pytest.TempPathFactory) -> None:
    load_plugin("ternary", tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def repeat_plugin(tmp_path_factory: pytest.TempPathFactory) -> None:
    load_plugin("repeat_drafter", tmp_path_factory.mktemp("plugin"))


def load_plugin(name: str, folder: Path) -> None:
    """Compiles tests/plugins/<name>.cpp and loads it."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = folder / f"{name}.so"
    source = ROOT / "tests" / "plugins" / f"{name}.cpp"
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    from cpmcu import C

    C.load_plugin(str(library))


def test_toy_model_from_outside(tmp_path: Path) -> None:
    config = tiny_config("llama", vocab_size=VOCAB)
    weights = random_weights(config)
    plain = make_engine(write_model(tmp_path / "plain", config, weights))
    toy_config = {**config, "architectures": ["ToyForCausalLM"], "dim": config["hidden_size"]}
    toy_config.pop("hidden_size")
    toy = make_engine(write_model(tmp_path / "toy", toy_config, weights))
    ids = random_ids(10, VOCAB)
    assert generate(toy, ids, 20) == generate(plain, ids, 20)
    assert registered_models()["ToyForCausalLM"] == __file__


def test_toy_quantisation_from_outside(tmp_path: Path, ternary_plugin: None) -> None:
    from cpmcu import C

    config = tiny_config("llama", vocab_size=VOCAB)
    dense, packed = random_weights(config), {}
    for name in list(dense):
        if not name.endswith("_proj.weight"):
            packed[name] = dense[name]
            continue
        codes = np.clip(np.round(dense[name] * np.sqrt(dense[name].shape[1])), -1, 1)
        scale = np.abs(dense[name]).mean(axis=1).astype(np.float32)
        dense[name] = (codes * scale[:, None]).astype(np.float32)
        stem = name.removesuffix(".weight")
        packed[stem + ".weight_codes"] = (codes + 1).astype(np.int32)
        packed[stem + ".scale"] = scale
    plain = make_engine(write_model(tmp_path / "dense", config, dense))
    quant_config = {**config, "quantization_config": {"quant_method": "toy_ternary"}}
    ternary = make_engine(write_model(tmp_path / "ternary", quant_config, packed))
    ids = random_ids(10, VOCAB)
    np.testing.assert_allclose(
        prompt_logits(ternary, ids), prompt_logits(plain, ids), rtol=1e-4, atol=1e-4
    )
    assert len(generate(ternary, ids, 20)) == 20
    assert "test_ternary" in C.registered()["linear"]
    assert registered_quants()["toy_ternary"] == __file__


def test_drafter_from_outside(tmp_path: Path, repeat_plugin: None) -> None:
    from cpmcu import C

    config = tiny_config("llama", vocab_size=VOCAB)
    model = write_model(tmp_path / "model", config, random_weights(config))
    speculation = SpeculativeConfig(method="repeat", spec_num_iter=3)
    plain, repeat = make_engine(model), make_engine(model, speculative_config=speculation)
    assert repeat.tokens_per_step == 4
    ids = random_ids(10, VOCAB)
    for fields in ({}, {"temperature": 1.0, "seed": 7}):
        assert generate(repeat, ids, 40, **fields)[:40] == generate(plain, ids, 40, **fields)
    bias = {"logit_bias": [(5, 100.0)]}  # now the draft is right
    steps = repeat.counters["steps"]
    assert generate(repeat, ids, 41, **bias) == [5] * 41
    assert repeat.counters["steps"] - steps == 1 + 10
    assert "repeat" in C.registered()["drafter"]
    assert registered_drafters()["repeat"] == __file__


def test_a_broken_plugin_is_an_error(tmp_path: Path) -> None:
    from cpmcu import C

    (tmp_path / "broken.so").write_bytes(b"not a library")
    with pytest.raises(ValueError, match=r"broken\.so cannot be loaded"):
        C.load_plugin(str(tmp_path / "broken.so"))
