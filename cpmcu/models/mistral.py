"""Mistral without a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec, refuse_sliding_window
from cpmcu.models.registry import register_model


@register_model("MistralForCausalLM")
def build_mistral(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    refuse_sliding_window(config, options)
    return read_spec(config, options)
