"""Random weights of tiny models with Mamba-2 layers: Nemotron-H and Granite 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Sizes that CUDA has, too. The chunks of transformers are shorter than the texts.
OWN_KEYS: dict[str, dict[str, Any]] = {
    "nemotron": {
        "num_hidden_layers": 8,
        "hybrid_override_pattern": "ME*-" * 2,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "chunk_size": 32,
        "time_step_min": 1e-9,  # transformers uses it instead of time_step_limit
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 56,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    "granitehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention"] * 2,
        "intermediate_size": 40,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 56,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 32,
        "time_step_limit": [0.1, 0.8],  # both are reached
        "embedding_multiplier": 1.0,  # a head of EAGLE takes no other
        "tie_word_embeddings": True,
    },
}


def is_own(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types") or ()
    return config["model_type"] == "nemotron_h" or "mamba" in kinds


class Weights:
    """Draws the parts of a layer."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self.config, self.hidden = config, config["hidden_size"]
        self.rng = np.random.default_rng(seed)

    def matrix(self, rows: int, columns: int) -> Array:
        drawn = self.rng.standard_normal((rows, columns)) / np.sqrt(columns)
        return drawn.astype(np.float32)

    def norm(self, size: int) -> Array:
        return self.rng.uniform(0.5, 1.5, size).astype(np.float32)

    def mamba(self, heads: int, head_dim: int, groups: int, state: int, taps: int) -> Any:
        inner = heads * head_dim
        channels = inner + 2 * groups * state
        own = {
            "in_proj.weight": self.matrix(inner + channels + heads, self.hidden),
            "conv1d.weight": self.matrix(channels, taps)[:, None],
            "A_log": np.log(self.rng.uniform(0.5, 8, heads)).astype(np.float32),
            "dt_bias": self.rng.uniform(-3, 1, heads).astype(np.float32),
            "D": self.norm(heads),
            "norm.weight": self.norm(inner),
            "out_proj.weight": self.matrix(self.hidden, inner),
        }
        has_bias = self.config.get("use_conv_bias", self.config.get("mamba_conv_bias", True))
        return own | ({"conv1d.bias": self.norm(channels) - 1} if has_bias else {})

    def attention(self) -> dict[str, Array]:
        config = self.config
        head_dim = config.get("head_dim") or self.hidden // config["num_attention_heads"]
        q, kv = (config[f"num_{part}_heads"] * head_dim for part in ("attention", "key_value"))
        own = {
            f"{part}_proj.weight": self.matrix(rows, self.hidden)
            for part, rows in (("q", q), ("k", kv), ("v", kv))
        }
        return own | {"o_proj.weight": self.matrix(self.hidden, q)}

    def mlp(self, width: int, hidden: int = 0) -> dict[str, Array]:
        """`hidden`: the width of input and output; 0: that of the model."""
        hidden = hidden or self.hidden
        up, down = self.matrix(width, hidden), self.matrix(hidden, width)
        return {"up_proj.weight": up, "down_proj.weight": down}


def mamba_weights(config: Mapping[str, Any], seed: int) -> dict[str, Array]:
    """float32 weights with the names of the published files."""
    of = Weights(config, seed)
    is_nemotron = config["model_type"] == "nemotron_h"
    body = "backbone" if is_nemotron else "model"
    table = of.rng.standard_normal((config["vocab_size"], of.hidden)).astype(np.float32)
    weights = {f"{body}.{'embeddings' if is_nemotron else 'embed_tokens'}.weight": table}
    layers = config["hybrid_override_pattern"] if is_nemotron else config["layer_types"]
    for layer, kind in enumerate(layers):
        own = _nemotron_layer(of, kind) if is_nemotron else _granite_layer(of, kind)
        weights |= {f"{body}.layers.{layer}.{name}": array for name, array in own.items()}
    for module in range(config.get("num_nextn_predict_layers") or 0):
        weights |= _nemotron_mtp(of, f"mtp.layers.{2 * module}.", f"mtp.layers.{2 * module + 1}.")
    weights[f"{body}.{'norm_f' if is_nemotron else 'norm'}.weight"] = of.norm(of.hidden)
    if not config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = of.matrix(config["vocab_size"], of.hidden)
    return weights


