"""Random e4m3 weights for kernel tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.kernels.util import context, ops, put, put_raw
from tests.reference.tiny_fp8 import quantise


@dataclass
class Weights:
    """Random e4m3 weights; `values` [N, K] are dequantised. `by_row`: a scale for each row."""

    n: int
    k: int
    by_row: bool = False
    gated: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed + self.k * 1000 + self.n)
        weight = rng.standard_normal((self.n, self.k)).astype(np.float32) / np.sqrt(self.k)
        self.tile = (1, self.k) if self.by_row else (128, 128)
        parts = np.split(weight, 2) if self.gated else [weight]  # gate, up
        made = [quantise(part, *self.tile, torch.float32) for part in parts]
        self.parts = [(c.view(torch.uint8).numpy(), s.numpy()) for c, s, _ in made]
        self.values = np.concatenate([v.numpy() for _, _, v in made]).astype(np.float64)

    @property
    def block_bytes(self) -> int:
        return 32768 + 4 * (256 if self.by_row else 32)

    @property
    def layout(self) -> dict[str, Any]:
        return {"codes": "e4m3", "scale_rows": 1 if self.by_row else 8, "gated": self.gated}

    def put(self, device: str) -> Any:
        shape = [-(-self.n // 256), -(-self.k // 128), self.block_bytes]
        blocks = put_raw(device, np.full(shape, 0xA5, np.uint8))
        weight = ops.PackedWeight(blocks, n=self.n, k=self.k, **self.layout)
        self.pack(device, weight)
        return weight

    def pack(self, device: str, weight: Any) -> None:
        row = 0
        for codes, scales in self.parts:
            ops.code8_pack(
                context(device), weight, put_raw(device, codes), put(device, scales),
                first_row=row, rows_per_scale=self.tile[0], k_per_scale=self.tile[1],
            )  # fmt: skip
            row += len(codes)
