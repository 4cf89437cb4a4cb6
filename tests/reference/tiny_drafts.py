"""Writes tiny random drafts for a tiny target, in each format that the package reads.

target = write_tiny(tmp_path / "target", "llama")
draft = write_draft(tmp_path / "draft", "eagle3", target)
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.tiny_blocks import BLOCKS, block
from tests.reference.tiny_checkpoints import (
    EXPERTS,
    MINICPM_SCALES,
    Array,
    TinyCheckpoint,
    random_weights,
    write_safetensors,
)

Weights = dict[str, Array]


def write_draft(
    directory: Path,
    kind: str,
    target: TinyCheckpoint,
    *,
    seed: int = 1,
    dtype: str = "float32",
    drop: tuple[str, ...] = (),
    extra: Mapping[str, Array] | None = None,
    **overrides: Any,
) -> TinyCheckpoint:
    """Writes config.json and model.safetensors of a draft of one of KINDS.

    `overrides` change the config (None removes a key), `drop` and `extra` the tensors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config, weights = KINDS[kind](target, seed)
    config |= {"torch_dtype": dtype} | overrides
    config = {key: value for key, value in config.items() if value is not None}
    for name in drop:
        del weights[name]
    weights |= dict(extra or {})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    write_safetensors(directory / "model.safetensors", weights, dtype)
    return TinyCheckpoint(directory, config, weights)


def _head_config(target: TinyCheckpoint, architecture: str) -> dict[str, Any]:
    return _dense_config(target) | {"architectures": [architecture]}


def _dense_config(target: TinyCheckpoint) -> dict[str, Any]:
    """The target's config with one layer; a head has no experts."""
    config = {key: value for key, value in target.config.items() if key not in EXPERTS}
    as_llama = ("lfm2", "lfm3", "nemotron_h")
    if config["model_type"].endswith("_moe") or config["model_type"] in as_llama:
        config["model_type"] = "llama"
    if "mamba" in (config.get("layer_types") or ()):  # Granite 4
        config |= {"model_type": "llama", "layer_types": None}
    return {**config, "num_hidden_layers": 1, "tie_word_embeddings": False}


def _layer(target: TinyCheckpoint, seed: int) -> Weights:
    """One layer's tensors, `self_attn.q_proj.weight` and so on."""
    config = _dense_config(target)
    prefix = "model.layers.0."
    weights = random_weights(config, seed)
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def _table(target: TinyCheckpoint) -> Array:
    weights = target.weights
    name = "model.embed_tokens.weight"
    return weights[name if name in weights else "backbone.embeddings.weight"]


def _matrix(rows: int, columns: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)


def _norm(size: int, seed: int) -> Array:
    return np.random.default_rng(seed).uniform(0.5, 1.5, size).astype(np.float32)


def eagle(target: TinyCheckpoint, seed: int) -> tuple[dict[str, Any], Weights]:
    """Returns an EAGLE head in the original format."""
    hidden = target.config["hidden_size"]
    weights = {
        "embed_tokens.weight": _table(target),
        "fc.weight": _matrix(hidden, 2 * hidden, seed + 100),
    }
    for name, array in _layer(target, seed).items():
        if name != "input_layernorm.weight":
            weights["layers.0." + name] = array
    return _head_config(target, "LlamaForCausalLM"), weights


def eagle_bias(target: TinyCheckpoint, seed: int) -> tuple[dict[str, Any], Weights]:
    """Returns an EAGLE head in the original format, with a bias in fc."""
    config, weights = eagle(target, seed)
    bias = np.random.default_rng(seed + 200).standard_normal(target.config["hidden_size"])
    weights["fc.bias"] = bias.astype(np.float32)
    return config, weights


def minicpm_eagle(target: TinyCheckpoint, seed: int) -> tuple[dict[str, Any], Weights]:
    """MiniCPM4's format with the names of CPM.cu."""
    config, weights = eagle(target, seed)
    hidden = target.config["hidden_size"]
    weights["layers.0.input_layernorm.weight"] = _layer(target, seed)["input_layernorm.weight"]
    weights["input_norm1.weight"] = _norm(hidden, seed + 300)
    weights["input_norm2.weight"] = _norm(hidden, seed + 400)
    return config | {"architectures": ["MiniCPMForCausalLM"]}, weights


