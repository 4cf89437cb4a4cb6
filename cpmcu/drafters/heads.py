"""What draft heads (EAGLE and its kin) share: they have some layers and lean on their target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cpmcu.drafters.registry import DraftFiles, TargetModel, Tensors
from cpmcu.loading.tensors import TensorMeta
from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.reader import ConfigReader
from cpmcu.models.rope import rope_from_config

WINDOW = 1024  # tokens
_ROPE_KEYS = (
    *("rope_theta", "rope_scaling", "rope_parameters"),
    *("max_position_embeddings", "original_max_position_embeddings"),
)
_SCALES = ("scale_emb", "scale_depth", "dim_model_base")


def head_fields(draft: DraftFiles, target: TargetModel) -> SpecFields:
    """The layers of a head: widths of its own config, rope and vocabulary of its target.

    Scales are 1. Raises ValueError if the head is made for another hidden size or has biases in
    its MLP.
    """
    ConfigReader(draft.config).refuse("mlp_bias", "a bias in the MLP is not supported")
    config = {k: v for k, v in draft.config.items() if k not in _ROPE_KEYS}
    config |= {k: target.config[k] for k in _ROPE_KEYS if k in target.config}
    config |= {"vocab_size": target.fields.vocab_size, "tie_word_embeddings": False}
    config.setdefault("rms_norm_eps", target.fields.rms_norm_eps)
    config.setdefault("head_dim", _head_dim(draft, target))
    reader = ConfigReader(config)
    hidden_size = reader.positive_int("hidden_size")
    if hidden_size != target.fields.hidden_size:
        raise ValueError(
            f"config.json: hidden_size is {hidden_size}, expected {target.fields.hidden_size}, "
            "the target's"
        )
    options = BuildOptions(device=target.device, max_model_len=target.max_model_len)
    tensors = draft.tensors
    fields = read_spec(
        {**config, "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None},
        options,
        qkv_bias=any(
            name.endswith(("_attn.q_proj.bias", "_attn.qkv_proj.bias")) for name in tensors
        ),
        qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in tensors),
    )
    if fields.head_dim == target.fields.head_dim:
        return replace(
            fields,
            rope_inv_freq=target.fields.rope_inv_freq,
            rope_attention_scaling=target.fields.rope_attention_scaling,
        )
    length = target.max_model_len or target.fields.max_position_embeddings
    rope = rope_from_config(config, fields.head_dim, length)
    return replace(
        fields,
        rope_inv_freq=tuple(rope.inv_freq.tolist()),
        rope_attention_scaling=rope.attention_scaling,
    )


def check_vocabulary(draft: DraftFiles, target: TargetModel) -> None:
    """Raises ValueError if config.json states another vocabulary than the target's."""
    found = draft.config.get("vocab_size")
    if found is not None and found != target.fields.vocab_size:
        raise ValueError(
            f"config.json: vocab_size is {found}, expected {target.fields.vocab_size}, the target's"
        )


def check_scales(draft: DraftFiles, target: TargetModel) -> None:
    """Raises ValueError if config.json states another muP scale than the target's."""
    for key in _SCALES:
        found, expected = draft.config.get(key), target.config.get(key, 1.0)
        if found is not None and found != expected:
            raise ValueError(f"config.json: {key} is {found}, expected {expected}, the target's")


def residual_scale(config: Mapping[str, Any], draft: DraftFiles, target: TargetModel) -> float:
    """scale_depth / sqrt(mup_denominator), or of the target's layers and one more; 1 without muP.

    `config` is the one that says scale_depth: the draft's or the target's.
    """
    if config.get("scale_depth") is None:
        return 1.0
    denominator = ConfigReader(draft.config).positive_float(
        "mup_denominator", default=target.fields.num_hidden_layers + 1
    )
    return ConfigReader(config).positive_float("scale_depth") / math.sqrt(denominator)


def refuse_quantised_head(tensors: Tensors) -> None:
    """Raises ValueError for a head of its own that the file has quantised."""
    for name in tensors:
        if name.endswith(("lm_head.qweight", "lm_head.weight_packed")):
            raise ValueError(f"{name} is there, expected a draft's lm_head to be dense")


def copies_of_target(tensors: Tensors, *suffixes: str) -> dict[str, str]:
    """The tensors that end so -> why they are not needed."""
    return {
        name: "the target's is used"
        for name in tensors
        if any(name == suffix or name.endswith("." + suffix) for suffix in suffixes)
    }


def draft_vocab_ids(draft: DraftFiles, d2t: str, target: TargetModel) -> list[int]:
    """Draft id -> target id, of the tensor called `d2t`: target id = draft id + d2t[draft id].

    Raises ValueError for ids that the target does not have or a config that says otherwise.
    """
    vocab_size = target.fields.vocab_size
    stated = draft.config.get("vocab_size")
    smaller = draft.config.get("draft_vocab_size")
    if stated is not None and smaller is not None and stated != vocab_size:
        raise ValueError(
            f"config.json: vocab_size is {stated}, expected {vocab_size}, the target's"
        )
    meta = draft.tensors[d2t]
    if meta.dtype not in ("int32", "int64") or len(meta.shape) != 1:
        raise ValueError(
            f"{d2t} is {meta.dtype} {list(meta.shape)}, expected int32 or int64 [drafted tokens]"
        )
    offsets = np.asarray(draft.checkpoint.read(d2t)).astype(np.int64)
    ids = offsets + np.arange(offsets.size)
    if not offsets.size or ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"d2t leads to token ids {ids.min() if ids.size else 0} to "
            f"{ids.max() if ids.size else 0}, expected ids of the target, 0 to {vocab_size - 1}"
        )
    return [int(i) for i in ids]


def check_own_head(head: TensorMeta, vocab_ids: Sequence[int], target: TargetModel) -> None:
    """Raises ValueError if a draft's lm_head has not a row for each token that it drafts."""
    expected = len(vocab_ids) or target.fields.vocab_size
    if head.shape[:1] != (expected,):
        raise ValueError(
            f"lm_head.weight has {head.shape[0] if head.shape else 0} rows, expected {expected}, "
            f"{'as d2t has entries' if vocab_ids else 'the vocabulary of the target'}"
        )


def _head_dim(draft: DraftFiles, target: TargetModel) -> int:
    """Of a config that does not say: what its q_proj has, else hidden_size / heads."""
    reader = ConfigReader(draft.config)
    heads = reader.positive_int("num_attention_heads")
    for name, meta in draft.tensors.items():
        if name.endswith("self_attn.q_proj.weight") and meta.shape and meta.shape[0] % heads == 0:
            return max(1, meta.shape[0] // heads)
    return reader.positive_int("hidden_size") // heads
