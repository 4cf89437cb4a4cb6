"""The interpreter's exit while other threads load.

A thread that comes back from the extension when the interpreter is gone is ended inside it, and the
process with it, by an abort. So loads are given up at exit, which waits for them.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_changed = threading.Condition()
_loading: list[threading.Thread] = []
_exits = False


def check() -> None:
    """Raises RuntimeError if the interpreter is exiting."""
    if _exits:
        raise RuntimeError("loading was given up: the interpreter is exiting")


@contextmanager
def waited_for() -> Iterator[None]:
    """What an exit waits for; it should `check` now and then. Raises RuntimeError as that does."""
    thread = threading.current_thread()
    with _changed:
        check()
        _loading.append(thread)
    try:
        yield
        check()
    finally:
        with _changed:
            _loading.remove(thread)
            _changed.notify_all()


@atexit.register
def _give_up() -> None:
    global _exits
    with _changed:
        _exits = True
        _changed.wait_for(lambda: not any(thread.is_alive() for thread in _loading))
