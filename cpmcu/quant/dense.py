"""No quantisation: dense weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.registry import DENSE, QuantPlan, quantised_tensors, register_quant


@register_quant("dense")
class Dense:
    """A checkpoint without quantization_config and without a quantised layer's tensors."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return not quant_config and not quantised_tensors(tensors)

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        return DENSE
