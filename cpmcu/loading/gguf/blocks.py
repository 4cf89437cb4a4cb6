"""GGUF types whose blocks the engine multiplies as they are: their tensors in the engine's formats.

| form | types | tensors of a module |
|---|---|---|
| INT4 | Q4_0 | `weight_packed` int32 [N, K / 8], `weight_scale` f16 [N, K / 32] |
| INT8 | Q8_0, Q5_0, IQ4_NL | `weight` int8 [N, K], `weight_scale` f16 [N, K / 32] |
| MXFP4 | MXFP4 | `weight_packed` uint8 [N, K / 2], `weight_scale` uint8 [N, K / 32] |
| NVFP4 | NVFP4 | `weight` uint8, `weight_scale` e4m3, `weight_scale_2` |
| K4 | Q4_K | `weight_packed` uint8 [N, K / 2], records of scales and of minima |
| K4_HALVES | Q4_1 | the same |
| K8 | Q6_K, Q3_K, IQ4_XS | `weight` int8 [N, K], records of scales |
| K8_MIN | Q5_K, Q2_K | `weight` int8 [N, K], records of scales and of minima |
| K8_HALVES, K8_MIN_HALVES | mixes; the second has Q5_1 | those of K8 and of K8_MIN |

Records are uint8 [N, ceil(K / 128) * bytes of a record], in the layout of
csrc/kernels/gemm/packed/layout.h. Their names are `weight_records` and `weight_min_records`. In
forms with halves they are `weight_half_records` and `weight_half_min_records`.

Parts of one matrix may have different types. INT8 holds parts of INT4 and INT8. K8 and K8_MIN hold
parts of K-quants. K8_HALVES and K8_MIN_HALVES hold parts of all integer types.
No number is rounded.

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
_THREAD_BYTES = 1 << 20  # minimum number of bytes of blocks for each thread

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, NVFP4 = 2, 3, 6, 7, 8, 20, 39, 40
_BLOCK_K = 128  # inputs (k) of one of the engine's weight blocks
_TAG = np.array([0xFF, 0x7F], np.uint8)  # begins a record of halves; other records begin with d


class Form(enum.Enum):
    """The engine's forms of weights; see the table."""

    INT4 = enum.auto()
    INT8 = enum.auto()
    MXFP4 = enum.auto()
    NVFP4 = enum.auto()
    K4 = enum.auto()
    K4_HALVES = enum.auto()
    K8 = enum.auto()
    K8_MIN = enum.auto()
    K8_HALVES = enum.auto()
    K8_MIN_HALVES = enum.auto()

    @property
    def has_min(self) -> bool:
        return self in (Form.K4, Form.K4_HALVES, Form.K8_MIN, Form.K8_MIN_HALVES)

    @property
    def has_halves(self) -> bool:
        return self.name.endswith("HALVES")

    @property
    def record_bytes(self) -> int:
        return {Form.K4: 6, Form.K4_HALVES: 8}.get(self, 10)

    @property
    def records(self) -> tuple[str, ...]:
        """The names of the records of scales and, if there are any, of minima."""
        half = "half_" if self.has_halves else ""
        names = (f"weight_{half}records", f"weight_{half}min_records")
        return names if self.has_min else names[:1]


_HALVES = (Form.INT4, Form.INT8, Form.K4_HALVES, Form.K8_HALVES, Form.K8_MIN_HALVES)


@dataclass(frozen=True, slots=True)
class Block:
    """A packed type: its name, the values and bytes of a block, and its own form."""

    name: str
    values: int
    nbytes: int
    form: Form


