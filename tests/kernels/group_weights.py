"""Weights with scales for small groups of k, floats and integers, for kernel tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kernels.util import context, ops, put, put_raw
from tests.reference import packing as layouts
from tests.reference.float_groups import GROUPS, dequantise, quantise

FLOATS = ("nvfp4", "mxfp4", "mxfp8")
# kind -> bits, zero points, k of a scale in the file
INTEGERS = {
    "int4": (4, False, 32),
    "int4 zeros": (4, True, 32),
    "int4 by 64": (4, True, 64),
    "int4 by 16": (4, False, 16),
    "int4 by 16 zeros": (4, True, 16),
    "int8": (8, False, 32),
    "int8 by 128": (8, False, 128),
    "int8 zeros": (8, True, 64),
}
# kind -> codes in weight blocks, has a minimum, codes from and below, k of a group scale
K_QUANTS = {
    "q4_k": ("k4", True, 0, 16, 32),
    "q5_k": ("k8", True, 0, 32, 16),
    "q6_k": ("k8", False, -32, 32, 16),
    "q4_1": ("k4_halves", True, 0, 16, 32),
    "q5_1": ("k8_halves", True, 0, 32, 16),  # rows of two kinds
    "q8_0": ("k8_halves", False, -128, 128, 16),
}
TAG = np.array([0xFF, 0x7F], np.uint8)  # kHalvesTag
KINDS = (*FLOATS, *INTEGERS, *K_QUANTS)


def whole(kind: str, k: int) -> int:
    """Returns K, or the next larger K that this kind of weights can have."""
    if kind not in K_QUANTS:
        return k
    return -(-k // 32) * 32 if kind == "q4_1" else -(-k // 256) * 256


def codes_of(kind: str) -> str:
    return "e4m3" if kind == "mxfp8" else "e2m1"


@dataclass
class FloatWeights:
    """Random weights [N, K]; `values` are dequantised. Parts have factors of their own."""

    kind: str
    n: int
    k: int
    parts: int = 1
    gated: bool = False
    interleaved: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed + self.k * 1000 + self.n)
        weight = rng.standard_normal((self.n, self.k)) / np.sqrt(self.k)
        weight[:, :: self.k // 2 or 1] *= 40  # so group scales differ
        weight[0] = 0
        first = self.n // self.parts // 8 * 8
        self.stored = []
        for i, part in enumerate(np.split(weight, [first] if self.parts == 2 else [])):
            factor = 0.37 / 448 * (1 + i) if self.kind == "nvfp4" else 1.0
            self.stored.append((*quantise(self.kind, part, factor), np.float32(factor)))
        self.values = np.concatenate(
            [dequantise(self.kind, c, s, float(f)) for c, s, f in self.stored]
        )

    @property
    def layout(self) -> dict[str, Any]:
        group = GROUPS[self.kind]
        settings = {"codes": codes_of(self.kind), "scale_rows": 8, "group": group}
        return {**settings, "gated": self.gated}

    @property
    def block_bytes(self) -> int:
        return (
            256 * 128 * (8 if self.kind == "mxfp8" else 4) // 8
            + 128
            + (256 * 128 // GROUPS[self.kind])
        )

    def put(self, device: str) -> Any:
        return self._packed(device)[0]

    def blocks(self, device: str) -> Any:
        """The array of the weight blocks."""
        return self._packed(device)[1]

    def _packed(self, device: str) -> tuple[Any, Any]:
        shape = [-(-self.n // 256), -(-self.k // 128), self.block_bytes]
        blocks = put_raw(device, np.full(shape, 0xA5, np.uint8))
        weight = ops.PackedWeight(blocks, n=self.n, k=self.k, **self.layout)
        row = 0
        for codes, scales, factor in self.stored:
            if self.interleaved:
                codes, scales = (alternating(each) for each in (codes, scales))
            ops.float_group_pack(
                context(device), weight, put_raw(device, codes), put_raw(device, scales),
                powers=self.kind != "nvfp4", factor=put(device, factor.reshape(1)),
                first_row=row, interleaved=self.interleaved,
            )  # fmt: skip
            row += len(codes)
        return weight, blocks


def alternating(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Interleaves stacked rows: all of gate, then all of up, become gate, up, gate, up."""
    return np.stack(np.split(rows, 2), 1).reshape(rows.shape)


