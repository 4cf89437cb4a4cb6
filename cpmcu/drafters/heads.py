"""Code shared by draft heads (EAGLE, EAGLE-3): their layers, and tensors taken from the target."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.drafters.registry import DraftFiles, TargetModel, Tensors
from cpmcu.loading.tensors import FLOAT_DTYPES, Checkpoint, TensorMeta
from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import find_model
from cpmcu.models.rope import Float32Array, rope_from_config, rope_parameters

logger = logging.getLogger(__name__)

WINDOW = 1024  # default window of a head, in KV entries
OF_TARGET = "the target's tensor is used"
EMBEDDING = "model.embed_tokens.weight"
COMPARED_ROWS = 16  # rows of each table that are compared
ROUNDING = 0.01  # relative distance of rows; rounding to a supported dtype changes less
_ORIGINAL = "original_max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_LENGTH_KEYS = ("max_position_embeddings", _ORIGINAL)
_SCALES = ("scale_emb", "scale_depth", "dim_model_base")
_GRANITE = "embedding_multiplier"


def head_fields(
    draft: DraftFiles, target: TargetModel, unstated_rope: Mapping[str, Any] | None = None
) -> SpecFields:
    """The fields of a head's layers: widths and RoPE of its config, vocabulary of its target.

    `unstated_rope`: RoPE keys for a config without any; None: the target's. Scales are 1. Raises
    ValueError if the head has another hidden size than the target or a bias in its MLP.
    """
    ConfigReader(draft.config).refuse("mlp_bias", "a bias in the MLP is not supported")
    config = {
        k: v for k, v in draft.config.items() if k not in (*_ROPE_KEYS, *_LENGTH_KEYS, _PARTIAL)
    }
    config |= {k: target.config[k] for k in _LENGTH_KEYS if k in target.config}
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
        config,
        options,
        qkv_bias=any(
            name.endswith(("_attn.q_proj.bias", "_attn.qkv_proj.bias")) for name in tensors
        ),
        qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in tensors),
    )
    return _with_rope(fields, _own_rope(draft, target) or unstated_rope, target)


def _own_rope(draft: DraftFiles, target: TargetModel) -> dict[str, Any]:
    """RoPE and length keys of a head's config; empty if it has no RoPE keys."""
    rope = {k: draft.config[k] for k in _ROPE_KEYS if draft.config.get(k) not in (None, {})}
    if not rope:
        return {}
    lengths = {
        key: config[key]
        for config in (target.config, draft.config)
        for key in _LENGTH_KEYS
        if config.get(key) is not None
    }
    if draft.config.get(_PARTIAL) is not None:
        rope[_PARTIAL] = draft.config[_PARTIAL]
    if _ORIGINAL in rope_parameters(rope) and draft.config.get(_ORIGINAL) is None:
        lengths.pop(_ORIGINAL, None)  # else it would override the head's
    return lengths | rope


def _with_rope(
    fields: SpecFields, own: Mapping[str, Any] | None, target: TargetModel
) -> SpecFields:
    """The fields with the RoPE of `own`, or with the target's if both are equal."""
    length = target.max_model_len or target.fields.max_position_embeddings

    def angles(config: Mapping[str, Any]) -> tuple[tuple[float, ...], float]:
        rope = rope_from_config(config, fields.head_dim, length)
        return tuple(rope.inv_freq.tolist()), rope.attention_scaling

    if own is not None and angles(own) != angles(target.config):
        inv_freq, scaling = angles(own)
    elif (
        fields.head_dim == target.fields.head_dim
    ):  # BuildOptions may have changed the target's RoPE
        inv_freq, scaling = target.fields.rope_inv_freq, target.fields.rope_attention_scaling
    else:
        inv_freq, scaling = angles(target.config)
    return replace(fields, rope_inv_freq=inv_freq, rope_attention_scaling=scaling)


def is_scaled(config: Mapping[str, Any]) -> bool:
    """Does a config.json have muP scales, like MiniCPM's?"""
    return any(config.get(key) is not None for key in _SCALES)


def check_vocabulary(draft: DraftFiles, target: TargetModel) -> None:
    """Raises ValueError if config.json has another vocab_size than the target."""
    found = draft.config.get("vocab_size")
    if found is not None and found != target.fields.vocab_size:
        raise ValueError(
            f"config.json: vocab_size is {found}, expected {target.fields.vocab_size}, the target's"
        )


def check_scales(draft: DraftFiles, target: TargetModel) -> None:
    """Raises ValueError if config.json has another muP scale than the target, or Granite's."""
    for found in (draft.config.get(_GRANITE), target.config.get(_GRANITE)):
        if found not in (None, 1):
            raise ValueError(
                f"config.json: {_GRANITE} is {found}, expected 1: which scales the head of a "
                "Granite model has is not known; draft with n-grams or a smaller Granite model"
            )
    for key in _SCALES:
        found, expected = draft.config.get(key), target.config.get(key, 1.0)
        if found is not None and found != expected:
            raise ValueError(f"config.json: {key} is {found}, expected {expected}, the target's")


