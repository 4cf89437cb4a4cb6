"""Granite 3.x, and Granite 4 with attention in every layer: Llama with four scales.

Embeddings are multiplied by embedding_multiplier, the output of each attention and MLP by
residual_multiplier. Logits are divided by logits_scaling. attention_multiplier replaces the softmax
scale 1 / sqrt(head_dim). RoPE scales cos and sin of q and of k by the square root of the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec, with_attention
from cpmcu.models.names import Piece, canonical_names
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model
from cpmcu.models.rope import NO_ROTATION

_SCALES = (
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "attention_multiplier",
)
_ATTENTION = ("attention", "full_attention")
_SHARED_MLP = {
    ".shared_mlp.input_linear.": ".mlp.gate_up_proj.",
    ".shared_mlp.output_linear.": ".mlp.down_proj.",
}


@register_model("GraniteForCausalLM")
def build_granite(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    return _with_attention_multiplier(*read_scaled(config, options))


def read_scaled(config: Mapping[str, Any], options: BuildOptions) -> tuple[SpecFields, float]:
    """The fields with three of the scales, and the attention multiplier.

    Raises ValueError for a config that the engine cannot run.
    """
    reader = ConfigReader(config)
    reader.refuse("attention_bias", "a bias on all four attention projections is not supported")
    reader.refuse("mlp_bias", "a bias in the MLP is not supported")
    scales = {key: reader.positive_float(key, default=1.0) for key in _SCALES}
    fields = read_spec(
        config,
        options,
        embed_scale=scales["embedding_multiplier"],
        residual_scale=scales["residual_multiplier"],
        logit_scale=1 / scales["logits_scaling"],
    )
    return fields, scales["attention_multiplier"]


def granite4_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    """shared_mlp.input_linear -> mlp.gate_proj, mlp.up_proj; output_linear -> mlp.down_proj"""
    for own, llama in _SHARED_MLP.items():
        name = name.replace(own, llama)
    return canonical_names(name, fields)


@register_model("GraniteMoeHybridForCausalLM", names=granite4_names)
def build_granite4(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    reader = ConfigReader(config)
    if reader.config.get("num_local_experts") != 0:
        raise reader.fail("num_local_experts", "0: experts of Granite are not supported")
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if not isinstance(kinds, list) or any(kind not in _ATTENTION for kind in kinds):
        raise reader.fail("layer_types", "attention in every layer: Mamba-2 is not supported")
    if config.get("position_embedding_type") not in (None, "rope"):
        raise reader.fail("position_embedding_type", "'rope' or null")
    width = reader.positive_int("shared_intermediate_size", default=1024)
    config = {**config, "intermediate_size": width}
    if config.get("position_embedding_type") == "rope":
        return build_granite(config, options)
    fields = build_granite({**config, "rope_scaling": None, "rope_parameters": None}, options)
    still = {"rope_inv_freq": (NO_ROTATION,) * (fields.head_dim // 2)}
    return with_attention(fields, [still] * fields.num_hidden_layers)


def _with_attention_multiplier(fields: SpecFields, multiplier: float) -> SpecFields:
    """The fields with scaled RoPE as a parameter of each layer.

    The model's own RoPE stays unscaled, because a draft head takes it over.
    """
    factor = math.sqrt(multiplier * math.sqrt(fields.head_dim))
    if factor == 1:
        return fields
    if 2 * len(fields.rope_inv_freq) != fields.head_dim:  # the factor must reach all elements
        raise ValueError(
            f"config.json: RoPE rotates {2 * len(fields.rope_inv_freq)} of head_dim="
            f"{fields.head_dim} elements, expected all of them, as in Granite's models"
        )
    params = {
        "rope_inv_freq": fields.rope_inv_freq,
        "rope_attention_scaling": fields.rope_attention_scaling * factor,
    }
    return with_attention(fields, [params] * fields.num_hidden_layers)