@dataclass
class IntegerWeights:
    """Random weights [N, K] of all codes; `values` are dequantised. Parts are packed apart."""

    kind: str
    n: int
    k: int
    parts: int = 1
    gated: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed + self.k * 1000 + self.n)
        self.bits, self.has_zeros, self.size = INTEGERS[self.kind]
        groups = -(-self.k // self.size)
        self.q = rng.integers(0, 1 << self.bits, (self.n, self.k), dtype=np.uint8)
        scales = rng.uniform(0.2, 1, (self.n, groups)) / (4.6 * np.sqrt(self.k))
        self.scales = (scales if self.bits == 4 else scales / 16).astype(np.float16)
        middle = 1 << self.bits - 1
        self.zeros = np.full((self.n, groups), middle, np.uint8)
        if self.has_zeros:
            self.zeros = rng.integers(0, 1 << self.bits, (self.n, groups), dtype=np.uint8)
        wide = np.arange(self.k) // self.size
        numbers = self.q.astype(np.float64) - self.zeros[:, wide]
        self.values = numbers * self.scales[:, wide].astype(np.float64)

    @property
    def layout(self) -> dict[str, Any]:
        settings = {"codes": f"int{self.bits}", "group": self.group, "zero_points": self.has_zeros}
        return {**settings, "gated": self.gated}

    @property
    def group(self) -> int:
        """The number of inputs (k) that share a scale in weight blocks."""
        return min(self.size, 32)

    def put(self, device: str) -> Any:
        return self._packed(device)[0]

    def blocks(self, device: str) -> Any:
        """The array of the weight blocks."""
        return self._packed(device)[1]

    def _packed(self, device: str) -> tuple[Any, Any]:
        block_bytes = 256 * 128 * self.bits // 8
        block_bytes += 256 * 128 // self.group * (3 if self.has_zeros else 2)
        shape = [-(-self.n // 256), -(-self.k // 128), block_bytes]
        blocks = put_raw(device, np.full(shape, 0xA5, np.uint8))
        weight = ops.PackedWeight(blocks, n=self.n, k=self.k, **self.layout)
        first = self.n // 2 // 8 * 8 if self.parts == 2 else self.n
        for rows in (slice(0, first), slice(first, self.n)):
            q, scales, zeros = (each[rows] for each in (self.q, self.scales, self.zeros))
            if not len(q):
                continue
            if self.bits == 8:
                more = {"zeros": put_raw(device, fours(zeros))} if self.has_zeros else {}
                ops.int8_pack(
                    context(device), weight, put_raw(device, q), put_raw(device, scales), **more,
                    first_row=rows.start, k_per_scale=self.size,
                )  # fmt: skip
                continue
            arrays = {"q": layouts.pack_compressed(q.T), "scales": scales}
            if self.has_zeros:
                arrays["zeros"] = layouts.pack_compressed_zeros(zeros.T)
            given = {name: put_raw(device, np.ascontiguousarray(a)) for name, a in arrays.items()}
            ops.int4_pack(
                context(device), weight, 3, **given, first_row=rows.start, n=len(q),
                k_per_scale=self.size,
            )  # fmt: skip
        return weight, blocks


def fours(zeros: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """[N, G] -> int32 [N / 4, G]: byte i of row r is n = 4 r + i."""
    quads = zeros.reshape(-1, 4, zeros.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(quads).view("<i4")[..., 0]


@dataclass
class KQuantWeights:
    """Random K-quants [N, K]; `values` are dequantised, rounded to float32 as in llama.cpp."""

    kind: str
    n: int
    k: int
    parts: int = 1
    gated: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed + self.k * 1000 + self.n)
        self.codes, self.minimum, low, high, group = K_QUANTS[self.kind]
        n, k = self.n, self.k
        self.q = rng.integers(low, high, (n, k), dtype=np.int8)
        small = 1 / (high * 64 * 3 * np.sqrt(k))
        supers = -(-k // 256)
        self.d, self.e = (
            (rng.uniform(0.2, 1, (n, supers)) * small * times).astype(np.float16)
            for times in (8, 8 * high / 2)
        )
        signed = 0 if self.minimum else -128
        self.s = rng.integers(
            signed, 64 if self.minimum else 128, (n, supers * 256 // group), dtype=np.int8
        )
        self.m = rng.integers(0, 64, (n, supers * 256 // group), dtype=np.uint8)
        # Rows with float16 scales have one scale for each 32 k, of either sign.
        self.is_half = np.zeros(n, bool)
        if self.codes.endswith("halves"):
            self.is_half = (np.arange(n) % 3 > 0) | (self.codes == "k4_halves")
        self.d_half, self.e_half = (
            (rng.uniform(-1, 1, (n, supers * 8)) * small * 64 * times).astype(np.float16)
            for times in (4, 4 * high / 2)
        )
        halves = [
            each.astype(np.float64).repeat(32 // group, 1) for each in (self.d_half, self.e_half)
        ]
        levels = [
            numbers.repeat(256 // group, 1).astype(np.float64) * of_groups
            for numbers, of_groups in ((self.d, self.s), (self.e, self.m))
        ]
        scales, minima = (
            np.where(self.is_half[:, None], half, level).repeat(group, 1)[:, :k]
            for half, level in zip(halves, levels)
        )
        exact = scales * self.q - minima * self.minimum
        self.values = exact.astype(np.float32).astype(np.float64)

    def records(
        self, numbers: npt.NDArray[Any], groups: npt.NDArray[Any], halves: npt.NDArray[Any]
    ) -> npt.NDArray[np.uint8]:
        """Records [N, bytes] as csrc/kernels/gemm/packed/layout.h has them."""
        blocks, rows = -(-self.k // 128), []
        for row in range(self.n):
            for block in range(blocks):
                half = halves[row, 4 * block : 4 * block + 4]
                half = np.where(np.arange(4) * 32 + block * 128 < self.k, half, np.float16(0))
                if self.is_half[row]:
                    tag = [] if self.codes == "k4_halves" else [TAG]
                    rows.append(np.concatenate([*tag, half.astype("<f2").view(np.uint8)]))
                    continue
                of_block = groups.shape[1] // (2 * numbers.shape[1])
                its = groups[row, block * of_block : (block + 1) * of_block]
                number = numbers[row, block // 2 : block // 2 + 1]
                rows.append(np.concatenate([number.view(np.uint8), its.view(np.uint8)]))
        return np.stack(rows).reshape(self.n, -1)

    @property
    def layout(self) -> dict[str, Any]:
        codes, halves = self.codes.removesuffix("_halves"), self.codes.endswith("_halves")
        settings = {"codes": codes, "group": K_QUANTS[self.kind][4], "minimum": self.minimum}
        return {**settings, "halves": halves, "gated": self.gated}

    def put(self, device: str) -> Any:
        return self._packed(device)[0]

    def blocks(self, device: str) -> Any:
        """The array of the weight blocks."""
        return self._packed(device)[1]

    def _packed(self, device: str) -> tuple[Any, Any]:
        bits = 4 if self.codes.startswith("k4") else 8
        records = self.records(self.d, self.s, self.d_half)
        min_records = self.records(self.e, self.m, self.e_half)
        block_bytes = 256 * (128 * bits // 8)
        k_blocks = -(-self.k // 128)
        block_bytes += 256 * records.shape[1] // k_blocks * (1 + self.minimum)
        shape = [-(-self.n // 256), k_blocks, block_bytes]
        blocks = put_raw(device, np.full(shape, 0xA5, np.uint8))
        weight = ops.PackedWeight(blocks, n=self.n, k=self.k, **self.layout)
        first = self.n // 2 // 8 * 8 if self.parts == 2 else self.n
        for rows in (slice(0, first), slice(first, self.n)):
            q = self.q[rows]
            if not len(q):
                continue
            stored = q if bits == 8 else (q[:, 0::2] | q[:, 1::2] << 4).view(np.uint8)
            more = {"min_records": put_raw(device, min_records[rows])} if self.minimum else {}
            ops.k_quant_pack(
                context(device), weight, put_raw(device, np.ascontiguousarray(stored)),
                put_raw(device, records[rows]), **more, first_row=rows.start,
            )  # fmt: skip
        return weight, blocks


Weights = FloatWeights | IntegerWeights | KQuantWeights


def make_weights(kind: str, n: int, k: int, **settings: Any) -> Weights:
    """Random weights of a kind of KINDS."""
    made = KQuantWeights if kind in K_QUANTS else FloatWeights if kind in FLOATS else IntegerWeights
    return made(kind, n, k, **settings)
