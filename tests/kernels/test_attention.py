from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.kernels.util import (
    SMALL,
    Step,
    chain_masks,
    check,
    context,
    empty,
    encode,
    get,
    on_devices,
    on_devices_and_dtypes,
    ops,
    put,
    put_raw,
    random_tree,
    rounded,
    sizes,
)
from tests.reference import ops as reference


@dataclass
class Case:
    """Inputs of attention. Cells that no row sees hold NaN: they must not count."""

    step: Step
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    seed: int = 0

    def __post_init__(self) -> None:
        step, dim = self.step, self.head_dim
        rng = np.random.default_rng(self.seed)
        columns = (self.num_heads + 2 * self.num_kv_heads) * dim
        self.scale = dim**-0.5
        self.qkv = rounded(rng.standard_normal((step.num_rows, columns)) * 1.5, self.dtype)
        # [cells, Hkv, D] of each sequence; the same numbers whatever the step's shape.
        self.k, self.v = (
            [
                rounded(
                    np.random.default_rng([self.seed, seq, which]).standard_normal(
                        (end, self.num_kv_heads, dim)
                    ),
                    self.dtype,
                )
                for seq, end in enumerate(step.ends)
            ]
            for which in (0, 1)
        )

    def cache(self, cells: list[np.ndarray]) -> np.ndarray:
        """Raw [pages, Hkv, 64, D] with the sequences' cells in their pages."""
        shape = (self.step.num_pages, self.num_kv_heads, 64, self.head_dim)
        cache = np.full(shape, encode(np.nan, self.dtype))
        for seq, values in enumerate(cells):
            page, cell = self.step.where(seq, np.arange(len(values)))
            cache[page, :, cell] = encode(values, self.dtype)
        return cache

    def put_raw(self, device: str, raw: np.ndarray) -> Any:
        if self.dtype != "bfloat16":
            return put_raw(device, raw)
        array = ops.Array(context(device), list(raw.shape), "bfloat16")
        array.copy_from(raw)
        return array

    def run(self, name: str, device: str) -> Any:
        step = self.step
        out = empty(device, [step.num_rows, self.num_heads * self.head_dim], self.dtype)
        floats = ops.attention_scratch_floats(
            num_rows=step.num_rows, num_heads=self.num_heads, head_dim=self.head_dim,
            max_kv=step.max_kv,
        )  # fmt: skip
        getattr(ops, name)(
            context(device), out=out, qkv=put(device, self.qkv, self.dtype),
            k_cache=self.put_raw(device, self.cache(self.k)),
            v_cache=self.put_raw(device, self.cache(self.v)),
            scale=self.scale, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim, rows=step.rows(device), scratch=empty(device, [floats]),
        )  # fmt: skip
        return out

    def reference(self) -> np.ndarray:
        out = np.empty((self.step.num_rows, self.num_heads * self.head_dim))
        for row in range(self.step.num_rows):
            seq, cells = self.step.row_seqs[row], self.step.visible(row)
            q = self.qkv[row].reshape(-1, self.head_dim)[: self.num_heads]
            k, v = self.k[seq][cells], self.v[seq][cells]
            out[row] = reference.attention_row(q, k, v, self.scale).reshape(-1)
        return out

    def check(self, name: str, device: str) -> None:
        run = lambda device: get(self.run(name, device))  # noqa: E731
        check(run, device, self.reference(), "attention", self.dtype)


HEADS = sizes(
    (1, 1, 64), (4, 2, 128), (6, 2, 64), (8, 2, 128), (7, 1, 128), (14, 2, 64), (16, 2, 128),
    (32, 2, 128), (2, 2, 256), (8, 1, 256),
)  # fmt: skip
EDGES = [0, 1, 63, 64, 65, 127, 128, 129]
DECODE, PREFILL = "attention_decode", "attention_prefill"


