"""Output of the programs: generated text on stdout, all other messages on stderr."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from cpmcu.errors import sentence
from cpmcu.outputs import RequestOutput
from cpmcu.ui.progress import Bar, LoadProgressBar, PlainBar, PrefillProgressBar, RichBar
from cpmcu.ui.summary import summary_line, summary_sections
from cpmcu.ui.tables import plain_table


def is_terminal() -> bool:
    """Is stderr a terminal that can move its cursor?"""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class Display:
    """The terminal output of one program.

    `plain`: no colours and progress bars. This is also the mode if stderr is not a terminal or
    TERM is dumb. If stderr is closed, its output is dropped.
    """

    def __init__(self, *, plain: bool, debug: bool = False) -> None:
        if sys.stderr is None:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # open until the program ends
        self.plain = plain or not is_terminal()
        level = logging.DEBUG if debug else logging.WARNING
        logging.basicConfig(level=level, format="cpmcu: %(message)s", stream=sys.stderr)
        for stream in (
            sys.stdout,
            sys.stderr,
        ):  # a character outside the terminal's encoding must not end the program
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")

    def text(self, piece: str) -> None:
        """Writes generated text and flushes it."""
        sys.stdout.write(piece)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Writes a line to stderr."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def error(self, error: BaseException | str) -> None:
        """Writes an error as one line."""
        self.note(f"cpmcu: {sentence(error)}")

    @property
    def asks(self) -> bool:
        """True if stdin is a terminal."""
        return sys.stdin is not None and sys.stdin.isatty()

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Writes a table to stdout."""
        sys.stdout.write(plain_table(columns, rows))

    def load_progress(self, verb: str = "loading", *, time_left: bool = False) -> LoadProgressBar:
        """Returns a progress listener of loading, or of the work that `verb` names."""
        return LoadProgressBar(plain=self.plain, verb=verb, time_left=time_left)

    def bar(self, what: str, total: int, unit: str, *, lines: bool = False) -> Bar:
        """Returns a bar of `total` units of work. `lines`: writes lines, since stdout is in use."""
        return (PlainBar if self.plain or lines else RichBar)(what, total, unit, 1.0)

    def prefill_progress(self) -> PrefillProgressBar:
        """Returns a progress listener of prefill."""
        return PrefillProgressBar(plain=self.plain)

    def summary(self, result: RequestOutput, *, full: bool = True, sampled: bool = True) -> None:
        """Writes lengths, times and speeds of a request to stderr. `full`: tables, else a line."""
        if not full:
            self.note(self._dim(summary_line(result, sampled=sampled)))
            return
        for section in summary_sections(result):
            self._stderr_table(section.columns, section.rows)
            self.note(section.closing)

    def logprobs(self, result: RequestOutput) -> None:
        """Writes the log-probabilities of the output's tokens, and of the likeliest tokens."""
        rows = [
            (
                repr(entry.text),
                f"{entry.logprob:.4f}",
                ", ".join(
                    f"{text!r} {logprob:.4f}"
                    for text, (_, logprob) in zip(entry.top_texts, entry.top)
                ),
            )
            for entry in result.outputs[0].logprobs or []
        ]
        self._stderr_table(("token", "logprob", "most likely"), rows)

    def _dim(self, text: str) -> str:
        return text if self.plain or os.environ.get("NO_COLOR") else f"\x1b[2m{text}\x1b[0m"

    def _stderr_table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if self.plain:
            sys.stderr.write(plain_table(columns, rows))
            return
        from rich.console import Console  # imported only for a terminal
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console(stderr=True).print(table)
