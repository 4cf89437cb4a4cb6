"""Gemma 4: norms before and after each block, windows in five of six layers.

Layers with full attention have other heads (`global_head_dim`, `num_global_key_value_heads`), and
with `attention_k_eq_v` no v_proj: values are the keys before their norm and RoPE. Values have a
norm without weights. The softmax scale is 1. `layer_scalar` multiplies the residual stream after
each layer. With `enable_moe_block`, experts run beside the MLP
(csrc/layers/mlp_and_experts.cpp). Files with towers for images and sound have the keys of the
language model in `text_config`; the engine runs the language model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cpmcu.models.common import BuildOptions, SpecFields, layer_kinds, read_spec
from cpmcu.models.experts import expert_names, read_experts
from cpmcu.models.limits import CUDA_HEAD_DIMS, MODEL_LIMITS
from cpmcu.models.names import Piece, canonical_names
from cpmcu.models.reader import ConfigReader, language_config
from cpmcu.models.registry import register_model
from cpmcu.models.rope import rope_by_kind, rope_from_config

# transformers' defaults of keys that a config.json may leave out.
DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "tie_word_embeddings": True,
}
DEFAULT_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
KINDS = ("sliding_attention", "full_attention")
FULL_INTERVAL = 6  # without layer_types, every sixth layer has full attention
_NAMES = {
    ".post_attention_layernorm.": ".attention_output_norm.",
    ".pre_feedforward_layernorm.": ".post_attention_layernorm.",
    ".post_feedforward_layernorm.": ".mlp_output_norm.",
    ".layer_scalar": ".mlp_output_scale",
}
# The same in a layer with experts beside the MLP.
_EXPERT_NAMES = {
    ".post_attention_layernorm.": ".attention_output_norm.",
    ".pre_feedforward_layernorm.": ".post_attention_layernorm.",
    ".pre_feedforward_layernorm_2.": ".mlp.experts_norm.",
    ".post_feedforward_layernorm_1.": ".mlp_output_norm_1.",
    ".post_feedforward_layernorm_2.": ".mlp_output_norm_2.",
    ".post_feedforward_layernorm.": ".mlp_and_experts_output_norm.",
    ".layer_scalar": ".mlp_and_experts_output_scale",
    ".router.proj.": ".mlp.gate.",
    ".router.scale": ".mlp.router_norm.weight",
    ".router.per_expert_scale": ".mlp.expert_scale",
    ".experts.": ".mlp.experts.",
}
_NOT_OF_THE_TEXT = re.compile(r"^(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\.")
_K_PROJ = re.compile(r"^model\.layers\.(?P<layer>\d+)\.self_attn\.k_proj\.")


def gemma4_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    """Llama's names. In a layer without v_proj, k_proj is v_proj, too. No towers."""
    if _NOT_OF_THE_TEXT.match(name):
        return ()
    name = name.replace("model.language_model.", "model.", 1)
    has_experts = any(kind == "mlp_and_experts" for kind, _ in fields.layers[0])
    for own, engine in (_EXPERT_NAMES if has_experts else _NAMES).items():
        if own in name:
            return expert_names(name.replace(own, engine), fields)
    keys = _K_PROJ.match(name)
    if keys and int(keys["layer"]) in fields.layers_without_v:
        return (Piece(name), Piece(name.replace(".k_proj.", ".v_proj.")))
    return canonical_names(name, fields)


