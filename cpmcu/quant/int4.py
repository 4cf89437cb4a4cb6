"""4-bit weights, and checks shared by the schemes with integer weights."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpmcu.checks import shown
from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.parts import Part, leaf
from cpmcu.quant.registry import LinearOptions, Read, Repack

GROUP_SIZE = 128
CHANNEL_WISE = -1
GROUP_SIZES = {4: (16, 32, 64, GROUP_SIZE), 8: (32, 64, GROUP_SIZE)}  # bits -> sizes of groups

_FUSED = ("qkv_proj", "gate_up_proj")  # modules that CPM.cu stores as one matrix
# Projections without a bias in all supported models.
_NO_BIAS = ("o_proj", "out_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj")


class Format(enum.IntEnum):
    """The values of Int4Format in csrc/kernels/gemm/packed/int4_pack.h."""

    GPTQ = 0
    GPTQ_V2 = 1
    AWQ = 2
    COMPRESSED = 3
    MARLIN = 4


@dataclass(frozen=True, slots=True)
class ZeroBiases:
    """Biases that some quantisers write as zeros."""

    names: Sequence[str]

    @property
    def ignored(self) -> dict[str, str]:
        """As QuantPlan.ignored."""
        return dict.fromkeys(self.names, "it is zero")

    def verify(self, read: Read) -> None:
        """Raises ValueError for a bias that is not zero."""
        for name in self.names:
            if np.any(read(name)):
                raise ValueError(f"{name} is not zero, expected no bias there")


def zero_biases(tensors: Mapping[str, TensorMeta], modules: Iterable[str]) -> ZeroBiases:
    """The biases of modules that have none in any supported model."""
    names = [m + ".bias" for m in modules if leaf(m) in _NO_BIAS and m + ".bias" in tensors]
    return ZeroBiases(names)


def stated_scales(tensors: Mapping[str, TensorMeta], names: Iterable[str]) -> str:
    """The dtype of scales. Raises ValueError unless it is float16 or bfloat16, one for all."""
    dtypes = {tensors[name].dtype for name in names if name in tensors}
    if len(dtypes) > 1 or not dtypes <= {"float16", "bfloat16"}:
        raise ValueError(
            f"scales of integer weights are {', '.join(sorted(dtypes))}, expected all float16 or "
            "all bfloat16"
        )
    return next(iter(dtypes), "float16")


def int4_part(
    layout: Format,
    tensors: Mapping[str, TensorMeta],
    modules: Sequence[str],
    *,
    group_size: int,
    zero_points: bool,
    ignored: Mapping[str, str] | None = None,
    repacks: Sequence[Repack] = (),
) -> Part:
    """The modules with 4-bit weights.

    `ignored`: redundant tensor -> reason. Raises ValueError for scales that are not float16 or
    bfloat16. The part's `verify` raises ValueError for scales that are not finite and for an
    unsupported nonzero bias.
    """
    scales = ".weight_scale" if layout == Format.COMPRESSED else ".scales"
    dtype = stated_scales(tensors, [module + scales for module in modules])
    biases = zero_biases(tensors, modules)

    def verify(read: Read) -> None:
        for module in modules:
            if module + scales in tensors:
                check_finite(tensors[module + scales], read)
        biases.verify(read)

    options = LinearOptions(
        layout="int4",
        format=layout.name.lower(),
        group_size=group_size,
        zero_points=zero_points,
        scale_dtype=dtype,
        stacked=any(leaf(module) in _FUSED for module in modules),
    )
    return Part(
        modules,
        options,
        "4 bits" + (f" with groups of {group_size}" if group_size != CHANNEL_WISE else ""),
        repacks=repacks,
        ignored={**(ignored or {}), **biases.ignored},
        verify=verify,
    )


def quantised_modules(tensors: Mapping[str, TensorMeta], suffix: str) -> list[str]:
    """Names of the modules that have a tensor with this suffix."""
    return [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]


def check_present(scheme: str, tensors: Mapping[str, TensorMeta], suffix: str) -> None:
    """Raises ValueError if no tensor name ends in `suffix`."""
    if not quantised_modules(tensors, suffix):
        raise ValueError(f"quantization_config says {scheme}, but no tensor ends in {suffix}")


def check_group_size(found: Any, sizes: Sequence[int]) -> int:
    """Returns `found` if it is one of `sizes` or -1. Raises ValueError otherwise."""
    if found not in (*sizes, CHANNEL_WISE) or isinstance(found, bool):
        raise ValueError(
            f"quantization_config: group_size is {shown(found)}, expected "
            f"{', '.join(map(str, sizes))}, or {CHANNEL_WISE} for one scale a channel"
        )
    return int(found)


def check_bits(found: Any, *supported: int) -> int:
    """Returns `found` if it is one of the `supported` numbers. Raises ValueError otherwise."""
    if found not in supported or isinstance(found, bool):
        raise ValueError(
            f"quantization_config: the weights have {shown(found)} bits, expected "
            f"{' or '.join(map(str, supported))}"
        )
    return int(found)


def check_finite(meta: TensorMeta, read: Read) -> None:
    """Raises ValueError if a float16 or bfloat16 tensor of scales holds inf or nan."""
    exponent = np.uint16(0x7C00 if meta.dtype == "float16" else 0x7F80)
    bits = read(meta.name).view(np.uint16)
    wrong = np.argwhere((bits & exponent) == exponent)
    if len(wrong):
        place = wrong[0].tolist()
        word = int(bits[tuple(place)])
        infinite = "-inf" if word >> 15 else "inf"
        found = infinite if word & 0x7FFF == exponent else "nan"
        raise ValueError(
            f"{meta.name} holds {found} at {place}, expected finite numbers: the file is damaged"
        )


def misfit(meta: TensorMeta, expected: str, hint: str = "") -> ValueError:
    """The exception for a tensor with an unexpected dtype or shape."""
    return ValueError(f"{meta.name} is {meta.dtype} {list(meta.shape)}, expected {expected}{hint}")


def is_marlin(tensors: Mapping[str, TensorMeta]) -> bool:
    """Do the first packed weights have Marlin's shape: [K / 16, 2 N] with scales [G, N]?"""
    for name, meta in tensors.items():
        scales = tensors.get(name.removesuffix(".qweight") + ".scales")
        if name.endswith(".qweight") and scales is not None:
            return (
                len(meta.shape) == len(scales.shape) == 2 and meta.shape[1] == 2 * scales.shape[1]
            )
    return False
