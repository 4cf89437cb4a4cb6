"""Limits the host memory of the prefix cache and of preempted sequences."""

from __future__ import annotations

import os

DEFAULT_CACHE_BYTES = 8_000_000_000
DEFAULT_SWAP_BYTES = 4_000_000_000


def cache_bytes(gigabytes: float | None, *, is_cuda: bool) -> int:
    """Bytes for pages of the prefix cache. `gigabytes`: as configured; None: the default."""
    return _bytes(gigabytes, DEFAULT_CACHE_BYTES, is_cuda=is_cuda)


def swap_bytes(gigabytes: float | None, *, is_cuda: bool) -> int:
    """Bytes for pages of preempted sequences. `gigabytes`: as configured; None: the default."""
    return _bytes(gigabytes, DEFAULT_SWAP_BYTES, is_cuda=is_cuda)


def _bytes(gigabytes: float | None, default: int, *, is_cuda: bool) -> int:
    if gigabytes is not None:
        return int(gigabytes * 1e9)
    if not is_cuda:  # the engine's pages are in host memory already
        return 0
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(default, free // 4)
