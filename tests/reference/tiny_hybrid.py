"""Configs and random weights of tiny models with gated delta nets; `write_tiny` writes them.

| family | architecture |
|---|---|
| qwen3_5 | Qwen3_5ForCausalLM |
| qwen3_5_vl | Qwen3_5ForConditionalGeneration: `text_config`, `model.language_model.*` |
| qwen3_next | Qwen3NextForCausalLM with an MLP in every layer |

`mtp_num_hidden_layers=1` adds the MTP head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.models.reader import language_config

Array = npt.NDArray[Any]

HYBRIDS = ("qwen3_5", "qwen3_5_vl", "qwen3_next")
MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
EXPERTS: dict[str, Any] = {  # overrides for layers with experts
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "mlp_only_layers": [],
}

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
# Sizes that CUDA can run.
CUDA_SIZES: dict[str, Any] = {
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [1, 1, 0],
}
VISION: dict[str, Any] = {
    "model_type": "qwen3_5_vision",
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "patch_size": 4,
}


def hybrid_config(
    family: str, dtype: str, base: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """A config.json. `overrides` change keys of the language model; None removes a key."""
    text = {**base, **SIZES, "torch_dtype": dtype}
    del text["rope_theta"]
    if family == "qwen3_next":
        text |= {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    else:
        text["rope_parameters"] = dict(ROPE)
    text |= overrides
    if family == "qwen3_next":
        text |= {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
        text.setdefault("mlp_only_layers", list(range(text["num_hidden_layers"])))
    else:
        text |= {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
        if "num_experts" in text:
            text |= {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
            del text["intermediate_size"], text["mlp_only_layers"]
    text = {key: value for key, value in text.items() if value is not None or key not in overrides}
    if family != "qwen3_5_vl":
        return text
    del text["architectures"]
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {**VISION, "out_hidden_size": text["hidden_size"]},
    }


class _Weights:
    """Random tensors, scaled so that activations stay near 1."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self.config = language_config(config)
        self.rng = np.random.default_rng(seed)
        self.made: dict[str, Array] = {}

    def matrix(self, name: str, rows: int, columns: int) -> None:
        values = self.rng.standard_normal((rows, columns)) / np.sqrt(columns)
        self.made[name] = values.astype(np.float32)

    def vector(self, name: str, low: float, high: float, size: int) -> None:
        self.made[name] = self.rng.uniform(low, high, size).astype(np.float32)

    def norm(self, name: str, size: int) -> None:
        self.vector(f"{name}.weight", -0.5, 0.5, size)  # the factor is 1 + weight

    def attention(self, prefix: str) -> None:
        config = self.config
        hidden, head_dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        gated = config.get("attn_output_gate", True)
        self.matrix(f"{prefix}q_proj.weight", heads * head_dim * (1 + gated), hidden)
        self.matrix(f"{prefix}k_proj.weight", kv_heads * head_dim, hidden)
        self.matrix(f"{prefix}v_proj.weight", kv_heads * head_dim, hidden)
        self.matrix(f"{prefix}o_proj.weight", hidden, heads * head_dim)
        self.norm(f"{prefix}q_norm", head_dim)
        self.norm(f"{prefix}k_norm", head_dim)

    def delta_net(self, prefix: str) -> None:
        config, hidden = self.config, self.config["hidden_size"]
        heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads
        values *= value_dim
        conv = 2 * keys + values
        if config["model_type"] == "qwen3_next":
            self.matrix(f"{prefix}in_proj_qkvz.weight", conv + values, hidden)
            self.matrix(f"{prefix}in_proj_ba.weight", 2 * heads, hidden)
        else:
            self.matrix(f"{prefix}in_proj_qkv.weight", conv, hidden)
            self.matrix(f"{prefix}in_proj_z.weight", values, hidden)
            self.matrix(f"{prefix}in_proj_b.weight", heads, hidden)
            self.matrix(f"{prefix}in_proj_a.weight", heads, hidden)
        taps = config["linear_conv_kernel_dim"]
        self.matrix(f"{prefix}conv1d.weight", conv, taps)
        self.made[f"{prefix}conv1d.weight"].shape = (conv, 1, taps)
        # Decays of a token from nearly 1 to nearly 0.
        self.made[f"{prefix}A_log"] = np.log(self.rng.uniform(0.05, 8, heads)).astype(np.float32)
        self.vector(f"{prefix}dt_bias", -4, 1, heads)
        self.vector(f"{prefix}norm.weight", 0.5, 1.5, value_dim)
        self.matrix(f"{prefix}out_proj.weight", hidden, values)

    def mlp(self, prefix: str, width: int) -> None:
        hidden = self.config["hidden_size"]
        self.matrix(f"{prefix}gate_proj.weight", width, hidden)
        self.matrix(f"{prefix}up_proj.weight", width, hidden)
        self.matrix(f"{prefix}down_proj.weight", hidden, width)

    def experts(self, prefix: str) -> None:
        config, hidden = self.config, self.config["hidden_size"]
        self.matrix(f"{prefix}gate.weight", config["num_experts"], hidden)
        self.matrix(f"{prefix}shared_expert_gate.weight", 1, hidden)
        for name in ("gate", "shared_expert_gate"):
            self.made[f"{prefix}{name}.weight"] *= 3
        for expert in range(config["num_experts"]):
            self.mlp(f"{prefix}experts.{expert}.", config["moe_intermediate_size"])
        self.mlp(f"{prefix}shared_expert.", config["shared_expert_intermediate_size"])

    def layer(self, prefix: str, full_attention: bool, has_experts: bool) -> None:
        hidden = self.config["hidden_size"]
        self.norm(f"{prefix}input_layernorm", hidden)
        if full_attention:
            self.attention(f"{prefix}self_attn.")
        else:
            self.delta_net(f"{prefix}linear_attn.")
        self.norm(f"{prefix}post_attention_layernorm", hidden)
        if has_experts:
            self.experts(f"{prefix}mlp.")
        else:
            self.mlp(f"{prefix}mlp.", self.config["intermediate_size"])

    def mtp(self) -> None:
        hidden = self.config["hidden_size"]
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norm(f"mtp.{name}", hidden)
        self.matrix("mtp.fc.weight", hidden, 2 * hidden)
        has_experts = bool(self.config.get("num_experts"))
        self.layer("mtp.layers.0.", full_attention=True, has_experts=has_experts)


