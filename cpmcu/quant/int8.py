"""8-bit integer weights: w = (q - 128) * scale for a group of 128 inputs, or of a whole row.

The engine multiplies 8 bits as two planes of nibbles, q = 16 h + l (csrc/linear/int8_tensors.cpp):
w = (h - 8) * 16 scale + l * scale. A repack splits the words of the file, which are

| format | words |
|---|---|
| gptq | `qweight` int32 [K / 4, N], byte i is k = 4 row + i |
| compressed | `weight_packed` int32 [N, K / 4], byte i is k = 4 column + i |
| plain | `weight` int8 [N, K], holds q - 128 |
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.loading.tensors import TensorMeta
from cpmcu.quant.int4 import CHANNEL_WISE, check_finite, misfit, stated_scales, zero_biases
from cpmcu.quant.packing import BLOCK_K
from cpmcu.quant.parts import Part
from cpmcu.quant.registry import Arrays, LinearOptions, Read, Repack

U32 = npt.NDArray[np.uint32]

_BAND = 64  # rows of words that are split at a time, to stay in the cache
_HIGH_ZEROS = 0x88888888  # zero points 8; also the padding of K, whose numbers are 0


class Int8Format(enum.Enum):
    """Tensors in the file: (words, scales)."""

    GPTQ = ".qweight", ".scales"
    COMPRESSED = ".weight_packed", ".weight_scale"
    PLAIN = ".weight", ".weight_scale"


def int8_part(
    form: Int8Format,
    tensors: Mapping[str, TensorMeta],
    modules: Sequence[str],
    *,
    group_size: int,
    ignored: Mapping[str, str] | None = None,
) -> Part:
    """The modules with symmetric 8-bit weights.

    Raises ValueError for experts, for words of another dtype or shape, and for scales that are not
    float16 or bfloat16. The part's `verify` raises ValueError for scales that are not finite or,
    times 16, not in range.
    """
    if experts := [module for module in modules if ".experts." in module]:
        raise ValueError(
            f"{experts[0]} has 8-bit integers, expected 4 bits, FP8 or 16 bits: experts have no "
            "kernels for 8-bit integers"
        )
    scales = form.value[1]
    dtype = stated_scales(tensors, [module + scales for module in modules])
    biases = zero_biases(tensors, modules)
    repacks = [_repack(form, tensors, module, group_size) for module in modules]

    def verify(read: Read) -> None:
        biases.verify(read)
        for module in modules:
            check_finite(tensors[module + scales], read)
            if dtype == "float16" and np.any(np.abs(read(module + scales)) >= 4096):
                raise ValueError(
                    f"{module}{scales} holds {np.abs(read(module + scales)).max()}, expected less "
                    "than 4096 of 8-bit weights"
                )

    return Part(
        modules,
        LinearOptions(layout="int8", group_size=group_size, zero_points=True, scale_dtype=dtype),
        "8 bits" + (f" with groups of {group_size}" if group_size != CHANNEL_WISE else ""),
        repacks=repacks,
        ignored={**(ignored or {}), **biases.ignored},
        verify=verify,
    )


def _repack(
    form: Int8Format, tensors: Mapping[str, TensorMeta], module: str, group_size: int
) -> Repack:
    words, scales = (module + suffix for suffix in form.value)
    if scales not in tensors:
        raise ValueError(f"{scales} is missing, expected it beside {words}")
    k, n = _size(form, tensors[words])
    stored = tensors[scales]
    blocks = -(-k // BLOCK_K)
    groups = 1 if group_size == CHANNEL_WISE else blocks
    shape = (groups, n) if form is Int8Format.GPTQ else (n, groups)
    for_matrix = form is Int8Format.PLAIN and stored.num_elements == 1
    if stored.shape != shape and not for_matrix:
        raise misfit(stored, f"{list(shape)} beside {list(tensors[words].shape)} of 8 bits")
    outputs = []
    for plane in ("high", "low"):
        outputs += [
            TensorMeta(f"{module}.{plane}.qweight", "int32", (blocks * BLOCK_K // 8, n)),
            TensorMeta(f"{module}.{plane}.scales", stored.dtype, (groups, n)),
            TensorMeta(f"{module}.{plane}.qzeros", "int32", (groups, n // 8)),
        ]
    run = partial(_split_module, form, module, stored.dtype, outputs)
    return Repack((words, scales), tuple(outputs), run)


def _size(form: Int8Format, words: TensorMeta) -> tuple[int, int]:
    """(K, N) of a module. Raises ValueError for another dtype, or K or N that 8 does not divide."""
    expected = {
        Int8Format.GPTQ: "int32 [K / 4, N]",
        Int8Format.COMPRESSED: "int32 [N, K / 4]",
        Int8Format.PLAIN: "int8 [N, K]",
    }[form]
    if words.dtype != expected.partition(" ")[0] or len(words.shape) != 2:
        raise misfit(words, expected)
    rows, columns = words.shape
    k, n = {
        Int8Format.GPTQ: (4 * rows, columns),
        Int8Format.COMPRESSED: (4 * columns, rows),
        Int8Format.PLAIN: (columns, rows),
    }[form]
    if k % 8 or n % 8:
        raise misfit(words, f"{expected} with N and K that are multiples of 8")
    return k, n


def _split_module(
    form: Int8Format, module: str, dtype: str, outputs: Sequence[TensorMeta], arrays: Arrays
) -> Arrays:
    words, scales = (arrays[module + suffix] for suffix in form.value)
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    if form is Int8Format.PLAIN:
        unsigned = unsigned ^ np.uint32(0x80808080)
    low_scales = _scales(form, scales, outputs[1].shape)
    shapes = {meta.name: meta.shape for meta in outputs}
    made: dict[str, npt.NDArray[Any]] = {}
    for plane, shift in (("high", 4), ("low", 0)):
        name = f"{module}.{plane}"
        zero = _HIGH_ZEROS if shift else 0
        q = np.full(shapes[f"{name}.qweight"], zero, np.uint32)
        split_plane(q, unsigned, shift, by_row=form is not Int8Format.GPTQ)
        zeros = np.full(shapes[f"{name}.qzeros"], zero, np.uint32)
        made[f"{name}.qweight"], made[f"{name}.qzeros"] = q.view(np.int32), zeros.view(np.int32)
        made[f"{name}.scales"] = sixteen_times(low_scales, dtype) if shift else low_scales
    return made


def split_plane(to: U32, words: U32, shift: int, *, by_row: bool) -> None:
    """Writes one nibble of each byte to `to` [K' / 8, N]; `shift` is 4 for high nibbles, else 0.

    `words`: [K / 4, N], or [N, K / 4] if `by_row`. Rows of `to` beyond K keep their values.
    """
    for begin in range(0, len(words), _BAND):
        t = words[begin : begin + _BAND] >> np.uint32(shift)
        t &= np.uint32(0x0F0F0F0F)
        t |= t >> np.uint32(4)
        t &= np.uint32(0x00FF00FF)
        t |= t >> np.uint32(8)
        t &= np.uint32(0xFFFF)
        if by_row:
            joined = t[:, 0::2] | t[:, 1::2] << np.uint32(16)
            to[: joined.shape[1], begin : begin + len(t)] = joined.T
        else:
            to[begin // 2 : (begin + len(t)) // 2] = t[0::2] | t[1::2] << np.uint32(16)


def _scales(form: Int8Format, stored: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """The scales as [G, N]."""
    if form is Int8Format.GPTQ:
        return stored
    return np.ascontiguousarray(np.broadcast_to(stored.reshape(-1, shape[0]).T, shape))


def sixteen_times(scales: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """16 times the scales (bfloat16 as uint16); exact."""
    if dtype == "float16":
        scaled: npt.NDArray[Any] = scales * np.float16(16)
        return scaled
    wide = (scales.astype(np.uint32) << 16).view(np.float32) * np.float32(16)
    upper: npt.NDArray[Any] = (wide.view(np.uint32) >> 16).astype(np.uint16)
    return upper
