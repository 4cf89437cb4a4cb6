"""Server-sent events. A stream is cancelled as soon as its client disconnects."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cpmcu.serving.errors import ApiError, internal_error

logger = logging.getLogger(__name__)

# OpenAPI's description of a stream: the data of each event is a JSON chunk or [DONE].
CONTENT = {
    "text/event-stream": {
        "itemSchema": {
            "type": "object",
            "properties": {"data": {"type": "string"}},
            "required": ["data"],
        }
    }
}

DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"


# One encoder for all events: json.dumps would construct one for each call.
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def encoded(value: Any) -> bytes:
    """Returns `value` as JSON. Half a surrogate pair is written as its escape."""
    return to_json(value).encode("utf-8", "backslashreplace")


def event(value: Any) -> bytes:
    """Returns one event with `value` as JSON."""
    return f"data: {to_json(value)}\n\n".encode()


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How an interface ends a stream. `failed` returns the events of an error.

    `last` ends every stream. `ping` is sent if there is no event for some time.
    """

    failed: Callable[[ApiError], bytes]
    last: bytes
    ping: bytes = _PING


CHUNKS = Ending(lambda error: event(error.body()), DONE)


class EventStream(Response):
    """Sends `events`, and the ending's ping after `ping_interval` seconds without an event.

    If the client disconnects or the server stops this response, `cancel` is called at once. An
    exception of `events` becomes an error event; only an ApiError's text is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        cancel: Callable[[], None],
        ping_interval: float,
        ending: Ending = CHUNKS,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._cancel = cancel
        self._ping_interval = ping_interval
        self._ending = ending
        self._sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the response."""
        helpers = [asyncio.create_task(self._watch(receive))]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            helpers.append(asyncio.create_task(self._ping(send)))
            async for block in self._blocks():
                self._sent = time.monotonic()
                await send({"type": "http.response.body", "body": block, "more_body": True})
            for helper in helpers:
                helper.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # the client disconnected during a send
            pass
        finally:
            for helper in helpers:
                helper.cancel()
            self._cancel()

    async def _watch(self, receive: Receive) -> None:
        await disconnected(receive)
        self._cancel()

    async def _ping(self, send: Send) -> None:
        while True:
            left = self._sent + self._ping_interval - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
                continue
            self._sent = time.monotonic()
            await send({"type": "http.response.body", "body": self._ending.ping, "more_body": True})

    async def _blocks(self) -> AsyncIterator[bytes]:
        try:
            async for block in self._events:
                yield block
        except ApiError as error:
            yield self._ending.failed(error)
        except Exception:
            logger.exception("a stream failed")
            yield self._ending.failed(internal_error())
        if self._ending.last:
            yield self._ending.last


async def disconnected(receive: Receive) -> None:
    """Waits until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
