"""K-quants of GGUF files: w = d s q - e m, taken apart.

| type | bytes a block | q | s: form, numbers that share one | e m |
|---|---|---|---|---|
| Q2_K | 84 | 0..3 | 4 bits, 16 | yes |
| Q3_K | 110 | -4..3 | 6 bits - 32, 16 | |
| Q4_K | 144 | 0..15 | 6 bits, 32 | yes |
| Q5_K | 176 | 0..31 | 6 bits, 32 | yes |
| Q6_K | 210 | -32..31 | int8, 16 | |
| IQ4_XS | 136 | int8 of a table | 6 bits - 32, 32 | |

d and e are float16, one for 256 numbers. Source: ggml-common.h and ggml-quants.c of the ggml
repository.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]

SUPER = 256  # numbers in one block
TABLE = np.array(  # numbers that the 4-bit codes of IQ4_NL and IQ4_XS stand for
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


@dataclass(frozen=True, slots=True)
class KQuant:
    """Blocks of a type, taken apart; `mins` and `group_mins` are None without a minimum."""

    q: I8  # [blocks, 256]: codes
    scales: npt.NDArray[np.float16]  # [blocks]: d
    group_scales: I8  # [blocks, groups]: s
    mins: npt.NDArray[np.float16] | None = None  # [blocks]: e
    group_mins: U8 | None = None  # [blocks, groups]: m


def _half(raw: U8) -> npt.NDArray[Any]:
    """Returns the float16 numbers [blocks] of bytes [blocks, 2]."""
    return np.ascontiguousarray(raw).view("<f2")[:, 0]


def _bits(raw: U8, shifts: range, mask: int, run: int) -> U8:
    """Splits bytes into bit fields. The lowest fields of `run` bytes come first."""
    parts = raw.reshape(len(raw), -1, 1, run)
    fields: U8 = parts >> np.array(shifts, np.uint8).reshape(1, 1, -1, 1) & np.uint8(mask)
    return fields.reshape(len(raw), -1)


def _six_bits(raw: U8) -> tuple[U8, U8]:
    """Returns s and m of eight groups, 6 bits each, which 12 bytes hold."""
    low, high, rest = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], axis=1)
    mins = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], axis=1)
    return scales, mins


def _q2(raw: U8) -> KQuant:
    scales, mins = raw[:, :16] & np.uint8(15), raw[:, :16] >> np.uint8(4)
    q = _bits(raw[:, 16:80], range(0, 8, 2), 3, 32)
    return KQuant(_i8(q), _half(raw[:, 80:82]), _i8(scales), _half(raw[:, 82:84]), mins)


def _q3(raw: U8) -> KQuant:
    high = _bits(raw[:, :32], range(8), 1, 32)
    low = _bits(raw[:, 32:96], range(0, 8, 2), 3, 32)
    scales = _bits(raw[:, 96:104], range(0, 8, 4), 15, 8)
    scales |= _bits(raw[:, 104:108], range(0, 8, 2), 3, 4) << 4
    return KQuant(
        _i8(low) - _i8((high ^ 1) << 2), _half(raw[:, 108:110]), _i8(scales) - np.int8(32)
    )


def _q4(raw: U8) -> KQuant:
    scales, mins = _six_bits(raw[:, 4:16])
    q = _bits(raw[:, 16:144], range(0, 8, 4), 15, 32)
    return KQuant(_i8(q), _half(raw[:, 0:2]), _i8(scales), _half(raw[:, 2:4]), mins)


def _q5(raw: U8) -> KQuant:
    scales, mins = _six_bits(raw[:, 4:16])
    q = _bits(raw[:, 48:176], range(0, 8, 4), 15, 32)
    q |= _bits(raw[:, 16:48], range(8), 1, 32) << 4
    return KQuant(_i8(q), _half(raw[:, 0:2]), _i8(scales), _half(raw[:, 2:4]), mins)


def _q6(raw: U8) -> KQuant:
    q = _bits(raw[:, :128], range(0, 8, 4), 15, 64)
    q |= _bits(raw[:, 128:192], range(0, 8, 2), 3, 32) << 4
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8)
    return KQuant(_i8(q) - np.int8(32), _half(raw[:, 208:210]), scales)


def _iq4(raw: U8) -> KQuant:
    high = np.ascontiguousarray(raw[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = _bits(raw[:, 4:8], range(0, 8, 4), 15, 1)
    scales = _i8(low | high.astype(np.uint8) << 4) - np.int8(32)
    return KQuant(TABLE[_bits(raw[:, 8:136], range(0, 8, 4), 15, 16)], _half(raw[:, :2]), scales)


def _i8(values: npt.NDArray[Any]) -> I8:
    return values.astype(np.int8)


@dataclass(frozen=True, slots=True)
class KType:
    """A type: its name, the bytes of a block, and how one is taken apart."""

    name: str
    nbytes: int
    take_apart: Callable[[U8], KQuant]


K_TYPES: Mapping[int, KType] = {
    10: KType("Q2_K", 84, _q2),
    11: KType("Q3_K", 110, _q3),
    12: KType("Q4_K", 144, _q4),
    13: KType("Q5_K", 176, _q5),
    14: KType("Q6_K", 210, _q6),
    23: KType("IQ4_XS", 136, _iq4),
}
