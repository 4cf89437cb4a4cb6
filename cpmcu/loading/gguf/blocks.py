"""GGUF types whose blocks the engine multiplies as they are: their tensors in the engine's formats.

| type | block | tensors of a module |
|---|---|---|
| Q4_0 | 32: f16 d, nibbles of j and j + 16 | `weight_packed` int32 [N, K / 8], `weight_scale` f16 [N, K / 32] |
| Q8_0 | 32: f16 d, int8 | `weight` int8 [N, K], `weight_scale` f16 [N, K / 32] |
| IQ4_NL | as Q4_0, places in a table of int8 | as Q8_0 |
| MXFP4 | 32: a power of two, nibbles | `weight_packed` uint8 [N, K / 2], `weight_scale` uint8 [N, K / 32] |
| NVFP4 | 64: 4 e4m3, nibbles of j and j + 8 | `weight` uint8, `weight_scale` e4m3, `weight_scale_2` |

No number is rounded. Source: ggml-common.h and ggml-quants.c of the ggml repository.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.loading.tensors import TensorMeta

U8 = npt.NDArray[np.uint8]
Arrays = dict[str, npt.NDArray[Any]]  # suffix of a name -> tensor

Q4_0, Q8_0, IQ4_NL, MXFP4, NVFP4 = 2, 8, 20, 39, 40
_IQ4_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


@dataclass(frozen=True, slots=True)
class Block:
    """A packed type: its name, and the values and bytes of a block."""

    name: str
    values: int
    nbytes: int


BLOCKS: Mapping[int, Block] = {
    Q4_0: Block("Q4_0", 32, 18),
    Q8_0: Block("Q8_0", 32, 34),
    IQ4_NL: Block("IQ4_NL", 32, 18),
    MXFP4: Block("MXFP4", 32, 17),
    NVFP4: Block("NVFP4", 64, 36),
}


def metas(module: str, type_id: int, n: int, k: int) -> list[TensorMeta]:
    """The tensors of a module [N, K]."""
    if type_id == NVFP4:
        return [
            TensorMeta(f"{module}.weight", "uint8", (n, k // 2)),
            TensorMeta(f"{module}.weight_scale", "float8_e4m3fn", (n, k // 16)),
            TensorMeta(f"{module}.weight_scale_2", "float32", (1,)),
        ]
    codes = {
        Q4_0: TensorMeta(f"{module}.weight_packed", "int32", (n, k // 8)),
        MXFP4: TensorMeta(f"{module}.weight_packed", "uint8", (n, k // 2)),
    }.get(type_id, TensorMeta(f"{module}.weight", "int8", (n, k)))
    dtype = "uint8" if type_id == MXFP4 else "float16"
    return [codes, TensorMeta(f"{module}.weight_scale", dtype, (n, k // 32))]


def split(type_id: int, raw: U8) -> Arrays:
    """Rows of blocks [N, bytes] -> tensors; `weight_scale_2` is a tensor of its own."""
    block = BLOCKS[type_id]
    blocks = raw.reshape(len(raw), -1, block.nbytes)
    if type_id == NVFP4:
        scales = blocks[:, :, :4].reshape(len(raw), -1)
        codes = _nibbles(blocks[:, :, 4:].reshape(len(raw), -1, 8))
        return {"weight": _pairs(codes), "weight_scale": np.where(scales == 0x7F, 0, scales)}
    if type_id == MXFP4:
        scales = np.ascontiguousarray(blocks[:, :, 0])
        return {"weight_packed": _pairs(_nibbles(blocks[:, :, 1:])), "weight_scale": scales}
    scale = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0]
    if type_id == Q8_0:
        numbers = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(len(raw), -1)
        return {"weight": numbers, "weight_scale": scale}
    codes = _nibbles(blocks[:, :, 2:])
    if type_id == IQ4_NL:
        return {"weight": _IQ4_NL[codes], "weight_scale": scale}
    return {"weight_packed": _pairs(codes).view("<i4"), "weight_scale": scale}


def _nibbles(packed: U8) -> U8:
    """[N, groups, bytes] -> [N, K]: the low nibbles of a group come first."""
    both: U8 = np.concatenate([packed & 15, packed >> 4], axis=-1)
    return both.reshape(len(packed), -1)


def _pairs(codes: U8) -> U8:
    """[N, K] -> [N, K / 2]: the even k in the low nibble."""
    return np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4)
