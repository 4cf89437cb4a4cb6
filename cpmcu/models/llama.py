"""Llama 2 and 3.x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model


@register_model("LlamaForCausalLM")
def build_llama(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    reader = ConfigReader(config)
    reader.refuse("attention_bias", "a bias on all four attention projections is not supported")
    reader.refuse("mlp_bias", "a bias in the MLP is not supported")
    return read_spec(config, options)
