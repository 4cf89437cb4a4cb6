"""Qwen3-MoE: Qwen3 with a mixture of experts instead of the MLP of most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec, with_windows
from cpmcu.models.experts import (
    expert_layers,
    expert_names,
    read_experts,
    with_experts,
)
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model


@register_model("Qwen3MoeForCausalLM", names=expert_names)
def build_qwen3_moe(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    reader = ConfigReader(config)
    reader.refuse("attention_bias", "a bias on all four attention projections is not supported")
    fields = read_spec(config, options, qk_norm=True)
    if reader.flag("use_sliding_window"):  # all layers have the window
        fields = with_windows(fields, {**config, "layer_types": None}, options)
    layers = expert_layers(reader, fields.num_hidden_layers)
    return with_experts(fields, layers, read_experts(reader)) if layers else fields
