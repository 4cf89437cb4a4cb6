"""Shared parts of the kernel tests: devices, dtypes, arrays, comparison, tokens of a step."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cpmcu import C
from tests.tolerances import KERNELS, ULP, assert_close

ops = C.ops
Floats = npt.NDArray[np.float64]

# compute-sanitizer slows kernels down a hundredfold.
SMALL = os.environ.get("CPMCU_SMALL") == "1"

PAGE = 64

GPU = pytest.mark.gpu
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
# The CUDA back end has no float32 models.
on_devices_and_dtypes = pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", dtype) for dtype in ("float32", "float16", "bfloat16")]
    + [pytest.param("cuda", dtype, marks=GPU) for dtype in ("float16", "bfloat16")],
)
# For tests that are slow on the CPU, where dtypes differ only in the storage of numbers.
on_devices_and_cuda_dtypes = pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", "float32")]
    + [pytest.param("cuda", dtype, marks=GPU) for dtype in ("float16", "bfloat16")],
)


def sizes(*all_sizes: Any, small: int = 3) -> Sequence[Any]:
    """All sizes, or the first `small` under a sanitizer."""
    return all_sizes[:small] if SMALL else all_sizes


def for_cuda_only(device: str, reason: str) -> None:
    """Skips a case that selects a path of the CUDA kernels, if the CPU kernel has one path."""
    if device == "cpu":
        pytest.skip(f"a case of the CUDA kernels only: {reason}")


ANY_LENGTH = "the CPU kernel runs one loop over pages for any length"


# ---- arrays


@functools.cache
def context(device: str) -> Any:
    folders = [Path("/usr/local/cuda/lib64"), *(Path(f, "nvidia/cu13/lib") for f in sys.path)]
    found = [str(f) for folder in folders for f in sorted(folder.glob("libcublasLt.so*"))]
    return ops.Context(device, cublas_paths=found)


def encode(values: npt.ArrayLike, dtype: str) -> npt.NDArray[Any]:
    """Rounds float64 to `dtype` (to nearest even). bfloat16 is returned as uint16."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(np.asarray(values, np.float64).astype(dtype))
    bits = np.ascontiguousarray(np.asarray(values, np.float32)).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    nan = np.isnan(np.asarray(values, np.float32))
    return np.where(nan, 0x7FFF, rounded).astype(np.uint16)


def decode(array: npt.NDArray[Any], dtype: str) -> Floats:
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def rounded(values: npt.ArrayLike, dtype: str) -> Floats:
    """Rounds to `dtype` and returns float64."""
    return decode(encode(values, dtype), dtype)


def put(device: str, values: npt.ArrayLike, dtype: str = "float32", pinned: bool = False) -> Any:
    """An Array with real numbers."""
    source = encode(values, dtype)
    array = ops.Array(context(device), list(source.shape), dtype, pinned)
    array.copy_from(source)
    return array


def put_raw(device: str, source: npt.NDArray[Any], pinned: bool = False) -> Any:
    """An Array with integers, or with C structs as bytes."""
    source = np.ascontiguousarray(source)
    if source.dtype.fields:
        source = source.view(np.uint8).reshape(*source.shape, source.dtype.itemsize)
    array = ops.Array(context(device), list(source.shape), source.dtype.name, pinned)
    array.copy_from(source)
    return array


def put_ints(device: str, values: npt.ArrayLike) -> Any:
    return put_raw(device, np.asarray(values, np.int32))


def empty(device: str, shape: Sequence[int], dtype: str = "float32") -> Any:
    """A new Array, with all bytes 0xFF."""
    return ops.Array(context(device), list(shape), dtype)


def empty_structs(device: str, shape: Sequence[int], dtype: Any, pinned: bool = False) -> Any:
    return ops.Array(context(device), [*shape, dtype.itemsize], "uint8", pinned)


def get(array: Any) -> Floats:
    """The content as float64."""
    return decode(array.numpy(), array.dtype)


def get_structs(array: Any, dtype: Any) -> npt.NDArray[Any]:
    raw = array.numpy()
    return np.ascontiguousarray(raw).view(dtype).reshape(raw.shape[:-1])


def check(
    run: Callable[[str], Floats], device: str, reference: Floats, kind: str, dtype: str
) -> None:
    """Compares run(device) with float64 values. On CUDA also with the CPU kernel.

    Two results that are both close to a number between two neighbours may be rounded to either.
    """
    tolerance = KERNELS[kind][dtype]
    result = run(device)
    assert_close(result, reference, tolerance)
    if device == "cuda":
        one_ulp = replace(tolerance, max_abs=max(tolerance.max_abs, ULP[dtype]))
        assert_close(result, run("cpu"), one_ulp)


