"""Weights of floats with group scales for kernel tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kernels.util import context, ops, put, put_raw
from tests.reference.float_groups import GROUPS, dequantise, quantise

KINDS = ("nvfp4", "mxfp4", "mxfp8")


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
    """gate rows, then up rows -> a row of gate, a row of up, …"""
    return np.stack(np.split(rows, 2), 1).reshape(rows.shape)
