"""Lists the tensors of a model or a draft head in forward order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from scripts.synthetic.sources import Array
from scripts.synthetic.tensors import (
    Config,
    TensorSpec,
    matrix,
    norm,
    normal,
    normal_with_raised_start,
    stored,
    tensor_seed,
)

COMMON_SCORE = 48.0  # score of a common expert over the mean of the normed hidden state


def attention_tensors(
    config: Config, prefix: str, columns: int, branch: float
) -> Iterator[TensorSpec]:
    """The projections of one attention layer whose inputs have `columns` elements."""
    hidden, kind = config["hidden_size"], config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield matrix(f"{prefix}{name}_proj.weight", rows * head_dim, columns)
        if kind == "qwen2":
            yield TensorSpec(f"{prefix}{name}_proj.bias", (rows * head_dim,), normal(0.1))
    if kind in ("qwen3", "qwen3_moe"):
        yield norm(f"{prefix}q_norm.weight", head_dim)
        yield norm(f"{prefix}k_norm.weight", head_dim)
    yield matrix(f"{prefix}o_proj.weight", hidden, heads * head_dim, branch)


def mlp_tensors(
    config: Config, prefix: str, branch: float, width: str = "intermediate_size"
) -> Iterator[TensorSpec]:
    """Yields the tensors of an MLP. `width`: the key of its width in the config."""
    hidden, intermediate = config["hidden_size"], config[width]
    yield matrix(f"{prefix}gate_proj.weight", intermediate, hidden)
    yield matrix(f"{prefix}up_proj.weight", intermediate, hidden)
    yield matrix(f"{prefix}down_proj.weight", hidden, intermediate, branch)


def embedding(config: Config, std: float) -> TensorSpec:
    """The embedding table. Its elements have a mean if some experts are common."""
    mean = std / 4 if config.get("common_experts") else 0.0
    shape = (config["vocab_size"], config["hidden_size"])
    return TensorSpec("model.embed_tokens.weight", shape, normal(std, mean))


def has_experts(config: Config, layer: int) -> bool:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", ())
    return "num_experts" in config and (layer + 1) % step == 0 and layer not in dense


def expert_tensors(config: Config, prefix: str, branch: float) -> Iterator[TensorSpec]:
    """A router and its experts.

    Random scores choose all experts about equally often. With `common_experts` in the config, so
    many experts have higher scores, because embeddings have a mean, and nearly every token chooses
    them.
    """
    hidden, common = config["hidden_size"], config.get("common_experts", 0)
    router = matrix(f"{prefix}gate.weight", config["num_experts"], hidden, 2)
    if common:
        raised = normal_with_raised_start(router.std, COMMON_SCORE / hidden, common * hidden)
        router = replace(router, fill=raised)
    yield router
    for expert in range(config["num_experts"]):
        yield from mlp_tensors(
            config, f"{prefix}experts.{expert}.", branch, "moe_intermediate_size"
        )


def decoder_tensors(config: Config) -> Iterator[TensorSpec]:
    """The tensors of a Llama, MiniCPM, Qwen2, Qwen3 or Qwen3-MoE model, in forward order."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    layers = config["num_hidden_layers"]
    scale_emb = config.get("scale_emb", 1.0)
    tied = config["tie_word_embeddings"]
    # A tied table is also the head. If the head's input is not scaled, the table must be small.
    small = tied and "dim_model_base" not in config
    embed_std = 2 / math.sqrt(hidden) if small else 1 / scale_emb
    yield embedding(config, embed_std)

    # MiniCPM scales its residual branches. For other models the weights are scaled.
    branch = 0.5 if "scale_depth" in config else 1 / math.sqrt(2 * layers)
    for index in range(layers):
        prefix = f"model.layers.{index}."
        yield norm(f"{prefix}input_layernorm.weight", hidden)
        yield from attention_tensors(config, f"{prefix}self_attn.", hidden, branch)
        yield norm(f"{prefix}post_attention_layernorm.weight", hidden)
        of_layer = expert_tensors if has_experts(config, index) else mlp_tensors
        yield from of_layer(config, f"{prefix}mlp.", branch)
    yield norm("model.norm.weight", hidden)
    if not tied:
        # Undoes the scale of the head's input, so that logits have a standard deviation of about 2.
        head_scale = config.get("dim_model_base", hidden) / hidden
        yield matrix("lm_head.weight", vocab, hidden, 2 / head_scale)


