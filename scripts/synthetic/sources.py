"""Random number sources of tensors: numpy, or torch on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cpmcu.loading.tensors import STORAGE_DTYPES

Array = npt.NDArray[Any]

CHUNK = 1 << 24  # elements of a chunk


@dataclass(frozen=True, slots=True)
class Bits:
    """Words: `least` plus the sum of `terms` random words, each masked by `mask`."""

    mask: int
    least: int = 0
    terms: int = 1


class Source(Protocol):
    """Generates the elements of a tensor from a seed, in chunks of the storage dtype.

    A chunk is valid until the next one is generated.
    """

    def normal(
        self, seed: int, count: int, mean: float, std: float, dtype: str
    ) -> Iterator[Array]: ...

    def vectors(
        self, seed: int, count: int, index: Array, columns: int, scale: float, dtype: str
    ) -> Iterator[Array]:
        """Row i is unit vector number index[i], times `scale`. The seed gives `count` vectors."""

    def words(self, seed: int, count: int, bits: Bits) -> Iterator[Array]:
        """Generates `count` int32 words."""


class NumpySource:
    name = "numpy"

    def normal(self, seed: int, count: int, mean: float, std: float, dtype: str) -> Iterator[Array]:
        rng = np.random.default_rng(seed)
        for begin in range(0, count, CHUNK):
            values = rng.standard_normal(min(CHUNK, count - begin), dtype=np.float32)
            values *= np.float32(std)
            values += np.float32(mean)
            yield encode(values, dtype)

    def vectors(
        self, seed: int, count: int, index: Array, columns: int, scale: float, dtype: str
    ) -> Iterator[Array]:
        rng = np.random.default_rng(seed)
        table = rng.standard_normal((count, columns), dtype=np.float32)
        table *= np.float32(scale) / np.linalg.norm(table, axis=1, keepdims=True)
        for begin in range(0, index.size, step := max(1, CHUNK // columns)):
            yield encode(table[index[begin : begin + step]].ravel(), dtype)

    def words(self, seed: int, count: int, bits: Bits) -> Iterator[Array]:
        rng = np.random.default_rng(seed)
        for begin in range(0, count, CHUNK):
            made = np.full(min(CHUNK, count - begin), bits.least, np.uint32)
            for _ in range(bits.terms):
                made += rng.integers(0, 1 << 32, made.size, dtype=np.uint32) & np.uint32(bits.mask)
            yield made.view(np.int32)


class TorchSource:
    """Generates the elements on a GPU. The numbers differ from numpy's."""

    def __init__(self, device: str) -> None:
        import torch  # optional: needed only on a GPU

        self.torch = torch
        self.device = torch.device(device)
        self.name = torch.cuda.get_device_name(self.device)
        self.host: Any = None  # pinned staging buffer of the largest chunk

    def normal(self, seed: int, count: int, mean: float, std: float, dtype: str) -> Iterator[Array]:
        torch = self.torch
        kind = getattr(torch, dtype)
        generator = torch.Generator(self.device).manual_seed(seed)
        for begin in range(0, count, CHUNK):
            size = min(CHUNK, count - begin)
            values = torch.empty(size, dtype=torch.float32, device=self.device)
            values.normal_(mean, std, generator=generator)
            yield self.staged(values.to(kind), dtype)

    def vectors(
        self, seed: int, count: int, index: Array, columns: int, scale: float, dtype: str
    ) -> Iterator[Array]:
        torch = self.torch
        kind = getattr(torch, dtype)
        generator = torch.Generator(self.device).manual_seed(seed)
        table = torch.empty((count, columns), dtype=torch.float32, device=self.device)
        table.normal_(generator=generator)
        table *= scale / table.norm(dim=1, keepdim=True)
        rows = torch.from_numpy(index).to(self.device)
        for begin in range(0, index.size, step := max(1, CHUNK // columns)):
            yield self.staged(table[rows[begin : begin + step]].to(kind).flatten(), dtype)

    def words(self, seed: int, count: int, bits: Bits) -> Iterator[Array]:
        torch = self.torch
        generator = torch.Generator(self.device).manual_seed(seed)
        mask, least = (int(np.uint32(value).view(np.int32)) for value in (bits.mask, bits.least))
        for begin in range(0, count, CHUNK):
            size = (bits.terms, min(CHUNK, count - begin))
            values = torch.empty(size, dtype=torch.int32, device=self.device)
            values.random_(-(1 << 31), 1 << 31, generator=generator)
            made = (values & mask).sum(0, dtype=torch.int32) + least
            yield self.staged(made, "int32")

    def staged(self, values: Any, dtype: str) -> Array:
        """Copies a GPU tensor to the staging buffer. The result is valid until the next call."""
        data = values.view(self.torch.uint8)
        if self.host is None:
            self.host = self.torch.empty(CHUNK * 4, dtype=self.torch.uint8, pin_memory=True)
        self.host[: data.numel()].copy_(data)
        data_on_host: Array = self.host[: data.numel()].numpy()
        return data_on_host.view(STORAGE_DTYPES[dtype])


def encode(values: Array, dtype: str) -> Array:
    """Converts fp32 values to the storage dtype."""
    if dtype == "bfloat16":
        return round_to_bfloat16(values)
    return values.astype(np.float16) if dtype == "float16" else values


def round_to_bfloat16(values: Array) -> Array:
    """Converts finite fp32 values to bf16 bits (uint16), rounding to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def make_source(device: str) -> Source:
    """Returns the source for `device`: auto, cpu, or a torch device such as cuda:0."""
    if device == "cpu":
        return NumpySource()
    try:
        import torch
    except ImportError:
        if device != "auto":
            raise SystemExit(f"--device {device} needs torch, which is not installed") from None
        return NumpySource()
    if device == "auto":
        return TorchSource("cuda") if torch.cuda.is_available() else NumpySource()
    return TorchSource(device)
