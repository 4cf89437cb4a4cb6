"""Qwen3 (dense): Llama with an RMSNorm on each head of q and k."""

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

DEFAULT_HEAD_DIM = 128  # not hidden_size / num_attention_heads: small models differ


@register_model("Qwen3ForCausalLM")
def build_qwen3(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    reader = ConfigReader(config)
    reader.refuse("attention_bias", "a bias on all four attention projections is not supported")
    if config.get("head_dim") is None:
        config = {**config, "head_dim": DEFAULT_HEAD_DIM}
    fields = read_spec(config, options, qk_norm=True)
    if reader.flag("use_sliding_window"):
        return with_windows(fields, config, options, first_window_layer(config))
    return fields