def residual_scale(config: Mapping[str, Any], draft: DraftFiles, target: TargetModel) -> float:
    """scale_depth / sqrt(mup_denominator); 1 if `config` has no scale_depth.

    `config`: the draft's or the target's config.json. The default of mup_denominator is the number
    of the target's layers plus 1.
    """
    if config.get("scale_depth") is None:
        return 1.0
    denominator = ConfigReader(draft.config).positive_float(
        "mup_denominator", default=target.fields.num_hidden_layers + 1
    )
    return ConfigReader(config).positive_float("scale_depth") / math.sqrt(denominator)


def refuse_quantised_head(tensors: Tensors) -> None:
    """Raises ValueError if the draft's own lm_head is quantised."""
    for name in tensors:
        if name.endswith(("lm_head.qweight", "lm_head.weight_packed")):
            raise ValueError(f"{name} is present, expected a draft's lm_head to be dense")


def copies_of_target(
    draft: DraftFiles, target: TargetModel, table: str, name: str
) -> dict[str, str]:
    """The draft's tensors `name` [V, H] -> reason to ignore them: the target's `table` is used.

    Warns if the values differ from the target's. Raises ValueError if the shapes differ.
    """
    ignored = {}
    for found in draft.tensors:
        if found == name or found.endswith("." + name):
            if not is_copy(draft, found, target, table):
                logger.warning(
                    "%s of the draft differs from the target's, which is used: fewer drafted "
                    "tokens may be accepted",
                    found,
                )
            ignored[found] = OF_TARGET
    return ignored


def head_table(target: TargetModel) -> str:
    """The engine's name of the target's lm_head."""
    tied = target.fields.tie_word_embeddings
    return EMBEDDING if tied else "lm_head.weight"


def is_copy(draft: DraftFiles, name: str, target: TargetModel, table: str) -> bool:
    """Is a tensor of the draft [V, H] equal to the target's `table`, up to rounding?

    `table` is the engine's name. COMPARED_ROWS rows are compared. If the target's tensor is not
    available, returns True. Raises ValueError for another shape.
    """
    meta, shape = draft.tensors[name], (target.fields.vocab_size, target.fields.hidden_size)
    if meta.shape != shape:
        raise ValueError(
            f"{name} has shape {list(meta.shape)}, expected {list(shape)}, the target's"
        )
    stored = _stored_name(target, table)
    if target.checkpoint is None or stored is None or meta.dtype not in FLOAT_DTYPES:
        return True
    ids = (2 * np.arange(COMPARED_ROWS) + 1) * shape[0] // (2 * COMPARED_ROWS)
    found, expected = _rows(draft.checkpoint, name, ids), _rows(target.checkpoint, stored, ids)
    distance = np.linalg.norm(found - expected, axis=1)
    return bool(np.all(distance <= ROUNDING * np.linalg.norm(expected, axis=1)))


def _stored_name(target: TargetModel, table: str) -> str | None:
    """The name in the target's checkpoint; None if it has no such floating-point tensor."""
    if target.checkpoint is None:
        return None
    names, shape = find_model(target.config).names, (target.fields.vocab_size,)
    for name, stored in target.checkpoint.tensors.items():
        pieces = names(name, target.fields)
        if [piece.name for piece in pieces] == [table] and stored.meta.shape[:1] == shape:
            return name if stored.meta.dtype in FLOAT_DTYPES else None
    return None


def _rows(checkpoint: Checkpoint, name: str, ids: npt.NDArray[np.int64]) -> Float32Array:
    rows = checkpoint.read(name)[ids]
    if checkpoint.tensors[name].meta.dtype == "bfloat16":
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32)


def draft_vocab_ids(draft: DraftFiles, d2t: str, target: TargetModel) -> list[int]:
    """Draft id -> target id from the tensor `d2t`: target id = draft id + d2t[draft id].

    Raises ValueError for ids outside the target's vocabulary, repeated ids, and a config.json with
    other sizes.
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
    if len(np.unique(ids)) != len(ids):
        raise ValueError(f"{d2t} leads to some token ids twice, expected each token once")
    if smaller not in (None, len(ids)):
        raise ValueError(
            f"config.json: draft_vocab_size is {smaller}, expected {len(ids)}, the entries of {d2t}"
        )
    return [int(i) for i in ids]


def check_own_head(head: TensorMeta, vocab_ids: Sequence[int], target: TargetModel) -> None:
    """Raises ValueError unless a draft's lm_head has one row per drafted token."""
    expected = len(vocab_ids) or target.fields.vocab_size
    if head.shape[:1] != (expected,):
        raise ValueError(
            f"lm_head.weight has {head.shape[0] if head.shape else 0} rows, expected {expected}, "
            f"{'as d2t has entries' if vocab_ids else 'the vocabulary of the target'}"
        )


def _head_dim(draft: DraftFiles, target: TargetModel) -> int:
    """head_dim for a config without it: from the shape of q_proj, else hidden_size / heads."""
    reader = ConfigReader(draft.config)
    heads = reader.positive_int("num_attention_heads")
    for name, meta in draft.tensors.items():
        if name.endswith("self_attn.q_proj.weight") and meta.shape and meta.shape[0] % heads == 0:
            return max(1, meta.shape[0] // heads)
    return reader.positive_int("hidden_size") // heads
