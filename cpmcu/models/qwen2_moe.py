"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, one of them shared by all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.experts import (
    expert_layers,
    expert_names,
    with_shared_expert,
)
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model


@register_model("Qwen2MoeForCausalLM", names=expert_names)
def build_qwen2_moe(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    reader = ConfigReader(config)
    reader.refuse("use_sliding_window", "no published model of the family has a window")
    fields = read_spec(config, options, qkv_bias=reader.flag("qkv_bias", default=True))
    return with_shared_expert(fields, reader, expert_layers(reader, fields.num_hidden_layers))
