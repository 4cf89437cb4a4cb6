"""4-bit layouts: comparison with loops over single elements, and round trips."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmcu.quant import packing as p
from tests.reference import packing as reference

U8 = npt.NDArray[np.uint8]
small = st.integers(1, 3)
seeds = st.integers(0, 2**32 - 1)


def random_q(seed: int, k: int, n: int) -> U8:
    return np.random.default_rng(seed).integers(0, 16, (k, n), dtype=np.uint8)


def nibble(words: npt.NDArray[np.int32], index: tuple[int, ...], i: int) -> int:
    return (int(words[index]) & 0xFFFFFFFF) >> (4 * i) & 15


@settings(max_examples=25, deadline=None)
@given(k8=small, n=st.integers(1, 9), seed=seeds)
def test_gptq(k8: int, n: int, seed: int) -> None:
    q = random_q(seed, 8 * k8, n)
    packed = p.pack_gptq(q)
    assert packed.dtype == np.int32 and packed.shape == (k8, n)
    for k in range(8 * k8):
        for column in range(n):
            assert nibble(packed, (k // 8, column), k % 8) == q[k, column]
    assert np.array_equal(p.unpack_gptq(packed), q)


@settings(max_examples=25, deadline=None)
@given(groups=small, n8=small, seed=seeds, version=st.sampled_from([1, 2]))
def test_gptq_zeros(groups: int, n8: int, seed: int, version: int) -> None:
    z = random_q(seed, groups, 8 * n8)
    packed = p.pack_gptq_zeros(z, version)
    assert packed.shape == (groups, n8)
    for g in range(groups):
        for n in range(8 * n8):
            stored = int(z[g, n]) - 1 if version == 1 else int(z[g, n])
            assert nibble(packed, (g, n // 8), n % 8) == stored % 16
    assert np.array_equal(p.unpack_gptq_zeros(packed, version), z)


@settings(max_examples=25, deadline=None)
@given(k=st.integers(1, 9), n8=small, seed=seeds)
def test_awq(k: int, n8: int, seed: int) -> None:
    q = random_q(seed, k, 8 * n8)
    packed = reference.pack_awq(q)
    assert packed.shape == (k, n8)
    for row in range(k):
        for word in range(n8):
            for i, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                assert nibble(packed, (row, word), i) == q[row, 8 * word + column]
    assert np.array_equal(reference.unpack_awq(packed), q)


@settings(max_examples=25, deadline=None)
@given(k=st.integers(1, 20), n=st.integers(1, 9), seed=seeds)
def test_compressed(k: int, n: int, seed: int) -> None:
    q = random_q(seed, k, n)
    packed = reference.pack_compressed(q)
    assert packed.shape == (n, -(-k // 8))
    for row in range(n):
        for i in range(8 * packed.shape[1]):
            assert nibble(packed, (row, i // 8), i % 8) == (q[i, row] if i < k else 0)
    assert np.array_equal(reference.unpack_compressed(packed, k), q)


@settings(max_examples=25, deadline=None)
@given(groups=small, n=st.integers(1, 20), seed=seeds)
def test_compressed_zeros(groups: int, n: int, seed: int) -> None:
    z = random_q(seed, groups, n)
    packed = reference.pack_compressed_zeros(z)
    assert packed.shape == (-(-n // 8), groups) and packed.flags.c_contiguous
    for g in range(groups):
        for row in range(n):
            assert nibble(packed, (row // 8, g), row % 8) == z[g, row]
    assert np.array_equal(reference.unpack_compressed_zeros(packed, n), z)


@settings(max_examples=10, deadline=None)
@given(tiles=small, groups=small, seed=seeds)
def test_marlin(tiles: int, groups: int, seed: int) -> None:
    q = random_q(seed, 16 * tiles, 64 * groups)
    packed = p.pack_marlin(q)
    assert packed.shape == (tiles, 128 * groups)
    for t in range(tiles):
        for c in range(groups):
            for lane in range(32):
                for j in range(4):
                    for i in range(8):
                        k = 16 * t + 2 * (lane % 4) + 8 * (i & 1) + (i >> 2)
                        n = 64 * c + 16 * j + lane // 4 + 8 * (i >> 1 & 1)
                        word = (t, 128 * c + 4 * lane + j)
                        assert nibble(packed, word, i) == q[k, n]
    assert np.array_equal(reference.unpack_marlin(packed), q)


def test_marlin_scales_of_groups() -> None:
    scales = np.arange(3 * 192).reshape(3, 192)
    permuted = p.marlin_scales(scales, channel_wise=False)
    for g in range(3):
        for n in range(192):
            t = n % 64
            assert permuted[g, n] == scales[g, n - t + 8 * (t % 8) + t // 8]
    assert np.array_equal(p.marlin_scales(permuted, channel_wise=False), scales)


def test_marlin_scales_of_channels() -> None:
    scales = np.arange(128).reshape(1, 128)
    permuted = p.marlin_scales(scales, channel_wise=True)
    order = [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27]
    order += [4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23, 30, 31]
    assert [int(i) for i in permuted[0]] == [32 * b + i for b in range(4) for i in order]
    assert np.array_equal(p.marlin_scales(permuted, channel_wise=True), scales)


def nibble_of_block(row: int, k: int) -> tuple[int, int]:
    """Does the work of nibble_place in csrc/kernels/gemm/packed/packed.h."""
    warp, tile, row_half, g = row // 32, row // 16 % 2, row // 8 % 2, row % 8
    step, k_half, q, odd = k // 16, k // 8 % 2, k // 2 % 4, k % 2
    lane, reg = 4 * g + q, row_half + 2 * k_half
    return 512 * warp + 128 * (step // 2) + 4 * lane + 2 * (step % 2) + tile, reg + 4 * odd


@settings(max_examples=4, deadline=None)
@given(
    k=st.sampled_from([1, 72, 128, 200]),
    n=st.sampled_from([1, 255, 257]),
    has_zeros=st.booleans(),
    channel_wise=st.booleans(),
    seed=seeds,
)
def test_blocks(k: int, n: int, has_zeros: bool, channel_wise: bool, seed: int) -> None:
    q, groups = random_q(seed, k, n), -(-k // 128)
    rng = np.random.default_rng(seed)
    stored = 1 if channel_wise else groups
    scales = rng.uniform(0.5, 2, (stored, n)).astype(np.float16)
    zeros = random_q(seed + 1, stored, n) if has_zeros else None
    blocks = p.pack_blocks(q, scales, zeros)
    assert blocks.shape == (-(-n // 256), groups, 17152 if has_zeros else 16896)
    for rb, kb in np.ndindex(blocks.shape[:2]):
        words = blocks[rb, kb, :16384].copy().view(np.int32)
        for row in range(256):
            full_row, group = 256 * rb + row, 0 if channel_wise else kb
            scale = blocks[rb, kb, 16384:16896].view(np.float16)[row]
            assert scale == (scales[group, full_row] if full_row < n else 0)
            if zeros is not None:
                zero = blocks[rb, kb, 16896 + row]
                assert zero == (zeros[group, full_row] if full_row < n else 8)
        for row, i in np.ndindex(256, 128):
            word, position = nibble_of_block(row, i)
            full_row, full_k = 256 * rb + row, 128 * kb + i
            inside = full_row < n and full_k < k
            assert nibble(words, (word,), position) == (q[full_k, full_row] if inside else 8)
    q_back, scales_back, zeros_back = reference.unpack_blocks(blocks, k, n)
    assert np.array_equal(q_back, q)
    assert np.array_equal(scales_back, np.broadcast_to(scales, (groups, n)))
    if zeros is not None:
        assert zeros_back is not None
        assert np.array_equal(zeros_back, np.broadcast_to(zeros, (groups, n)))


@pytest.mark.parametrize(
    "call",
    [
        lambda: p.pack_gptq(np.zeros((12, 8), np.uint8)),
        lambda: reference.pack_awq(np.zeros((8, 12), np.uint8)),
        lambda: p.pack_marlin(np.zeros((8, 64), np.uint8)),
        lambda: p.pack_marlin(np.zeros((16, 32), np.uint8)),
        lambda: p.pack_gptq_zeros(np.zeros((1, 8), np.uint8), 3),
        lambda: p.pack_blocks(np.zeros((300, 8), np.uint8), np.zeros((2, 8), np.float16)),
    ],
)
def test_refuses_sizes_that_do_not_fit(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        call()
