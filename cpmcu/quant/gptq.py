"""GPTQ in the format of AutoGPTQ and GPTQModel: 4 bits, groups of 128 or channels, in order of K.

Each linear layer has `qweight` int32 [K / 8, N], `scales` [G, N], `qzeros` int32 [G, N / 8] and
`g_idx` [K]. If `sym` is true, all zero points are 8; otherwise `qzeros` is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cpmcu.checks import shown
from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.int4 import (
    CHANNEL_WISE,
    GROUP_SIZE,
    Format,
    check_bits,
    check_group_size,
    check_present,
    is_marlin,
    misfit,
    plan_int4,
    quantised_modules,
)
from cpmcu.quant.packing import unpack_gptq_zeros
from cpmcu.quant.registry import QuantPlan, Read, quant_config_of, register_quant

_VERSIONS = {"gptq": Format.GPTQ, "gptq_v2": Format.GPTQ_V2}
ZERO_POINT = 8


@register_quant("gptq")
class Gptq:
    """4-bit GPTQ, except in Marlin's layout."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return quant_config.get("quant_method") == "gptq" and not is_marlin(tensors)

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        quant = quant_config_of(config)
        check_present("gptq", tensors, ".qweight")
        check_bits(quant.get("bits"))
        group_size = check_group_size(quant.get("group_size"))
        refuse_order(quant, group_size)
        stated = stored_format(quant)
        if not isinstance(stated, str) or stated not in _VERSIONS:
            raise ValueError(
                f"quantization_config: checkpoint_format is {shown(stated)}, expected "
                f"{' or '.join(_VERSIONS)}"
            )
        layout = _VERSIONS[stated]
        symmetric = quant.get("sym") is True
        plan = plan_int4(
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
            version = 1 + int(layout == Format.GPTQ_V2) if symmetric else None
            for module in quantised_modules(tensors, ".qweight"):
                size = size_of(tensors[module + ".qweight"])
                g_idx, qzeros = (tensors.get(module + part) for part in (".g_idx", ".qzeros"))
                check_side_tensors(g_idx, qzeros, read, size, group_size, version)

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


def stored_format(quant: Mapping[str, Any]) -> Any:
    """`checkpoint_format` (in transformers: `format`), which defines the stored zero points."""
    return quant.get("checkpoint_format") or quant.get("format") or "gptq"


def refuse_order(quant: Mapping[str, Any], group_size: int) -> None:
    """Raises ValueError for desc_act. With channel-wise scales, the order has no effect."""
    if quant.get("desc_act") and group_size != CHANNEL_WISE:
        raise ValueError(
            "quantization_config: desc_act is true (groups follow the order of activations), "
            "expected false"
        )


def size_of(qweight: TensorMeta) -> tuple[int, int]:
    """(K, N) of a layer. Raises ValueError for another dtype or number of dimensions."""
    if qweight.dtype != "int32" or len(qweight.shape) != 2:
        raise misfit(qweight, "int32 [K / 8, N]")
    return 8 * qweight.shape[0], qweight.shape[1]


def check_side_tensors(
    g_idx: TensorMeta | None,
    qzeros: TensorMeta | None,
    read: Read,
    size: tuple[int, int],
    group_size: int,
    version: int | None,
) -> None:
    """Raises ValueError unless g_idx is in order and all zero points are 8.

    `size`: (K, N) of the layer. `version`: format of the zero points, as in `unpack_gptq_zeros`;
    None: any zero points.
    """
    k, n = size
    if g_idx is not None:
        if (g_idx.dtype, g_idx.shape) != ("int32", (k,)):
            raise misfit(g_idx, f"int32 [{k}]")
        check_order(g_idx, read, group_size)
    if qzeros is not None and version is not None:
        groups = 1 if group_size == CHANNEL_WISE else -(-k // GROUP_SIZE)
        if (qzeros.dtype, qzeros.shape) != ("int32", (groups, n // 8)):
            raise misfit(qzeros, f"int32 [{groups}, {n // 8}]")
        check_symmetric(qzeros, read, version)


def check_order(g_idx: TensorMeta, read: Read, group_size: int) -> None:
    """Raises ValueError unless g_idx[k] is k div group size."""
    if g_idx.dtype != "int32" or len(g_idx.shape) != 1:
        raise misfit(g_idx, "int32 [K]")
    groups = read(g_idx.name)
    step = GROUP_SIZE if group_size == GROUP_SIZE else len(groups)
    if not np.array_equal(groups, np.arange(len(groups)) // max(step, 1)):
        raise ValueError(
            f"{g_idx.name} permutes the inputs (desc_act), expected groups of {step} in order"
        )


def check_symmetric(qzeros: TensorMeta, read: Read, version: int) -> None:
    """Raises ValueError for a zero point other than 8. `version`: see `unpack_gptq_zeros`.

    Some files say version 1 and store 8 everywhere, as version 2 does. They mean 8 too.
    """
    if qzeros.dtype != "int32" or len(qzeros.shape) != 2:
        raise misfit(qzeros, "int32 [G, N / 8]")
    words = read(qzeros.name)
    words_of_8 = {0x11111111 * (ZERO_POINT - 2 + version), 0x11111111 * ZERO_POINT}
    if any(np.all(words.view(np.uint32) == word) for word in words_of_8):
        return
    zeros = unpack_gptq_zeros(words, version)
    if np.any(zeros != ZERO_POINT):
        raise ValueError(
            f"{qzeros.name} has the zero point {zeros[zeros != ZERO_POINT][0]}, expected "
            f"{ZERO_POINT} everywhere as quantization_config has sym true"
        )