# ---- against the reference


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_heads(device: str, dtype: str, name: str, heads: tuple[int, int, int]) -> None:
    Case(Step(lengths=[0, 63, 130, 300], counts=[1, 2, 1, 3]), *heads, dtype).check(name, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_lengths_around_page_edges(device: str, dtype: str, name: str) -> None:
    step = Step(lengths=EDGES, counts=[1] * len(EDGES))
    Case(step, 4, 2, 64, dtype).check(name, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("lengths", sizes([640], [4095, 4096, 4097], [20479, 20480, 20481, 23000],
                                          small=1))  # fmt: skip
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_long(device: str, dtype: str, name: str, lengths: list[int]) -> None:
    step = Step(lengths=lengths, counts=[1] * len(lengths))
    Case(step, 4, 1, 64, dtype).check(name, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("size", sizes(1, 2, 12, 33, 60, 64))
@pytest.mark.parametrize("heads", [(4, 2, 128), (7, 1, 64)])
def test_trees(device: str, dtype: str, size: int, heads: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(size)
    counts = [size, 1, max(1, size // 2)]
    masks = [random_tree(rng, count) for count in counts]
    step = Step(lengths=[200, 63, 0], counts=counts, masks=masks)
    Case(step, *heads, dtype).check(DECODE, device)


@on_devices_and_dtypes
@pytest.mark.parametrize(
    ("lengths", "counts"),
    sizes(
        ([0], [1]), ([0], [65]), ([70, 0, 5], [64, 2, 127]), ([0], [200]), ([129], [129]),
        ([1000], [63]), ([300, 0], [256, 257]),
    ),
)  # fmt: skip
def test_prefill_chunks(device: str, dtype: str, lengths: list[int], counts: list[int]) -> None:
    Case(Step(lengths=lengths, counts=counts), 4, 2, 128, dtype).check(PREFILL, device)


@on_devices_and_dtypes
def test_large_scores(device: str, dtype: str) -> None:
    case = Case(Step(lengths=[150, 3], counts=[2, 2]), 4, 2, 64, dtype)
    case.scale = 8.0  # one cell takes all the weight, and exp would overflow unguarded
    case.check(DECODE, device)
    case.check(PREFILL, device)


# ---- bit for bit


def one_sequence(case: Case, seq: int, rows: Sequence[int]) -> Case:
    """A step of some of a sequence's rows, the last ones of a chain; earlier rows are cached."""
    step = case.step
    first = int(step.in_seq[rows[0]])
    alone = Step(lengths=[step.lengths[seq] + first], counts=[len(rows)], seed=77)
    result = Case(alone, case.num_heads, case.num_kv_heads, case.head_dim, case.dtype)
    result.qkv = case.qkv[list(rows)]
    result.k, result.v = [case.k[seq][: alone.ends[0]]], [case.v[seq][: alone.ends[0]]]
    return result


LENGTHS = [0, 65, 700] if SMALL else [0, 65, 127, 700, 4200]


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", [(4, 2, 128), (7, 1, 64)])
def test_decode_rows_do_not_depend_on_the_batch(
    device: str, dtype: str, heads: tuple[int, int, int]
) -> None:
    counts = [1, 7, 64, 13, 2][: len(LENGTHS)]
    case = Case(Step(lengths=LENGTHS, counts=counts), *heads, dtype)
    together = case.run(DECODE, device).numpy()
    for seq, count in enumerate(counts):
        begin = int(case.step.begins[seq])
        rows = range(begin, begin + count)
        alone = one_sequence(case, seq, rows).run(DECODE, device).numpy()
        assert np.array_equal(alone, together[begin : begin + count]), f"sequence {seq}"
        for row in {rows[0], rows[count // 2], rows[-1]}:
            single = one_sequence(case, seq, [row]).run(DECODE, device).numpy()
            assert np.array_equal(single[0], together[row]), f"row {row} of sequence {seq}"


@on_devices_and_dtypes
def test_a_chain_of_masks_equals_causal(device: str, dtype: str) -> None:
    counts = [12, 64]
    case = Case(Step(lengths=[100, 1], counts=counts), 4, 2, 64, dtype)
    causal = case.run(DECODE, device).numpy()
    case.step.masks = [chain_masks(count) for count in counts]
    assert np.array_equal(case.run(DECODE, device).numpy(), causal)


@on_devices_and_dtypes
def test_a_tree_row_does_not_depend_on_later_rows(device: str, dtype: str) -> None:
    masks = random_tree(np.random.default_rng(1), 60)
    case = Case(Step(lengths=[333], counts=[60], masks=[masks]), 8, 2, 128, dtype)
    whole = case.run(DECODE, device).numpy()
    for count in (1, 2, 31, 59):
        part = Case(Step(lengths=[333], counts=[count], masks=[masks[:count]]), 8, 2, 128, dtype)
        part.qkv = case.qkv[:count]
        part.k, part.v = [case.k[0][: 333 + count]], [case.v[0][: 333 + count]]
        assert np.array_equal(part.run(DECODE, device).numpy(), whole[:count]), f"{count} rows"


@on_devices_and_dtypes
def test_decode_does_not_depend_on_max_kv(device: str, dtype: str) -> None:
    case = Case(Step(lengths=LENGTHS, counts=[2] * len(LENGTHS)), 4, 2, 64, dtype)
    expected = case.run(DECODE, device).numpy()
    for max_kv in (4608, 8192, 32768):
        case.step.max_kv = max_kv
        assert np.array_equal(case.run(DECODE, device).numpy(), expected), f"max_kv {max_kv}"


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", [(4, 2, 64), (2, 1, 128)])
def test_prefill_rows_do_not_depend_on_the_chunk(
    device: str, dtype: str, heads: tuple[int, int, int]
) -> None:
    case = Case(Step(lengths=[0], counts=[300]), *heads, dtype)
    whole = case.run(PREFILL, device).numpy()
    for cuts in ([64, 128, 256], [1, 2, 65, 200], [17, 150, 299]):
        edges = [0, *cuts, 300]
        for begin, end in pairwise(edges):
            part = one_sequence(case, 0, range(begin, end)).run(PREFILL, device).numpy()
            assert np.array_equal(part, whole[begin:end]), f"rows {begin} to {end}"


# ---- errors


@on_devices
def test_decode_takes_up_to_64_rows_of_a_sequence(device: str) -> None:
    with pytest.raises(ValueError, match="65"):
        Case(Step(lengths=[0], counts=[65]), 1, 1, 64, "float16").run(DECODE, device)


@on_devices
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_heads_must_divide(device: str, name: str) -> None:
    with pytest.raises(ValueError, match="5"):
        Case(Step(lengths=[0], counts=[1]), 5, 2, 64, "float16").run(name, device)
