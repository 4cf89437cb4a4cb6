"""Writes tiny random block drafters for a tiny target: DFlash and its kin.

    draft = write_block(tmp_path / "draft", "dspark", target, markov_rank=0)

The layouts are those of the published files. Tensors follow from the config, so that a changed key
changes them, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.tiny_checkpoints import Array, TinyCheckpoint, from_bits, to_bits
from tests.reference.tiny_checkpoints import write_safetensors as store

Weights = dict[str, Array]

BLOCKS = ("dflash", "jetspec", "dflash2", "dspark", "lilicorr", "domino")
ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "jetspec": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
    "lilicorr": "LiLiCorrDraftModel",
    "domino": "DFlashDraftModel",
}
# Keys of nested objects, by kind.
NESTED: dict[str, dict[str, Any]] = {
    "dflash": {"target_layer_ids": [0, 1]},
    "jetspec": {"target_layer_ids": [0, 1], "causal_head": True},
    "dflash2": {
        "target_layer_ids": [0, 1],
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 16,
        "selector_top_k": 4,
    },
    "lilicorr": {
        "target_layer_ids": [0, 1],
        "projector_type": "lilicorr",
        "lilicorr_enabled": True,
        "lilicorr_candidate_topk": 4,
        "lilicorr_hidden_size": 32,
        "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 2,
        "lilicorr_mlp_ratio": 1.5,
        "lilicorr_factor_dim": 8,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 2.0,
    },
    "domino": {
        "target_layer_ids": [0, 1],
        "projector_type": "domino",
        "shift_label": True,
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 24,
        "emb_dim": 16,
    },
}
# Keys of the top level that differ from the defaults, by kind.
OWN_KEYS: dict[str, dict[str, Any]] = {
    "dflash": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 20,
    },
    "jetspec": {},
    "lilicorr": {},
    "domino": {},
    "dflash2": {
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 20,
        "is_causal": False,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 5.0,
    },
    "dspark": {
        "block_size": 7,
        "target_layer_ids": [0, 1],
        "mask_token_id": 5,
        "markov_rank": 16,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}


def block_config(kind: str, target: TinyCheckpoint, **overrides: Any) -> dict[str, Any]:
    """A config.json. None removes a key; a mapping changes the keys of a nested object."""
    of_target = target.config
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": "qwen3",
        "vocab_size": of_target["vocab_size"],
        "hidden_size": of_target["hidden_size"],
        "intermediate_size": of_target["intermediate_size"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": of_target.get("head_dim") or 16,
        "hidden_act": "silu",
        "rms_norm_eps": 0.01,  # differs from the target's, as rope_theta does
        "rope_theta": 20000.0,
        "max_position_embeddings": of_target["max_position_embeddings"],
        "attention_bias": False,
        "num_target_layers": of_target["num_hidden_layers"],
        "tie_word_embeddings": False,
        "block_size": 8,
    }
    if kind in NESTED:
        config["dflash_config"] = {"mask_token_id": 5, **NESTED[kind]}
    return merged(config | OWN_KEYS[kind], overrides)


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `changes`; None removes a key. Nested objects are merged likewise."""
    made = dict(config)
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(made.get(key), Mapping):
            made[key] = merged(made[key], value)
        elif value is None:
            made.pop(key, None)
        else:
            made[key] = value
    return made


