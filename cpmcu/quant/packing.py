"""Layouts of 4-bit weights in files and in the engine's memory, in numpy.

| symbol | meaning |
|---|---|
| K, N | inputs, outputs |
| G | groups along K; 1: channel-wise |
| q | uint8 [K, N], 0..15 |
| z | zero points, uint8 [G, N] |
| scales | [G, N], any dtype |

w = (q - z) * scale. Nibble i of an int32 word is its bits [4i, 4i + 4). Sizes that do not fit a
layout raise ValueError.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
Array = npt.NDArray[Any]

BLOCK_ROWS = 256  # rows of a weight block (csrc/kernels/gemm/packed/packed.h)
BLOCK_K = 128

# ---- GPTQ


def pack_gptq(q: U8) -> I32:
    """q [K, N] -> qweight [K / 8, N]: nibble i of row r is k = 8 r + i."""
    check_multiple("K", q.shape[0], 8)
    return join_nibbles(q.reshape(q.shape[0] // 8, 8, q.shape[1]).swapaxes(1, 2))


def pack_gptq_8(q: U8) -> I32:
    """q [K, N] of 8 bits -> qweight [K / 4, N]: byte i of row r is k = 4 r + i."""
    check_multiple("K", q.shape[0], 4)
    quads = np.ascontiguousarray(q.reshape(q.shape[0] // 4, 4, q.shape[1]).swapaxes(1, 2))
    words: I32 = quads.view("<i4")[..., 0]
    return words


def unpack_gptq(qweight: I32) -> U8:
    """Returns the codes [K, N] that qweight [K / 8, N] holds."""
    q: U8 = split_nibbles(qweight).swapaxes(1, 2).reshape(8 * qweight.shape[0], qweight.shape[1])
    return q


def pack_gptq_zeros(z: U8, version: int = 1) -> I32:
    """z [G, N] -> qzeros [G, N / 8]: nibble i of column c is n = 8 c + i.

    Version 1 stores z - 1 (mod 16), version 2 ("gptq_v2") stores z.
    """
    check_multiple("N", z.shape[1], 8)
    stored: U8 = (z - _gptq_offset(version)) & np.uint8(15)
    return join_nibbles(stored.reshape(z.shape[0], -1, 8))


def unpack_gptq_zeros(qzeros: I32, version: int = 1) -> U8:
    """qzeros [G, N / 8] -> z [G, N]. Version 1: a stored 15 is z = 0."""
    z: U8 = (split_nibbles(qzeros).reshape(qzeros.shape[0], -1) + _gptq_offset(version)) & np.uint8(
        15
    )
    return z


def _gptq_offset(version: int) -> U8:
    if version not in (1, 2):
        raise ValueError(f"the version of GPTQ's zero points is {version}, expected 1 or 2")
    return np.array(2 - version, np.uint8)


# ---- Marlin layout of CPM.cu's files


def pack_marlin(q: U8) -> I32:
    """q [K, N] -> qweight [K / 16, 2 N], tiles of 16 k and 64 n.

    Nibble p of word [t, 128 c + 4 l + j], l in 0..31 and j in 0..3, is
    k = 16 t + 2 (l mod 4) + 8 (p & 1) + (p >> 2), n = 64 c + 16 j + l div 4 + 8 ((p >> 1) & 1).
    """
    k, n = q.shape
    check_multiple("K", k, 16)
    check_multiple("N", n, 64)
    #                     t        p0 l%4 p2 c        j  p1 l/4
    parts = q.reshape(k // 16, 2, 4, 2, n // 64, 4, 2, 8)
    return join_nibbles(parts.transpose(0, 4, 7, 2, 5, 3, 6, 1).reshape(k // 16, 2 * n, 8))


def marlin_scales(scales: Array, *, channel_wise: bool) -> Array:
    """scales [G, N] in Marlin's order.

    | scales | columns | permutation |
    |---|---|---|
    | groups | 64 | out[t] = in[8 (t mod 8) + t div 8] |
    | channel-wise | 32 | out[8 a + 2 b + c] = in[8 b + 2 a + c], a and b in 0..3, c in 0..1 |

    Each permutation is its own inverse.
    """
    groups, n = scales.shape
    check_multiple("N", n, 64)
    shape = (groups, -1, 4, 4, 2) if channel_wise else (groups, -1, 8, 8, 1)
    permuted: Array = scales.reshape(shape).swapaxes(2, 3).reshape(groups, n)
    return permuted


# ---- the engine's weight blocks


def pack_blocks(q: U8, scales: Array, zeros: U8 | None = None) -> U8:
    """q [K, N], scales [G, N] of 2 bytes, z [G, N] -> uint8 [ceil(N/256), ceil(K/128), bytes].

    A weight block has 16896 bytes, with zero points 17152. G is ceil(K / 128), or 1 for
    channel-wise scales. Padding beyond N and K has q = z = 8 and scale 0. See
    csrc/kernels/gemm/packed/packed.h.
    """
    k, n = q.shape
    row_blocks, k_blocks = -(-n // BLOCK_ROWS), -(-k // BLOCK_K)
    padded = np.full((row_blocks * BLOCK_ROWS, k_blocks * BLOCK_K), 8, np.uint8)
    padded[:n, :k] = q.T
    #                                 warp tile half g        step  pair half q odd
    parts = padded.reshape(row_blocks, 8, 2, 2, 8, k_blocks, 4, 2, 2, 4, 2)
    words = join_nibbles(parts.transpose(0, 5, 1, 6, 4, 9, 7, 2, 10, 8, 3).reshape(-1, 8))
    columns = [words.view(np.uint8).reshape(row_blocks, k_blocks, -1)]
    columns.append(_by_block(scales, n, k_blocks, 0).view(np.uint8))
    if zeros is not None:
        columns.append(_by_block(zeros, n, k_blocks, 8))
    return np.concatenate(columns, axis=2)


def _by_block(values: Array, n: int, k_blocks: int, fill: int) -> Array:
    """[G, N] -> [row blocks, k blocks, 256]. Channel-wise values are repeated along K."""
    if values.shape not in ((k_blocks, n), (1, n)):
        raise ValueError(
            f"scales or zero points are {list(values.shape)}, expected [{k_blocks} or 1, {n}]"
        )
    row_blocks = -(-n // BLOCK_ROWS)
    padded = np.full((k_blocks, row_blocks * BLOCK_ROWS), fill, values.dtype)
    padded[:, :n] = values
    return np.ascontiguousarray(padded.reshape(k_blocks, row_blocks, BLOCK_ROWS).swapaxes(0, 1))


# ---- words of eight nibbles


def join_nibbles(nibbles: U8) -> I32:
    """Packs eight nibbles, uint8 [..., 8], into each word of int32 [...]."""
    pairs = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    words: I32 = np.ascontiguousarray(pairs).view("<i4")[..., 0]
    return words


def split_nibbles(words: I32) -> U8:
    """Returns the eight nibbles of each word: int32 [...] becomes uint8 [..., 8]."""
    pairs = np.ascontiguousarray(words)[..., None].view(np.uint8)
    nibbles = np.empty((*words.shape, 8), np.uint8)
    nibbles[..., 0::2] = pairs & 15
    nibbles[..., 1::2] = pairs >> 4
    return nibbles


def check_multiple(what: str, size: int, factor: int) -> None:
    if size % factor:
        raise ValueError(f"{what} is {size}, expected a multiple of {factor}")
