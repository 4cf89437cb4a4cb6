"""Code shared by the schemes with packed weights, and the plan of 4-bit weights.

The tensors determine the method, not the config's lists of exceptions. A module with packed weights
uses the C++ method "packed". A module with a plain `weight` stays dense.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cpmcu.checks import shown
from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.registry import LinearOptions, QuantPlan, Read, Repack

GROUP_SIZE = 128
CHANNEL_WISE = -1

# One matrix of the engine -> its parts in a checkpoint.
_STACKS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_STACK_OF = {part: stack for stack, parts in _STACKS.items() for part in parts}
_FUSED = ("qkv_proj", "gate_up_proj")  # stored as one matrix by CPM.cu
_LINEARS = {*_STACK_OF, *_STACKS, "o_proj", "out_proj", "down_proj", "lm_head", "fc"}
# Projections without a bias in all supported models.
_NO_BIAS = ("o_proj", "out_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj")


class Format(enum.IntEnum):
    """Int4Format of csrc/kernels/gemm/packed/int4_pack.h."""

    GPTQ = 0
    GPTQ_V2 = 1
    AWQ = 2
    COMPRESSED = 3
    MARLIN = 4


def plan_int4(
    scheme: str,
    layout: Format,
    tensors: Mapping[str, TensorMeta],
    *,
    group_size: int,
    zero_points: bool,
    ignored: Mapping[str, str] | None = None,
    repacks: Iterable[Repack] = (),
) -> QuantPlan:
    """The plan of a checkpoint with a supported variant of the scheme.

    `ignored`: redundant tensor -> reason. Raises ValueError for scales that are not float16 or
    bfloat16 and for a fused projection that is quantised in part. The plan's `verify` raises
    ValueError for scales that are not finite and for an unsupported nonzero bias.
    """
    by_row = layout == Format.COMPRESSED
    packed, scales = (".weight_packed", ".weight_scale") if by_row else (".qweight", ".scales")
    modules = quantised_modules(tensors, packed)
    dtypes = {tensors[m + scales].dtype for m in modules if m + scales in tensors}
    if len(dtypes) > 1 or not dtypes <= {"float16", "bfloat16"}:
        raise ValueError(
            f"scales of 4-bit weights are {', '.join(sorted(dtypes))}, expected all float16 or all "
            "bfloat16"
        )
    biases = [m + ".bias" for m in modules if _leaf(m) in _NO_BIAS and m + ".bias" in tensors]

    def verify(read: Read) -> None:
        for module in modules:
            if module + scales in tensors:
                check_finite(tensors[module + scales], read)
        for name in biases:  # some quantisers write zeros
            if np.any(read(name)):
                raise ValueError(f"{name} is not zero, expected no bias there")

    options = LinearOptions(
        layout="int4",
        format=layout.name.lower(),
        group_size=group_size,
        zero_points=zero_points,
        scale_dtype=next(iter(dtypes), "float16"),
        stacked=any(_leaf(module) in _FUSED for module in modules),
    )
    return QuantPlan(
        scheme=scheme,
        linear_method="packed",
        linear_options=options,
        linear_overrides=dense_modules(tensors, set(modules)),
        repacks=tuple(repacks),
        ignored={**(ignored or {}), **dict.fromkeys(biases, "it is zero")},
        verify=verify,
    )


def quantised_modules(tensors: Mapping[str, TensorMeta], suffix: str) -> list[str]:
    """Names of the modules that have a tensor with this suffix."""
    return [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]


def check_present(scheme: str, tensors: Mapping[str, TensorMeta], suffix: str) -> None:
    """Raises ValueError if no tensor name ends in `suffix`."""
    if not quantised_modules(tensors, suffix):
        raise ValueError(f"quantization_config says {scheme}, but no tensor ends in {suffix}")


def check_group_size(found: Any) -> int:
    """Returns `found` if it is 128 or -1. Raises ValueError otherwise."""
    if found not in (GROUP_SIZE, CHANNEL_WISE) or isinstance(found, bool):
        raise ValueError(
            f"quantization_config: group_size is {shown(found)}, expected {GROUP_SIZE}, or "
            f"{CHANNEL_WISE} for one scale a channel"
        )
    return int(found)


def check_bits(found: Any) -> None:
    """Raises ValueError unless `found` is 4."""
    if found != 4 or isinstance(found, bool):
        raise ValueError(f"quantization_config: the weights have {shown(found)} bits, expected 4")


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


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def dense_modules(tensors: Mapping[str, TensorMeta], quantised: set[str]) -> dict[str, str]:
    """Fused name of each module with plain weights -> "dense"."""
    dense = {
        name.removesuffix(".weight")
        for name, meta in tensors.items()
        if name.endswith(".weight") and len(meta.shape) == 2
    }
    overrides: dict[str, str] = {}
    for module in sorted(dense):
        prefix, _, leaf = module.rpartition(".")
        if leaf not in _LINEARS or module in quantised:
            continue
        stack = _STACK_OF.get(leaf, leaf)
        name = f"{prefix}.{stack}" if prefix else stack
        for part in (*_STACKS.get(stack, ()), stack):
            other = f"{prefix}.{part}" if prefix else part
            if other in quantised:
                raise ValueError(
                    f"{module} is dense and {other} is quantised, expected both the same: they "
                    "are one matrix here"
                )
        overrides[name] = "dense"
    if "lm_head" not in quantised:
        overrides["lm_head"] = "dense"
    return overrides
