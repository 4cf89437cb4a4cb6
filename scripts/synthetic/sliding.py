"""Lists the tensors of gpt-oss and of dense Gemma 4, which have windows in some layers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scripts.synthetic.compressed import E2M1, rms
from scripts.synthetic.layouts import mlp_tensors
from scripts.synthetic.sources import Bits
from scripts.synthetic.tensors import Config, TensorSpec, matrix, norm, normal, random_bits

MXFP4: Config = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
GROUP = 32  # of MXFP4
FULL_INTERVAL = 6  # every sixth layer of Gemma 4 has full attention


def biased(name: str, rows: int, columns: int, gain: float = 1.0) -> Iterator[TensorSpec]:
    yield matrix(f"{name}.weight", rows, columns, gain)
    yield TensorSpec(f"{name}.bias", (rows,), normal(0.1 * gain))


def stacked_experts(
    name: str, experts: int, rows: int, columns: int, gain: float = 1.0
) -> Iterator[TensorSpec]:
    """Experts in MXFP4. Scales are powers of two, so standard deviations are approximate."""
    if columns % GROUP:
        raise SystemExit(f"{name} has {columns} inputs, expected a multiple of {GROUP}")
    std = gain / math.sqrt(columns)
    scale = 127 + round(math.log2(std / (rms(E2M1) * rms([1, 2]))))
    groups, codes = columns // GROUP, random_bits(Bits(0xFFFFFFFF))
    scales = random_bits(Bits(0x01010101, scale * 0x01010101))
    yield TensorSpec(f"{name}_blocks", (experts, rows, groups, GROUP // 2), codes, "uint8")
    yield TensorSpec(f"{name}_scales", (experts, rows, groups), scales, "uint8")
    yield TensorSpec(f"{name}_bias", (experts, rows), normal(0.1 * gain))


def gpt_oss_tensors(config: Config) -> Iterator[TensorSpec]:
    """The tensors of gpt-oss with experts in MXFP4, in forward order."""
    hidden, vocab, layers = (
        config[key] for key in ("hidden_size", "vocab_size", "num_hidden_layers")
    )
    heads, kv_heads, head_dim = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    experts, width = config["num_local_experts"], config["intermediate_size"]
    branch = 1 / math.sqrt(2 * layers)
    yield TensorSpec("model.embed_tokens.weight", (vocab, hidden), normal(1.0))
    for index in range(layers):
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        yield norm(f"{prefix}input_layernorm.weight", hidden)
        for part, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield from biased(f"{attention}{part}_proj", rows * head_dim, hidden)
        yield from biased(f"{attention}o_proj", hidden, heads * head_dim, branch)
        yield TensorSpec(f"{attention}sinks", (heads,), normal(1.0))
        yield norm(f"{prefix}post_attention_layernorm.weight", hidden)
        yield from biased(f"{mlp}router", experts, hidden, 2)
        yield from stacked_experts(f"{mlp}experts.gate_up_proj", experts, 2 * width, hidden)
        yield from stacked_experts(f"{mlp}experts.down_proj", experts, hidden, width, branch)
    yield norm("model.norm.weight", hidden)
    yield matrix("lm_head.weight", vocab, hidden, 2)


def gemma4_tensors(config: Config) -> Iterator[TensorSpec]:
    """The tensors of a dense Gemma 4, in forward order.

    The softmax scale of this family is 1, so q_norm is small.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    branch = 1 / math.sqrt(2 * layers)
    table = (config["vocab_size"], hidden)
    yield TensorSpec("model.embed_tokens.weight", table, normal(2 / math.sqrt(hidden)))

    def output_norm(name: str) -> TensorSpec:
        return TensorSpec(f"{name}.weight", (hidden,), normal(0.05 * branch, mean=branch))

    for index in range(layers):
        prefix = f"model.layers.{index}."
        is_full = (index + 1) % FULL_INTERVAL == 0 or index == layers - 1
        yield norm(f"{prefix}input_layernorm.weight", hidden)
        yield from gemma4_attention(config, f"{prefix}self_attn.", is_full)
        yield output_norm(f"{prefix}post_attention_layernorm")
        yield norm(f"{prefix}pre_feedforward_layernorm.weight", hidden)
        yield from mlp_tensors(config, f"{prefix}mlp.", 1.0)
        yield output_norm(f"{prefix}post_feedforward_layernorm")
        yield TensorSpec(f"{prefix}layer_scalar", (1,), normal(0.0, mean=1.0))
    yield norm("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        yield matrix("lm_head.weight", *table, 2)


def gemma4_attention(config: Config, prefix: str, is_full: bool) -> Iterator[TensorSpec]:
    heads, of_kind = config["num_attention_heads"], "global_" if is_full else ""
    kv_heads = config[f"num_{of_kind}key_value_heads"]
    head_dim, hidden = config[f"{of_kind}head_dim"], config["hidden_size"]
    parts = [("q", heads), ("k", kv_heads), *([] if is_full else [("v", kv_heads)])]
    for name, rows in parts:
        yield matrix(f"{prefix}{name}_proj.weight", rows * head_dim, hidden)
    mean = 1 / math.sqrt(head_dim)
    yield TensorSpec(f"{prefix}q_norm.weight", (head_dim,), normal(0.05 * mean, mean=mean))
    yield norm(f"{prefix}k_norm.weight", head_dim)
    yield matrix(f"{prefix}o_proj.weight", hidden, heads * head_dim)
