"""Memory that large requests took, given back to the system."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import threading
from collections.abc import Callable

LARGE = 1 << 18  # bytes of a body

_SOON_SECONDS = 0.1

_turn = threading.Lock()


def give_back_soon() -> None:
    """As `give_back`, on another thread, once the caller's request is forgotten."""
    thread = threading.Thread(target=give_back, name="cpmcu-memory", daemon=True)
    asyncio.get_running_loop().call_later(_SOON_SECONDS, thread.start)


def give_back() -> None:
    """Returns what is free to the system, which C's allocator would keep. Takes milliseconds.

    Does nothing while another thread does it, and where the C library has no such function.
    """
    trim = _malloc_trim()
    if trim is None or not _turn.acquire(blocking=False):
        return
    try:
        gc.collect()  # exceptions hold the request that they were raised for
        trim(0)  # without the interpreter's lock
    finally:
        _turn.release()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim  # glibc
    except (AttributeError, OSError):
        return None
