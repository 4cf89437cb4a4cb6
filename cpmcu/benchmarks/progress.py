"""Shows the progress of a benchmark on stderr, if stderr is a terminal.

No bar is drawn while steps are timed: its thread would take time from them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from cpmcu.loading.progress import LoadProgress
from cpmcu.ui.display import is_terminal
from cpmcu.ui.interrupts import announced
from cpmcu.ui.progress import LoadProgressBar, PrefillProgressBar

STOPPING = "stopping after this pass"


class BenchProgress:
    """Shows the phases of a benchmark, and ends it early after Ctrl-C."""

    def __init__(self) -> None:
        self._shows = is_terminal()
        self._reads_prompt = False
        self._stopped = False
        self._bar: PrefillProgressBar | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While the context is open, Ctrl-C in a pass is announced at once."""
        with announced(self._interrupted):
            yield

    def loading(self) -> LoadProgress | None:
        """A progress bar of loading; None: loading is logged instead."""
        return LoadProgressBar(plain=False) if self._shows else None

    def note(self, text: str) -> None:
        """Writes a line."""
        if self._shows:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    @contextlib.contextmanager
    def prefill(self, context: int) -> Iterator[None]:
        """Shows the progress of the first passes over `context` tokens, which `read` reports."""
        self._reads_prompt = True
        self._bar = PrefillProgressBar(plain=False) if self._shows else None
        if self._bar is not None:
            self._bar.begin(context)
        try:
            yield
        finally:
            self._reads_prompt = False
            if self._bar is not None:
                self._bar.finish()

    def read(self, done: int, context: int) -> None:
        """Reports a pass. Raises InterruptedError after Ctrl-C."""
        if self._bar is not None:
            self._bar(done, context)
        self.check()

    def check(self) -> None:
        """Raises InterruptedError after Ctrl-C. The engine's thread has to look for it."""
        if self._stopped:
            raise InterruptedError("stopped")

    def _interrupted(self) -> None:
        self._stopped = True
        if self._reads_prompt and sys.stderr is not None:
            sys.stderr.write(f"{STOPPING}\n")
            sys.stderr.flush()
