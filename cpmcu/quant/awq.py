"""AWQ in AutoAWQ's format "gemm": zero points, groups of 16 to 128, or channel-wise scales.

`qweight` int32 [K, N / 8], `qzeros` int32 [G, N / 8] and `scales` [G, N] for each linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.checks import shown
from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.int4 import (
    GROUP_SIZES,
    Format,
    check_bits,
    check_group_size,
    check_present,
    int4_part,
    quantised_modules,
)
from cpmcu.quant.parts import plan_parts
from cpmcu.quant.registry import QuantPlan, quant_config_of, register_quant


@register_quant("awq")
class Awq:
    """4-bit AWQ."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return quant_config.get("quant_method") == "awq"

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        quant = quant_config_of(config)
        check_present("awq", tensors, ".qweight")
        check_bits(quant.get("bits", quant.get("w_bit")), 4)
        group_size = check_group_size(
            quant.get("group_size", quant.get("q_group_size")), GROUP_SIZES[4]
        )
        version = str(quant.get("version", "gemm")).lower()
        if version != "gemm":
            raise ValueError(f"quantization_config: version is {shown(version)}, expected 'gemm'")
        if quant.get("zero_point", True) is not True:
            raise ValueError("quantization_config: zero_point is false, expected true")
        modules = quantised_modules(tensors, ".qweight")
        part = int4_part(Format.AWQ, tensors, modules, group_size=group_size, zero_points=True)
        return plan_parts("awq", tensors, [part])
