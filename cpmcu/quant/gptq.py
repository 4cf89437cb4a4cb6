"""GPTQ in the format of AutoGPTQ and GPTQModel: groups of 16 to 128, or channels, in order of K.

Each linear layer has `qweight` int32 [K / 8, N], `scales` [G, N], `qzeros` int32 [G, N / 8] and
`g_idx` [K]. With 8 bits, `qweight` is [K / 4, N] and `qzeros` [G, N / 4].

If `sym` is true, all zero points are 8 (128). Otherwise `qzeros` is loaded. `dynamic`
gives modules their own bits and groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cpmcu.checks import shown
from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.int4 import (
    CHANNEL_WISE,
    GROUP_SIZES,
    Format,
    check_bits,
    check_group_size,
    check_present,
    int4_part,
    is_marlin,
    misfit,
    quantised_modules,
)
from cpmcu.quant.int8 import Int8Format, int8_part
from cpmcu.quant.packing import unpack_gptq_zeros
from cpmcu.quant.parts import Part, plan_parts
from cpmcu.quant.registry import QuantPlan, Read, quant_config_of, register_quant

_VERSIONS = {"gptq": Format.GPTQ, "gptq_v2": Format.GPTQ_V2}
ZERO_POINTS = {4: 8, 8: 128}  # bits -> the zero point of symmetric weights


@dataclass(frozen=True, slots=True)
class _Form:
    """How a module is stored."""

    bits: int
    group_size: int
    symmetric: bool


@register_quant("gptq")
class Gptq:
    """GPTQ with 4 or 8 bits, except in Marlin's layout."""

    def matches(self, quant_config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> bool:
        return quant_config.get("quant_method") == "gptq" and not is_marlin(tensors)

    def plan(self, config: Mapping[str, Any], tensors: Mapping[str, TensorMeta]) -> QuantPlan:
        quant = quant_config_of(config)
        check_present("gptq", tensors, ".qweight")
        stated = stored_format(quant)
        if not isinstance(stated, str) or stated not in _VERSIONS:
            raise ValueError(
                f"quantization_config: checkpoint_format is {shown(stated)}, expected "
                f"{' or '.join(_VERSIONS)}"
            )
        forms: dict[_Form, list[str]] = {}
        for module in quantised_modules(tensors, ".qweight"):
            forms.setdefault(_form(module_settings(quant, module)), []).append(module)
        parts = [_part(_VERSIONS[stated], form, tensors, its) for form, its in forms.items()]
        return plan_parts("gptq", tensors, parts)


def module_settings(quant: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """The settings of one quantised module, after the rules in `dynamic`.

    A rule is a regular expression that matches from the name's beginning, after "+:" or nothing.
    The first match counts. "-:" names modules that are not quantised. Raises ValueError for rules
    of another form.
    """
    rules = quant.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise ValueError(f"quantization_config: dynamic is {shown(rules)}, expected an object")
    for rule, own in rules.items():
        pattern = str(rule).removeprefix("+:").removeprefix("-:")
        try:
            found = re.match(pattern, module)
        except re.error as error:
            raise ValueError(
                f"quantization_config: dynamic has the rule {shown(rule)}, which is no regular "
                f"expression: {error}"
            ) from error
        if not found:
            continue
        if str(rule).startswith("-:"):
            raise ValueError(
                f"{module} has a qweight, but the rule {shown(rule)} of dynamic says that it is "
                "not quantised"
            )
        if not isinstance(own, Mapping):
            raise ValueError(
                f"quantization_config: the rule {shown(rule)} of dynamic is {shown(own)}, "
                "expected an object"
            )
        return {**quant, **own}
    return quant


def _form(settings: Mapping[str, Any]) -> _Form:
    bits = check_bits(settings.get("bits"), 4, 8)
    group_size = check_group_size(settings.get("group_size"), GROUP_SIZES[bits])
    refuse_order(settings, group_size)
    return _Form(bits, group_size, settings.get("sym") is True)


def _part(
    layout: Format, form: _Form, tensors: Mapping[str, TensorMeta], modules: Sequence[str]
) -> Part:
    ignored = _ignored(tensors, modules, form.symmetric)
    if form.bits == 8:
        part = int8_part(
            Int8Format.GPTQ,
            tensors,
            modules,
            group_size=form.group_size,
            zero_points=not form.symmetric,
            version=1 + int(layout == Format.GPTQ_V2),
            ignored=ignored,
        )
    else:
        part = int4_part(
            layout,
            tensors,
            modules,
            group_size=form.group_size,
            zero_points=not form.symmetric,
            ignored=ignored,
        )

    def verify(read: Read) -> None:
        if part.verify is not None:
            part.verify(read)
        version = 1 + int(layout == Format.GPTQ_V2) if form.symmetric else None
        for module in modules:
            size = size_of(tensors[module + ".qweight"], form.bits)
            g_idx, qzeros = (tensors.get(module + side) for side in (".g_idx", ".qzeros"))
            check_side_tensors(g_idx, qzeros, read, size, form.group_size, version, form.bits)

    return replace(part, verify=verify)


def _ignored(
    tensors: Mapping[str, TensorMeta], modules: Sequence[str], symmetric: bool
) -> dict[str, str]:
    reasons = {".g_idx": "groups are in order of K"}
    if symmetric:
        reasons[".qzeros"] = "sym is true"
    return {
        module + suffix: reason
        for module in modules
        for suffix, reason in reasons.items()
        if module + suffix in tensors
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


def size_of(qweight: TensorMeta, bits: int = 4) -> tuple[int, int]:
    """Returns (K, N) of a layer. Raises ValueError for another dtype or number of dimensions."""
    in_word = 32 // bits
    if qweight.dtype != "int32" or len(qweight.shape) != 2:
        raise misfit(qweight, f"int32 [K / {in_word}, N]")
    return in_word * qweight.shape[0], qweight.shape[1]


def check_side_tensors(
    g_idx: TensorMeta | None,
    qzeros: TensorMeta | None,
    read: Read,
    size: tuple[int, int],
    group_size: int,
    version: int | None,
    bits: int = 4,
) -> None:
    """Raises ValueError unless g_idx is in order and all zero points are 8 (of 8 bits: 128).

    `size`: (K, N) of the layer. `version`: format of the zero points, as in `unpack_gptq_zeros`;
    None: any zero points.
    """
    k, n = size
    if g_idx is not None:
        if (g_idx.dtype, g_idx.shape) != ("int32", (k,)):
            raise misfit(g_idx, f"int32 [{k}]")
        check_order(g_idx, read, group_size)
    if qzeros is not None and version is not None:
        groups = 1 if group_size == CHANNEL_WISE else -(-k // group_size)
        columns = n * bits // 32
        if (qzeros.dtype, qzeros.shape) != ("int32", (groups, columns)):
            raise misfit(qzeros, f"int32 [{groups}, {columns}]")
        check_symmetric(qzeros, read, version, bits)


def check_order(g_idx: TensorMeta, read: Read, group_size: int) -> None:
    """Raises ValueError unless g_idx[k] is k div group size."""
    if g_idx.dtype != "int32" or len(g_idx.shape) != 1:
        raise misfit(g_idx, "int32 [K]")
    groups = read(g_idx.name)
    step = len(groups) if group_size == CHANNEL_WISE else group_size
    if not np.array_equal(groups, np.arange(len(groups)) // max(step, 1)):
        raise ValueError(
            f"{g_idx.name} permutes the inputs (desc_act), expected groups of {step} in order"
        )


def check_symmetric(qzeros: TensorMeta, read: Read, version: int, bits: int = 4) -> None:
    """Raises ValueError for a zero point other than 8 (of 8 bits: 128).

    `version`: see `unpack_gptq_zeros`. Some files say version 1 and store 8 (128) everywhere, as
    version 2 does. They mean 8 (128) too.
    """
    if qzeros.dtype != "int32" or len(qzeros.shape) != 2:
        raise misfit(qzeros, f"int32 [G, N / {32 // bits}]")
    words, middle = read(qzeros.name), ZERO_POINTS[bits]
    ones = 0x11111111 if bits == 4 else 0x01010101
    if any(np.all(words.view(np.uint32) == ones * (middle - 2 + v)) for v in (version, 2)):
        return
    if bits == 4:
        zeros = unpack_gptq_zeros(words, version)
    else:
        zeros = np.ascontiguousarray(words).view(np.uint8) + np.uint8(2 - version)
    if np.any(zeros != middle):
        raise ValueError(
            f"{qzeros.name} has the zero point {zeros[zeros != middle][0]}, expected {middle} "
            "everywhere as quantization_config has sym true"
        )
