"""GGUF types whose blocks the engine multiplies as they are: their tensors in the engine's formats.

| form | types | tensors of a module |
|---|---|---|
| INT4 | Q4_0 | `weight_packed` int32 [N, K / 8], `weight_scale` f16 [N, K / 32] |
| INT8 | Q8_0, Q5_0, IQ4_NL | `weight` int8 [N, K], `weight_scale` f16 [N, K / 32] |
| MXFP4 | MXFP4 | `weight_packed` uint8 [N, K / 2], `weight_scale` uint8 [N, K / 32] |
| NVFP4 | NVFP4 | `weight` uint8, `weight_scale` e4m3, `weight_scale_2` |
| K4 | Q4_K | `weight_packed` uint8 [N, K / 2], scales and minima for 32 k |
| K8 | Q6_K, Q3_K, IQ4_XS | `weight` int8 [N, K], scales for 16 k |
| K8_MIN | Q5_K, Q2_K | K8's, and minima for 16 k |

K-quants have `weight_scale` f16 [N, K / 256] and `weight_group_scale` int8, and for minima
`weight_min` f16 [N, K / 256] and `weight_group_min` uint8. Parts of one matrix may have
different types. INT8 holds parts of INT4 and INT8. K8_MIN holds parts of K4, K8 and K8_MIN. No
number is rounded.
Source: ggml-common.h and ggml-quants.c of the ggml repository.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.loading.gguf.k_quants import K_TYPES, SUPER, TABLE
from cpmcu.loading.tensors import TensorMeta

U8 = npt.NDArray[np.uint8]
Arrays = dict[str, npt.NDArray[Any]]  # suffix of a name -> tensor

_MAX_THREADS = 16
_THREAD_BYTES = 1 << 20  # of blocks, at least, for each thread

Q4_0, Q5_0, Q8_0, IQ4_NL, MXFP4, NVFP4, Q4_K = 2, 6, 8, 20, 39, 40, 12


class Form(enum.Enum):
    """The engine's forms of weights; see the table."""

    INT4 = enum.auto()
    INT8 = enum.auto()
    MXFP4 = enum.auto()
    NVFP4 = enum.auto()
    K4 = enum.auto()
    K8 = enum.auto()
    K8_MIN = enum.auto()


@dataclass(frozen=True, slots=True)
class Block:
    """A packed type: its name, the values and bytes of a block, and its own form."""

    name: str
    values: int
    nbytes: int
    form: Form


BLOCKS: Mapping[int, Block] = {
    Q4_0: Block("Q4_0", 32, 18, Form.INT4),
    Q5_0: Block("Q5_0", 32, 22, Form.INT8),
    Q8_0: Block("Q8_0", 32, 34, Form.INT8),
    IQ4_NL: Block("IQ4_NL", 32, 18, Form.INT8),
    MXFP4: Block("MXFP4", 32, 17, Form.MXFP4),
    NVFP4: Block("NVFP4", 64, 36, Form.NVFP4),
} | {
    type_id: Block(
        kind.name,
        SUPER,
        kind.nbytes,
        {"Q4_K": Form.K4, "Q5_K": Form.K8_MIN, "Q2_K": Form.K8_MIN}.get(kind.name, Form.K8),
    )
    for type_id, kind in K_TYPES.items()
}


def form_of(types: Collection[int]) -> Form | None:
    """The form that holds all these types exactly; None: there is none."""
    forms = {BLOCKS[type_id].form if type_id in BLOCKS else None for type_id in types}
    if len(forms) == 1:
        return forms.pop()
    if forms <= {Form.INT4, Form.INT8}:
        return Form.INT8
    return Form.K8_MIN if forms <= {Form.K4, Form.K8, Form.K8_MIN} else None


