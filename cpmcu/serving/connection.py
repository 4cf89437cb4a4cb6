"""Connections whose requests must arrive in time, so that a slow sender cannot hold them open."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from cpmcu.serving.errors import error_body

logger = logging.getLogger("cpmcu.server")

_GRACE_SECONDS = 2.0  # for the application to answer a late body itself


def with_deadlines(header_seconds: float, body_seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, with limits on how long headers and body may take to arrive.

    Late headers get a 408. A late body gets its answer from `BodyLimit`; the connection is closed
    here if it is still incomplete after that, whatever the application answered.
    """

    class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """One connection. What uvicorn does not time: a request from its first to its last byte."""

        _phase: tuple[str, Any] | None = None  # what is awaited, and after which request
        _timer: asyncio.TimerHandle | None = None
        _begun = False  # has a byte of the awaited headers come?

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._await("headers")

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._await("headers")
                self._begun = True
            else:
                self._await("body" if self.cycle.more_body else None)

        def on_response_complete(self) -> None:
            answered = self.cycle
            super().on_response_complete()  # begins with the next request if it came already
            if self.cycle is answered:  # idle: uvicorn's own limit holds until a byte comes
                self._await(None)
            else:
                self._await("body" if self.cycle.more_body else None)

        def connection_lost(self, exc: Exception | None) -> None:
            self._await(None)
            super().connection_lost(exc)

        def _await(self, what: str | None) -> None:
            """Begins to wait, unless it does so already."""
            phase = None if what is None else (what, self.cycle)
            if phase == self._phase:
                return
            self._phase, self._begun = phase, False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if what is not None:
                limit = header_seconds if what == "headers" else body_seconds + _GRACE_SECONDS
                self._timer = self.loop.call_later(limit, self._expire)

        def _expire(self) -> None:
            assert self._phase is not None  # the timer is cancelled with its phase
            if self.transport.is_closing():
                return
            if self._phase[0] == "headers" and self._begun:
                logger.info("a connection is closed: its headers took too long")
                self.transport.write(_late_headers(header_seconds))
            self.transport.close()

    return Protocol


def _late_headers(seconds: float) -> bytes:
    message = f"The request's headers did not arrive within {seconds:g} s."
    body = json.dumps(error_body(408, message)).encode()
    head = (
        "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
