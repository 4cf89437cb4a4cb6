"""Granite 3.x and 4: Llama with four scales.

Embeddings are multiplied by embedding_multiplier, the output of each attention and MLP by
residual_multiplier. Logits are divided by logits_scaling. attention_multiplier replaces the softmax
scale 1 / sqrt(head_dim). RoPE scales cos and sin of q and of k by the square root of the ratio.

Granite 4 may have Mamba-2 instead of attention in most layers. It may also have experts beside the
MLP. The MLP is then a shared expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec, with_attention
from cpmcu.models.experts import expert_names, read_experts
from cpmcu.models.mamba2 import read_mamba
from cpmcu.models.names import Piece
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
_MAMBA = ("mamba", "linear_attention")
_MAMBA_KEYS = {
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "num_groups": "mamba_n_groups",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
}
# transformers' defaults of keys that a config.json may leave out.
_MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_NAMES = {
    ".block_sparse_moe.router.layer.": ".mlp.gate.",
    ".block_sparse_moe.input_linear.": ".mlp.experts.gate_up_proj.",
    ".block_sparse_moe.output_linear.": ".mlp.experts.down_proj.",
}
_SHARED_MLP = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}


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
    """Llama's names; shared_mlp is the MLP, or the shared expert of a layer with experts."""
    for own, engine in _NAMES.items():
        name = name.replace(own, engine)
    has_experts = any(kind == "moe" for layer in fields.layers for kind, _ in layer)
    for own, engine in _SHARED_MLP.items():
        mlp = "mlp.shared_expert" if has_experts else "mlp"
        name = name.replace(f".shared_mlp.{own}.", f".{mlp}.{engine}.")
    return expert_names(name, fields)


@register_model("GraniteMoeHybridForCausalLM", names=granite4_names)
def build_granite4(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    reader = ConfigReader(config)
    width = reader.positive_int("shared_intermediate_size", default=1024)
    own: dict[str, Any] = {"intermediate_size": width}
    position = config.get("position_embedding_type")
    if position not in (None, "rope", "nope"):
        raise reader.fail("position_embedding_type", "'rope', 'nope' or null")
    if position != "rope":
        own |= {"rope_scaling": None, "rope_parameters": None}
    fields = build_granite({**config, **own}, options)
    if position != "rope":
        still = {"rope_inv_freq": (NO_ROTATION,) * (fields.head_dim // 2)}
        fields = with_attention(fields, [still] * fields.num_hidden_layers)
    given = config.get("layer_types") or config.get("layers_block_type")
    kinds = given if isinstance(given, list) else []
    is_whole = len(kinds) == fields.num_hidden_layers
    if not is_whole or any(kind not in _ATTENTION + _MAMBA for kind in kinds):
        raise reader.fail("layer_types", f"{fields.num_hidden_layers} of 'attention' or 'mamba'")
    experts = _experts(reader, width)
    if all(kind in _ATTENTION for kind in kinds) and not experts:
        return fields
    attention = fields.layers[0][0] if fields.layers else ("attention", {})
    has_mamba = any(kind in _MAMBA for kind in kinds)
    mamba = ("mamba2", _mamba(config, fields) if has_mamba else {})
    mlp = ("moe", experts) if experts else ("mlp", {})
    layers = tuple((mamba if kind in _MAMBA else attention, mlp) for kind in kinds)
    return replace(fields, layers=layers)


def _experts(reader: ConfigReader, shared_width: int) -> dict[str, Any]:
    """The parameters of a moe block; empty: an MLP instead."""
    if reader.config.get("num_local_experts") == 0:
        return {}
    own = {
        "moe_intermediate_size": reader.positive_int("intermediate_size"),
        "norm_topk_prob": True,
    }
    if shared_width % 8:
        raise reader.fail("shared_intermediate_size", "a multiple of 8")
    return read_experts(ConfigReader({**reader.config, **own})) | {
        "shared_intermediate_size": shared_width,
        "shared_expert_gate": False,
    }


def _mamba(config: Mapping[str, Any], fields: SpecFields) -> dict[str, Any]:
    config = {**_MAMBA_DEFAULTS, **config}
    reader = ConfigReader(config)
    reader.refuse("mamba_proj_bias", "biases of projections are not supported")
    num_heads = reader.positive_int("mamba_n_heads")
    inner = reader.positive_int("mamba_expand") * fields.hidden_size
    if config["mamba_d_head"] == "auto":
        config["mamba_d_head"] = inner // num_heads
    if config["mamba_d_head"] != inner / num_heads:
        raise reader.fail("mamba_d_head", "mamba_expand * hidden_size / mamba_n_heads")
    return read_mamba(reader, _MAMBA_KEYS)


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
