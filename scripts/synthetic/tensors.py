"""Tensor descriptions: name, shape, and a fill that generates the values."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpmcu.loading.tensors import STORAGE_DTYPES
from scripts.synthetic.sources import Array, Bits, Source

Config = dict[str, Any]
Fill = Callable[[Source, int, int, str], Iterator[Array]]  # source, seed, count, dtype -> chunks


def normal(std: float, mean: float = 0.0) -> Fill:
    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        return source.normal(seed, count, mean, std, dtype)

    return fill


def normal_with_raised_start(std: float, mean: float, num_raised: int) -> Fill:
    """A fill whose first `num_raised` values have this mean; the others have mean 0."""

    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        yield from source.normal(seed, num_raised, mean, std, dtype)
        yield from source.normal(seed + 1, count - num_raised, 0.0, std, dtype)

    return fill


def stored(values: Array) -> Fill:
    """A fill with the given values, which have the storage dtype."""

    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        yield np.ascontiguousarray(values).reshape(-1)

    return fill


def random_bits(bits: Bits) -> Fill:
    """A fill with random words, of which a tensor of bytes has four elements each."""

    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        kind = STORAGE_DTYPES[dtype]
        size = np.dtype(kind).itemsize
        for chunk in source.words(seed, -(-count * size // 4), bits):
            elements = chunk.view(kind)[:count]
            count -= elements.size
            yield elements

    return fill


def vectors(seed: int, index: Array, config: Config, scale: float) -> Fill:
    """A fill whose row i is `scale` times unit vector index[i] of a table of one a token."""
    size, columns = config["vocab_size"], config["hidden_size"]
    table = tensor_seed(seed, "planted")  # the name is part of the seed: do not rename

    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        return source.vectors(table, size, index, columns, scale, dtype)

    return fill


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    fill: Fill
    dtype: str | None = None  # None: the run's dtype
    std: float = 0.0  # standard deviation of a quantisable matrix; 0: not quantisable

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> TensorSpec:
    """A matrix W [rows, columns] for which y = x W^T has the RMS of x times `gain`."""
    std = gain / math.sqrt(columns)
    return TensorSpec(name, (rows, columns), normal(std), std=std)


def norm(name: str, size: int) -> TensorSpec:
    return TensorSpec(name, (size,), normal(0.05, mean=1.0))


def tensor_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "little")
