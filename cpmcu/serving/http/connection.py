"""Time limits for the arrival of requests: a slow sender cannot hold a connection open."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from cpmcu.serving.errors import error_body

logger = logging.getLogger("cpmcu.server")

_GRACE_SECONDS = 2.0  # time for the application to answer a late body itself


def with_deadlines(header_seconds: float, body_seconds: float) -> type[asyncio.Protocol]:
    """Returns uvicorn's HTTP protocol with time limits for the headers and the body.

    Late headers get a 408. `BodyLimit` answers a late body. If the body is still incomplete after
    that, this protocol closes the connection.
    """

    class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """One connection, with a timer from the first to the last byte of each request."""

        _phase: tuple[str, Any] | None = None  # ("headers" or "body", previous request)
        _timer: asyncio.TimerHandle | None = None
        _begun = False  # True: a byte of the awaited headers has arrived

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
            super().on_response_complete()  # starts the next request if it has arrived
            if self.cycle is answered:  # idle: uvicorn's own limit applies until the next byte
                self._await(None)
            else:
                self._await("body" if self.cycle.more_body else None)

        def connection_lost(self, exc: Exception | None) -> None:
            self._await(None)
            super().connection_lost(exc)

        def _await(self, what: str | None) -> None:
            """Starts the timer for `what`, unless it is running. None stops the timer."""
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
            assert self._phase is not None  # the end of a phase cancels its timer
            if self.transport.is_closing():
                return
            if self._phase[0] == "headers" and self._begun:
                logger.info("connection closed: its headers did not arrive in time")
                self.transport.write(_late_headers(header_seconds))
            self.transport.close()

    return Protocol


class OneLength:
    """ASGI middleware: closes the connection behind a request that states its length twice.

    This server uses Transfer-Encoding, but a proxy may have used Content-Length. The bytes after
    the request may therefore not be a request (RFC 9112, section 6.1).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        names = {name for name, _ in scope.get("headers", ())}

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", []), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        twice = {b"transfer-encoding", b"content-length"} <= names
        await self._app(scope, receive, closing if twice else send)


def _late_headers(seconds: float) -> bytes:
    message = f"The request's headers did not arrive within {seconds:g} s."
    body = json.dumps(error_body(408, message)).encode()
    head = (
        "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
