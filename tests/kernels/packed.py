"""4-bit weights and inputs for kernel tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cpmcu.quant import packing
from tests.kernels.util import decode, empty, encode, ops, put_raw, rounded
from tests.reference import ops as reference

U8 = npt.NDArray[np.uint8]


@dataclass
class Weights:
    """Random 4-bit weights; `values` [N, K] are dequantised."""

    k: int
    n: int
    scale_dtype: str = "float16"
    channel_wise: bool = False
    has_zeros: bool = False
    seed: int = 0
    gated: bool = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed + self.k * 1000 + self.n)
        groups = 1 if self.channel_wise else -(-self.k // 128)
        self.q: U8 = rng.integers(0, 16, (self.k, self.n), dtype=np.uint8)
        scales = rng.uniform(0.2, 1, (groups, self.n)) / (4.6 * np.sqrt(self.k))
        self.scales = encode(scales, self.scale_dtype)
        self.zeros: U8 | None = None
        if self.has_zeros:
            self.zeros = rng.integers(0, 16, (groups, self.n), dtype=np.uint8)
        self.values = reference.w4_weights(
            self.q, decode(self.scales, self.scale_dtype), self.zeros
        )

    @property
    def blocks(self) -> U8:
        tensors = (self.q, self.scales, self.zeros)
        if self.gated:  # interleave eight columns of gate and of up
            interleaved = np.arange(self.n).reshape(2, -1, 8).swapaxes(0, 1).ravel()
            tensors = tuple(t if t is None else t[:, interleaved] for t in tensors)
        return packing.pack_blocks(*tensors)

    def empty(self, device: str) -> Any:
        blocks = empty(device, self.blocks.shape, "uint8")
        return blocks, self.weight(blocks)

    def weight(self, blocks: Any) -> Any:
        return ops.PackedWeight(
            blocks,
            n=self.n,
            k=self.k,
            zero_points=self.has_zeros,
            scale_dtype=self.scale_dtype,
            gated=self.gated,
        )

    def put(self, device: str) -> Any:
        return self.weight(put_raw(device, self.blocks))


def scratch_of(device: str, weight: Any, rows: int) -> Any:
    return empty(device, [max(1, ops.packed_scratch_floats(weight, rows))], "float32")


def random_x(m: int, k: int, dtype: str) -> npt.NDArray[np.float64]:
    return rounded(np.random.default_rng(m).standard_normal((m, k)), dtype)
