"""OLMo 2 and 3: norms follow the blocks. The norms of q and k are over all heads together.

x = x + norm(attention(x)), x = x + norm(mlp(x)). In OLMo 3, layers with a window have plain RoPE.
The RoPE parameters of the config apply to layers with full attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, layer_kinds, read_spec, with_attention
from cpmcu.models.names import Piece, canonical_names
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model
from cpmcu.models.rope import rope_by_kind

DEFAULT_THETA = 500000.0
FULL_INTERVAL = 4  # without layer_types, every fourth layer of OLMo 3 has full attention
_OUTPUT_NORMS = {
    ".post_attention_layernorm.": ".attention_output_norm.",
    ".post_feedforward_layernorm.": ".mlp_output_norm.",
}


def olmo_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    """Renames the two post-norms to the engine's output norms."""
    for own, engine in _OUTPUT_NORMS.items():
        name = name.replace(own, engine)
    return canonical_names(name, fields)


@register_model("Olmo2ForCausalLM", names=olmo_names)
def build_olmo2(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    ConfigReader(config).refuse(
        "attention_bias", "a bias on all four attention projections is not supported"
    )
    fields = read_spec({"rope_theta": DEFAULT_THETA, **config}, options)
    norms = {"input_norm": False, "output_norm": True}
    layer = (("attention", norms | {"joint_qk_norm": True}), ("mlp", norms))
    return replace(fields, layers=(layer,) * fields.num_hidden_layers)


@register_model("Olmo3ForCausalLM", names=olmo_names)
def build_olmo3(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = {"rope_theta": DEFAULT_THETA, "sliding_window": 4096, **config}
    reader = ConfigReader(config)
    num_layers = reader.positive_int("num_hidden_layers")
    kinds = layer_kinds(reader, num_layers, FULL_INTERVAL)
    of_kind = rope_by_kind(config, ("sliding_attention", "full_attention"), unscaled="sliding_")
    fields = build_olmo2(of_kind["full_attention"], options)
    plain = build_olmo2(of_kind["sliding_attention"], options)
    window: dict[str, Any] = {
        "window": reader.positive_int("sliding_window"),
        "rope_inv_freq": plain.rope_inv_freq,
        "rope_attention_scaling": plain.rope_attention_scaling,
    }
    if window["window"] >= (options.max_model_len or fields.max_position_embeddings):
        del window["window"]
    return with_attention(fields, [window if kind[0] == "s" else {} for kind in kinds])
