"""CPM.cu's Marlin files: 4-bit symmetric weights in tiles, q, k, v and gate, up fused.

Each linear layer has `qweight` int32 [K / 16, 2 N] and `scales` [G, N] in Marlin's order.
config.json is that of the original GPTQ checkpoint, so only the shapes identify the format. An
EAGLE head's `fc` [2 H -> H] is stored as two matrices of H inputs side by side, [H / 16, 4 H].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.gptq import check_order, check_symmetric, refuse_order, stored_format
from cpmcu.quant.int4 import (
    CHANNEL_WISE,
    GROUP_SIZE,
    Format,
    check_bits,
    check_group_size,
    int4_part,
    is_marlin,
    quantised_modules,
)
from cpmcu.quant.parts import plan_parts
from cpmcu.quant.registry import Arrays, QuantPlan, Read, Repack, quant_config_of, register_quant

_METHODS = (None, "gptq", "gptq_marlin")


@register_quant("cpmcu-marlin")
class CpmcuMarlin:
    """The layout of vLLM's gptq_marlin, stored in a checkpoint."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return quant_config.get("quant_method") in _METHODS and is_marlin(tensors)

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        quant = quant_config_of(config)
        check_bits(quant.get("bits", 4), 4)
        group_size = check_group_size(quant.get("group_size", GROUP_SIZE), (GROUP_SIZE,))
        if quant.get("sym", True) is not True:
            raise ValueError("quantization_config: sym is false, expected true of a Marlin file")
        refuse_order(quant, group_size)
        part = int4_part(
            Format.MARLIN,
            tensors,
            quantised_modules(tensors, ".qweight"),
            group_size=group_size,
            zero_points=False,
            ignored={
                module + suffix: reason
                for suffix, reason in ((".g_idx", "groups are in order"), (".qzeros", "it is 8"))
                for module in quantised_modules(tensors, suffix)
            },
            repacks=_stack_halves(config.get("hidden_size"), tensors, group_size),
        )
        version = 2 if stored_format(quant) == "gptq_v2" else 1
        plan = plan_parts("cpmcu-marlin", tensors, [part])

        def verify(read: Read) -> None:
            if plan.verify is not None:
                plan.verify(read)
            for module in quantised_modules(tensors, ".g_idx"):
                check_order(tensors[module + ".g_idx"], read, group_size)
            for module in quantised_modules(tensors, ".qzeros"):
                check_symmetric(tensors[module + ".qzeros"], read, version)

        return replace(plan, verify=verify)


def _stack_halves(
    hidden_size: Any, tensors: Mapping[str, TensorMeta], group_size: int
) -> list[Repack]:
    """Stacks the two halves of an EAGLE head's fc along K. A row of the file is a tile of 16 k."""
    name = next((name for name in ("fc", "model.fc") if name + ".qweight" in tensors), None)
    if name is None or 16 * tensors[name + ".qweight"].shape[0] != hidden_size:
        return []
    if group_size == CHANNEL_WISE or hidden_size % GROUP_SIZE:
        raise ValueError(
            f"{name} is two halves of {hidden_size} inputs with group_size {group_size}, expected "
            f"groups of {GROUP_SIZE} that fill each half"
        )
    sources = {part: tensors[f"{name}.{part}"] for part in ("qweight", "scales")}
    outputs = {
        part: TensorMeta(f"{name}.{part}", meta.dtype, (2 * meta.shape[0], meta.shape[1] // 2))
        for part, meta in sources.items()
    }

    def run(arrays: Arrays) -> Arrays:
        made = {}
        for part, output in outputs.items():
            rows, columns = output.shape
            halves = arrays[sources[part].name].reshape(rows // 2, 2, columns)
            made[output.name] = np.ascontiguousarray(halves.swapaxes(0, 1)).reshape(rows, columns)
        return made

    return [Repack(tuple(meta.name for meta in sources.values()), tuple(outputs.values()), run)]
