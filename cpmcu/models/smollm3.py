"""SmolLM3: Llama without RoPE in some layers, which may have a sliding window.

`no_rope_layers` has 1 for a layer with RoPE and 0 for one without. If config.json does not have it,
each `no_rope_layer_interval`-th layer has no RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.models.common import (
    BuildOptions,
    SpecFields,
    read_spec,
    with_attention,
    with_windows,
)
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model
from cpmcu.models.rope import NO_ROTATION

# transformers' defaults of keys that a config.json may leave out.
DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True}
DEFAULT_INTERVAL = 4


@register_model("SmolLM3ForCausalLM")
def build_smollm3(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = {**DEFAULTS, **config}
    reader = ConfigReader(config)
    reader.refuse("attention_bias", "a bias on all four attention projections is not supported")
    reader.refuse("mlp_bias", "a bias in the MLP is not supported")
    fields = read_spec(config, options)
    has_rope = _layers_with_rope(reader, fields.num_hidden_layers)
    still = {
        "rope_inv_freq": (NO_ROTATION,) * len(fields.rope_inv_freq),
        "rope_attention_scaling": 1.0,
    }
    if not all(has_rope):
        fields = with_attention(fields, [{} if has else still for has in has_rope])
    if not reader.flag("use_sliding_window") or config.get("sliding_window") is None:
        return fields
    kinds = ["full_attention" if has else "sliding_attention" for has in has_rope]
    kinds = config.get("layer_types") or kinds
    return with_windows(fields, {**config, "layer_types": kinds}, options)


def _layers_with_rope(reader: ConfigReader, num_layers: int) -> list[bool]:
    flags = reader.config.get("no_rope_layers")
    if flags is None:
        interval = reader.positive_int("no_rope_layer_interval", default=DEFAULT_INTERVAL)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    is_list = isinstance(flags, list) and all(flag in (0, 1) for flag in flags)
    if not is_list or len(flags) < num_layers:
        raise reader.fail("no_rope_layers", f"a list of {num_layers} numbers, 1: RoPE, 0: none")
    return [bool(flag) for flag in flags[:num_layers]]
