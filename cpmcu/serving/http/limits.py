"""Limits on the size of requests, enforced before the request is parsed."""

from __future__ import annotations

import time

import anyio
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpmcu.serving import memory
from cpmcu.serving.errors import ApiError
from cpmcu.serving.http.json_size import ValueCounter

_MAX_INNER_VALUES = 1 << 16  # maximum number of JSON values within a string of a body
_SMALL = 1 << 16  # bytes of a body; in smaller bodies, values are not counted


class BodyLimit:
    """ASGI middleware: answers 413 to a body that is too large, 408 to a late one.

    `max_values` limits the JSON values, `max_parts` the lists, objects and members.
    """

    def __init__(
        self, app: ASGIApp, *, max_bytes: int, max_values: int, max_parts: int, seconds: float
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_values = max_values
        self._max_parts = max_parts
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on with a counted and timed body; frees the memory of a large one."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((v for name, v in scope["headers"] if name == b"content-length"), b"")
        if length.isdigit() and int(length) > self._max_bytes:
            error = self._too_large(self._max_bytes, "bytes")
            await ApiError(413, error.detail).response(scope["path"])(scope, receive, send)
            return
        deadline = time.monotonic() + self._seconds
        counter = None if length.isdigit() and int(length) <= _SMALL else ValueCounter()
        taken, more = 0, True

        async def limited() -> Message:
            nonlocal taken, more
            if not more:  # only a disconnect can follow
                return await receive()
            with anyio.move_on_after(deadline - time.monotonic()):
                message = await receive()
                piece = message.get("body", b"")
                taken += len(piece)
                more = message.get("more_body", False)
                if taken > self._max_bytes:
                    raise self._too_large(self._max_bytes, "bytes")
                if counter is not None:
                    self._count(counter, piece)
                return message
            raise self._too_late()

        try:
            await self._app(scope, limited, send)
        finally:
            if taken >= memory.LARGE:
                memory.give_back_soon()

    def _count(self, counter: ValueCounter, piece: bytes) -> None:
        counter.feed(piece)
        if counter.values > self._max_values:
            raise self._too_large(self._max_values, "JSON values")
        if counter.parts > self._max_parts:
            raise self._too_large(self._max_parts, "JSON lists, objects and members")

    # HTTPException, not ApiError: while FastAPI reads a body, it turns other exceptions into a 400.

    def _too_large(self, most: int, what: str) -> HTTPException:
        return HTTPException(413, f"The request body has more than {most} {what}.")

    def _too_late(self) -> HTTPException:
        message = f"The request body did not arrive within {self._seconds:g} s."
        return HTTPException(408, message, headers={"Connection": "close"})


def check_text(text: str, param: str, max_length: int) -> None:
    """Raises ApiError (400) if a text has more than `max_length` characters."""
    if len(text) > max_length:
        raise ApiError(
            400,
            f"{param} has {len(text)} characters, but may have at most {max_length}.",
            param=param,
            code="string_too_long",
        )


def check_values(text: str, param: str) -> None:
    """Raises ApiError (400) if the JSON in a text has too many values."""
    counter = ValueCounter()
    counter.feed(text.encode("utf-8", "replace"))
    if max(counter.values, counter.parts) > _MAX_INNER_VALUES:
        raise ApiError(
            400,
            f"{param} has more than {_MAX_INNER_VALUES} JSON values in a text.",
            param=param,
            code="invalid_value",
        )
