"""Qwen3.5, 3.6 and 3.8, dense or with experts: Qwen3-Next with separate input projections.

Files of these models have a vision tower, and the language model's keys are in `text_config`. The
engine runs the language model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.experts import with_shared_expert
from cpmcu.models.qwen3_next import build_hybrid, hybrid_names
from cpmcu.models.reader import ConfigReader, language_config
from cpmcu.models.registry import register_model

logger = logging.getLogger(__name__)


@register_model("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", names=hybrid_names)
def build_qwen3_5(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = language_config(config)
    if config.get("num_experts"):
        raise ConfigReader(config).fail("num_experts", "0 in a model of this architecture")
    return _build(config, options)


@register_model("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", names=hybrid_names)
def build_qwen3_5_moe(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Every layer has experts. Raises ValueError for a config that the engine cannot run."""
    config = language_config(config)
    reader = ConfigReader({**config, "norm_topk_prob": True})
    width = reader.positive_int("moe_intermediate_size")
    fields = _build({"intermediate_size": width, **config}, options)
    return with_shared_expert(fields, reader, range(fields.num_hidden_layers))


def _build(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    if config.get("vision_config"):
        logger.info("vision_config is ignored: text alone is read, and model.visual.* not loaded")
    return build_hybrid(config, options, fused_projections=False)
