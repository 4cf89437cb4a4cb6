"""The quantised tensors of a GGUF file that stay as they are (cpmcu/loading/gguf/blocks.py).

They have names, dtypes and shapes of other formats, so the parts are those of these formats. Their
numbers are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.float_groups import FloatFormat, float_group_part
from cpmcu.quant.fp8 import modules_of
from cpmcu.quant.int4 import Format, int4_part, quantised_modules
from cpmcu.quant.int8 import Int8Format, int8_part
from cpmcu.quant.parts import Part, plan_parts
from cpmcu.quant.registry import QuantPlan, register_quant

_GROUP = 32  # values of a block of integers


@register_quant("gguf")
class Gguf:
    """Q4_0, Q8_0, IQ4_NL, MXFP4 and NVFP4; the loader decodes all other types."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return quant_config.get("quant_method") == "gguf"

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        packed = quantised_modules(tensors, ".weight_packed")
        integers = [m for m in packed if tensors[m + ".weight_packed"].dtype == "int32"]
        mxfp4 = [m for m in packed if m not in set(integers)]
        nvfp4, int8 = modules_of(tensors, "uint8"), modules_of(tensors, "int8")
        parts: list[Part] = []
        if integers:
            parts.append(
                int4_part(
                    Format.COMPRESSED, tensors, integers, group_size=_GROUP, zero_points=False
                )
            )
        if int8:
            parts.append(int8_part(Int8Format.PLAIN, tensors, int8, group_size=_GROUP))
        if mxfp4:
            parts.append(float_group_part(FloatFormat.MXFP4, tensors, mxfp4))
        if nvfp4:
            parts.append(float_group_part(FloatFormat.NVFP4_MODELOPT, tensors, nvfp4))
        return plan_parts("gguf", tensors, parts)
