"""MiniCPM 1 and 2, MiniCPM4 and 4.1: Llama with muP scales and, if enabled, sparse attention.

Embeddings are multiplied by scale_emb, the output of each attention and MLP by
scale_depth / sqrt(num_hidden_layers), and the head's input by dim_model_base / hidden_size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from cpmcu.models.common import BuildOptions, SpecFields, read_spec
from cpmcu.models.minicpm4_factors import EXTENDED_LENGTH, LONGROPE_FACTORS, ORIGINAL_LENGTH
from cpmcu.models.reader import ConfigReader
from cpmcu.models.registry import register_model
from cpmcu.models.rope import rope_parameters
from cpmcu.models.sparse import with_sparse_attention

logger = logging.getLogger(__name__)


@register_model("MiniCPMForCausalLM")
def build_minicpm(config: Mapping[str, Any], options: BuildOptions) -> SpecFields:
    """Raises ValueError for a config that the engine cannot run."""
    reader = ConfigReader(config)
    reader.refuse("attention_bias", "a bias on all four attention projections is not supported")
    if config.get("num_experts"):
        raise reader.fail("num_experts", "0: mixture-of-experts layers are not supported")
    if options.minicpm4_yarn:
        config = extend_context(config)
    num_layers = reader.positive_int("num_hidden_layers")
    fields = read_spec(
        config,
        options,
        embed_scale=reader.positive_float("scale_emb"),
        residual_scale=reader.positive_float("scale_depth") / math.sqrt(num_layers),
        logit_scale=(reader.positive_float("dim_model_base") / reader.positive_int("hidden_size")),
    )
    return with_sparse_attention(fields, config, options)


def extend_context(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with the published MiniCPM4 factors and 128K positions.

    If the config has other factors, as MiniCPM4.1 and 0.5B do, they stay. Raises ValueError if
    head_dim does not match the factors.
    """
    own = rope_parameters(config)
    if own.get("long_factor", list(LONGROPE_FACTORS)) != list(LONGROPE_FACTORS):
        logger.warning("minicpm4_yarn has no effect: config.json has other factors")
        return config
    hidden_size = ConfigReader(config).positive_int("hidden_size")
    num_heads = ConfigReader(config).positive_int("num_attention_heads")
    head_dim = config.get("head_dim") or hidden_size // num_heads
    if head_dim != 2 * len(LONGROPE_FACTORS):
        raise ValueError(
            f"minicpm4_yarn is for MiniCPM4-8B with head_dim {2 * len(LONGROPE_FACTORS)}, "
            f"config.json has head_dim {head_dim}"
        )
    scaling = {
        "rope_type": "longrope",
        "rope_theta": own.get("rope_theta") or config.get("rope_theta"),
        "long_factor": list(LONGROPE_FACTORS),
        "short_factor": list(LONGROPE_FACTORS),
        "original_max_position_embeddings": ORIGINAL_LENGTH,
        "attention_factor": 1.0,  # the factors were published for unscaled attention
    }
    rest = {key: value for key, value in config.items() if key != "rope_parameters"}
    return {**rest, "rope_scaling": scaling, "max_position_embeddings": EXTENDED_LENGTH}