# ---- steps


@dataclass
class Step:
    """The tokens of a step of several sequences, with pages at random places."""

    lengths: list[int]  # cached tokens of each sequence
    counts: list[int]  # tokens of each sequence in the step
    masks: list[npt.NDArray[np.uint64]] | None = None  # for each sequence; None: causal
    seed: int = 0
    extra_kv: int = 0  # added to max_kv

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        num_seqs = len(self.lengths)
        self.num_slots = num_seqs + 2
        self.slots = rng.permutation(self.num_slots)[:num_seqs]
        self.ends = [length + count for length, count in zip(self.lengths, self.counts)]
        needed = [-(-end // PAGE) for end in self.ends]
        self.num_pages = sum(needed) + 3
        self.page_table = np.zeros((self.num_slots, max(needed) + 1), np.int32)
        pages = iter(rng.permutation(self.num_pages))
        for slot, count in zip(self.slots, needed):
            self.page_table[slot, :count] = [next(pages) for _ in range(count)]
        self.begins = np.concatenate([[0], np.cumsum(self.counts)])
        self.num_rows = int(self.begins[-1])
        self.token_seqs = np.repeat(np.arange(num_seqs), self.counts)
        self.in_seq = np.arange(self.num_rows) - self.begins[self.token_seqs]
        self.token_entries = np.array(self.lengths)[self.token_seqs] + self.in_seq
        depths = self.in_seq
        if self.masks is not None:
            depths = np.array([int(mask).bit_count() - 1 for mask in np.concatenate(self.masks)])
        self.positions = np.array(self.lengths)[self.token_seqs] + depths  # a test may replace them
        self.max_kv = max(self.ends) + self.extra_kv

    def visible(self, row: int) -> npt.NDArray[np.int64]:
        """The entries that token `row` of the step sees."""
        seq, j = self.token_seqs[row], int(self.in_seq[row])
        length = self.lengths[seq]
        bits = (1 << (j + 1)) - 1 if self.masks is None else int(self.masks[seq][j])
        return np.array([*range(length), *(length + i for i in range(j + 1) if bits >> i & 1)])

    def where(self, seq: int, entries: Any) -> tuple[Any, Any]:
        """Page, and place in the page, of entries of a sequence."""
        entries = np.asarray(entries)
        return self.page_table[self.slots[seq], entries // PAGE], entries % PAGE

    def rows(self, device: str, parents: Any = None) -> Any:
        slot_lengths = np.full(self.num_slots, 12345)
        slot_lengths[self.slots] = self.lengths
        masks = None
        if self.masks is not None:
            masks = put_raw(device, np.concatenate(self.masks).astype(np.uint64))
        return ops.StepTokens(
            num_tokens=self.num_rows,
            num_seqs=len(self.lengths),
            max_seq_tokens=max(self.counts),
            max_kv=self.max_kv,
            positions=put_ints(device, self.positions),
            token_seqs=put_ints(device, self.token_seqs),
            seq_slots=put_ints(device, self.slots),
            seq_token_begin=put_ints(device, self.begins),
            slot_lengths=put_ints(device, slot_lengths),
            page_table=put_ints(device, self.page_table),
            ancestor_masks=masks,
            token_parents=parents,
        )


def inv_freq_of(head_dim: int, theta: float = 1e4) -> npt.NDArray[np.float32]:
    return (theta ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)


def random_tree(rng: np.random.Generator, size: int) -> npt.NDArray[np.uint64]:
    """Ancestor masks of a random tree: a token sees itself and its ancestors."""
    masks = [1]
    for i in range(1, size):
        masks.append(masks[int(rng.integers(i))] | 1 << i)
    return np.array(masks, np.uint64)


def deep_tree(size: int) -> npt.NDArray[np.uint64]:
    """Ancestor masks of a tree whose longest path has about half the nodes."""
    rng = np.random.default_rng(size)
    masks = [1]
    for i in range(1, size):
        masks.append(masks[max(0, i - 1 - int(rng.integers(3)))] | 1 << i)
    return np.array(masks, np.uint64)


def chain_masks(size: int) -> npt.NDArray[np.uint64]:
    return np.array([(1 << (i + 1)) - 1 for i in range(size)], np.uint64)
