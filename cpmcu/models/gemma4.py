"""Gemma 4: norms before and after each block, windows in five of six layers.

Layers with full attention have other heads (`global_head_dim`, `num_global_key_value_heads`). With
`attention_k_eq_v` these layers have no v_proj: values are the keys before their norm and RoPE.
Values have a norm without weights. The softmax scale is 1. `layer_scalar` multiplies the residual
stream after each layer. With `enable_moe_block`, experts run beside the MLP
(csrc/layers/mlp_and_experts.cpp).

In the E models, each layer adds an embedding of its own (csrc/layers/per_layer_input.cpp). The last
`num_kv_shared_layers` layers have no keys and values: each reads those of the last layer of its
kind that has some. If a file has towers for images and sound, `text_config` holds the keys of the
language model. The engine runs only the language model.
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
# Replaces _NAMES in a model with experts beside the MLP.
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
# Names of the embeddings that each layer adds. They are replaced before the other names.
_PER_LAYER_NAMES = {
    "model.embed_tokens_per_layer.": "model.layers.0.per_layer_embedding.table.",
    "model.per_layer_model_projection.": "model.layers.0.per_layer_embedding.projection.",
    "model.per_layer_projection_norm.": "model.layers.0.per_layer_embedding.norm.",
    ".per_layer_input_gate.": ".per_layer_input.gate.",
    ".per_layer_projection.": ".per_layer_input.projection.",
    ".post_per_layer_input_norm.": ".per_layer_input_output_norm.",
    ".layer_scalar": ".per_layer_input_output_scale",
}
_NOT_OF_THE_TEXT = re.compile(r"^(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\.")
_K_PROJ = re.compile(r"^model\.layers\.(?P<layer>\d+)\.self_attn\.k_proj\.")
_KV = re.compile(r"^model\.layers\.(?P<layer>\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


def gemma4_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    """Llama's names; none for the towers. In a layer without v_proj, k_proj is v_proj, too."""
    if _NOT_OF_THE_TEXT.match(name):
        return ()
    name = name.replace("model.language_model.", "model.", 1)
    kinds = [kind for kind, _ in fields.layers[0]]
    renamed = _EXPERT_NAMES if "mlp_and_experts" in kinds else _NAMES
    if "per_layer_input" in kinds:
        scale = ".layer_scalar"
        renamed = {**_PER_LAYER_NAMES, **renamed, scale: _PER_LAYER_NAMES[scale]}
    kv = _KV.match(name)
    if kv and "kv_layer" in dict(fields.layers[int(kv["layer"])])["attention"]:
        return ()  # the layer reads another layer's; some files have these all the same
    for own, engine in renamed.items():
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
    mlp_kind, mlp = _mlp(reader)
    width = reader.config.get("hidden_size_per_layer_input", 256)
    if width:
        width = reader.positive_int("hidden_size_per_layer_input", default=256)
        _check_per_layer(reader, width)
    owners = _kv_layers(reader, kinds)
    layers = []
    for layer, kind in enumerate(kinds):
        params = sliding if kind == KINDS[0] else attention | _full(reader, layer, of_kind, options)
        blocks: list[tuple[str, Mapping[str, Any]]] = []
        if width and layer == 0:
            blocks.append(("per_layer_embedding", {"width": width, "input_norm": False}))
        if owners[layer] is None:
            blocks += [("attention", params), (mlp_kind, mlp)]
        else:
            wide = reader.flag("use_double_wide_mlp") and mlp_kind == "mlp"
            own = {"intermediate_size": 2 * fields.intermediate_size} if wide else {}
            blocks += [("attention", {**params, "kv_layer": owners[layer]}), (mlp_kind, mlp | own)]
        if width:
            # layer_scalar comes after the last block.
            blocks[-1] = (mlp_kind, {**blocks[-1][1], "output_scale": False})
            per_layer = {"input_norm": False, "output_norm": True, "output_scale": True}
            blocks.append(("per_layer_input", per_layer | {"width": width, "layer": layer}))
        layers.append(tuple(blocks))
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
    if reader.config.get("use_bidirectional_attention") == "all":
        raise reader.fail("use_bidirectional_attention", "null or 'vision': attention is causal")
    if reader.config.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise reader.fail("hidden_activation", "'gelu_pytorch_tanh'")


def _check_per_layer(reader: ConfigReader, width: int) -> None:
    if width % 8:
        raise reader.fail("hidden_size_per_layer_input", "a multiple of 8")
    vocab_size = reader.positive_int("vocab_size")
    if reader.positive_int("vocab_size_per_layer_input", default=262144) != vocab_size:
        raise reader.fail("vocab_size_per_layer_input", f"vocab_size={vocab_size}")


def _kv_layers(reader: ConfigReader, kinds: Sequence[str]) -> list[int | None]:
    """Returns, for each layer, the layer whose keys and values it reads; None: its own."""
    shared = reader.config.get("num_kv_shared_layers") or 0
    if shared:
        shared = reader.positive_int("num_kv_shared_layers", most=len(kinds) - 1)
    first = len(kinds) - shared
    last_of = {kind: layer for layer, kind in enumerate(kinds[:first])}
    if missing := set(kinds[first:]) - set(last_of):
        raise reader.fail("num_kv_shared_layers", f"a layer of {missing.pop()} before those layers")
    return [None if layer < first else last_of[kind] for layer, kind in enumerate(kinds)]


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


def stored_layers(config: Mapping[str, Any], num_layers: int) -> dict[str, int]:
    """Returns, by kind of layer, the last layer of this kind with keys and values of its own."""
    reader = ConfigReader({**DEFAULTS, **config})
    kinds = layer_kinds(reader, num_layers, FULL_INTERVAL)
    kinds[-1] = KINDS[1]
    owners = _kv_layers(reader, kinds)
    return {kind: layer for layer, kind in enumerate(kinds) if owners[layer] is None}


def _embed_scale(config: Mapping[str, Any]) -> float:
    """sqrt(hidden_size), in the dtype of the weights, as transformers computes it."""
    scale = np.float32(math.sqrt(ConfigReader(config).positive_int("hidden_size")))
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype == "bfloat16":
        bits = int(scale.view(np.uint32))
        scale = np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(np.float32)
    return float(scale)
