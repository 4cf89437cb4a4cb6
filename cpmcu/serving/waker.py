"""Passes the tokens of many requests to the event loop with one wake-up."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Waker:
    """Calls functions on an event loop. One wake-up of the loop serves all that were added so far.

    A step emits tokens for many requests, and each wake-up costs a system call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._functions: deque[Callable[[], None]] = deque()
        self._is_waking = False  # the loop will call `_run`

    def add(self, function: Callable[[], None]) -> None:
        """Calls `function` soon. Any thread may call this. RuntimeError: the loop is closed."""
        self._functions.append(function)
        if self._is_waking:
            return
        loop = self._loop()
        if loop is None:
            raise RuntimeError("the event loop is closed")
        self._is_waking = True
        try:
            loop.call_soon_threadsafe(self._run)
        except RuntimeError:  # the loop is closed
            self._is_waking = False
            raise

    def _run(self) -> None:
        self._is_waking = False
        while self._functions:
            try:
                self._functions.popleft()()
            except Exception:  # must not stop the others
                logger.exception("a request's tokens could not be passed on")
