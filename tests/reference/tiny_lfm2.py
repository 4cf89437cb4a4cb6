"""Random weights of tiny LFM2 and LFM3 models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

MODEL_TYPES = ("lfm2", "lfm2_moe", "lfm3")
OWN_KEYS: dict[str, dict[str, Any]] = {
    "lfm3": {
        "norm_eps": 1e-5,
        "conv_L_cache": 7,
        "num_hidden_layers": 6,
        "layer_types": ["conv", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 33,
        "tie_word_embeddings": True,
    },
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "lfm2moe": {
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"] * 2,
        "tie_word_embeddings": True,
        "num_dense_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    },
}


def lfm2_weights(config: Mapping[str, Any], seed: int) -> dict[str, Array]:
    """float32 weights with the names of the files."""
    rng = np.random.default_rng(seed)
    is_lfm3 = config["model_type"] == "lfm3"
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = (config[key] * head_dim for key in ("num_attention_heads", "num_key_value_heads"))

    def matrix(rows: int, columns: int) -> Array:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm(size: int) -> Array:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    def of_layer(layer: int, kind: str) -> dict[str, Array]:
        own = {"operator_norm.weight": norm(hidden), "ffn_norm.weight": norm(hidden)}
        if kind == "conv":
            own["conv.in_proj.weight"] = matrix(3 * hidden, hidden)
            own["conv.conv.weight"] = matrix(hidden, config["conv_L_cache"])[:, None]
            own["conv.out_proj.weight"] = matrix(hidden, hidden)
        else:
            for part, rows in (("q", q), ("k", kv), ("v", kv)):
                own[f"self_attn.{part}_proj.weight"] = matrix(rows, hidden)
            out, of_heads = ("o_proj", "norm") if is_lfm3 else ("out_proj", "layernorm")
            own[f"self_attn.{out}.weight"] = matrix(hidden, q)
            own |= {f"self_attn.{part}_{of_heads}.weight": norm(head_dim) for part in "qk"}
            if is_lfm3 and config.get("use_attention_gate", True):
                own["self_attn.g_proj.weight"] = matrix(config["num_attention_heads"], hidden)
        if is_lfm3 and config.get("use_sandwich_norm", True):
            own |= {f"post_{part}_norm.weight": norm(hidden) for part in ("operator", "ffn")}
        if layer < config.get("num_dense_layers", layer + 1):
            for part, rows, columns in (("1", inner, hidden), ("3", inner, hidden)):
                own[f"feed_forward.w{part}.weight"] = matrix(rows, columns)
            own["feed_forward.w2.weight"] = matrix(hidden, inner)
            return own
        experts, width = config["num_experts"], config["moe_intermediate_size"]
        own["feed_forward.gate.weight"] = 3 * matrix(experts, hidden)
        own["feed_forward.expert_bias"] = norm(experts) - 1
        for part, rows, columns in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
            stack = [matrix(rows, columns) for _ in range(experts)]
            own[f"feed_forward.experts.{part}_proj"] = np.stack(stack)
        return own

    weights = {
        "model.embed_tokens.weight": rng.standard_normal((config["vocab_size"], hidden)).astype(
            np.float32
        )
    }
    for layer, kind in enumerate(config["layer_types"]):
        own = of_layer(layer, kind)
        weights |= {f"model.layers.{layer}.{name}": array for name, array in own.items()}
    weights["model.embedding_norm.weight"] = norm(hidden)
    return weights
