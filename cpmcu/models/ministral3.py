"""Ministral 3 and Mistral 3: Llama, whose queries grow with the position in long texts.

A query at position p is multiplied by 1 + beta * ln(1 + floor(p / length)), where beta is
`llama_4_scaling_beta` and length `original_max_position_embeddings`. If a file has a vision tower,
`text_config` holds the keys of the language model. The engine runs only the language model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cpmcu.models.common import (
    BuildOptions,
    SpecFields,
    read_spec,
    with_attention,
    with_windows,
)
from cpmcu.models.names import Piece, canonical_names
from cpmcu.models.reader import ConfigReader, language_config
from cpmcu.models.registry import register_model
from cpmcu.models.rope import rope_parameters

# transformers' defaults of keys that a config.json may leave out.
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "sliding_window": None}
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_NOT_OF_THE_TEXT = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


def text_names(name: str, fields: SpecFields) -> Sequence[Piece]:
    """Returns Llama's names of a language model's tensor; none for the vision tower's tensors."""
    if name.startswith(_NOT_OF_THE_TEXT):
        return ()
    for prefix, llama in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            name = llama + name.removeprefix(prefix)
            break
    return canonical_names(name, fields)


@register_model("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration", names=text_names)
def build_ministral3(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = language_config(config)
    is_ministral = config.get("model_type") == "ministral3"
    config = {**DEFAULTS, **config}
    if is_ministral and not rope_parameters(config):
        config["rope_parameters"] = DEFAULT_ROPE
    fields = with_windows(read_spec(config, options), config, options)
    rope = ConfigReader(rope_parameters(config), "config.json: rope_parameters")
    if rope.config.get("llama_4_scaling_beta") is None:
        return fields
    params = {
        "query_scale_beta": rope.positive_float("llama_4_scaling_beta"),
        "query_scale_length": rope.positive_int("original_max_position_embeddings"),
    }
    return with_attention(fields, [params] * fields.num_hidden_layers)
