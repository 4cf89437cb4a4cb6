"""What programs do about errors: one sentence, and an end after Ctrl-C."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130  # exit status after Ctrl-C: 128 and the number of SIGINT


def sentence(error: BaseException | str) -> str:
    """An error in one line. One of the system's begins with the file's name, not with a number."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(text.split()) or type(error).__name__


def forget_interrupt() -> None:
    """Lets a program that has caught a Ctrl-C choose its exit status.

    CPython remembers a Ctrl-C that came while a text was executed, as the making of a dataclass
    does it, and ends by that signal unless another text was executed since.
    """
    exec("")


def reader_left() -> None:
    """Lets a program end quietly whose reader of stdout is gone, as `head` is after its lines."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