def eagle_tensors(config: Config) -> Iterator[TensorSpec]:
    """An EAGLE head in the original layout, or in that of MiniCPM4, which has three more norms.

    Published files also have the target's embedding table, which no engine reads.
    """
    hidden, minicpm4 = config["hidden_size"], config["model_type"] == "minicpm"
    if minicpm4:
        yield norm("input_norm1.weight", hidden)
        yield norm("input_norm2.weight", hidden)
    yield matrix("fc.weight", hidden, 2 * hidden)
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        if minicpm4 or index > 0:
            yield norm(f"{prefix}input_layernorm.weight", hidden)
        yield from attention_tensors(config, f"{prefix}self_attn.", hidden, 0.5)
        yield norm(f"{prefix}post_attention_layernorm.weight", hidden)
        yield from mlp_tensors(config, f"{prefix}mlp.", 0.5)


def module_tensors(config: Config) -> Iterator[TensorSpec]:
    """MTP modules in DeepSeek's layout, whose layers follow those of their target."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    for module in range(config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layers + module}."
        for name in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm"):
            yield norm(f"{prefix}{name}.weight", hidden)
        yield matrix(f"{prefix}eh_proj.weight", hidden, 2 * hidden)
        yield from attention_tensors(config, f"{prefix}self_attn.", hidden, 0.5)
        yield from mlp_tensors(config, f"{prefix}mlp.", 0.5)
        yield norm(f"{prefix}shared_head.norm.weight", hidden)


def eagle3_tensors(config: Config) -> Iterator[TensorSpec]:
    """An EAGLE-3 head whose draft vocabulary is the most frequent tokens of `token_counts`."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    drafted = np.sort(most_frequent(config, config["draft_vocab_size"]))
    yield from draft_vocabulary(drafted, vocab)
    yield matrix("fc.weight", hidden, 3 * hidden)
    for name in ("hidden_norm", "input_layernorm"):
        yield norm(f"midlayer.{name}.weight", hidden)
    yield from attention_tensors(config, "midlayer.self_attn.", 2 * hidden, 0.5)
    yield norm("midlayer.post_attention_layernorm.weight", hidden)
    yield from mlp_tensors(config, "midlayer.mlp.", 0.5)
    yield norm("norm.weight", hidden)
    yield matrix("lm_head.weight", drafted.size, hidden, 2)


def draft_vocabulary(drafted: Array, vocab: int) -> Iterator[TensorSpec]:
    """d2t [Vd]: target id = draft id + d2t[draft id]. t2d [V]: true in the draft vocabulary."""
    offsets = drafted.astype(np.int64) - np.arange(drafted.size)
    yield TensorSpec("d2t", (drafted.size,), stored(offsets), "int64")
    yield TensorSpec("t2d", (vocab,), stored(np.isin(np.arange(vocab), drafted)), "bool")


def token_counts(vocab: int) -> Array:
    """Returns token counts that follow Zipf's law, in random order of ids."""
    ranks = np.random.default_rng(tensor_seed(0, "token_counts")).permutation(vocab)
    return (10**9 // (ranks + 1)).astype(np.int64)


def most_frequent(config: Config, count: int) -> Array:
    """Returns the most frequent tokens without special tokens."""
    counts = token_counts(config["vocab_size"])
    counts[sorted(special_ids(config))] = -1
    return np.argsort(-counts, kind="stable")[:count]


def special_ids(config: Config) -> set[int]:
    """The BOS, EOS, padding and mask ids."""
    found: set[int] = set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id"):
        ids = config.get(key)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return {i for i in found if i < config["vocab_size"]}
