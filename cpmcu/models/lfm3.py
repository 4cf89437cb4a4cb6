"""LFM3: LFM2 with norms after blocks, gates of heads, and windows in some attention layers.

A sigmoid of `g_proj` multiplies the output of each attention head. Layers with windows have RoPE
parameters of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.lfm2 import conv_kernel, lfm2_names
from cpmcu.models.names import Piece
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model
from cpmcu.models.rope import rope_by_kind

# transformers' defaults of keys that a config.json may leave out.
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "sliding_window": 256,
}
DEFAULT_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
}
KINDS = ("conv", "sliding_attention", "full_attention")


def lfm3_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    """LFM2's names; post_operator_norm and post_ffn_norm are norms of outputs."""
    name = name.replace(".post_ffn_norm.", ".mlp_output_norm.")
    if ".post_operator_norm." in name:
        layer = name.removeprefix("model.layers.").partition(".")[0]
        if layer.isdecimal() and int(layer) < len(fields.layers):
            kind = fields.layers[int(layer)][0][0]
            name = name.replace(".post_operator_norm.", f".{kind}_output_norm.")
    return lfm2_names(name, fields)


@register_model("Lfm3ForCausalLM", names=lfm3_names)
def build_lfm3(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = {**DEFAULTS, **config}
    if not config.get("rope_parameters"):
        config["rope_parameters"] = DEFAULT_ROPE
    reader = ConfigReader(config)
    reader.refuse("attention_bias", "a bias on all four attention projections is not supported")
    config["rms_norm_eps"] = reader.positive_float("norm_eps", default=1e-5)
    of_kind = rope_by_kind(config, KINDS[1:])
    sliding, full = (read_spec(of_kind[kind], options, qk_norm=True) for kind in KINDS[1:])
    norms = {"output_norm": reader.flag("use_sandwich_norm", default=True)}
    attention = norms | {"head_gate": reader.flag("use_attention_gate", default=True)}
    window = reader.positive_int("sliding_window")
    own: dict[str, Any] = {
        "window": window,
        "rope_inv_freq": sliding.rope_inv_freq,
        "rope_attention_scaling": sliding.rope_attention_scaling,
    }
    if window >= (options.max_model_len or full.max_position_embeddings):
        del own["window"]
    mixers: dict[str, tuple[str, Mapping[str, Any]]] = {
        "conv": ("short_conv", norms | {"conv_kernel": conv_kernel(reader, default=7)}),
        "sliding_attention": ("attention", attention | own),
        "full_attention": ("attention", attention),
    }
    kinds = _layer_kinds(reader, full.num_hidden_layers)
    return replace(full, layers=tuple((mixers[kind], ("mlp", norms)) for kind in kinds))


def _layer_kinds(reader: ConfigReader, num_layers: int) -> list[str]:
    kinds = reader.config.get("layer_types")
    if kinds is None:
        attention = {2: "full_attention", 0: "sliding_attention"}
        return [attention.get(i % 4, "conv") if i > 0 else "conv" for i in range(num_layers)]
    known = isinstance(kinds, list) and all(kind in KINDS for kind in kinds)
    if not known or len(kinds) != num_layers:
        raise reader.fail("layer_types", f"{num_layers} of {', '.join(KINDS)}")
    return list(kinds)