def _nemotron_layer(of: Weights, kind: str) -> dict[str, Array]:
    config = of.config
    if kind == "M":
        sizes = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
        mixer = of.mamba(*(config[key] for key in sizes))
    elif kind == "*":
        mixer = of.attention()
    elif kind == "-":
        mixer = of.mlp(config["intermediate_size"])
    else:
        experts = config["n_routed_experts"]
        mixer = {"gate.weight": 3 * of.matrix(experts, of.hidden)}
        mixer["gate.e_score_correction_bias"] = of.norm(experts) - 1
        latent = config.get("moe_latent_size") or 0
        widths = {f"experts.{i}": config["moe_intermediate_size"] for i in range(experts)}
        widths["shared_experts"] = config["moe_shared_expert_intermediate_size"]
        for name, width in widths.items():
            hidden = latent if name != "shared_experts" else 0
            mixer |= {f"{name}.{part}": array for part, array in of.mlp(width, hidden).items()}
        if latent:
            mixer["fc1_latent_proj.weight"] = of.matrix(latent, of.hidden)
            mixer["fc2_latent_proj.weight"] = of.matrix(of.hidden, latent)
    own = {f"mixer.{name}": array for name, array in mixer.items()}
    return own | {"norm.weight": of.norm(of.hidden)}


def _nemotron_mtp(of: Weights, first: str, second: str) -> dict[str, Array]:
    """A module of multi-token prediction: a layer of attention and one of experts."""
    own = {first + name: array for name, array in _nemotron_layer(of, "*").items()}
    own |= {second + name: array for name, array in _nemotron_layer(of, "E").items()}
    for norm in (f"{first}enorm", f"{first}hnorm", f"{second}final_layernorm"):
        own[f"{norm}.weight"] = of.norm(of.hidden)
    return own | {f"{first}eh_proj.weight": of.matrix(of.hidden, 2 * of.hidden)}


def _granite_layer(of: Weights, kind: str) -> dict[str, Array]:
    config, hidden = of.config, of.hidden
    if kind == "mamba":
        sizes = ("n_heads", "d_head", "n_groups", "d_state", "d_conv")
        mixer = of.mamba(*(config[f"mamba_{key}"] for key in sizes))
        own = {f"mamba.{name}": array for name, array in mixer.items()}
    else:
        own = {f"self_attn.{name}": array for name, array in of.attention().items()}
    shared, experts = config["shared_intermediate_size"], config["num_local_experts"]
    own["shared_mlp.input_linear.weight"] = of.matrix(2 * shared, hidden)
    own["shared_mlp.output_linear.weight"] = of.matrix(hidden, shared)
    if experts:
        width = config["intermediate_size"]
        own["block_sparse_moe.router.layer.weight"] = 3 * of.matrix(experts, hidden)
        for part, rows, columns in (("input", 2 * width, hidden), ("output", hidden, width)):
            stack = np.stack([of.matrix(rows, columns) for _ in range(experts)])
            own[f"block_sparse_moe.{part}_linear.weight"] = stack
    for norm in ("input", "post_attention"):
        own[f"{norm}_layernorm.weight"] = of.norm(hidden)
    return own


def hf_weights(config: Mapping[str, Any], weights: Mapping[str, Array]) -> dict[str, Array]:
    """The weights with the names of transformers' modules."""
    renamed = {}
    for name, array in weights.items():
        name = name.replace("backbone.", "model.")
        name = name.replace(".router.layer.weight", ".router.weight")
        name = name.replace(
            ".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"
        )
        name = name.replace(
            ".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"
        )
        renamed[name] = array
    for layer, kind in enumerate(config.get("hybrid_override_pattern", "")):
        if kind != "E":
            continue
        experts = f"model.layers.{layer}.mixer.experts."
        for part in ("up_proj", "down_proj"):
            each = range(config["n_routed_experts"])
            stack = [renamed.pop(f"{experts}{i}.{part}.weight") for i in each]
            renamed[experts + part] = np.stack(stack)
    return renamed
