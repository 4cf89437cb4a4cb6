"""4-bit exports of Qwen3-Next and Qwen3.5, which leave some projections and the MTP head dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpmcu.loading.checkpoint import open_checkpoint
from cpmcu.loading.index import read_json
from cpmcu.loading.loader import plan_target_quant
from cpmcu.models.common import BuildOptions
from cpmcu.models.reader import language_config
from cpmcu.models.registry import find_model
from cpmcu.quant.registry import QuantPlan
from tests.reference.tiny_hybrid import HYBRIDS
from tests.reference.tiny_w4 import HYBRID_DENSE, write_hybrid_w4

LAYOUTS = ["gptq", "awq", "compressed"]
# Lists of exceptions as exports write them. The tensors decide.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "gptq": {"dynamic": {"-:.*in_proj_a.*": {}, "-:.*in_proj_b.*": {}, "-:.*mtp.*": {}}},
    "awq": {"modules_to_not_convert": ["in_proj_a", "in_proj_b", "mtp", "visual"]},
    "compressed": {"ignore": ["lm_head", "re:.*in_proj_[ab]$", "re:mtp.*", "re:.*visual.*"]},
}


def plan(directory: Path) -> QuantPlan:
    config = language_config(read_json(directory / "config.json"))
    checkpoint, family = open_checkpoint(directory), find_model(config)
    fields = family.build(config, BuildOptions())
    metas = {
        name: stored.meta
        for name, stored in checkpoint.tensors.items()
        if family.names(name, fields)
    }
    found = plan_target_quant(config, metas, family, fields)
    assert found.verify is not None
    found.verify(checkpoint.read)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_dense_modules_have_the_engines_names(tmp_path: Path, family: str, layout: str) -> None:
    found = plan(write_hybrid_w4(tmp_path, family, layout).directory)
    assert found.linear_method == "packed" and not found.linear_options.stacked
    small = {f"model.layers.{i}.linear_attn.in_proj_ba": "dense" for i in range(3)}
    assert found.linear_overrides == {**small, "lm_head": "dense"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_with_dense_mixers(tmp_path: Path, layout: str) -> None:
    """Some exports quantise the MLPs alone."""
    dense = (*HYBRID_DENSE, "linear_attn", "self_attn")
    found = plan(write_hybrid_w4(tmp_path, "qwen3_5_vl", layout, dense).directory)
    names = ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"]
    mixers = [f"model.layers.{i}.{name}" for i in range(3) for name in names]
    mixers += ["model.layers.3.self_attn.qkv_proj", "model.layers.3.self_attn.o_proj"]
    assert found.linear_overrides == dict.fromkeys([*mixers, "lm_head"], "dense")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lists_of_exceptions_change_nothing(tmp_path: Path, layout: str) -> None:
    expected = plan(write_hybrid_w4(tmp_path / "a", "qwen3_5", layout).directory)
    listed = write_hybrid_w4(tmp_path / "b", "qwen3_5", layout, quant=EXCEPTIONS[layout])
    found = plan(listed.directory)
    assert found.linear_overrides == expected.linear_overrides
    assert found.linear_options == expected.linear_options


def test_the_parts_of_one_matrix_are_quantised_together(tmp_path: Path) -> None:
    tiny = write_hybrid_w4(tmp_path, "qwen3_5", "gptq", (*HYBRID_DENSE, "in_proj_z"))
    with pytest.raises(ValueError, match=r"in_proj_z is dense and .*in_proj_qkv is quantised"):
        plan(tiny.directory)