def stated(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A key of config.json or of a nested object."""
    nested = [config.get(key) for key in ("dspark_config", "dflash_config")]
    places = [*nested, config, config.get("transformer_layer_config")]
    return next((place[key] for place in places if place and key in place), default)


def block_weights(
    kind: str, config: Mapping[str, Any], target: TinyCheckpoint, seed: int = 1
) -> Weights:
    """Random tensors of a config, scaled so that activations and pair scores stay near 1."""
    rng = np.random.default_rng(seed)
    key = {name: stated(config, name) for name in ("hidden_size", "head_dim", "intermediate_size")}
    hidden, head_dim, inner = key.values()
    q_size = stated(config, "num_attention_heads") * head_dim
    kv_size = stated(config, "num_key_value_heads") * head_dim
    layer_ids = stated(config, "target_layer_ids") or stated(config, "aux_hidden_state_layer_ids")
    num_inputs = len(layer_ids or [0, 1]) * target.config["hidden_size"]

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Array:
        drawn = rng.standard_normal((rows, columns)) * scale / np.sqrt(columns)
        return drawn.astype(np.float32)

    def norm(size: int) -> Array:
        shift = 1.0 if stated(config, "use_gemma_norm") else 0.0
        return (rng.uniform(0.5, 1.5, size) - shift).astype(np.float32)

    weights = {
        "fc.weight": matrix(hidden, num_inputs),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for i in range(stated(config, "num_hidden_layers")):
        layer = f"layers.{i}."
        weights[layer + "input_layernorm.weight"] = norm(hidden)
        weights[layer + "post_attention_layernorm.weight"] = norm(hidden)
        sizes = {"q": q_size, "k": kv_size, "v": kv_size, "o": hidden}
        for part, rows in sizes.items():
            columns = q_size if part == "o" else hidden
            weights[f"{layer}self_attn.{part}_proj.weight"] = matrix(rows, columns)
            if stated(config, "attention_bias"):
                bias = 0.3 * rng.standard_normal(rows)
                weights[f"{layer}self_attn.{part}_proj.bias"] = bias.astype(np.float32)
        for part in ("q", "k"):
            weights[f"{layer}self_attn.{part}_norm.weight"] = norm(head_dim)
        for part, (rows, columns) in {
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }.items():
            weights[f"{layer}mlp.{part}_proj.weight"] = matrix(rows, columns)
        if stated(config, "conv_kernel_size"):
            taps = stated(config, "conv_kernel_size")
            groups = hidden // stated(config, "conv_group_size")
            for place in ("attention_conv.", "mlp_conv."):
                base = 0.4 * rng.standard_normal((2, taps, hidden))
                base[:, 0] += 1
                weights[f"{layer}{place}base_kernel"] = base.astype(np.float32)
                projection = matrix(2 * taps * groups, hidden, 0.3)
                weights[f"{layer}{place}kernel_projection.weight"] = projection
    if kind == "dflash2":
        weights |= _selector(config, target, matrix)
    if kind == "dspark":
        weights |= _dspark(config, target, matrix)
    if kind == "lilicorr":
        made = lilicorr_weights(config, rng)
        weights |= {"lilicorr." + name: array for name, array in made.items()}
    if kind == "domino":
        state, width = stated(config, "gru_hidden_dim"), stated(config, "emb_dim")
        weights["prefix_gru.weight_ih_l0"] = matrix(3 * state, hidden, 2.0)
        weights["prefix_gru.weight_hh_l0"] = matrix(3 * state, state, 2.0)
        weights["embed_proj.0.weight"] = matrix(width, hidden + state, 4.0)
        weights["embed_proj.2.weight"] = matrix(target.config["vocab_size"], width)
    if drafted := stated(config, "draft_vocab_size"):
        vocab = target.config["vocab_size"]
        chosen = np.sort(np.random.default_rng(drafted).choice(vocab, drafted, replace=False))
        weights["d2t"] = chosen - np.arange(drafted)
        weights["t2d"] = np.isin(np.arange(vocab), chosen).astype(np.int32)
        weights["lm_head.weight"] = matrix(drafted, hidden)
    return weights


def _selector(config: Mapping[str, Any], target: TinyCheckpoint, matrix: Any) -> Weights:
    rank, vocab = stated(config, "selector_rank"), target.config["vocab_size"]
    selector = "candidate_selector."
    return {
        selector + "predecessor_codebook": matrix(vocab, rank, np.sqrt(rank)),
        selector + "successor_codebook": matrix(vocab, rank),
        selector + "hidden_projection.weight": matrix(rank, stated(config, "hidden_size"), 2.0),
    }


def lilicorr_weights(config: Mapping[str, Any], rng: np.random.Generator) -> Weights:
    """The tensors of a LiLiCorr head, without "lilicorr." before their names."""
    hidden = stated(config, "hidden_size")
    size = stated(config, "lilicorr_hidden_size") or hidden
    heads, factors = stated(config, "lilicorr_num_heads"), stated(config, "lilicorr_factor_dim")
    inner = int(size * stated(config, "lilicorr_mlp_ratio"))
    rows, topk = stated(config, "block_size"), stated(config, "lilicorr_candidate_topk")
    linears = {
        **({"token_proj": (size, hidden)} if size != hidden else {}),
        "pass_hidden_proj": (size, hidden),
        "context_proj": (size, hidden),
        "feature_mlp.up_proj": (size, 5),
        "feature_mlp.down_proj": (size, size),
        "factor_input_proj": (size, 3 * size),
        **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (factors, size)),
    }
    norms = {"feature_norm": 5, "output_norm": size, "anchor_norm": size}
    shapes = {
        "slot_embedding": (1, 1, rows - 1, 1, size),
        "rank_embedding": (1, 1, 1, topk, size),
        "relative_slot_bias": (heads, 2 * rows - 1),
        "same_slot_bias": (heads,),
        "feature_norm.bias": (5,),
    }
    for i in range(stated(config, "lilicorr_num_layers")):
        layer = f"layers.{i}."
        norms |= {layer + "attn_norm": size, layer + "mlp_norm": size}
        linears[layer + "attn.in_proj"] = (3 * size, size)
        linears[layer + "attn.out_proj"] = (size, size)
        linears |= {layer + "mlp.up_proj": (inner, size), layer + "mlp.down_proj": (size, inner)}
    weights = {name: 0.3 * rng.standard_normal(shape) for name, shape in shapes.items()}
    for name, columns in norms.items():
        weights[name + ".weight"] = rng.uniform(0.5, 1.5, columns)
    for name, (outputs, inputs) in linears.items():
        dot = "_" if name.endswith("in_proj") else "."  # torch's name of q, k and v
        drawn = rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)
        weights[f"{name}{dot}weight"] = drawn
        weights[f"{name}{dot}bias"] = 0.3 * rng.standard_normal(outputs)
    return {name: array.astype(np.float32) for name, array in weights.items()}


def _dspark(config: Mapping[str, Any], target: TinyCheckpoint, matrix: Any) -> Weights:
    rank, vocab = stated(config, "markov_rank", 0), target.config["vocab_size"]
    hidden = stated(config, "hidden_size")
    drafted = stated(config, "draft_vocab_size", vocab)
    (table,) = (w for n, w in target.weights.items() if n.endswith("embed_tokens.weight"))
    weights: Weights = {}
    if drafted == vocab:
        weights["embed_tokens.weight"] = table
        weights["lm_head.weight"] = target.weights.get("lm_head.weight", table)
    if rank:
        weights["markov_head.markov_w1.weight"] = matrix(vocab, rank, np.sqrt(rank))
        weights["markov_head.markov_w2.weight"] = matrix(drafted, rank)
    if rank and stated(config, "markov_head_type") == "gated":
        weights["markov_head.gate_proj.weight"] = matrix(rank, hidden + rank, 3.0)
        weights["markov_head.gate_proj.bias"] = matrix(1, rank, 3.0)[0]
    if rank and stated(config, "markov_head_type") == "rnn":
        weights["markov_head.joint_proj.weight"] = matrix(3 * rank, 2 * rank + hidden, 3.0)
        weights["markov_head.joint_proj.bias"] = matrix(1, 3 * rank, 3.0)[0]
    if stated(config, "enable_confidence_head"):
        markov = rank if stated(config, "confidence_head_with_markov") else 0
        weights["confidence_head.proj.weight"] = matrix(1, hidden + markov)
        weights["confidence_head.proj.bias"] = np.zeros(1, np.float32)
    return weights


def block(
    kind: str, target: TinyCheckpoint, seed: int = 1, **overrides: Any
) -> tuple[dict[str, Any], Weights]:
    """Config and tensors of a draft of one of ARCHITECTURES."""
    config = block_config(kind, target, **overrides)
    return config, block_weights(kind, config, target, seed)


def write_block(
    directory: Path,
    kind: str,
    target: TinyCheckpoint,
    *,
    seed: int = 1,
    dtype: str = "float32",
    drop: tuple[str, ...] = (),
    extra: Mapping[str, Array] | None = None,
    prefix: str = "",
    rename: Mapping[str, str] | None = None,
    **overrides: Any,
) -> TinyCheckpoint:
    """Writes config.json and model.safetensors of a draft of one of ARCHITECTURES.

    `overrides` change the config and with it the tensors, `drop` and `extra` only the tensors.
    `prefix` and `rename` (old part of a name -> new) change their names in the file alone.
    """
    config, weights = block(kind, target, seed, **overrides)
    config["torch_dtype"] = dtype
    for name in drop:
        del weights[name]
    weights |= dict(extra or {})
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    named = {}
    for name, array in weights.items():
        for old, new in (rename or {}).items():
            name = name.replace(old, new)
        named[prefix + name] = array
    store(directory / "model.safetensors", named, dtype)
    stored = {
        name: array if array.dtype.kind in "iu" else from_bits(to_bits(array, dtype), dtype)
        for name, array in weights.items()
    }
    return TinyCheckpoint(directory, config, stored)
