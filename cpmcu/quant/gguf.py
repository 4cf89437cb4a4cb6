"""The quantised tensors of a GGUF file that stay as they are (cpmcu/loading/gguf/blocks.py).

The loader gives them names, dtypes and shapes of other formats, and their numbers stay exact. So
the parts are those of these formats.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.float_groups import FloatFormat, float_group_part
from cpmcu.quant.fp8 import modules_of
from cpmcu.quant.int4 import Format, int4_part, quantised_modules
from cpmcu.quant.int8 import Int8Format, int8_part
from cpmcu.quant.parts import Part, plan_parts
from cpmcu.quant.registry import LinearOptions, QuantPlan, register_quant

_GROUP = 32  # values that share a scale in a block of integers
_RECORDS = (".weight_records", ".weight_half_records")


@register_quant("gguf")
class Gguf:
    """The types of cpmcu/loading/gguf/blocks.py; the loader decodes all others."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return quant_config.get("quant_method") == "gguf"

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        k_quants = {m for name in _RECORDS for m in quantised_modules(tensors, name)}
        packed = [m for m in quantised_modules(tensors, ".weight_packed") if m not in k_quants]
        integers = [m for m in packed if tensors[m + ".weight_packed"].dtype == "int32"]
        mxfp4 = [m for m in packed if m not in set(integers)]
        nvfp4 = modules_of(tensors, "uint8")
        int8 = [m for m in modules_of(tensors, "int8") if m not in k_quants]
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
        parts += _k_quant_parts(tensors, k_quants)
        return plan_parts("gguf", tensors, parts)


def _k_quant_parts(tensors: Mapping[str, TensorMeta], modules: Collection[str]) -> list[Part]:
    """Parts with formats of csrc/linear/k_quant_tensors.cpp, which follow from the tensors."""
    by_format: dict[str, list[str]] = {}
    for module in sorted(modules):
        by_format.setdefault(_k_quant_format(tensors, module), []).append(module)
    return [
        Part(its, LinearOptions(layout="k_quants", format=name), f"K-quants ({name})")
        for name, its in by_format.items()
    ]


def _k_quant_format(tensors: Mapping[str, TensorMeta], module: str) -> str:
    halves = f"{module}.weight_half_records" in tensors
    of_min = f"{module}.weight_half_min_records" if halves else f"{module}.weight_min_records"
    if f"{module}.weight_packed" in tensors:
        kind = "k4"
    else:
        kind = "k8_min" if of_min in tensors else "k8"
    return kind + ("_halves" if halves else "")
