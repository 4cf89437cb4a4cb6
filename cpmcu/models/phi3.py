"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with fused projections and, for long texts, longrope.

transformers picks longrope's factors anew for each length; the engine does so once (rope.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec, with_windows
from cpmcu.models.registry import register_model
from cpmcu.models.rope import rope_parameters

# transformers' defaults of keys that a config.json may leave out.
DEFAULTS = {"original_max_position_embeddings": 4096, "sliding_window": None}


@register_model("Phi3ForCausalLM")
def build_phi3(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = {**DEFAULTS, **config}
    rope = rope_parameters(config)
    if (rope.get("rope_type") or rope.get("type")) in ("su", "yarn"):  # the first names of longrope
        config = {**config, "rope_scaling": {**rope, "rope_type": "longrope"}}
    return with_windows(read_spec(config, options), config, options)
