"""Mistral and Ministral: Llama, in some versions with a sliding window in all or some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec, with_windows
from cpmcu.models.registry import register_model


@register_model("MistralForCausalLM", "MinistralForCausalLM")
def build_mistral(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    return with_windows(read_spec(config, options), config, options)
