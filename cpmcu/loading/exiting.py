"""Interpreter exit while other threads load a model.

If a thread returns from the extension after the interpreter has been finalised, CPython ends the
thread inside C++ code and the process aborts. At exit, loading is therefore cancelled and waited
for.
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
    """The interpreter's exit waits for the end of this context, which calls `check` regularly.

    Raises RuntimeError if the interpreter is exiting.
    """
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
