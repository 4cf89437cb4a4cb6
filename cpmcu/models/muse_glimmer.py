"""Muse Glimmer: norms before and after each block, gates after attention, NoPE in full attention.

The norms of a layer multiply by 1 + weight, the norm before the head by the weight. Embeddings, q
and k have norms without weights; queries are then multiplied by `qk_scale_factor`. The output of
attention is multiplied by the sigmoid of a projection of its own. Every fourth layer from the last
one back has full attention without RoPE. The engine runs the language model, without the images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec, with_windows
from cpmcu.models.names import Piece, canonical_names
from cpmcu.models.reader import ConfigReader, language_config
from cpmcu.models.registry import register_model
from cpmcu.models.rope import NO_ROTATION

# transformers' defaults of keys that a config.json may leave out.
DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "sliding_window": 2048,
    "tie_word_embeddings": False,
}
FULL_INTERVAL = 4
_NAMES = {
    ".post_attention_layernorm.": ".attention_output_norm.",
    ".pre_feedforward_layernorm.": ".post_attention_layernorm.",
    ".post_feedforward_layernorm.": ".mlp_output_norm.",
}
_TEXT = ("model.language_model.", "lm_head.")


def muse_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    """Returns Llama's names of a language model's tensor; none for the vision tower's tensors."""
    if not name.startswith(_TEXT):
        return ()
    name = name.replace("model.language_model.", "model.", 1)
    for own, engine in _NAMES.items():
        if own in name:
            return (Piece(name.replace(own, engine)),)
    return canonical_names(name, fields)


@register_model("MuseGlimmerForConditionalGeneration", names=muse_names)
def build_muse_glimmer(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = {**DEFAULTS, **language_config(config)}
    reader = ConfigReader(config)
    reader.refuse("attention_bias", "a bias on all four attention projections is not supported")
    if config.get("hidden_activation", "silu") != "silu":
        raise reader.fail("hidden_activation", "'silu'")
    fields = read_spec(
        config,
        options,
        qk_norm=True,
        logit_scale=reader.positive_float("output_multiplier", default=0.19611613513818404),
    )
    num_layers = fields.num_hidden_layers
    is_full = [(num_layers - 1 - layer) % FULL_INTERVAL == 0 for layer in range(num_layers)]
    if config.get("layer_types") is None:
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[full] for full in is_full]
    output = {
        "output_norm": True,
        "output_norm_eps": reader.positive_float("post_norm_eps", default=1e-8),
    }
    factor = reader.positive_float("qk_scale_factor", default=3.87)
    attention = output | {
        "qk_norm_weights": False,
        "gate_proj": True,
        "softmax_scale": factor / math.sqrt(fields.head_dim),
    }
    still = {"rope_inv_freq": (NO_ROTATION,) * len(fields.rope_inv_freq)}
    layers = tuple(
        (("attention", attention if has_rope else attention | still), ("mlp", output))
        for has_rope in _layers_with_rope(reader, is_full)
    )
    fields = replace(
        fields,
        zero_centred_norms=True,
        plain_final_norm=True,
        normed_embedding=True,
        logit_softcap=reader.positive_float("final_logit_softcapping", default=20.0),
        layers=layers,
    )
    return with_windows(fields, config, options)


def _layers_with_rope(reader: ConfigReader, is_full: Sequence[bool]) -> list[bool]:
    thetas = reader.config.get("layer_rope_theta")
    if thetas is None:
        return [not full for full in is_full]
    if not isinstance(thetas, list) or len(thetas) != len(is_full):
        raise reader.fail("layer_rope_theta", f"a list of {len(is_full)} numbers, 0: no RoPE")
    return [bool(theta) for theta in thetas]
