"""LFM2: gated short convolutions in most layers, attention in the others.

The layer of a convolution has the inputs of its last tokens as its state, instead of keys and
values. LFM2-MoE has experts after the first `num_dense_layers` layers, and a sigmoid router.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.experts import expert_names, read_experts, with_experts
from cpmcu.models.names import Piece
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model

Layer = tuple[tuple[str, Mapping[str, Any]], ...]

# transformers' defaults of keys that a config.json may leave out.
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
KINDS = ("conv", "full_attention")
_NAMES = {
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    "model.embedding_norm.": "model.norm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
    ".feed_forward.expert_bias": ".mlp.gate.correction_bias",
    ".feed_forward.": ".mlp.",
}
_WIDTHS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_PROJECTION = re.compile(r"\.(w[123])(?=\.|$)")


def lfm2_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    """Llama's names; w1, w3 and w2 are gate, up and down."""
    for own, engine in _NAMES.items():
        name = name.replace(own, engine)
    name = _PROJECTION.sub(lambda found: f".{_WIDTHS[found[1]]}", name)
    return expert_names(name, fields)


@register_model("Lfm2ForCausalLM", names=lfm2_names)
def build_lfm2(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = {**config}
    for old, new in (
        ("block_ff_dim", "intermediate_size"),
        ("tie_embedding", "tie_word_embeddings"),
    ):
        if old in config:
            config[new] = config[old]
    if config.get("layer_types") is None:
        full = config.get("full_attn_idxs")
        layers = range(ConfigReader(config).positive_int("num_hidden_layers"))
        config["layer_types"] = [KINDS[full is None or i in full] for i in layers]
    return _build(config | {"intermediate_size": _mlp_width(ConfigReader(config))}, options)


@register_model("Lfm2MoeForCausalLM", names=lfm2_names)
def build_lfm2_moe(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = {"num_experts_per_tok": 4, "num_dense_layers": 2, "norm_topk_prob": True, **config}
    if "tie_embedding" in config:
        config["tie_word_embeddings"] = config["tie_embedding"]
    fields, reader = _build(config, options), ConfigReader(config)
    dense = reader.config["num_dense_layers"]
    if type(dense) is not int or not 0 <= dense <= fields.num_hidden_layers:
        raise reader.fail("num_dense_layers", f"0 to {fields.num_hidden_layers}")
    experts = read_experts(reader) | {
        "scoring": "sigmoid",
        "correction_bias": reader.flag("use_expert_bias", default=True),
        "norm_epsilon": 1e-6,
        "routing_factor": reader.positive_float("routed_scaling_factor", default=1.0),
    }
    return with_experts(fields, range(dense, fields.num_hidden_layers), experts)


def _build(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    config = {**DEFAULTS, **config}
    reader = ConfigReader(config)
    eps = reader.positive_float("norm_eps", default=1e-5)
    fields = read_spec({**config, "rms_norm_eps": eps}, options, qk_norm=True)
    mixers: dict[str, tuple[str, Mapping[str, Any]]] = {
        "conv": ("short_conv", {"conv_kernel": conv_kernel(reader, default=3)}),
        "full_attention": ("attention", {}),
    }
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != fields.num_hidden_layers:
        raise reader.fail("layer_types", f"a list of {fields.num_hidden_layers} layer types")
    if others := sorted({str(kind) for kind in kinds} - set(KINDS)):
        raise reader.fail("layer_types", f"only {' or '.join(KINDS)}, not {', '.join(others)}")
    layers: tuple[Layer, ...] = tuple((mixers[kind], ("mlp", {})) for kind in kinds)
    return replace(fields, layers=layers)


def conv_kernel(reader: ConfigReader, default: int) -> int:
    """The length of a convolution. Raises ValueError for a convolution with biases."""
    reader.refuse("conv_bias", "biases of convolutions are not supported")
    kernel_size = reader.positive_int("conv_L_cache", default=default, most=8)
    if kernel_size < 2:
        raise reader.fail("conv_L_cache", "2 to 8")
    return kernel_size


def _mlp_width(reader: ConfigReader) -> int:
    """`intermediate_size`, or what follows from it with `block_auto_adjust_ff_dim`."""
    width = reader.positive_int("intermediate_size")
    if not reader.flag("block_auto_adjust_ff_dim", default=True):
        return width
    width = 2 * width // 3
    if reader.config.get("block_ffn_dim_multiplier", 1.0) is None:
        return width
    width = int(reader.positive_float("block_ffn_dim_multiplier", default=1.0) * width)
    multiple = reader.positive_int("block_multiple_of", default=256)
    return -(-width // multiple) * multiple
