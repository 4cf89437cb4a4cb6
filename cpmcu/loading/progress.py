"""Progress of loading: a protocol that the user interface implements, and log messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

logger = logging.getLogger(__name__)


class LoadProgress(Protocol):
    """The loading thread calls start, any number of updates, and finish.

    After an error, also one of start, finish is called.
    """

    def start(self, total_bytes: int, what: str) -> None:
        """Loading of `what` begins. `total_bytes`: size of its weights."""

    def update(self, done_bytes: int) -> None:
        """`done_bytes` of the total are loaded."""

    def finish(self) -> None:
        """No further updates follow."""


class LogProgress:
    """Logs the beginning and the speed of loading."""

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
    """Up to `limit` names in one line, and the number of further names."""
    text = ", ".join(names[:limit])
    return f"{text} and {len(names) - limit} more" if len(names) > limit else text


def log_conversion(counts: dict[str, int], to_dtype: str, reason: str = "") -> None:
    """Logs one warning for all tensors that change dtype, or nothing.

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
    """Logs one warning with the unused tensors of the checkpoint and the reasons."""
    if reasons:
        names = [f"{name} ({reason})" for name, reason in reasons.items()]
        logger.warning("%d tensors are not used: %s", len(names), list_names(names))
