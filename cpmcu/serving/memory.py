"""Returns the memory of large requests to the system."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import threading
from collections.abc import Callable

LARGE = 1 << 18  # bytes of a body; a smaller one is not worth a trim

_SOON_SECONDS = 0.1

_lock = threading.Lock()


def give_back_soon() -> None:
    """Runs `give_back` on another thread after the caller has released its request."""
    thread = threading.Thread(target=give_back, name="cpmcu-memory", daemon=True)
    asyncio.get_running_loop().call_later(_SOON_SECONDS, thread.start)


def give_back() -> None:
    """Returns the allocator's free memory to the system. Takes milliseconds.

    Does nothing if another thread is doing it or the C library has no malloc_trim.
    """
    trim = _malloc_trim()
    if trim is None or not _lock.acquire(blocking=False):
        return
    try:
        gc.collect()  # frees requests and exceptions that refer to each other
        trim(0)  # ctypes releases the GIL
    finally:
        _lock.release()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim  # glibc
    except (AttributeError, OSError):
        return None
