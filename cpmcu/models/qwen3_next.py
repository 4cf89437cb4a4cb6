"""Qwen3-Next: three layers with gated delta nets to one with gated attention.

Norms multiply by 1 + weight.

The layer of a gated delta net has a recurrent state of a fixed size instead of keys and values.
The state is float32, whatever `mamba_ssm_dtype` is. Qwen3.5 has the same layers (qwen3_5.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.experts import (
    expert_layers,
    expert_names,
    with_shared_expert,
)
from cpmcu.models.limits import MODEL_LIMITS
from cpmcu.models.names import Piece
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model

Params = Mapping[str, Any]

# transformers' defaults of keys that a config.json may leave out.
DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25}
DEFAULT_INTERVAL = 4  # layers from one full attention to the next
DEFAULT_EXPERTS = 512
MAX_HEADS = MODEL_LIMITS["num_attention_heads"][1]
CONV_KERNEL = 4  # equal to kConvTaps of csrc/kernels/delta_net/gated_delta_net.h
_KINDS = ("linear_attention", "full_attention")
_NOT_OF_THE_TARGET = ("mtp.", "model.visual.", "visual.")


def hybrid_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    """Returns a tensor's names in Llama; none for the MTP head and the vision tower."""
    if name.startswith(_NOT_OF_THE_TARGET):
        return ()
    return expert_names(name.replace("model.language_model.", "model.", 1), fields)


@register_model("Qwen3NextForCausalLM", names=hybrid_names)
def build_qwen3_next(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = {"num_experts": DEFAULT_EXPERTS, "norm_topk_prob": True, **config}
    fields = build_hybrid(config, options, fused_projections=True)
    reader = ConfigReader(config)
    layers = expert_layers(reader, fields.num_hidden_layers) if config["num_experts"] else []
    return with_shared_expert(fields, reader, layers)


def build_hybrid(
    config: Mapping[str, Any], options: BuildOptions, *, fused_projections: bool
) -> SpecFields:
    """The fields of a model of gated delta nets and gated attention, with an MLP in each layer.

    `fused_projections`: a delta net has the matrices `in_proj_qkvz` and `in_proj_ba`. Raises
    ValueError for a config that the engine cannot run.
    """
    reader = ConfigReader(config)
    reader.refuse("attention_bias", "a bias on all four attention projections is not supported")
    if config.get("output_gate_type") not in (None, "swish", "silu"):
        raise reader.fail("output_gate_type", "'swish', the gate of a delta net's output")
    stated = {key: value for key, value in config.items() if value is not None}
    fields = read_spec({**DEFAULTS, **stated}, options, qk_norm=True)
    delta_net = _delta_net(reader, fused_projections)
    attention = {"output_gate": True} if reader.flag("attn_output_gate", default=True) else {}
    mixers: dict[str, tuple[str, Params]] = {
        "linear_attention": ("gated_delta_net", delta_net),
        "full_attention": ("attention", attention),
    }
    kinds = _layer_kinds(reader, fields.num_hidden_layers)
    layers: tuple[tuple[tuple[str, Params], ...], ...] = tuple(
        (mixers[kind], ("mlp", {})) for kind in kinds
    )
    return replace(fields, zero_centred_norms=True, layers=layers)


def _delta_net(reader: ConfigReader, fused_projections: bool) -> Params:
    """The parameters of the block `gated_delta_net`."""
    num_key_heads = reader.positive_int("linear_num_key_heads", default=16, most=MAX_HEADS)
    num_value_heads = reader.positive_int("linear_num_value_heads", default=32, most=MAX_HEADS)
    if num_value_heads % num_key_heads:
        raise reader.fail(
            "linear_num_value_heads", f"a multiple of linear_num_key_heads={num_key_heads}"
        )
    if reader.positive_int("linear_conv_kernel_dim", default=CONV_KERNEL) != CONV_KERNEL:
        raise reader.fail(
            "linear_conv_kernel_dim", f"{CONV_KERNEL}, the only width that the engine has"
        )
    return {
        "num_key_heads": num_key_heads,
        "num_value_heads": num_value_heads,
        "key_head_dim": _head_dim(reader, "linear_key_head_dim"),
        "value_head_dim": _head_dim(reader, "linear_value_head_dim"),
        "conv_kernel": CONV_KERNEL,
        "fused_projections": fused_projections,
    }


def _head_dim(reader: ConfigReader, key: str) -> int:
    value = reader.positive_int(key, default=128, most=256)
    if value % 8:
        raise reader.fail(key, "a multiple of 8")
    return value


def _layer_kinds(reader: ConfigReader, num_layers: int) -> list[str]:
    """The kind of each layer: `layer_types`, else every `full_attention_interval`-th is full."""
    kinds = reader.config.get("layer_types")
    if kinds is None:
        interval = reader.positive_int("full_attention_interval", default=DEFAULT_INTERVAL)
        return [_KINDS[(layer + 1) % interval == 0] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise reader.fail("layer_types", f"a list of {num_layers} layer types")
    if others := sorted({str(kind) for kind in kinds} - set(_KINDS)):
        raise ValueError(
            f"{reader.where}: layer_types has {', '.join(others)}, expected only "
            f"{' or '.join(_KINDS)}"
        )
    return kinds