def minicpm_eagle_hf(target: TinyCheckpoint, seed: int) -> tuple[dict[str, Any], Weights]:
    """MiniCPM4's format on Hugging Face, with copies of the target's tables."""
    _, native = minicpm_eagle(target, seed)
    weights = {
        "model." + name.replace("layers.", "eagle_layers."): array for name, array in native.items()
    }
    weights["model.norm.weight"] = _norm(target.config["hidden_size"], seed + 500)
    table = _table(target)
    weights["lm_head.weight"] = target.weights.get("lm_head.weight", table)
    return _head_config(target, "EagleMiniCPMForCausalLM"), weights


def eagle3(target: TinyCheckpoint, seed: int) -> tuple[dict[str, Any], Weights]:
    """EAGLE-3 with its own head and half of the target's vocabulary."""
    hidden, vocab = target.config["hidden_size"], target.config["vocab_size"]
    size = vocab // 2
    chosen = np.sort(np.random.default_rng(seed).choice(vocab, size, replace=False))
    weights: Weights = {
        "d2t": chosen - np.arange(size),
        "t2d": np.isin(np.arange(vocab), chosen).astype(np.int32),
        "fc.weight": _matrix(hidden, 3 * hidden, seed + 100),
        "midlayer.hidden_norm.weight": _norm(hidden, seed + 300),
        "norm.weight": _norm(hidden, seed + 400),
        "lm_head.weight": _matrix(size, hidden, seed + 500),
    }
    for i, (name, array) in enumerate(_layer(target, seed).items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            array = _matrix(array.shape[0], 2 * hidden, seed + 600 + i)
        weights["midlayer." + name] = array
    config = _head_config(target, "LlamaForCausalLMEagle3") | {"draft_vocab_size": size}
    return {key: value for key, value in config.items() if key not in MINICPM_SCALES}, weights


def eagle3_shared(target: TinyCheckpoint, seed: int) -> tuple[dict[str, Any], Weights]:
    """EAGLE-3 with the target's head and vocabulary and the recycled state of 3.1."""
    config, weights = eagle3(target, seed)
    for name in ("d2t", "t2d", "lm_head.weight"):
        del weights[name]
    return config | {"draft_vocab_size": target.config["vocab_size"], "norm_output": True}, weights


def model(target: TinyCheckpoint, seed: int) -> tuple[dict[str, Any], Weights]:
    """A language model with one layer."""
    config = {**target.config, "num_hidden_layers": 1}
    return config, random_weights(config, seed)


def itself(target: TinyCheckpoint, seed: int) -> tuple[dict[str, Any], Weights]:
    """The target itself."""
    return dict(target.config), dict(target.weights)


def noisy(target: TinyCheckpoint, seed: int) -> tuple[dict[str, Any], Weights]:
    """The target with noise on every weight: some drafted tokens are right."""
    rng = np.random.default_rng(seed)
    weights = {
        name: (array + 0.12 * array.std() * rng.standard_normal(array.shape)).astype(np.float32)
        for name, array in target.weights.items()
    }
    return dict(target.config), weights


KINDS: dict[str, Callable[[TinyCheckpoint, int], tuple[dict[str, Any], Weights]]] = {
    "eagle": eagle,
    "eagle_bias": eagle_bias,
    "minicpm_eagle": minicpm_eagle,
    "minicpm_eagle_hf": minicpm_eagle_hf,
    "eagle3": eagle3,
    "eagle3_shared": eagle3_shared,
    "model": model,
    "itself": itself,
    "noisy": noisy,
    **{kind: functools.partial(block, kind) for kind in BLOCKS},
    "dspark_gated": functools.partial(block, "dspark", markov_head_type="gated"),
    "dspark_rnn": functools.partial(block, "dspark", markov_head_type="rnn"),
}
HEADS = tuple(kind for kind in KINDS if "eagle" in kind)