@register_model("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", names=gemma4_names)
def build_gemma4(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = {**DEFAULTS, **language_config(config)}
    if not config.get("rope_parameters"):
        config["rope_parameters"] = DEFAULT_ROPE
    reader = ConfigReader(config)
    _refuse(reader)
    of_kind = rope_by_kind(config, KINDS)
    fields = read_spec(of_kind[KINDS[0]], options, qk_norm=True, embed_scale=_embed_scale(config))
    kinds = layer_kinds(reader, fields.num_hidden_layers, FULL_INTERVAL)
    kinds[-1] = KINDS[1]  # as transformers does
    attention = {"v_norm": True, "softmax_scale": 1.0, "output_norm": True}
    window = reader.positive_int("sliding_window")
    sliding = attention | {"window": window}
    if window >= (options.max_model_len or fields.max_position_embeddings):
        sliding = attention
    mlp = _mlp(reader)
    layers = []
    for layer, kind in enumerate(kinds):
        params = sliding if kind == KINDS[0] else attention | _full(reader, layer, of_kind, options)
        layers.append((("attention", params), mlp))
    full = [layer for layer, kind in enumerate(kinds) if kind == KINDS[1]]
    cap = reader.config.get("final_logit_softcapping")
    return replace(
        fields,
        layers=tuple(layers),
        logit_softcap=0.0 if cap is None else reader.positive_float("final_logit_softcapping"),
        layers_without_v=tuple(full) if reader.flag("attention_k_eq_v") else (),
    )


def _mlp(reader: ConfigReader) -> tuple[str, dict[str, Any]]:
    """The block after attention: its kind and parameters."""
    params: dict[str, Any] = {"activation": "gelu_tanh", "output_norm": True, "output_scale": True}
    if not reader.flag("enable_moe_block"):
        return "mlp", params
    top_k = reader.positive_int("top_k_experts")
    config = {**reader.config, "num_experts_per_tok": top_k, "norm_topk_prob": True}
    experts = read_experts(ConfigReader(config, reader.where))
    own = {
        "input_norm": False,
        "router_norm": True,
        "expert_scale": True,
        "mlp_intermediate_size": reader.positive_int("intermediate_size"),
    }
    return "mlp_and_experts", params | experts | own


def _refuse(reader: ConfigReader) -> None:
    reader.refuse("attention_bias", "a bias on all four attention projections is not supported")
    reader.refuse("use_double_wide_mlp", "layers of two widths are not supported")
    if reader.config.get("use_bidirectional_attention") == "all":
        raise reader.fail("use_bidirectional_attention", "null or 'vision': attention is causal")
    if reader.config.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise reader.fail("hidden_activation", "'gelu_pytorch_tanh'")
    if reader.config.get("hidden_size_per_layer_input", 256):
        raise reader.fail(
            "hidden_size_per_layer_input",
            "0: embeddings of each layer, as in E2B and E4B, are not supported",
        )
    if reader.config.get("num_kv_shared_layers"):
        raise reader.fail(
            "num_kv_shared_layers", "0: keys and values of another layer are not supported"
        )


def _full(
    reader: ConfigReader,
    layer: int,
    of_kind: Mapping[str, Mapping[str, Any]],
    options: BuildOptions,
) -> dict[str, Any]:
    """The parameters of full attention. transformers 5 writes them as `per_layer_config`."""
    own = reader.config.get("per_layer_config")
    if isinstance(own, dict) and isinstance(own.get(str(layer)), dict):
        found = ConfigReader(own[str(layer)], f"{reader.where}: per_layer_config of layer {layer}")
        key, kv_key = "head_dim", "num_key_value_heads"
    else:
        found, key, kv_key = reader, "global_head_dim", "num_global_key_value_heads"
    _, most, multiple = MODEL_LIMITS["head_dim"]
    head_dim = found.positive_int(key, default=512, most=most)
    if head_dim % multiple:
        raise found.fail(key, f"a multiple of {multiple}")
    if options.device == "cuda" and head_dim not in CUDA_HEAD_DIMS:
        raise ValueError(
            f"{found.where}: {key} is {head_dim}, expected one of "
            f"{', '.join(map(str, CUDA_HEAD_DIMS))} on CUDA; use device cpu"
        )
    kv_heads = reader.positive_int("num_key_value_heads")
    if reader.flag("attention_k_eq_v") or found is not reader:
        kv_heads = found.positive_int(kv_key, default=kv_heads)
    if reader.positive_int("num_attention_heads") % kv_heads:
        raise found.fail(kv_key, "a divisor of num_attention_heads")
    rope = rope_from_config(of_kind[KINDS[1]], head_dim, options.max_model_len)
    return {
        "head_dim": head_dim,
        "num_key_value_heads": kv_heads,
        "rope_inv_freq": tuple(rope.inv_freq.tolist()),
        "rope_attention_scaling": rope.attention_scaling,
    }


def _embed_scale(config: Mapping[str, Any]) -> float:
    """sqrt(hidden_size), in the dtype of the weights, as transformers computes it."""
    scale = np.float32(math.sqrt(ConfigReader(config).positive_int("hidden_size")))
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype == "bfloat16":
        bits = int(scale.view(np.uint32))
        scale = np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(np.float32)
    return float(scale)
