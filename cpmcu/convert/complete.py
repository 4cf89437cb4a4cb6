"""Checks the tensors of a checkpoint against its config.json before a conversion writes files.

Shapes are those of dense matrices, [outputs, inputs], in any storage format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.loading.progress import list_names
from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.names import canonical_names
from cpmcu.models.reader import ConfigReader

Shape = tuple[int, ...]

# Keys that read_spec requires and that a head takes from its target.
_OF_THE_TARGET = {
    "vocab_size": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
}


def check_complete(
    found: Mapping[str, Shape], expected: Mapping[str, Shape], fields: SpecFields
) -> None:
    """Raises ValueError for missing tensors, else for the first tensor with a wrong shape."""
    parts = _split(found, fields)
    missing = [name for name in expected if name not in parts]
    if missing:
        raise ValueError(
            f"{len(missing)} tensors are missing that config.json asks for: {list_names(missing)}"
        )
    for name, shape in expected.items():
        if parts[name] != shape:
            raise ValueError(
                f"{name} has shape {list(parts[name])}, expected {list(shape)} by config.json"
            )


def model_shapes(fields: SpecFields) -> dict[str, Shape]:
    """Returns the name and shape of each tensor of a model."""
    table = (fields.vocab_size, fields.hidden_size)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": table}
    for layer in range(fields.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes |= layer_shapes(fields, prefix, fields.hidden_size)
        shapes[f"{prefix}input_layernorm.weight"] = (fields.hidden_size,)
    shapes["model.norm.weight"] = (fields.hidden_size,)
    return shapes if fields.tie_word_embeddings else {**shapes, "lm_head.weight": table}


def head_shapes(fields: SpecFields, *, is_eagle3: bool) -> dict[str, Shape]:
    """Returns the shapes of an EAGLE or EAGLE-3 head's tensors but `fc`, by CPM.cu's names."""
    hidden = fields.hidden_size
    if is_eagle3:
        norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm")
        shapes: dict[str, Shape] = {f"{norm}.weight": (hidden,) for norm in norms}
        return shapes | layer_shapes(fields, "midlayer.", 2 * hidden)
    shapes = {}
    for layer in range(fields.num_hidden_layers):
        shapes |= layer_shapes(fields, f"layers.{layer}.", hidden)
        if layer > 0:  # the first layer has this norm only in MiniCPM4's heads
            shapes[f"layers.{layer}.input_layernorm.weight"] = (hidden,)
    return shapes


def layer_shapes(fields: SpecFields, prefix: str, num_inputs: int) -> dict[str, Shape]:
    """Returns the shapes of one layer's tensors by name, without the norm before attention."""
    hidden, inner, head_dim = fields.hidden_size, fields.intermediate_size, fields.head_dim
    q, kv = fields.num_attention_heads * head_dim, fields.num_key_value_heads * head_dim
    shapes: dict[str, Shape] = {
        f"{prefix}self_attn.q_proj.weight": (q, num_inputs),
        f"{prefix}self_attn.k_proj.weight": (kv, num_inputs),
        f"{prefix}self_attn.v_proj.weight": (kv, num_inputs),
        f"{prefix}self_attn.o_proj.weight": (hidden, q),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
    }
    if fields.qkv_bias:
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{prefix}self_attn.{part}_proj.bias"] = (rows,)
    if fields.qk_norm:
        for part in "qk":
            shapes[f"{prefix}self_attn.{part}_norm.weight"] = (head_dim,)
    return shapes


def head_fields(config: Mapping[str, Any], num_q_outputs: int | None) -> SpecFields:
    """The sizes of a draft head. If config.json has no head_dim, it follows from q_proj."""
    config = {**config, **_OF_THE_TARGET, "tie_word_embeddings": False}
    if config.get("head_dim") is None and num_q_outputs:
        num_heads = ConfigReader(config).positive_int("num_attention_heads")
        config["head_dim"] = num_q_outputs // num_heads
    return read_spec(config, BuildOptions())


def _split(found: Mapping[str, Shape], fields: SpecFields) -> dict[str, Shape]:
    """Splits `qkv_proj` and `gate_up_proj`. Extra or missing rows belong to the last part."""
    parts: dict[str, Shape] = {}
    for name, shape in found.items():
        pieces = canonical_names(name, fields)
        for piece in pieces:
            rows = shape[:1]
            if piece.num_rows is not None and shape:
                is_last = piece is pieces[-1]
                rows = (shape[0] - piece.first_row if is_last else piece.num_rows,)
            parts[piece.name] = (*rows, *shape[1:])
    return parts
