"""Lists the tensors of models with gated delta nets (Qwen3-Next, Qwen3.5) and of their MTP head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from scripts.synthetic.layouts import embedding, expert_tensors, has_experts, mlp_tensors
from scripts.synthetic.sources import Array, Source, encode
from scripts.synthetic.tensors import Config, Fill, TensorSpec, matrix, norm, normal

STEP_SIZES = (0.001, 0.1)  # softplus(dt_bias), of which a decay is exp(-exp(A_log) * size)
RATES = (1.0, 16.0)  # exp(A_log)


def zero_centred_norm(name: str, size: int) -> TensorSpec:
    """A norm that multiplies by 1 + weight."""
    return TensorSpec(name, (size,), normal(0.05))


def delta_net_tensors(config: Config, prefix: str, branch: float) -> Iterator[TensorSpec]:
    """One gated delta net. Its heads forget within a few up to a thousand tokens."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    rows = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}
    rows |= {"in_proj_b": heads, "in_proj_a": heads}
    if config["model_type"] == "qwen3_next":
        rows = {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * heads}
    for name, count in rows.items():
        yield matrix(f"{prefix}{name}.weight", count, hidden)
    taps = config["linear_conv_kernel_dim"]
    shape = (2 * keys + values, 1, taps)
    yield TensorSpec(f"{prefix}conv1d.weight", shape, normal(1 / math.sqrt(taps)))
    yield TensorSpec(f"{prefix}A_log", (heads,), between(np.log, *RATES), "float32")
    yield TensorSpec(f"{prefix}dt_bias", (heads,), between(inverse_softplus, *STEP_SIZES))
    yield norm(f"{prefix}norm.weight", config["linear_value_head_dim"])
    yield matrix(f"{prefix}out_proj.weight", hidden, values, branch)


def between(function: Callable[[Array], Array], low: float, high: float) -> Fill:
    """A fill with `function` of numbers from low to high, whose logarithms are uniform."""

    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        rng = np.random.default_rng(seed)
        made = np.exp(rng.uniform(math.log(low), math.log(high), count))
        yield encode(function(made).astype(np.float32), dtype)

    return fill


def inverse_softplus(values: Array) -> Array:
    made: Array = np.log(np.expm1(values))
    return made


def gated_attention_tensors(config: Config, prefix: str, branch: float) -> Iterator[TensorSpec]:
    """One attention layer. A head of q_proj has rows for the query and for its gate."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for name, rows in (("q", 2 * heads), ("k", kv_heads), ("v", kv_heads)):
        yield matrix(f"{prefix}{name}_proj.weight", rows * head_dim, hidden)
    yield zero_centred_norm(f"{prefix}q_norm.weight", head_dim)
    yield zero_centred_norm(f"{prefix}k_norm.weight", head_dim)
    yield matrix(f"{prefix}o_proj.weight", hidden, heads * head_dim, branch)


def shared_expert_tensors(config: Config, prefix: str, branch: float) -> Iterator[TensorSpec]:
    """Returns the tensors of the expert that all tokens use, and of its gate."""
    width = "shared_expert_intermediate_size"
    yield from mlp_tensors(config, f"{prefix}shared_expert.", branch, width)
    yield matrix(f"{prefix}shared_expert_gate.weight", 1, config["hidden_size"])


def layer_tensors(
    config: Config, prefix: str, full_attention: bool, branch: float, experts: bool
) -> Iterator[TensorSpec]:
    hidden, mlp = config["hidden_size"], f"{prefix}mlp."
    yield zero_centred_norm(f"{prefix}input_layernorm.weight", hidden)
    if full_attention:
        yield from gated_attention_tensors(config, f"{prefix}self_attn.", branch)
    else:
        yield from delta_net_tensors(config, f"{prefix}linear_attn.", branch)
    yield zero_centred_norm(f"{prefix}post_attention_layernorm.weight", hidden)
    if experts:
        yield from expert_tensors(config, mlp, branch)
        yield from shared_expert_tensors(config, mlp, branch)
    else:
        yield from mlp_tensors(config, mlp, branch)


def hybrid_tensors(config: Config) -> Iterator[TensorSpec]:
    """The tensors of a model of gated delta nets and attention, and of its MTP head."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    layers, interval = config["num_hidden_layers"], config["full_attention_interval"]
    tied = config["tie_word_embeddings"]
    yield embedding(config, 2 / math.sqrt(hidden) if tied else 1.0)  # a tied table is also the head
    branch = 1 / math.sqrt(2 * layers)
    for index in range(layers):
        full_attention = (index + 1) % interval == 0
        experts = has_experts(config, index)
        yield from layer_tensors(config, f"model.layers.{index}.", full_attention, branch, experts)
    yield zero_centred_norm("model.norm.weight", hidden)
    if not tied:
        yield matrix("lm_head.weight", vocab, hidden, 2)
    if config.get("mtp_num_hidden_layers"):
        yield from mtp_tensors(config)


def mtp_tensors(config: Config) -> Iterator[TensorSpec]:
    hidden = config["hidden_size"]
    yield zero_centred_norm("mtp.pre_fc_norm_embedding.weight", hidden)
    yield zero_centred_norm("mtp.pre_fc_norm_hidden.weight", hidden)
    yield matrix("mtp.fc.weight", hidden, 2 * hidden)
    yield from layer_tensors(config, "mtp.layers.0.", True, 0.5, "num_experts" in config)
    yield zero_centred_norm("mtp.norm.weight", hidden)


def wrapped_tensors(specs: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
    """The tensors of a language model with the names of a model with vision, and two of vision."""
    yield TensorSpec("model.visual.pos_embed.weight", (64, 32), normal(1))
    yield TensorSpec("model.visual.blocks.0.attn.qkv.weight", (96, 32), normal(0.1))
    for spec in specs:
        name = spec.name.replace("model.", "model.language_model.", 1)
        yield replace(spec, name=name) if spec.name.startswith("model.") else spec


def wrapped_config(config: Config) -> Config:
    """The config.json of a model with vision whose language model has `config`."""
    of_whole = ("tie_word_embeddings", "quantization_config")
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        **{key: config[key] for key in of_whole if key in config},
        "text_config": {k: v for k, v in config.items() if k not in (*of_whole, "architectures")},
        "vision_config": {"model_type": "qwen3_5_vision", "depth": 1, "hidden_size": 32},
    }
