"""Seed-OSS: Llama with a bias on q, k and v; head_dim is not hidden_size / heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model

# transformers' defaults of keys that a config.json may leave out.
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8}


@register_model("SeedOssForCausalLM")
def build_seed_oss(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    reader = ConfigReader(config)
    reader.refuse("attention_out_bias", "a bias on o_proj is not supported")
    reader.refuse("mlp_bias", "a bias in the MLP is not supported")
    qkv_bias = reader.flag("attention_bias", default=True)
    return read_spec({**DEFAULTS, **config}, options, qkv_bias=qkv_bias)
