"""Matrices of noise with a few chosen elements, dense or in 4 bits.

Matrices of zeros would run faster than real weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scripts.synthetic.gptq import GROUP_SIZE, LEVELS_STD, gptq_tensors
from scripts.synthetic.sources import CHUNK, Array, Source, encode
from scripts.synthetic.tensors import TensorSpec

NOISE = 0.01  # RMS of y over RMS of x, for y = x W^T without the chosen elements


@dataclass(frozen=True, slots=True)
class Entries:
    """The chosen elements: element i is `values[i]` at [rows[i], columns[i]]."""

    rows: Array
    columns: Array
    values: Array

    @classmethod
    def of(cls, rows: Array, columns: Array, value: float) -> Entries:
        """Elements of one value."""
        rows, columns = np.broadcast_arrays(rows, columns)
        return cls(rows.ravel(), columns.ravel(), np.full(rows.size, value, np.float32))


def dense_entries(name: str, rows: int, columns: int, entries: Entries) -> TensorSpec:
    """A dense matrix [rows, columns]."""

    def fill(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        noise = np.float32(NOISE / math.sqrt(columns))
        for begin in range(0, rows, step := max(1, CHUNK // columns)):
            shape = (min(step, rows - begin), columns)
            made = np.random.default_rng([seed, begin]).standard_normal(shape, dtype=np.float32)
            made *= noise
            here = (entries.rows >= begin) & (entries.rows < begin + step)
            made[entries.rows[here] - begin, entries.columns[here]] += entries.values[here]
            yield encode(made.ravel(), dtype)

    return TensorSpec(name, (rows, columns), fill)


def entries_in_4_bits(
    module: str, rows: int, columns: int, entries: Entries
) -> Iterator[TensorSpec]:
    """Entries in 4 bits. If a group has a chosen element, its other elements are zero."""
    noise = NOISE / math.sqrt(columns) / LEVELS_STD
    row, column = entries.rows, entries.columns
    group = column // GROUP_SIZE
    largest = np.zeros((columns // GROUP_SIZE, rows), np.float32)
    np.maximum.at(largest, (group, row), np.abs(entries.values))

    def q(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        rng = np.random.default_rng(seed)
        made = rng.integers(0, 1 << 32, (columns // 8, rows), dtype=np.uint32)
        words = (group * (GROUP_SIZE // 8))[:, None] + np.arange(GROUP_SIZE // 8)
        made[words, row[:, None]] = 0x88888888
        code = 8 + np.rint(7 * entries.values / largest[group, row]).astype(np.int64)
        bits = ((code ^ 8) << (4 * (column % 8))).astype(np.uint32)
        np.bitwise_xor.at(made, (column // 8, row), bits)
        yield made.view(np.int32).ravel()

    def scales(source: Source, seed: int, count: int, dtype: str) -> Iterator[Array]:
        made = np.where(largest > 0, largest / 7, np.float32(noise)).astype(np.float32)
        yield encode(made.ravel(), dtype)

    yield from gptq_tensors(module, rows, columns, q, noise, scales)


def entries_matrix(
    module: str, rows: int, columns: int, entries: Entries, in_4_bits: bool
) -> Iterator[TensorSpec]:
    """The tensors of a module with such a matrix."""
    if in_4_bits:
        yield from entries_in_4_bits(module, rows, columns, entries)
    else:
        yield dense_entries(f"{module}.weight", rows, columns, entries)
