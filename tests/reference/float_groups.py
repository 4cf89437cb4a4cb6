"""Floats with a scale for each group of k: rounding, stored tensors, and numbers of stored tensors.

    codes, scales = quantise("nvfp4", weight)       # weight [N, K]
    dequantise("nvfp4", codes, scales, factor)      # [N, K], float64

| kind | codes | scales |
|---|---|---|
| nvfp4 | e2m1, two in a byte, the even k low | e4m3 for 16 k, and one number for the matrix |
| mxfp4 | the same | 2^(byte - 127) for 32 k |
| mxfp8 | e4m3 | 2^(byte - 127) for 32 k |
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

U8 = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
_MIDDLES = (E2M1[:7] + E2M1[1:8]) / 2
GROUPS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}


def quantise(kind: str, weight: npt.NDArray[Any], factor: float = 1.0) -> tuple[U8, U8]:
    """Codes [N, K / 2] or [N, K], and scales [N, K / group]. `factor`: multiplies e4m3 scales."""
    n, k = weight.shape
    groups = weight.reshape(n, -1, GROUPS[kind]).astype(np.float64)
    most = 448 if kind == "mxfp8" else 6
    exact = np.abs(groups).max(2) / most
    if kind == "nvfp4":
        scales = to_e4m3(exact / factor)
        wide = E4M3[scales] * factor
    else:
        scales = np.ceil(np.log2(np.maximum(exact, 2.0**-120))).astype(np.int64) + 127
        wide = 2.0 ** (scales - 127)
        scales = scales.astype(np.uint8)
    ratios = groups / np.where(wide > 0, wide, 1)[:, :, None]
    if kind == "mxfp8":
        return to_e4m3(ratios).reshape(n, k), scales
    codes = (np.searchsorted(_MIDDLES, np.abs(ratios)) | (ratios < 0) << 3).astype(np.uint8)
    codes = codes.reshape(n, k)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def dequantise(kind: str, codes: U8, scales: U8, factor: float = 1.0) -> F64:
    """Returns the dequantised W [N, K]."""
    if kind == "mxfp8":
        numbers = E4M3[codes]
    else:
        numbers = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)]
    wide = E4M3[scales] if kind == "nvfp4" else 2.0 ** (scales.astype(np.float64) - 127)
    return numbers * wide.repeat(GROUPS[kind], 1) * factor


def to_e4m3(numbers: npt.NDArray[Any]) -> U8:
    rounded = torch.from_numpy(np.clip(numbers, -448, 448)).float().to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).numpy()
