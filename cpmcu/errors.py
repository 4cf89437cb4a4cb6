"""What programs do about errors: one sentence, and an end after Ctrl-C."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpmcu.checks import one_line

MAX_SENTENCE = 2000  # characters: some list names
INTERRUPTED = 130  # exit status after Ctrl-C: 128 and the number of SIGINT


class OutputError(RuntimeError):
    """One output cannot be finished. The text is a sentence for whoever asked for the output."""


def sentence(error: BaseException | str) -> str:
    """An error in one line. One of the system's begins with the file's name, not with a number."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(text.split()) or type(error).__name__


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Begins a ValueError with the file or directory that it is about, unless it names it."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


@contextmanager
def one_sentence() -> Iterator[None]:
    """Makes an error's text one line of bounded length, whatever was found in a file."""
    try:
        yield
    except (ValueError, FileNotFoundError, MemoryError, RuntimeError) as error:
        text = str(error)
        line = one_line(text, len(text) * 8)
        if len(line) > MAX_SENTENCE:  # what was found first, what was expected last
            line = f"{line[: MAX_SENTENCE * 2 // 3]}...{line[-MAX_SENTENCE // 4 :]}"
        if line == text or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise type(error)(line) from error


def forget_interrupt() -> None:
    """Lets a program that has caught a Ctrl-C choose its exit status.

    CPython remembers a Ctrl-C that came while a text was executed, as the making of a dataclass
    does it, and ends by that signal unless another text was executed since.
    """
    exec("")


def reader_left() -> None:
    """Lets a program end quietly whose reader of stdout is gone, as `head` is after its lines."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
