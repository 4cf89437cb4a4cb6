"""What programs show: generated text on stdout, everything about it on stderr."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpmcu.errors import sentence
from cpmcu.outputs import RequestOutput
from cpmcu.ui.progress import LoadProgressBar, PrefillProgressBar
from cpmcu.ui.tables import plain_table, text_bar

if TYPE_CHECKING:
    from cpmcu.spec_metrics import SpecDecodeMetrics


class Display:
    """The terminal of one program. `plain` (also when stderr is no terminal) leaves rich out.

    Where stderr is closed, what would go there is lost.
    """

    def __init__(self, *, plain: bool, debug: bool = False) -> None:
        if sys.stderr is None:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for as long as the program runs
        self.plain = plain or not sys.stderr.isatty()
        level = logging.DEBUG if debug else logging.WARNING
        logging.basicConfig(level=level, format="cpmcu: %(message)s", stream=sys.stderr)
        for stream in (sys.stdout, sys.stderr):  # a half-known character set must not end a run
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")

    def text(self, piece: str) -> None:
        """Generated text, at once."""
        sys.stdout.write(piece)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """A line about what is going on."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def error(self, error: BaseException | str) -> None:
        """One line that says what went wrong."""
        self.note(f"cpmcu: {sentence(error)}")

    def ask(self) -> str:
        """A line from the user. Raises EOFError at the end of input."""
        if sys.stdin.isatty():
            import readline  # noqa: F401  # gives input() its line editing

        sys.stderr.write("> ")
        sys.stderr.flush()
        return input()

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table that is itself the program's output."""
        sys.stdout.write(plain_table(columns, rows))

    def load_progress(self, verb: str = "loading") -> LoadProgressBar:
        """A listener for loading, or for what `verb` says."""
        return LoadProgressBar(plain=self.plain, verb=verb)

    def prefill_progress(self) -> PrefillProgressBar:
        """A listener for reading a prompt."""
        return PrefillProgressBar(plain=self.plain)

    def summary(self, result: RequestOutput) -> None:
        """Lengths, times and speeds of one request, on stderr."""
        timings = result.timings
        decoded = max(0, timings.output_tokens - 1)
        rows = [
            ("prefill", timings.prompt_tokens, timings.prefill_s, timings.prompt_tokens_per_s),
            ("decode", decoded, timings.decode_s, timings.decode_tokens_per_s),
        ]
        cells = [
            (name, str(tokens), f"{seconds:.3f}", f"{rate:.1f}")
            for name, tokens, seconds, rate in rows
        ]
        columns = ("", "tokens", "seconds", "tokens/s")
        output = result.outputs[0]
        closing = (
            f"{len(output.token_ids)} tokens, finish reason {output.finish_reason}, "
            f"seed {result.seed}"
        )
        self._stderr_table(columns, cells)
        self.note(closing)
        metrics = output.spec_decode_metrics
        if metrics is not None and metrics.num_spec_steps:
            self._acceptance(metrics)

    def _acceptance(self, metrics: SpecDecodeMetrics) -> None:
        """How many drafted tokens the steps accepted, as a histogram."""
        steps, counts = metrics.num_spec_steps, metrics.acceptance_histogram
        rows = []
        for accepted, count in enumerate(counts):
            if accepted == 0:
                position = ""
            else:
                position = f"{metrics.acceptance_per_position[accepted - 1]:.1%}"
            bar = text_bar(count / max(counts))
            rows.append((str(accepted), str(count), f"{count / steps:.1%}", position, bar))
        self._stderr_table(("accepted", "steps", "share", "or more", ""), rows)
        self.note(
            f"mean accept length {metrics.mean_acceptance_length:.2f}: "
            f"{metrics.num_accepted_draft_tokens} drafted tokens accepted in {steps} steps of up "
            f"to {metrics.num_spec_tokens}"
        )

    def logprobs(self, result: RequestOutput, token_text: Sequence[tuple[str, str]]) -> None:
        """Log-probabilities of the output's tokens; `token_text`: (token, likeliest ones)."""
        entries = result.outputs[0].logprobs or []
        rows = [
            (repr(token), f"{entry.logprob:.4f}", top)
            for entry, (token, top) in zip(entries, token_text)
        ]
        self._stderr_table(("token", "logprob", "most likely"), rows)

    def _stderr_table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if self.plain:
            sys.stderr.write(plain_table(columns, rows))
            return
        from rich.console import Console  # rich: only where there is a terminal to draw on
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console(stderr=True).print(table)
