"""Error handling of the programs: one-sentence messages, Ctrl-C, closed pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpmcu.checks import one_line

MAX_SENTENCE = 2000  # maximum number of characters of a message; some messages list names
INTERRUPTED = 130  # exit status after Ctrl-C: 128 + SIGINT


class OutputError(RuntimeError):
    """One output cannot be finished. The message is a sentence for the client."""


def sentence(error: BaseException | str) -> str:
    """An error in one line. An OSError begins with the file name and has no errno."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(text.split()) or type(error).__name__


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Prefixes a ValueError with `path`, unless its message already contains it."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


@contextmanager
def one_sentence() -> Iterator[None]:
    """Cuts the message of an error to one line of bounded length."""
    try:
        yield
    except (ValueError, FileNotFoundError, MemoryError, RuntimeError) as error:
        text = str(error)
        line = one_line(text, len(text) * 8)
        if len(line) > MAX_SENTENCE:  # keeps the value found (first) and expected (last)
            line = f"{line[: MAX_SENTENCE * 2 // 3]}...{line[-MAX_SENTENCE // 4 :]}"
        if line == text or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise type(error)(line) from error


def forget_interrupt() -> None:
    """Lets a program that has caught a Ctrl-C choose its exit status.

    If a Ctrl-C arrives during `exec` (which dataclasses use), CPython remembers it and ends by that
    signal. A later `exec` clears the memory.
    """
    exec("")


def check_stdout() -> None:
    """Raises OSError if stdout is closed. Called before work whose result goes there."""
    if sys.stdout is None:
        raise OSError("stdout is closed, but the output goes there")


def show_text(text: str, prog: str) -> int:
    """Writes `text` to stdout, for example a help text, and returns the exit status.

    For an error, `prog` writes a sentence to stderr and the status is 1.
    """
    try:
        check_stdout()
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        reader_left()
    except OSError as error:
        if sys.stderr is not None:
            sys.stderr.write(f"{prog}: {sentence(error)}\n")
        return 1
    return 0


def reader_left() -> None:
    """Redirects stdout to the null device after its reader (`head`, for example) has exited."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
