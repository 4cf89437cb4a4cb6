"""Nemotron-H and Nemotron 3: each layer is one Mamba-2 block, attention, MLP or block of experts.

Attention has no RoPE. The MLP and the experts have a squared ReLU and no gate.

The step sizes of a Mamba-2 layer are clipped to time_step_limit. transformers 5.24 instead raises
the step sizes of a prompt to time_step_min, but not those of single tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.experts import expert_names, read_experts
from cpmcu.models.mamba2 import read_mamba
from cpmcu.models.names import Piece
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model
from cpmcu.models.rope import NO_ROTATION

# transformers' defaults of keys that a config.json may leave out.
DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "n_groups": 8,
    "conv_kernel": 4,
    "norm_topk_prob": True,
}
_MAMBA = {
    "num_heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "num_groups": "n_groups",
    "state_size": "ssm_state_size",
    "conv_kernel": "conv_kernel",
    "conv_bias": "use_conv_bias",
}
_KINDS = {
    "M": "mamba2",
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "*": "attention",
    "attention": "attention",
    "full_attention": "attention",
    "-": "mlp",
    "mlp": "mlp",
    "E": "moe",
    "moe": "moe",
}
_LAYER = re.compile(r"^(?P<layer>model\.layers\.(?P<index>\d+)\.)(?P<rest>.+)$")
# Block -> the engine's name of the norm before it, and of the mixer.
_PARTS = {
    "mamba2": ("input_layernorm.", "mamba."),
    "attention": ("input_layernorm.", "self_attn."),
    "mlp": ("post_attention_layernorm.", "mlp."),
    "moe": ("post_attention_layernorm.", "mlp."),
}
_NAMES = {
    "backbone.": "model.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
    ".mixer.shared_experts.": ".mixer.shared_expert.",
    ".mixer.gate.e_score_correction_bias": ".mixer.gate.correction_bias",
}


def nemotron_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    """Returns a tensor's names in Llama; none for the MTP head (drafters/mtp_layouts.py)."""
    if name.startswith("mtp."):
        return ()
    for own, engine in _NAMES.items():
        name = name.replace(own, engine, 1)
    found = _LAYER.match(name)
    if found and int(found["index"]) < len(fields.layers):
        ((kind, _),) = fields.layers[int(found["index"])]
        norm, mixer = _PARTS[kind]
        rest = found["rest"]
        if rest.startswith("norm."):
            name = found["layer"] + norm + rest.removeprefix("norm.")
        elif rest.startswith("mixer."):
            name = found["layer"] + mixer + rest.removeprefix("mixer.")
    return expert_names(name, fields)


@register_model("NemotronHForCausalLM", names=nemotron_names)
def build_nemotron_h(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = DEFAULTS | {key: value for key, value in config.items() if value is not None}
    reader = ConfigReader(config)
    for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        reader.refuse(key, "biases of projections are not supported")
    for key, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if config.get(key, only) != only:
            raise reader.fail(key, repr(only))
    kinds = _layer_kinds(reader)
    blocks: dict[str, tuple[str, Mapping[str, Any]]] = {"mlp": ("mlp", {"activation": "relu2"})}
    if "mamba2" in kinds:
        blocks["mamba2"] = ("mamba2", read_mamba(reader, _MAMBA))
    if "moe" in kinds:
        blocks["moe"] = ("moe", _experts(reader))
    eps = reader.positive_float("layer_norm_epsilon", default=1e-5)
    own = {
        "num_hidden_layers": len(kinds),
        "rms_norm_eps": eps,
        "rope_scaling": None,
        "rope_parameters": None,
        "partial_rotary_factor": 1.0,
    }
    fields = read_spec({**config, **own}, options)
    still = {"rope_inv_freq": (NO_ROTATION,) * (fields.head_dim // 2)}
    blocks["attention"] = ("attention", still)
    return replace(fields, layers=tuple((blocks[kind],) for kind in kinds))


def _layer_kinds(reader: ConfigReader) -> list[str]:
    key = next(
        (k for k in ("layers_block_type", "layer_types") if k in reader.config),
        "hybrid_override_pattern",
    )
    kinds = reader.config.get(key)
    known = isinstance(kinds, list | str) and all(
        isinstance(kind, str) and kind in _KINDS for kind in kinds
    )
    if not kinds or not known:
        raise reader.fail(
            key, "the kinds of the layers: mamba (M), attention (*), mlp (-), moe (E)"
        )
    return [_KINDS[kind] for kind in kinds]


def _experts(reader: ConfigReader) -> dict[str, Any]:
    if reader.positive_int("n_shared_experts", default=1) != 1:
        raise reader.fail("n_shared_experts", "1: more shared experts are not supported")
    width = reader.positive_int("moe_shared_expert_intermediate_size")
    if width % 8:
        raise reader.fail("moe_shared_expert_intermediate_size", "a multiple of 8")
    experts = read_experts(reader)
    return (
        experts
        | _groups(reader, experts)
        | _latent(reader)
        | {
            "activation": "relu2",
            "scoring": "sigmoid",
            "correction_bias": True,
            "norm_epsilon": 1e-20,
            "routing_factor": reader.positive_float("routed_scaling_factor", default=1.0),
            "shared_intermediate_size": width,
            "shared_expert_gate": False,
        }
    )


def _groups(reader: ConfigReader, experts: Mapping[str, Any]) -> dict[str, int]:
    """Returns the parameters of groups of experts; {}: all experts are candidates."""
    count = reader.positive_int("n_group", default=1)
    top_k = reader.positive_int("topk_group", default=1)
    if top_k > count:
        raise reader.fail("topk_group", f"at most n_group={count}")
    if top_k == count:
        return {}
    num_experts = experts["num_experts"]
    if num_experts % count or num_experts // count < 2:
        raise reader.fail("n_group", f"a divisor of {num_experts} experts, with two in each group")
    if num_experts // count * top_k < experts["top_k"]:
        raise reader.fail("topk_group", f"groups with at least {experts['top_k']} experts")
    return {"num_expert_groups": count, "top_k_groups": top_k}


def _latent(reader: ConfigReader) -> dict[str, int]:
    """The width of the experts, if it is not that of the hidden state."""
    if "moe_latent_size" not in reader.config:
        return {}
    width = reader.positive_int("moe_latent_size")
    if width % 8:
        raise reader.fail("moe_latent_size", "a multiple of 8")
    return {"latent_size": width}
