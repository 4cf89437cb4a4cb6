"""Worker threads for functions that are too slow for the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from cpmcu.serving.errors import client_left
from cpmcu.serving.http.sse import disconnected

LONG_TEXT = 1 << 16  # characters of a text whose work takes about 20 ms

T = TypeVar("T")


class Workers:
    """Runs functions of requests on threads. Long texts have a small pool of their own.

    So short requests do not wait for long ones, and long ones occupy only some of the cores and
    memory.
    """

    def __init__(self) -> None:
        threads = max(1, min(4, (os.cpu_count() or 1) // 4))
        self._long = ThreadPoolExecutor(threads, "cpmcu-long-text")

    async def run(
        self, request: Request, length: int, function: Callable[..., T], *args: object
    ) -> T:
        """Returns `function(*args)`, which processes `length` characters of text.

        If the client of a long text disconnects, raises ApiError; a function not yet started is
        cancelled.
        """
        bound = functools.partial(contextvars.copy_context().run, function, *args)
        loop = asyncio.get_running_loop()
        if length < LONG_TEXT:
            return await loop.run_in_executor(None, bound)
        work = loop.run_in_executor(self._long, bound)
        watch = asyncio.ensure_future(disconnected(request.receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise client_left()
            return work.result()
        finally:
            watch.cancel()
            work.cancel()

    def close(self) -> None:
        """Cancels the functions that have not started."""
        self._long.shutdown(wait=False, cancel_futures=True)
