"""Granite with sliding windows: Granite's scales, attention sinks, RoPE's theta of each layer.

`layer_rope_theta` has a theta for each layer, 0 for a layer without RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, with_attention, with_windows
from cpmcu.models.granite import read_scaled
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model
from cpmcu.models.rope import NO_ROTATION, rope_from_config, rope_parameters

# transformers' defaults of keys that a config.json may leave out.
DEFAULTS = {"num_key_value_heads": 4, "sliding_window": 128, "tie_word_embeddings": True}
FULL_INTERVAL = 4  # without layer_types, layers 0, 4, 8, ... have full attention


@register_model("GraniteSWAForCausalLM")
def build_granite_swa(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = {**DEFAULTS, **config}
    fields, attention_multiplier = read_scaled(config, options)
    num_layers = fields.num_hidden_layers
    attention = {"sinks": True, "softmax_scale": attention_multiplier}
    thetas = _layer_thetas(ConfigReader(config), num_layers)
    fields = with_attention(fields, [attention | _rope(config, theta, fields) for theta in thetas])
    if config.get("layer_types") is None:
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[i % FULL_INTERVAL == 0] for i in range(num_layers)]
    return with_windows(fields, config, options)


def _layer_thetas(reader: ConfigReader, num_layers: int) -> list[float | None]:
    """Returns the RoPE theta of each layer; None: the model's."""
    thetas = reader.config.get("layer_rope_theta")
    if thetas is None:
        return [None] * num_layers
    numbers = isinstance(thetas, list) and all(
        isinstance(t, int | float) and not isinstance(t, bool) and (t == 0 or t > 1) for t in thetas
    )
    if not numbers or len(thetas) != num_layers:
        raise reader.fail(
            "layer_rope_theta", f"a list of {num_layers} numbers above 1, or 0 for no RoPE"
        )
    return list(thetas)


def _rope(config: Mapping[str, Any], theta: float | None, fields: SpecFields) -> dict[str, Any]:
    if theta is None:
        return {}
    if theta == 0:
        return {"rope_inv_freq": (NO_ROTATION,) * len(fields.rope_inv_freq)}
    params = {**rope_parameters(config), "rope_theta": theta}
    own = {**config, "rope_scaling": None, "rope_parameters": params}
    rope = rope_from_config(own, fields.head_dim, fields.max_position_embeddings)
    return {"rope_inv_freq": tuple(rope.inv_freq.tolist())}
