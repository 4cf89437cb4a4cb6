"""ASGI middleware: request ids, and one line of the log for each request."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpmcu.serving.errors import internal_error, server_stopping
from cpmcu.serving.http.request_id import request_id

logger = logging.getLogger(__name__)

_ID_HEADERS = (b"x-request-id", b"request-id")
_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestLog:
    """ASGI middleware: assigns a request id, logs each request, and hides exceptions.

    The id is the client's `x-request-id` if it is printable, else a new one. The response has it
    in the same header and in `request-id`, which is Anthropic's name. An uncaught exception is
    logged and answered with a 500 without details. A request that the stopping server cancels gets
    a 503. `headers` are added to every response.
    """

    def __init__(self, app: ASGIApp, headers: Mapping[str, str] | None = None) -> None:
        self._app = app
        self._headers = [(k.encode("ascii"), v.encode("ascii")) for k, v in (headers or {}).items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((v for name, v in scope["headers"] if name == b"x-request-id"), b"")
        text = given.decode("latin-1")
        name = text if _SANE_ID.fullmatch(text) else uuid.uuid4().hex
        token = request_id.set(name)
        start = time.perf_counter()
        status = 0

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(header, name.encode("ascii")) for header in _ID_HEADERS]
                headers = [*message.get("headers", []), *own, *self._headers]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        except asyncio.CancelledError:
            logger.warning("request cancelled: the server is stopping")
            if not status:
                await server_stopping().response(scope["path"])(scope, receive, with_id)
        except Exception:
            logger.exception("the request failed")
            if not status:
                await internal_error().response(scope["path"])(scope, receive, with_id)
        finally:
            self._line(scope, status, time.perf_counter() - start)
            request_id.reset(token)

    def _line(self, scope: Scope, status: int, seconds: float) -> None:
        quiet = scope["path"] in ("/health", "/ping", "/metrics") and status == 200
        fields = {
            "method": scope["method"],
            # The undecoded path: it cannot contain a line break.
            "path": scope.get("raw_path", b"").decode("latin-1") or scope["path"],
            "status": status,
            "ms": round(1e3 * seconds, 1),
            "client": (scope.get("client") or ("-",))[0],
        }
        logger.log(
            logging.DEBUG if quiet else logging.INFO,
            "%s %s %d %.1f ms from %s",
            *fields.values(),
            extra={"fields": fields},
        )
