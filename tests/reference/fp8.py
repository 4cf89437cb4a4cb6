"""Rows of an fp8 KV cache in numpy: e4m3 codes with a float32 scale (csrc/kernels/layer/fp8_row.h).

Codes come from a table of all values, not from the bits of float32 as in the engine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def _value(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


VALUES = np.array([_value(code) for code in range(127)])  # ascending; code 127 is NaN
_BETWEEN = (VALUES[1:] + VALUES[:-1]) / 2


def nearest(x: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """The codes of the nearest values, ties to the even code; larger magnitudes become 448."""
    x = np.asarray(x, np.float64)
    magnitude = np.abs(x)
    low, high = (np.searchsorted(_BETWEEN, magnitude, side=side) for side in ("left", "right"))
    code = np.where(low % 2 == 0, low, high)  # low and high differ only in the middle of two values
    return (code | np.signbit(x).astype(np.int64) << 7).astype(np.uint8)


def values_of(codes: npt.NDArray[np.uint8]) -> F64:
    values = np.append(VALUES, np.nan)[codes & 0x7F]
    signed: F64 = np.where(codes & 0x80, -values, values)
    return signed


def quantise(rows: npt.ArrayLike) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Returns codes [..., D] and scales [...] of rows [..., D]."""
    x = np.asarray(rows, np.float32)
    most = np.abs(x).max(axis=-1)
    scales = np.where(most < np.float32(2.0**-100), np.float32(0), most / np.float32(448))
    with np.errstate(divide="ignore"):
        inverse = np.where(most < np.float32(2.0**-100), np.float32(0), np.float32(448) / most)
    return nearest(x * inverse[..., None]), scales


def dequantised(rows: npt.ArrayLike) -> F64:
    codes, scales = quantise(rows)
    return values_of(codes) * scales[..., None].astype(np.float64)


def interleaved(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The bytes of rows in a page: columns c and c + 8 of each 16 are neighbours."""
    halves = codes.reshape(*codes.shape[:-1], -1, 2, 8)
    return np.ascontiguousarray(halves.swapaxes(-1, -2)).reshape(codes.shape)


def in_order(stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The inverse of `interleaved`."""
    pairs = stored.reshape(*stored.shape[:-1], -1, 8, 2)
    return np.ascontiguousarray(pairs.swapaxes(-1, -2)).reshape(stored.shape)
