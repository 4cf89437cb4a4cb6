"""Lists the tensors of Nemotron-H: Mamba-2, attention, MLPs and experts, one of them a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from scripts.synthetic.hybrid import RATES, STEP_SIZES, between, inverse_softplus
from scripts.synthetic.tensors import Config, TensorSpec, matrix, norm, normal

Tensors = Iterator[TensorSpec]


def nemotron_tensors(config: Config) -> Tensors:
    """The tensors of Nemotron-H, in forward order."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    pattern, layers = config["hybrid_override_pattern"], config["num_hidden_layers"]
    if len(pattern) != layers:
        raise SystemExit(
            f"hybrid_override_pattern has {len(pattern)} layers, expected num_hidden_layers="
            f"{layers}; set both"
        )
    branch = 1 / math.sqrt(layers)
    mixers = {"M": _mamba, "*": _attention, "-": _mlp, "E": _experts}
    yield TensorSpec("backbone.embeddings.weight", (vocab, hidden), normal(1.0))
    for index, kind in enumerate(pattern):
        yield norm(f"backbone.layers.{index}.norm.weight", hidden)
        yield from mixers[kind](config, f"backbone.layers.{index}.mixer.", branch)
    yield norm("backbone.norm_f.weight", hidden)
    yield matrix("lm_head.weight", vocab, hidden, 2)
    if config.get("num_nextn_predict_layers"):
        yield from _mtp(config)


def _mtp(config: Config) -> Tensors:
    """A module of multi-token prediction: a layer of attention and one of experts."""
    hidden, branch = config["hidden_size"], 1 / math.sqrt(2)
    first, second = "mtp.layers.0.", "mtp.layers.1."
    for name in (f"{first}enorm", f"{first}hnorm", f"{second}final_layernorm"):
        yield norm(f"{name}.weight", hidden)
    yield matrix(f"{first}eh_proj.weight", hidden, 2 * hidden)
    for prefix, mixer in ((first, _attention), (second, _experts)):
        yield norm(f"{prefix}norm.weight", hidden)
        yield from mixer(config, f"{prefix}mixer.", branch)


def _mamba(config: Config, prefix: str, branch: float) -> Tensors:
    """A Mamba-2 block. Each of its heads forgets within a few tokens up to a thousand."""
    hidden, heads = config["hidden_size"], config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    channels = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    taps = config["conv_kernel"]
    yield matrix(f"{prefix}in_proj.weight", inner + channels + heads, hidden)
    yield TensorSpec(f"{prefix}conv1d.weight", (channels, 1, taps), normal(1 / math.sqrt(taps)))
    yield TensorSpec(f"{prefix}conv1d.bias", (channels,), normal(0.1))
    yield TensorSpec(f"{prefix}A_log", (heads,), between(np.log, *RATES), "float32")
    yield TensorSpec(f"{prefix}dt_bias", (heads,), between(inverse_softplus, *STEP_SIZES))
    yield norm(f"{prefix}D", heads)
    yield norm(f"{prefix}norm.weight", inner)
    yield matrix(f"{prefix}out_proj.weight", hidden, inner, branch)


def _attention(config: Config, prefix: str, branch: float) -> Tensors:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for part, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield matrix(f"{prefix}{part}_proj.weight", rows * head_dim, hidden)
    yield matrix(f"{prefix}o_proj.weight", hidden, heads * head_dim, branch)


def _mlp(
    config: Config,
    prefix: str,
    branch: float,
    width: str = "intermediate_size",
    hidden: int | None = None,
) -> Tensors:
    """`width` is the key of the width in the config. Input and output have `hidden` values."""
    hidden = hidden or config["hidden_size"]
    yield matrix(f"{prefix}up_proj.weight", config[width], hidden)
    yield matrix(f"{prefix}down_proj.weight", hidden, config[width], branch)


def _experts(config: Config, prefix: str, branch: float) -> Tensors:
    """A router that chooses all experts about equally often, its experts, and a shared one.

    The chosen experts have the width `moe_latent_size`, if there is one.
    """
    experts, hidden = config["n_routed_experts"], config["hidden_size"]
    latent = config.get("moe_latent_size")
    yield matrix(f"{prefix}gate.weight", experts, hidden, 2)
    bias = f"{prefix}gate.e_score_correction_bias"
    yield TensorSpec(bias, (experts,), normal(0.01), "float32")
    for expert in range(experts):
        own = f"{prefix}experts.{expert}."
        yield from _mlp(config, own, 1 if latent else branch, "moe_intermediate_size", latent)
    if latent:
        yield matrix(f"{prefix}fc1_latent_proj.weight", latent, hidden)
        yield matrix(f"{prefix}fc2_latent_proj.weight", hidden, latent, branch)
    shared = "moe_shared_expert_intermediate_size"
    yield from _mlp(config, f"{prefix}shared_experts.", branch, shared)
