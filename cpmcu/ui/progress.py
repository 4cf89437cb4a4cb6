"""Progress of loading and prefill on stderr: a bar on a terminal, else lines."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress

_LINE_SECONDS = 2.0  # minimum time between two lines in plain mode
_FIRST_PASS_SECONDS = 0.5  # minimum time of a first pass of prefill that is shown
_LONG_LINE_SECONDS = 10.0  # _LINE_SECONDS of lines that show the time left


class Bar(Protocol):
    """A progress display. Any thread may call it.

    The constructor shows nothing. If start is interrupted, finish therefore has a bar to remove.
    """

    def start(self) -> None: ...
    def update(self, done: int) -> None: ...
    def finish(self) -> None: ...


class PlainBar:
    """Writes a line every few seconds and one at the end."""

    def __init__(
        self, what: str, total: int, unit: str, scale: float, time_left: bool = False
    ) -> None:
        self._what, self._total, self._unit, self._scale = what, total, unit, scale
        self._time_left = time_left
        self._started = self._told = 0.0
        self._done = 0
        self._finished = False

    def start(self) -> None:
        self._started = self._told = time.perf_counter()

    def update(self, done: int) -> None:
        self._done = done
        pause = _LONG_LINE_SECONDS if self._time_left else _LINE_SECONDS
        if time.perf_counter() - self._told >= pause:
            self._tell()

    def finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._tell()

    def _tell(self) -> None:
        self._told = time.perf_counter()
        done, total = self._done / self._scale, self._total / self._scale
        elapsed = max(self._told - self._started, 1e-9)
        rate = done / elapsed
        form = ".2f" if self._scale > 1 else ".0f"
        speed = f"{rate:{form}} {self._unit}/s"
        if self._time_left:
            speed = left_text(elapsed, done, total)
        sys.stderr.write(f"{self._what}: {done:{form}} of {total:{form}} {self._unit} ({speed})\n")
        sys.stderr.flush()


class RichBar:
    """Draws a progress bar with rich."""

    def __init__(
        self, what: str, total: int, unit: str, scale: float, time_left: bool = False
    ) -> None:
        self._scale = scale
        self._progress = _rich_progress(unit, scale > 1, time_left)
        self._task = self._progress.add_task(what, total=total / scale)

    def start(self) -> None:
        self._progress.start()

    def update(self, done: int) -> None:
        self._progress.update(self._task, completed=done / self._scale)

    def finish(self) -> None:
        try:
            with contextlib.suppress(IndexError):  # rich raises it if its start was interrupted
                self._progress.stop()
        finally:
            self._progress.console.show_cursor(True)


def left_text(elapsed: float, done: float, total: float) -> str:
    """The time that is left, from the seconds that `done` of `total` took."""
    if done <= 0:
        return "time left: unknown"
    seconds = round(elapsed * (total - done) / done)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"time left: {hours}:{minutes:02}:{seconds % 60:02}"


def _rich_progress(unit: str, decimals: bool, time_left: bool) -> Progress:
    from rich.console import Console  # imported only for a terminal
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    form = ".2f" if decimals else ".0f"

    class Amount(ProgressColumn):
        def render(self, task: Task) -> Text:
            elapsed = max(task.elapsed or 0.0, 1e-3)
            speed = f"{task.completed / elapsed:{form}} {unit}/s"
            if time_left:
                speed = left_text(elapsed, task.completed, task.total or 0)
            return Text(f"{task.completed:{form}}/{task.total:{form}} {unit}, {speed}")

    columns = (TextColumn("{task.description}"), BarColumn(), Amount(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


class LoadProgressBar:
    """Progress of loading or converting a model; see `cpmcu.loading.progress.LoadProgress`."""

    def __init__(self, *, plain: bool, verb: str = "loading", time_left: bool = False) -> None:
        self._plain = plain
        self._verb = verb
        self._time_left = time_left  # True: show the time left instead of the speed
        self._bar: Bar | None = None

    def start(self, total_bytes: int, what: str) -> None:
        kind = PlainBar if self._plain else RichBar
        unit, scale = ("GB", 1e9) if total_bytes >= 1e9 else ("MB", 1e6)
        self._bar = kind(f"{self._verb} {what}", total_bytes, unit, scale, self._time_left)
        self._bar.start()

    def update(self, done_bytes: int) -> None:
        if self._bar is not None:
            self._bar.update(done_bytes)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.finish()


class PrefillProgressBar:
    """Progress of prefill. A prompt of one short pass shows nothing. Any thread may call it."""

    def __init__(self, *, plain: bool) -> None:
        self._plain = plain
        self._bar: Bar | None = None
        self._lock = threading.Lock()
        self._finished = False
        self._timer: threading.Timer | None = None

    def begin(self, total: int) -> None:
        """If the first pass takes longer than half a second, shows 0 of `total` tokens."""
        self._timer = threading.Timer(_FIRST_PASS_SECONDS, self._show, [total])
        self._timer.daemon = True
        self._timer.start()

    def __call__(self, done: int, total: int) -> None:
        if done >= total:
            with self._lock:
                if self._bar is not None:
                    self._bar.update(done)
            self.finish()
            return
        if not done:  # `begin` shows 0
            return
        self._show(total)
        with self._lock:
            if self._bar is not None:
                self._bar.update(done)

    def finish(self) -> None:
        """Ends the display. Required also if prefill did not finish."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._finished = True
            if self._bar is not None:
                self._bar.finish()

    def _show(self, total: int) -> None:
        with self._lock:
            if self._bar is None and not self._finished:
                self._bar = (PlainBar if self._plain else RichBar)("prefill", total, "tokens", 1.0)
                self._bar.start()