BLOCKS: Mapping[int, Block] = {
    Q4_0: Block("Q4_0", 32, 18, Form.INT4),
    Q4_1: Block("Q4_1", 32, 20, Form.K4_HALVES),
    Q5_0: Block("Q5_0", 32, 22, Form.INT8),
    Q5_1: Block("Q5_1", 32, 24, Form.K8_MIN_HALVES),
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
    if forms & {None, Form.MXFP4, Form.NVFP4}:
        return None
    halves = any(form in _HALVES for form in forms)
    if any(form is not None and form.has_min for form in forms):
        return Form.K8_MIN_HALVES if halves else Form.K8_MIN
    return Form.K8_HALVES if halves else Form.K8


def metas(module: str, form: Form, n: int, k: int) -> list[TensorMeta]:
    """The tensors of a module [N, K]."""
    fours = form in (Form.K4, Form.K4_HALVES)
    codes = [("weight_packed", "uint8", k // 2)] if fours else [("weight", "int8", k)]
    columns = -(-k // _BLOCK_K) * form.record_bytes
    records = [(name, "uint8", columns) for name in form.records]
    made = {
        Form.INT4: [("weight_packed", "int32", k // 8), ("weight_scale", "float16", k // 32)],
        Form.INT8: [("weight", "int8", k), ("weight_scale", "float16", k // 32)],
        Form.MXFP4: [("weight_packed", "uint8", k // 2), ("weight_scale", "uint8", k // 32)],
        Form.NVFP4: [("weight", "uint8", k // 2), ("weight_scale", "float8_e4m3fn", k // 16)],
    }.get(form, codes + records)
    tensors = [TensorMeta(f"{module}.{name}", dtype, (n, columns)) for name, dtype, columns in made]
    if form == Form.NVFP4:
        tensors.append(TensorMeta(f"{module}.weight_scale_2", "float32", (1,)))
    return tensors


def split_rows(type_id: int, form: Form, raw: U8) -> Arrays:
    """Does the work of `split` with several threads."""
    count = min(len(raw), raw.nbytes // _THREAD_BYTES, os.cpu_count() or 1, _MAX_THREADS)
    if count < 2:
        return split(type_id, form, raw)
    with ThreadPoolExecutor(count) as pool:
        parts = list(pool.map(lambda rows: split(type_id, form, rows), np.array_split(raw, count)))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def split(type_id: int, form: Form, raw: U8) -> Arrays:
    """Rows of blocks [N, bytes] -> tensors; `weight_scale_2` is a tensor of its own."""
    block = BLOCKS[type_id]
    blocks = raw.reshape(len(raw), -1, block.nbytes)
    if form == Form.NVFP4:
        scales = blocks[:, :, :4].reshape(len(raw), -1)
        codes = _nibbles(blocks[:, :, 4:].reshape(len(raw), -1, 8))
        return {"weight": _pairs(codes), "weight_scale": np.where(scales == 0x7F, 0, scales)}
    if form == Form.MXFP4:
        scales = np.ascontiguousarray(blocks[:, :, 0])
        return {"weight_packed": _pairs(_nibbles(blocks[:, :, 1:])), "weight_scale": scales}
    if form == Form.INT4:
        return {"weight_packed": _pairs(_nibbles(blocks[:, :, 2:])).view("<i4"),
                "weight_scale": _halves(blocks[:, :, :2])}  # fmt: skip
    if form == Form.INT8:
        return {"weight": _integers(type_id, blocks), "weight_scale": _halves(blocks[:, :, :2])}
    return _split_into_records(type_id, form, raw)


def _halves(raw: U8) -> npt.NDArray[np.float16]:
    """Returns the float16 numbers [N, blocks] of bytes [N, blocks, 2]."""
    numbers: npt.NDArray[np.float16] = np.ascontiguousarray(raw).view("<f2")[:, :, 0]
    return numbers


def _integers(type_id: int, blocks: U8) -> npt.NDArray[np.int8]:
    """The codes q [N, K] of types with one scale for 32 k: w = d q, or d q + m."""
    if type_id == Q8_0:
        return np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(len(blocks), -1)
    codes = _nibbles(blocks[:, :, -16:])
    if type_id == IQ4_NL:
        numbers: npt.NDArray[np.int8] = TABLE[codes]
        return numbers
    if type_id in (Q5_0, Q5_1):
        high = np.unpackbits(blocks[:, :, -20:-16], axis=-1, bitorder="little")
        codes = codes | high.reshape(codes.shape) << np.uint8(4)
    middle = {Q4_0: 8, Q5_0: 16}.get(type_id, 0)
    centred: npt.NDArray[np.int8] = codes.astype(np.int8) - np.int8(middle)
    return centred


def _split_into_records(type_id: int, form: Form, raw: U8) -> Arrays:
    mins: U8 | None = None
    if type_id in K_TYPES:
        kind = K_TYPES[type_id]
        parts = kind.take_apart(raw.reshape(-1, kind.nbytes))
        q = parts.q.reshape(len(raw), -1)
        records = _two_levels(form, parts.scales, parts.group_scales).reshape(len(raw), -1)
        if parts.mins is not None and parts.group_mins is not None:
            mins = _two_levels(form, parts.mins, parts.group_mins).reshape(len(raw), -1)
    else:
        blocks = raw.reshape(len(raw), -1, BLOCKS[type_id].nbytes)
        q = _integers(type_id, blocks)
        records = _records_of_halves(form, _halves(blocks[:, :, :2]))
        if type_id in (Q4_1, Q5_1):  # a minimum is subtracted
            mins = _records_of_halves(form, -_halves(blocks[:, :, 2:4]))
    is_4 = form in (Form.K4, Form.K4_HALVES)
    made: Arrays = {"weight_packed": _pairs(q.view(np.uint8))} if is_4 else {"weight": q}
    all_records = (records, np.zeros_like(records) if mins is None else mins)
    return made | dict(zip(form.records, all_records))


def _two_levels(form: Form, numbers: npt.NDArray[np.float16], groups: npt.NDArray[Any]) -> U8:
    """d or e [supers], and bytes s or m [supers, groups] -> records [supers, 2, bytes]."""
    count = form.record_bytes - 2
    of_block = groups.view(np.uint8).repeat(2 * count // groups.shape[1], axis=1)
    first = numbers.repeat(2).view(np.uint8).reshape(-1, 2, 2)
    return np.concatenate([first, of_block.reshape(-1, 2, count)], axis=2)


def _records_of_halves(form: Form, numbers: npt.NDArray[np.float16]) -> U8:
    """Returns records [N, bytes] of numbers for 32 k [N, K / 32]. Numbers beyond K are 0."""
    rows, per_block = len(numbers), _BLOCK_K // 32
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per_block)))
    records = padded.view(np.uint8).reshape(rows, -1, 2 * per_block)
    if form != Form.K4_HALVES:
        tags = np.broadcast_to(_TAG, (*records.shape[:2], 2))
        records = np.concatenate([tags, records], axis=2)
    return np.ascontiguousarray(records.reshape(rows, -1))


def _nibbles(packed: U8) -> U8:
    """[N, groups, bytes] -> [N, K]: the low nibbles of a group come first."""
    both: U8 = np.concatenate([packed & 15, packed >> 4], axis=-1)
    return both.reshape(len(packed), -1)


def _pairs(codes: U8) -> U8:
    """[N, K] -> [N, K / 2]: the even k in the low nibble."""
    return np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4)
