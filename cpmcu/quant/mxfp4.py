"""MXFP4 as gpt-oss stores it: experts alone, all of a layer in one tensor.

`experts.gate_up_proj_blocks` uint8 [E, 2 I, H / 32, 16] and `gate_up_proj_scales` uint8
[E, 2 I, H / 32]; `down_proj` likewise. A block has the codes of 32 k; rows of gate and of up
alternate. The name map of models with experts splits both by expert (cpmcu/models/experts.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.float_groups import FloatFormat, float_group_part
from cpmcu.quant.int4 import check_present, quantised_modules
from cpmcu.quant.parts import plan_parts
from cpmcu.quant.registry import QuantPlan, register_quant


@register_quant("mxfp4")
class Mxfp4:
    """Experts in MXFP4, all else in 16 bits."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return quant_config.get("quant_method") == "mxfp4"

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        check_present("mxfp4", tensors, "_blocks")
        modules = quantised_modules(tensors, "_blocks")
        return plan_parts(
            "mxfp4", tensors, [float_group_part(FloatFormat.MXFP4_BLOCKS, tensors, modules)]
        )
