"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.models.common import (
    BuildOptions,
    SpecFields,
    first_window_layer,
    read_spec,
    with_windows,
)
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model


@register_model("Qwen2ForCausalLM")
def build_qwen2(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    fields = read_spec(config, options, qkv_bias=True)
    if ConfigReader(config).flag("use_sliding_window"):
        return with_windows(fields, config, options, first_window_layer(config))
    return fields
