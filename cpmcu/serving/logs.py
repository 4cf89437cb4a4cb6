"""Logging with request ids."""

from __future__ import annotations

import json
import logging
from typing import Any

from cpmcu.serving.http.request_id import request_id


class _WithRequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            record.request_id = request_id.get()
        return True


class _JsonFormatter(logging.Formatter):
    """One JSON object a line; `extra={"fields": {...}}` adds members."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": getattr(record, "request_id", "-"),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _is_news(record: logging.LogRecord) -> bool:
    """False for asyncio's warnings of writes to a client that has left; there may be many."""
    return record.msg != "socket.send() raised exception."


def configure(log_format: str, level: str) -> None:
    """Sends all log records to stderr in one format."""
    handler = logging.StreamHandler()
    handler.addFilter(_WithRequestId())
    text = "%(asctime)s %(levelname)-7s %(request_id)s %(name)s: %(message)s"
    handler.setFormatter(_JsonFormatter() if log_format == "json" else logging.Formatter(text))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    loop = logging.getLogger("asyncio")
    loop.setLevel(logging.WARNING)
    loop.addFilter(_is_news)
