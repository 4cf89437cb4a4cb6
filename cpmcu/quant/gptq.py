"""GPTQ as AutoGPTQ and GPTQModel write it: bits 4, groups of 128 or channels, in order of K.

`qweight` int32 [K / 8, N], `scales` [G, N], `qzeros` int32 [G, N / 8] and `g_idx` [K] for each
linear layer. Symmetric files say so and all have the zero point 8; others are read with theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.packing import unpack_gptq_zeros
from cpmcu.quant.registry import QuantPlan, Read, quant_config_of, register_quant
from cpmcu.quant.w4a16 import (
    CHANNEL_WISE,
    GROUP_SIZE,
    Format,
    check_bits,
    check_group_size,
    check_present,
    is_marlin,
    plan_w4,
    quantised_modules,
)

_VERSIONS = {"gptq": Format.GPTQ, "gptq_v2": Format.GPTQ_V2}
ZERO_POINT = 8


@register_quant("gptq")
class Gptq:
    """4-bit GPTQ; not its Marlin form."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return quant_config.get("quant_method") == "gptq" and not is_marlin(tensors)

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        quant = quant_config_of(config)
        check_present("gptq", tensors, ".qweight")
        check_bits(quant.get("bits"))
        group_size = check_group_size(quant.get("group_size"))
        if quant.get("desc_act") and group_size != CHANNEL_WISE:
            raise ValueError(
                "quantization_config: desc_act is true (groups follow the order of activations), "
                "expected false"
            )
        stated = quant.get("checkpoint_format", "gptq")
        if stated not in _VERSIONS:
            raise ValueError(
                f"quantization_config: checkpoint_format is {stated!r}, expected "
                f"{' or '.join(_VERSIONS)}"
            )
        layout = _VERSIONS[stated]
        symmetric = quant.get("sym") is True
        plan = plan_w4(
            "gptq",
            layout,
            tensors,
            group_size=group_size,
            zero_points=not symmetric,
            ignored=_ignored(tensors, symmetric),
        )

        def verify(read: Read) -> None:
            if plan.verify is not None:
                plan.verify(read)
            for module in quantised_modules(tensors, ".g_idx"):
                check_order(module, read, group_size)
            for module in quantised_modules(tensors, ".qzeros") if symmetric else ():
                check_symmetric(module, read, 1 + int(layout == Format.GPTQ_V2))

        return replace(plan, verify=verify)


def _ignored(tensors: Mapping[str, TensorMeta], symmetric: bool) -> dict[str, str]:
    reasons = {".g_idx": "groups are in order of K"}
    if symmetric:
        reasons[".qzeros"] = "sym is true"
    return {
        name: reason
        for name in tensors
        for suffix, reason in reasons.items()
        if name.endswith(suffix)
    }


def check_order(module: str, read: Read, group_size: int) -> None:
    """Raises ValueError if `g_idx` of a module does not count up in steps of the group size."""
    g_idx = read(module + ".g_idx")
    step = GROUP_SIZE if group_size == GROUP_SIZE else len(g_idx)
    if not np.array_equal(g_idx, np.arange(len(g_idx)) // max(step, 1)):
        raise ValueError(
            f"{module}.g_idx permutes the inputs (desc_act), expected groups of {step} in order"
        )


def check_symmetric(module: str, read: Read, version: int) -> None:
    """Raises ValueError for a zero point other than 8; `version` as in `unpack_gptq_zeros`."""
    words = read(module + ".qzeros")
    if np.all(words.view(np.uint32) == 0x11111111 * (ZERO_POINT - 2 + version)):
        return
    zeros = unpack_gptq_zeros(words, version)
    if np.any(zeros != ZERO_POINT):
        raise ValueError(
            f"{module}.qzeros has the zero point {zeros[zeros != ZERO_POINT][0]}, expected "
            f"{ZERO_POINT} everywhere as quantization_config has sym true"
        )
