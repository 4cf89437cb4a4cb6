"""An fp8 KV cache: rotary_kv writes it, attention reads it, keep_accepted moves its rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.kernels.attention import Case, put_fp8
from tests.kernels.test_attention import (
    DECODE,
    EDGES,
    PREFILL,
    check_by_position,
    one_sequence,
    trees,
)
from tests.kernels.util import (
    ANY_LENGTH,
    Step,
    chain_masks,
    context,
    empty,
    for_cuda_only,
    inv_freq_of,
    on_devices,
    on_devices_and_cuda_dtypes,
    on_devices_and_dtypes,
    ops,
    put,
    put_ints,
    put_raw,
    random_tree,
    rounded,
    sizes,
)
from tests.reference import fp8
from tests.reference import ops as reference

HEADS = sizes(
    (4, 2, 128), (7, 1, 64), (8, 1, 512), (8, 1, 256), (1, 1, 64), (14, 2, 64), (32, 2, 128)
)
NAMES = [DECODE, PREFILL]


@dataclass
class Fp8Case(Case):
    """Keys and values are stored as e4m3 with scales. Rows that no token sees are NaN."""

    def put(self, device: str) -> tuple[Any, Any, Any, Any]:
        k, v = (put_fp8(device, self, entries) for entries in (self.k, self.v))
        return put(device, self.qkv, self.dtype), k, v, self.step.rows(device)

    def params(self, device: str, qkv: Any, k: Any, v: Any, rows: Any) -> tuple[Any, Any]:
        self.selecting = {"k_scales": k[1], "v_scales": v[1]}
        return super().params(device, qkv, k[0], v[0], rows)

    def reference(self) -> np.ndarray:
        stored = self.k, self.v
        self.k, self.v = ([fp8.dequantised(rows) for rows in entries] for entries in stored)
        try:
            return super().reference()
        finally:
            self.k, self.v = stored


# ---- the format


def test_the_engine_rounds_to_nearest() -> None:
    """Every float16 number, so that all values, ties and subnormals occur."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)
    numbers = numbers[np.abs(numbers) <= 448]
    numbers = np.append(numbers, [448.0] * (-len(numbers) % 15))
    rows = np.concatenate([numbers.reshape(-1, 15), np.full((len(numbers) // 15, 1), 448.0)], 1)
    step = Step(lengths=[0], counts=[len(rows)])
    codes, scales = write("cpu", "float32", step, np.tile(rows, (1, 3)), (1, 1, 16))[1]
    page, entry = step.where(0, np.arange(len(rows)))
    assert (scales[page, 0, entry] == 1).all()
    assert np.array_equal(fp8.in_order(codes[page, 0, entry]), fp8.nearest(rows))


def test_rows_without_a_largest_number() -> None:
    rows = np.ones((5, 16))
    rows[0], rows[1], rows[2, 3], rows[3, 3], rows[4] = 0, 1e-35, np.inf, np.nan, 1e-20
    codes, scales = write("cpu", "float32", Step([0], [5]), np.tile(rows, (1, 3)), (1, 1, 16))[1]
    page = Step([0], [5]).where(0, 0)[0]
    codes, scales = codes[page, 0, :5], scales[page, 0, :5, 0]
    assert (scales[:2] == 0).all() and (codes[:2] == 0).all()
    assert np.isinf(scales[2]) and np.isnan(scales[3])
    assert scales[4] == np.float32(1e-20) / np.float32(448) and (codes[4] == 0x7E).all()


# ---- rotary_kv


def write(
    device: str,
    dtype: str,
    step: Step,
    qkv: np.ndarray,
    heads: tuple[int, int, int],
    rotary_dim: int = 0,
    turns: float = 0,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Codes and scales of keys and of values that rotary_kv writes into a cache of NaN."""
    num_heads, num_kv, dim = heads
    shape = [step.num_pages, num_kv, 64, dim]
    inv_freq = inv_freq_of(rotary_dim or dim) * np.float32(turns)
    caches = [(empty(device, shape, "uint8"), empty(device, [*shape[:3], 1])) for _ in range(2)]
    (k, k_scales), (v, v_scales) = caches
    rotary = ops.RotaryKv(
        qkv=put(device, qkv, dtype), k_cache=k, v_cache=v, k_scales=k_scales, v_scales=v_scales,
        inv_freq=put(device, inv_freq), num_heads=num_heads, num_kv_heads=num_kv, head_dim=dim,
        tokens=step.rows(device), rotary_dim=rotary_dim,
    )  # fmt: skip
    ops.rotary_kv(context(device), rotary)
    return [(codes.numpy(), scales.numpy()) for codes, scales in caches]


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("part", [1, 2, 4])
def test_rows_are_rounded_once(
    device: str, dtype: str, heads: tuple[int, int, int], part: int
) -> None:
    num_heads, num_kv, dim = heads
    rotary_dim = dim // part
    step = Step(lengths=[0, 63, 64, 130], counts=[3, 2, 1, 70])
    rng = np.random.default_rng(dim)
    columns = (num_heads + 2 * num_kv) * dim
    qkv = rounded(rng.standard_normal((step.num_rows, columns)) * 3, dtype)
    rows = qkv.reshape(step.num_rows, -1, dim)
    page, entry = zip(
        *(step.where(step.token_seqs[i], step.token_entries[i]) for i in range(len(rows)))
    )
    written = write(device, dtype, step, qkv, heads, rotary_dim, turns=1)
    untouched = np.ones((step.num_pages, 64), bool)
    untouched[list(page), list(entry)] = False
    for which, (codes, scales) in enumerate(written):
        first = num_heads + which * num_kv
        expected = rows[:, first : first + num_kv]
        if which == 0:
            expected = np.stack([
                reference.rope(x, int(p), inv_freq_of(rotary_dim), 1.0)
                for x, p in zip(expected, step.positions)
            ])  # fmt: skip
        found_scales = scales[list(page), :, list(entry), 0]
        np.testing.assert_allclose(found_scales, np.abs(expected).max(-1) / 448, rtol=2e-5)
        found = fp8.values_of(fp8.in_order(codes[list(page), :, list(entry)]))
        exact = expected / found_scales[..., None]
        spacing = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-6))) - 3)
        assert (np.abs(found - exact) <= spacing * 0.501).all()
        assert (codes.swapaxes(1, 2)[untouched] == 0xFF).all()
        assert np.isnan(scales.swapaxes(1, 2)[untouched]).all()
    if device == "cuda":
        for (codes, scales), (oracle, oracle_scales) in zip(
            written, write("cpu", dtype, step, qkv, heads, rotary_dim, turns=1)
        ):
            np.testing.assert_allclose(scales, oracle_scales, rtol=1e-5)
            assert (codes != oracle).mean() < 1e-3


# ---- attention


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", NAMES)
def test_heads(device: str, dtype: str, name: str, heads: tuple[int, int, int]) -> None:
    Fp8Case(Step(lengths=[0, 63, 130, 300], counts=[1, 2, 1, 3]), *heads, dtype).check(name, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [0, 40])
def test_lengths_around_page_edges(device: str, dtype: str, name: str, window: int) -> None:
    step = Step(lengths=EDGES, counts=[1] * len(EDGES))
    Fp8Case(step, 8, 2, 128, dtype, window=window).check(name, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("size", sizes(12, 64, 2))
@pytest.mark.parametrize("heads", HEADS[:3])
@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("window", [0, 40])
def test_trees(
    device: str, dtype: str, size: int, heads: tuple[int, int, int], by_position: bool, window: int
) -> None:
    rng = np.random.default_rng(size)
    lengths = [0, 63, 129, 200]
    step = Step(lengths, [size] * 4, [random_tree(rng, size) for _ in lengths])
    case = Fp8Case(step, *heads, dtype, by_position=by_position, window=window)
    case.check(DECODE, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", [(4, 2, 128), (7, 1, 64), (64, 8, 64)])
@pytest.mark.parametrize(("name", "window"), [(DECODE, 0), (DECODE, 128), (PREFILL, 128)])
def test_sinks(
    device: str, dtype: str, name: str, window: int, heads: tuple[int, int, int]
) -> None:
    step = Step(lengths=[0, 63, 130, 700], counts=[1, 2, 9, 3])
    Fp8Case(step, *heads, dtype, window=window, with_sinks=True).check(name, device)
    if name == DECODE:
        rng = np.random.default_rng(1)
        tree = Step(
            lengths=[5, 200], counts=[12, 33], masks=[random_tree(rng, n) for n in (12, 33)]
        )
        case = Fp8Case(tree, *heads, dtype, window=window, with_sinks=True, by_position=True)
        case.check(name, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("heads", HEADS[:3])
def test_prefill_chunks(device: str, dtype: str, heads: tuple[int, int, int]) -> None:
    step = Step(lengths=[0, 64, 100], counts=[200, 130, 37])
    Fp8Case(step, *heads, dtype).check(PREFILL, device)


@on_devices_and_cuda_dtypes
@pytest.mark.parametrize("name", NAMES)
def test_long(device: str, dtype: str, name: str) -> None:
    Fp8Case(Step(lengths=[9000, 33000], counts=[1, 2]), 4, 1, 128, dtype).check(name, device)


@on_devices_and_dtypes
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e-3, 300])
def test_small_and_large_values(device: str, dtype: str, name: str, size: float) -> None:
    """A value's scale multiplies probabilities, which float16 holds as well as without scales."""
    case = Fp8Case(Step(lengths=[200], counts=[2]), 4, 2, 128, dtype)
    case.v = [rounded(rows * size, dtype) for rows in case.v]
    case.check(name, device)


# ---- bits


@on_devices_and_cuda_dtypes
@pytest.mark.parametrize(
    "heads", sizes((4, 1, 64), (16, 1, 128), (8, 1, 512), (4, 1, 256), (32, 2, 128))
)
@pytest.mark.parametrize("size", sizes(12, 2, 33, 64))
@pytest.mark.parametrize("window", [0, 40])
def test_tree_nodes_equal_plain_decoding(
    device: str, dtype: str, heads: tuple[int, int, int], size: int, window: int
) -> None:
    lengths = [0, 1, 63, 64, 100, 127, 128, 129, 300]
    counts = [max(1, size - seq % 3) for seq in range(len(lengths))]
    step = Step(lengths=lengths, counts=counts, masks=trees(counts))
    rows = range(0, step.num_rows, 1 if size < 33 else 5)
    check_by_position(device, Fp8Case(step, *heads, dtype, window=window), rows)


@on_devices_and_cuda_dtypes
@pytest.mark.parametrize(
    ("lengths", "heads", "size"),
    sizes(
        ([4090, 4096], (4, 1, 64), 12), ([5000, 4096, 4090], (16, 1, 128), 60),
        ([5000, 4090], (2, 2, 256), 64), ([5000], (8, 1, 512), 64), ([28660], (2, 1, 128), 60),
        ([33790, 700], (32, 2, 128), 32),
        ([4060, 2020, 1000, 510], (4, 2, 128), 64), ([17100], (4, 2, 64), 16), small=1,
    ),
)  # fmt: skip
def test_tree_nodes_of_long_contexts_equal_plain_decoding(
    device: str, dtype: str, lengths: list[int], heads: tuple[int, int, int], size: int
) -> None:
    if max(lengths) > 5000 or len(lengths) > 3 or heads[2] >= 256:
        for_cuda_only(device, ANY_LENGTH)
    counts = [size] * len(lengths)
    step = Step(lengths=lengths, counts=counts, masks=trees(counts), extra_kv=2500)
    nodes = [first + i for first in step.begins[:-1] for i in {0, 1, size // 2, size - 1}]
    check_by_position(device, Fp8Case(step, *heads, dtype), nodes)


@on_devices_and_dtypes
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sinks", [False, True])
def test_tokens_do_not_depend_on_the_step(device: str, dtype: str, name: str, sinks: bool) -> None:
    lengths, counts = [0, 60, 100, 300], [64, 10, 1, 33]
    case = Fp8Case(Step(lengths, counts), 4, 2, 128, dtype, with_sinks=sinks)
    whole = case.run(name, device).numpy()
    for begin, end in pairwise(case.step.begins.tolist()):
        for first in {begin, (begin + end) // 2, end - 1}:
            seq = int(case.step.token_seqs[first])
            found = one_sequence(case, seq, range(first, end)).run(name, device).numpy()
            assert found.tobytes() == whole[first:end].tobytes()


@on_devices_and_dtypes
def test_a_chain_of_masks_equals_causal(device: str, dtype: str) -> None:
    lengths, counts = [0, 60, 300], [9, 64, 20]
    masked = Fp8Case(Step(lengths, counts, [chain_masks(n) for n in counts]), 4, 2, 128, dtype)
    causal = Fp8Case(Step(lengths, counts), 4, 2, 128, dtype)
    assert (
        masked.run(DECODE, device).numpy().tobytes() == causal.run(DECODE, device).numpy().tobytes()
    )


@on_devices_and_cuda_dtypes
@pytest.mark.parametrize("pairs", [1, 3, 4, 9])
def test_prompts_in_rounds(device: str, dtype: str, pairs: int) -> None:
    """The scratch holds some KV heads of a sequence, or several sequences."""
    for_cuda_only(device, "the CPU kernel has no scratch")
    step = Step(lengths=[0, 64, 1000], counts=[300, 1, 200])
    whole, parts = (Fp8Case(step, 16, 4, 128, dtype, pairs=n) for n in (12, pairs))
    parts.check(PREFILL, device)
    found, expected = (case.run(PREFILL, device).numpy() for case in (parts, whole))
    assert found.tobytes() == expected.tobytes()


def test_scratch_of_prompts() -> None:
    """All KV heads of a sequence, or as many as 320 MiB hold, or one."""
    for max_kv, num_heads in ((1, 8), (32768, 8), (131072, 4), (1 << 20, 1)):
        entries = -(-max_kv // 128) * 128
        assert ops.fp8_pair_floats(128, max_kv) == entries * (128 + 2)
        assert ops.fp8_prefill_floats(8, 128, max_kv) == num_heads * entries * (128 + 2)


# ---- moves of accepted rows


@on_devices
@pytest.mark.parametrize(("width", "dtype"), [(128, "uint8"), (1, "float32")])
def test_rows_of_any_width_move(device: str, width: int, dtype: str) -> None:
    """Codes have D bytes a row, scales 4."""
    heads, planes, lengths = 3, 2, [60, 130]
    counts, paths = [3, 2], [[0, 4, 5, -1], [0, 7, -1, -1]]
    step = Step(lengths=lengths, counts=[8, 8], seed=4)
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 200, (planes, step.num_pages, heads, 64, width)).astype(dtype)
    slots = np.arange(step.num_slots)
    all_counts, all_paths = np.zeros(len(slots), np.int32), np.full((len(slots), 4), -1, np.int32)
    new_lengths = np.zeros(len(slots), np.int32)
    expected = pool.copy()
    for seq, slot in enumerate(step.slots):
        all_counts[slot], all_paths[slot] = counts[seq], paths[seq]
        new_lengths[slot] = lengths[seq] + counts[seq]
        for j in range(counts[seq]):
            to, source = (step.where(seq, lengths[seq] + i) for i in (j, paths[seq][j]))
            expected[:, to[0], :, to[1]] = pool[:, source[0], :, source[1]]
    moved = put_raw(device, pool.reshape(planes, step.num_pages, -1))
    accepted = ops.Accepted(
        ids=put_ints(device, all_paths), paths=put_ints(device, all_paths),
        counts=put_ints(device, all_counts),
    )  # fmt: skip
    ops.keep_accepted(
        context(device), pool=moved, num_heads=heads, width=width,
        page_table=put_ints(device, step.page_table), num_nodes=8,
        seq_slots=put_ints(device, step.slots), lengths=put_ints(device, new_lengths),
        accepted=accepted,
    )  # fmt: skip
    assert np.array_equal(moved.numpy().reshape(pool.shape), expected)


# ---- refusals


@on_devices
@pytest.mark.parametrize("name", [*NAMES, "rotary_kv"])
def test_scales_must_fit(device: str, name: str) -> None:
    case = Fp8Case(Step(lengths=[10], counts=[1]), 2, 1, 64, "float16")
    qkv, (codes, scales), v, rows = case.put(device)
    few = empty(device, [1, 1, 64, 1])
    for k, message in (
        ([codes, few], "the scales of a cache are float32"),
        ([codes, codes], "the scales of a cache are uint8"),
        ([qkv, scales], "a cache is float16"),
    ):
        with pytest.raises(ValueError, match=message):
            if name == "rotary_kv":
                ops.rotary_kv(
                    context(device),
                    ops.RotaryKv(
                        qkv=qkv,
                        k_cache=k[0],
                        v_cache=v[0],
                        k_scales=k[1],
                        v_scales=v[1],
                        inv_freq=put(device, inv_freq_of(64)),
                        num_heads=2,
                        num_kv_heads=1,
                        head_dim=64,
                        tokens=rows,
                    ),
                )
            else:
                case.launch(name, device, qkv, k, v, rows)
