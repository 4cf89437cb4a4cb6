"""Qwen3.5, 3.6 and 3.8 (dense): the layers of Qwen3-Next with separate input projections.

Files of these models have a vision tower, and the language model's keys are in `text_config`. The
engine runs the language model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields
from cpmcu.models.qwen3_next import build_hybrid, hybrid_names
from cpmcu.models.reader import ConfigReader, language_config
from cpmcu.models.registry import register_model

logger = logging.getLogger(__name__)


@register_model("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", names=hybrid_names)
def build_qwen3_5(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    config = language_config(config)
    if config.get("num_experts"):
        raise ConfigReader(config).fail("num_experts", "0: mixture of experts is not supported yet")
    if config.get("vision_config"):
        logger.info("vision_config is ignored: text alone is read, and model.visual.* not loaded")
    return build_hybrid(config, options, fused_projections=False)