def hybrid_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, Array]:
    """float32 weights by the names of the checkpoint."""
    made = _Weights(config, seed)
    text = made.config
    vocab, hidden = text["vocab_size"], text["hidden_size"]
    made.matrix("model.embed_tokens.weight", vocab, hidden)
    made.made["model.embed_tokens.weight"] *= np.float32(np.sqrt(hidden))
    kinds = text.get("layer_types")
    for layer in range(text["num_hidden_layers"]):
        full = (layer + 1) % text["full_attention_interval"] == 0
        if kinds is not None:
            full = kinds[layer] == "full_attention"
        dense = layer in text.get("mlp_only_layers", ())
        made.layer(f"model.layers.{layer}.", full, "num_experts" in text and not dense)
    made.norm("model.norm", hidden)
    if not text.get("tie_word_embeddings"):
        made.matrix("lm_head.weight", vocab, hidden)
    if text.get("mtp_num_hidden_layers"):
        made.mtp()
    if "vision_config" not in config:
        return made.made
    made.matrix("model.visual.pos_embed.weight", 16, config["vision_config"]["hidden_size"])
    return {_vl_name(name): array for name, array in made.made.items()}


def _vl_name(name: str) -> str:
    of_text = name.startswith("model.") and not name.startswith("model.visual.")
    return name.replace("model.", "model.language_model.", 1) if of_text else name
