"""How loading tells what it is doing: a protocol that the user interface implements."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

logger = logging.getLogger(__name__)


class LoadProgress(Protocol):
    """Called on the loading thread: start, any number of updates, finish.

    finish is called also after an error, even one of start.
    """

    def start(self, total_bytes: int, what: str) -> None:
        """`total_bytes` of `what` are about to be loaded."""

    def update(self, done_bytes: int) -> None:
        """So many bytes are done, counted from the start."""

    def finish(self) -> None:
        """No more updates will come."""


class LogProgress:
    """Two lines in the log: what is loaded, and how fast it was."""

    def __init__(self) -> None:
        self._what = ""
        self._done_bytes = 0
        self._started = 0.0

    def start(self, total_bytes: int, what: str) -> None:
        self._what, self._done_bytes, self._started = what, 0, time.perf_counter()
        logger.info("loading %s: %.2f GB", what, total_bytes / 1e9)

    def update(self, done_bytes: int) -> None:
        self._done_bytes = done_bytes

    def finish(self) -> None:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        gigabytes = self._done_bytes / 1e9
        logger.info(
            "loaded %s: %.2f GB in %.1f s (%.2f GB/s)",
            self._what,
            gigabytes,
            seconds,
            gigabytes / seconds,
        )


def list_names(names: Sequence[str], limit: int = 8) -> str:
    """Some names in one line, and how many more there are."""
    text = ", ".join(names[:limit])
    return f"{text} and {len(names) - limit} more" if len(names) > limit else text


def log_conversion(counts: dict[str, int], to_dtype: str, reason: str = "") -> None:
    """One warning for all tensors that change dtype; nothing if there are none.

    `counts`: dtype in the checkpoint -> number of tensors.
    """
    if not counts:
        return
    from_dtypes = ", ".join(f"{count} from {dtype}" for dtype, count in sorted(counts.items()))
    total = sum(counts.values())
    logger.warning(
        "converting %d tensors to %s while loading: %s%s",
        total,
        to_dtype,
        from_dtypes,
        f" ({reason})" if reason else "",
    )


def log_unused(reasons: dict[str, str]) -> None:
    """One warning that names the checkpoint's tensors that the model does not use, and why."""
    if reasons:
        names = [f"{name} ({reason})" for name, reason in reasons.items()]
        logger.warning("%d tensors are not used: %s", len(names), list_names(names))
