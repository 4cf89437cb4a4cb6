"""Published shapes can be divided between two ranks, in the formats that their files have."""

from __future__ import annotations

from typing import Any

import pytest

from cpmcu.config import EngineConfig
from cpmcu.loading.loader import runtime_config
from cpmcu.models.common import BuildOptions
from cpmcu.models.registry import find_model
from scripts.synthetic.presets import PRESETS
from tests.reference.engines import extension_or_skip

C = extension_or_skip()

# linear_options of a form; empty: dense.
FORMS: dict[str, dict[str, Any]] = {
    "16 bits": {},
    "groups of 128": {"layout": "int4", "format": "gptq", "group_size": 128},
    "groups of 32": {"layout": "int4", "format": "gptq", "group_size": 32},
    "blocks of FP8": {"layout": "fp8", "format": "inverse"},
    "FP8 with one scale": {"layout": "fp8", "format": "tensor"},
    "MXFP4": {"layout": "float_groups", "format": "mxfp4"},
}
# The experts of these models have 1,440, 928 and 1,344 columns on a rank.
OF_SMALL_EXPERTS = ("gpt-oss-20b", "nemotron-3-nano", "nemotron-3-super")
OF_SMALL_GROUPS = ("16 bits", "groups of 32", "FP8 with one scale", "MXFP4")
CASES = [
    *((name, form) for name in PRESETS if name.startswith("qwen3.5-") for form in FORMS),
    *((name, form) for name in ("llama3.3-70b", "gemma4-31b") for form in FORMS),
    *((name, form) for name in OF_SMALL_EXPERTS for form in OF_SMALL_GROUPS),
]


def plan(preset: str, form: str, **config: Any) -> int:
    """Plans an engine's memory. The limit is less than any model needs."""
    stated, options = PRESETS[preset].config, FORMS[form]
    fields = find_model(stated).build(stated, BuildOptions(has_lm_head=True))
    spec = C.ModelSpec(
        **fields.to_kwargs(),
        dtype="bfloat16",
        linear_method="packed" if options else "dense",
        linear_options=options,
        linear_overrides={"lm_head": "dense"},
    )
    limits = {"max_model_len": 1024, "chunk_length": 256, "memory_limit": 1e-6}
    settings = EngineConfig(device="cpu", **limits, **config)
    return int(C.Engine.planned_model_len(spec, runtime_config(settings, "cpu")))


@pytest.mark.parametrize(("preset", "form"), CASES)
def test_published_shapes(preset: str, form: str) -> None:
    with pytest.raises(MemoryError, match="GPU 0 of 2: the model does not fit"):
        plan(preset, form, tensor_parallel_size=2)


def test_blocks_that_cannot_be_divided() -> None:
    stated = PRESETS["llama3.3-70b"].config
    fields = find_model(stated).build(stated, BuildOptions(has_lm_head=True)).to_kwargs()
    layer = [("attention", {}), ("block_of_a_plugin", {})]
    fields["layers"] = [layer] * fields["num_hidden_layers"]
    settings = EngineConfig(device="cpu", max_model_len=1024, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="layer 0 has a block of kind block_of_a_plugin, which"):
        C.Engine.planned_model_len(
            C.ModelSpec(**fields, dtype="bfloat16"), runtime_config(settings, "cpu")
        )


@pytest.mark.parametrize("preset", OF_SMALL_EXPERTS)
def test_experts_with_larger_groups(preset: str) -> None:
    with pytest.raises(ValueError, match=r"down_proj has \d+ inputs for each GPU, expected a mul"):
        plan(preset, "groups of 128", tensor_parallel_size=2)
