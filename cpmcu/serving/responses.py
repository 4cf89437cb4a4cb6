"""What the two generating routes share: running a request, usage, and the frame of a stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from cpmcu.outputs import CompletionOutput
from cpmcu.serving.answers import metrics_of
from cpmcu.serving.errors import client_left
from cpmcu.serving.generation import Generation, PrefillProgress
from cpmcu.serving.protocol.base import (
    ApiModel,
    GenerationRequest,
    PromptTokensDetails,
    UsageInfo,
)
from cpmcu.serving.service import Service
from cpmcu.serving.sse import EventStream, disconnected, to_json

_MANY_TOKENS = 4096  # of outputs: writing them would hold up the event loop
_PIECE = 1 << 13  # numbers or texts that are written at a time


def service_of(request: Request) -> Service:
    """The server's model."""
    service: Service = request.app.state.service
    return service


class Reply:
    """The frame of one response: id, model's name, time; and its usage."""

    def __init__(self, body: GenerationRequest, service: Service, prefix: str, kind: str) -> None:
        self.body = body
        self.service = service
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = body.model or service.names[0]
        frame = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        self._head = f"data: {to_json(frame)[:-1]},"  # the same in all chunks

    @property
    def wants_metrics(self) -> bool:
        """Shall the response have `metrics`?"""
        wanted = self.body.return_metrics
        return self.service.config.return_metrics if wanted is None else wanted

    def usage(self, generation: Generation, tokens: int | None = None) -> UsageInfo:
        """Token counts; `tokens`: of the outputs, if not all that were drawn."""
        prompt = sum(map(len, generation.prompts))
        if tokens is None:
            tokens = generation.num_tokens
        return UsageInfo(
            prompt_tokens=prompt,
            completion_tokens=tokens,
            total_tokens=prompt + tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=generation.cached_tokens),
        )

    def usage_so_far(self, generation: Generation, tokens: int) -> dict[str, Any]:
        """The member of a chunk that has the usage, if each shall have it.

        `tokens`: of the outputs, up to this chunk.
        """
        if not (self.body.continuous_usage or self._forces_usage):
            return {}
        return {"usage": self.usage(generation, tokens).model_dump()}

    @property
    def _forces_usage(self) -> bool:
        return self.service.config.enable_force_include_usage

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """An event of a stream."""
        rest = to_json({"choices": choices, **more})
        return f"{self._head}{rest[1:]}\n\n".encode()

    def progress(self, item: PrefillProgress) -> bytes:
        """An event that tells how much of a prompt was read (llama.cpp's field)."""
        progress = {
            "total": item.total,
            "cache": item.cached,
            "processed": item.processed,
            "time_ms": round(1e3 * item.seconds),
        }
        return self.chunk([], prompt_progress={"prompt_index": item.prompt_index, **progress})

    def last(self, generation: Generation, usage: UsageInfo) -> bytes | None:
        """The event after the choices, with usage and metrics as far as asked for."""
        more: dict[str, Any] = {}
        if self.body.include_usage or self._forces_usage:
            more["usage"] = usage.model_dump()
        if self.wants_metrics:
            more["metrics"] = metrics_of([request.output() for request in generation.requests])
        return self.chunk([], **more) if more else None


def written(model: ApiModel, *, without_none: bool = False) -> Response:
    """A response whose lists are written piece by piece: other threads go on in between."""
    members = []
    for name in type(model).model_fields:
        value = getattr(model, name)
        if value is None and without_none:
            continue
        if isinstance(value, list):
            text = f"[{','.join(_pieces(value))}]"
        else:
            text = to_json(_plain(value))
        members.append(f"{to_json(name)}:{text}")
    return Response(f"{{{','.join(members)}}}".encode(), media_type="application/json")


def _pieces(values: list[Any]) -> Iterator[str]:
    """The elements of a list as JSON, without its brackets."""
    size = _PIECE if all(isinstance(value, int | str) for value in values[:2]) else 1
    for at in range(0, len(values), size):
        yield to_json([_plain(value) for value in values[at : at + size]])[1:-1]


def _plain(value: Any) -> Any:
    """A value without models: lists and objects may hold them."""
    if isinstance(value, ApiModel):
        return value.model_dump(by_alias=True)
    if isinstance(value, dict):
        return {name: _plain(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_plain(member) for member in value]
    return value


async def answer(
    request: Request,
    generation: Generation,
    body: GenerationRequest,
    events: Callable[[], AsyncIterator[bytes]],
    whole: Callable[[Sequence[CompletionOutput]], ApiModel],
) -> Response:
    """Runs a request and answers it, streamed or whole; ends it when the client leaves."""
    generation.start()
    if body.stream:
        interval = service_of(request).config.ping_interval
        return EventStream(events(), cancel=generation.cancel, ping_interval=interval)
    work = asyncio.ensure_future(generation.outputs())
    watch = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise client_left()
        outputs = work.result()
        params = generation.params
        plain = params.logprobs is None and params.prompt_logprobs is None
        if plain and generation.num_tokens < _MANY_TOKENS:
            return written(whole(outputs))
        return await asyncio.to_thread(lambda: written(whole(outputs)))
    finally:
        generation.cancel()
        watch.cancel()
        work.cancel()
