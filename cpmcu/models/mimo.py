"""MiMo-7B: Qwen2 with MTP modules in its files (cpmcu/drafters/mtp_layouts.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.names import Piece, canonical_names
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model


def _names(name: str, fields: SpecFields) -> Sequence[Piece]:
    return () if name.startswith("model.mtp_layers.") else canonical_names(name, fields)


@register_model("MiMoForCausalLM", names=_names)
def build_mimo(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    reader = ConfigReader(config)
    reader.refuse("use_sliding_window", "a sliding window is not supported in MiMo")
    if config.get("attention_bias") is False:
        raise reader.fail("attention_bias", "true: MiMo has a bias on q, k and v")
    return read_spec(config, options, qkv_bias=True)
