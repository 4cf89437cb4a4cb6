"""Ctrl-C while the main thread is inside the extension, where Python cannot handle it yet."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def announced(call: Callable[[], None]) -> Iterator[None]:
    """While the context is open, `call` runs on another thread as soon as Ctrl-C is pressed.

    KeyboardInterrupt follows as usual. Outside the main thread the context does nothing, because
    Python handles signals in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while numbers := reader.recv(64):
            if signal.SIGINT in numbers:
                call()

    thread = threading.Thread(target=listen, name="cpmcu-interrupts", daemon=True)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()
        reader.close()
