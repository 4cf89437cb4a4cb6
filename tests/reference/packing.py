"""Closed forms of the 4-bit layouts that the package never packs or unpacks in numpy.

The conventions are those of `cpmcu.quant.packing`: q is uint8 [K, N], z uint8 [G, N], and nibble i
of an int32 word is its bits [4i, 4i + 4).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cpmcu.quant.packing import (
    BLOCK_K,
    BLOCK_ROWS,
    I32,
    U8,
    Array,
    check_multiple,
    join_nibbles,
    split_nibbles,
)

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is column 8 * word + _AWQ_ORDER[i]

# ---- AWQ


def pack_awq(q: U8) -> I32:
    """q [K, N] -> qweight [K, N / 8], and z [G, N] -> qzeros [G, N / 8].

    Nibble i of column c is n = 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i].
    """
    check_multiple("N", q.shape[1], 8)
    return join_nibbles(q.reshape(q.shape[0], -1, 8)[:, :, _AWQ_ORDER])


def unpack_awq(qweight: I32) -> U8:
    """Returns q [K, N] of qweight [K, N / 8], and z [G, N] of qzeros [G, N / 8]."""
    return split_nibbles(qweight)[:, :, np.argsort(_AWQ_ORDER)].reshape(qweight.shape[0], -1)


# ---- compressed-tensors (pack-quantized)


def pack_compressed(q: U8) -> I32:
    """q [K, N] -> weight_packed [N, ceil(K / 8)]: nibble i of column c is k = 8 c + i.

    The file's w is signed, stored as w + 8 = q. Nibbles beyond K are 0.
    """
    k, n = q.shape
    padded = np.zeros((n, -(-k // 8) * 8), np.uint8)
    padded[:, :k] = q.T
    return join_nibbles(padded.reshape(n, -1, 8))


def unpack_compressed(weight_packed: I32, k: int) -> U8:
    """Returns the codes [K, N] that weight_packed [N, ceil(K / 8)] holds."""
    return np.ascontiguousarray(
        split_nibbles(weight_packed).reshape(len(weight_packed), -1)[:, :k].T
    )


def pack_compressed_zeros(z: U8) -> I32:
    """z [G, N] -> weight_zero_point [ceil(N / 8), G]: nibble i of row r is n = 8 r + i.

    The file stores z, which is its signed zero point plus 8. Its scales are [N, G].
    """
    return np.ascontiguousarray(pack_compressed(z.T).T)


def unpack_compressed_zeros(zero_point: I32, n: int) -> U8:
    """Returns the zero points [G, N] that weight_zero_point [ceil(N / 8), G] holds."""
    return np.ascontiguousarray(unpack_compressed(np.ascontiguousarray(zero_point.T), n).T)


# ---- inverses of the packing functions of the package


def unpack_marlin(qweight: I32) -> U8:
    """Returns the codes [K, N] that qweight [K / 16, 2 N] holds."""
    tiles, words = qweight.shape
    check_multiple("the width of a Marlin qweight", words, 128)
    parts = split_nibbles(qweight).reshape(tiles, words // 128, 8, 4, 4, 2, 2, 2)
    q: U8 = parts.transpose(0, 7, 3, 5, 1, 4, 6, 2).reshape(16 * tiles, words // 2)
    return q


def unpack_blocks(
    blocks: U8, k: int, n: int, scale_dtype: npt.DTypeLike = np.float16
) -> tuple[U8, Array, U8 | None]:
    """The blocks of `pack_blocks` -> q [K, N], scales [ceil(K / 128), N], z likewise or None."""
    row_blocks, k_blocks, num_bytes = blocks.shape
    words = np.ascontiguousarray(blocks[:, :, :16384]).view(np.int32)
    parts = split_nibbles(words).reshape(row_blocks, k_blocks, 8, 4, 8, 4, 2, 2, 2, 2, 2)
    q = parts.transpose(0, 2, 7, 10, 4, 1, 3, 6, 9, 5, 8)
    q = q.reshape(row_blocks * BLOCK_ROWS, k_blocks * BLOCK_K)[:n, :k].T
    scales = np.ascontiguousarray(blocks[:, :, 16384:16896]).view(scale_dtype)
    zeros = blocks[:, :, 16896:] if num_bytes > 16896 else None

    def by_row(values: Array) -> Array:
        rows: Array = values.swapaxes(0, 1).reshape(k_blocks, -1)[:, :n]
        return rows

    return np.ascontiguousarray(q), by_row(scales), None if zeros is None else by_row(zeros)
