"""Chunks of running requests, as an iterator and as an async iterator."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from typing import NoReturn

from cpmcu.engine.request import Emit, Request
from cpmcu.outputs import StreamChunk

Item = StreamChunk | Exception
Submit = Callable[[Sequence[Request]], None]
Complete = Callable[[StreamChunk, Sequence[Request], bool], StreamChunk]


class ChunkStream(Iterator[StreamChunk]):
    """StreamChunks of requests, for one `for` or one `async for` loop.

    The requests are queued when the loop begins. If the stream is dropped or closed early, they are
    cancelled. `async for` does not block the event loop. Either loop raises the exception of a
    request that failed, and RuntimeError if the engine is closed or has failed.
    """

    def __init__(
        self, prepare: Callable[[Emit], list[Request]], submit: Submit, complete: Complete
    ) -> None:
        """`prepare(emit)` makes the requests, which call `emit` with each item.

        `complete(chunk, requests, last)` returns what the loop gets for a chunk.
        """
        # Neither loop refers to this object, so that dropping it ends them.
        self._sink = _Sink()
        self._rest = prepare(self._sink.emit), submit, complete
        self._chunks = _iterate(self._sink, *self._rest)

    def __reduce__(self) -> NoReturn:
        """Refuses `pickle` and `copy`."""
        raise TypeError(
            "a stream cannot be pickled or copied, since it is part of a running engine: pass its "
            "chunks on"
        )

    def __iter__(self) -> ChunkStream:
        return self

    def __next__(self) -> StreamChunk:
        return next(self._chunks)

    def close(self) -> None:
        """Cancels the requests of a `for` loop that has begun."""
        self._chunks.close()

    def __aiter__(self) -> AsyncGenerator[StreamChunk, None]:
        return _iterate_async(self._sink, *self._rest)


class _Sink:
    """Takes items on the engine's thread."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.put: Emit = self.items.put

    def emit(self, item: Item) -> None:
        """Passes an item on to the loop."""
        self.put(item)


def _iterate(
    sink: _Sink, requests: Sequence[Request], submit: Submit, complete: Complete
) -> Generator[StreamChunk, None, None]:
    left = len(requests)
    try:
        if left:
            submit(requests)
        while left:
            chunk = _checked(sink.items.get())
            left -= chunk.finish_reason is not None
            yield complete(chunk, requests, left == 0)
    finally:
        _cancel(requests)


async def _iterate_async(
    sink: _Sink, requests: Sequence[Request], submit: Submit, complete: Complete
) -> AsyncGenerator[StreamChunk, None]:
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[Item] = asyncio.Queue()

    def put(item: Item) -> None:
        try:
            loop.call_soon_threadsafe(items.put_nowait, item)
        except RuntimeError:  # the event loop is closed
            _cancel(requests)

    sink.put = put
    left = len(requests)
    try:
        submit(requests)
        while left:
            chunk = _checked(await items.get())
            left -= chunk.finish_reason is not None
            yield complete(chunk, requests, left == 0)
    finally:
        _cancel(requests)


def _checked(item: Item) -> StreamChunk:
    if isinstance(item, Exception):
        raise item
    return item


def _cancel(requests: Sequence[Request]) -> None:
    for request in requests:
        request.cancel()
