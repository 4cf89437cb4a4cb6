"""Limits on what a client may send, enforced before it costs memory or time."""

from __future__ import annotations

import time

import anyio
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpmcu.serving.errors import ApiError


class BodyLimit:
    """ASGI middleware that answers 413 for a body of more than `max_bytes`, 408 for a late one."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on with its body counted and timed."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((v for name, v in scope["headers"] if name == b"content-length"), b"")
        if length.isdigit() and int(length) > self._max_bytes:
            error = self._too_large()
            await ApiError(413, error.detail).response()(scope, receive, send)
            return
        deadline = time.monotonic() + self._seconds
        taken, more = 0, True

        async def limited() -> Message:
            nonlocal taken, more
            if not more:  # all that can come is that the client leaves
                return await receive()
            with anyio.move_on_after(deadline - time.monotonic()):
                message = await receive()
                taken += len(message.get("body", b""))
                more = message.get("more_body", False)
                if taken > self._max_bytes:
                    raise self._too_large()
                return message
            raise self._too_late()

        await self._app(scope, limited, send)

    # Not ApiErrors: FastAPI makes a 400 of what it does not know while it reads a body.

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"The request body has more than {self._max_bytes} bytes.")

    def _too_late(self) -> HTTPException:
        message = f"The request body did not arrive within {self._seconds:g} s."
        return HTTPException(408, message, headers={"Connection": "close"})


def check_text(text: str, param: str, max_length: int) -> None:
    """Raises ApiError (400) for a text of more than `max_length` characters."""
    if len(text) > max_length:
        raise ApiError(
            400,
            f"{param} has {len(text)} characters, but may have at most {max_length}.",
            param=param,
            code="string_too_long",
        )