def metas(module: str, form: Form, n: int, k: int) -> list[TensorMeta]:
    """The tensors of a module [N, K]."""
    made = {
        Form.INT4: [("weight_packed", "int32", 8), ("weight_scale", "float16", 32)],
        Form.INT8: [("weight", "int8", 1), ("weight_scale", "float16", 32)],
        Form.MXFP4: [("weight_packed", "uint8", 2), ("weight_scale", "uint8", 32)],
        Form.NVFP4: [("weight", "uint8", 2), ("weight_scale", "float8_e4m3fn", 16)],
        Form.K4: [("weight_packed", "uint8", 2), *_supers("weight_scale", "int8", 32)],
        Form.K8: [("weight", "int8", 1), *_supers("weight_scale", "int8", 16)],
        Form.K8_MIN: [("weight", "int8", 1), *_supers("weight_scale", "int8", 16)],
    }[form]
    if form in (Form.K4, Form.K8_MIN):
        made += _supers("weight_min", "uint8", 32 if form == Form.K4 else 16)
    tensors = [TensorMeta(f"{module}.{name}", dtype, (n, k // of)) for name, dtype, of in made]
    if form == Form.NVFP4:
        tensors.append(TensorMeta(f"{module}.weight_scale_2", "float32", (1,)))
    return tensors


def _supers(name: str, dtype: str, group: int) -> list[tuple[str, str, int]]:
    return [(name, "float16", SUPER), (name.replace("weight_", "weight_group_"), dtype, group)]


def split_rows(type_id: int, form: Form, raw: U8) -> Arrays:
    """`split` by several threads."""
    count = min(len(raw), raw.nbytes // _THREAD_BYTES, os.cpu_count() or 1, _MAX_THREADS)
    if count < 2:
        return split(type_id, form, raw)
    with ThreadPoolExecutor(count) as pool:
        parts = list(pool.map(lambda rows: split(type_id, form, rows), np.array_split(raw, count)))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def split(type_id: int, form: Form, raw: U8) -> Arrays:
    """Rows of blocks [N, bytes] -> tensors; `weight_scale_2` is a tensor of its own."""
    if type_id in K_TYPES:
        return _split_k_quant(type_id, form, raw)
    block = BLOCKS[type_id]
    blocks = raw.reshape(len(raw), -1, block.nbytes)
    if form == Form.NVFP4:
        scales = blocks[:, :, :4].reshape(len(raw), -1)
        codes = _nibbles(blocks[:, :, 4:].reshape(len(raw), -1, 8))
        return {"weight": _pairs(codes), "weight_scale": np.where(scales == 0x7F, 0, scales)}
    if form == Form.MXFP4:
        scales = np.ascontiguousarray(blocks[:, :, 0])
        return {"weight_packed": _pairs(_nibbles(blocks[:, :, 1:])), "weight_scale": scales}
    scale = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0]
    if type_id == Q8_0:
        numbers = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(len(raw), -1)
        return {"weight": numbers, "weight_scale": scale}
    codes = _nibbles(blocks[:, :, -16:])
    if form == Form.INT4:
        return {"weight_packed": _pairs(codes).view("<i4"), "weight_scale": scale}
    if type_id == IQ4_NL:
        return {"weight": TABLE[codes], "weight_scale": scale}
    middle = 8
    if type_id == Q5_0:
        high = np.unpackbits(blocks[:, :, 2:6], axis=-1, bitorder="little")
        codes, middle = codes | high.reshape(codes.shape) << np.uint8(4), 16
    return {"weight": codes.astype(np.int8) - np.int8(middle), "weight_scale": scale}


def _split_k_quant(type_id: int, form: Form, raw: U8) -> Arrays:
    rows, kind = len(raw), K_TYPES[type_id]
    parts = kind.take_apart(raw.reshape(-1, kind.nbytes))
    q, groups = parts.q.reshape(rows, -1), SUPER // (32 if form == Form.K4 else 16)

    def for_groups(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values.repeat(groups // values.shape[1], axis=1).reshape(rows, -1)

    made: Arrays = {"weight_packed": _pairs(q.view(np.uint8))} if form == Form.K4 else {"weight": q}
    made["weight_scale"] = parts.scales.reshape(rows, -1)
    made["weight_group_scale"] = for_groups(parts.group_scales)
    if form == Form.K8:
        return made
    mins, group_mins = parts.mins, parts.group_mins
    if mins is None or group_mins is None:
        mins, group_mins = np.zeros_like(parts.scales), np.zeros((len(parts.q), 1), np.uint8)
    made["weight_min"] = mins.reshape(rows, -1)
    made["weight_group_min"] = for_groups(group_mins)
    return made


def _nibbles(packed: U8) -> U8:
    """[N, groups, bytes] -> [N, K]: the low nibbles of a group come first."""
    both: U8 = np.concatenate([packed & 15, packed >> 4], axis=-1)
    return both.reshape(len(packed), -1)


def _pairs(codes: U8) -> U8:
    """[N, K] -> [N, K / 2]: the even k in the low nibble."""
    return np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4)
