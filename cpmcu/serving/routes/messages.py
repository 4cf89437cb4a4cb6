"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from cpmcu.outputs import CompletionOutput, FinishReason
from cpmcu.serving.chat.answers import AnswerParser, metrics_of
from cpmcu.serving.chat.job import ChatJob, num_prompt_tokens, prepare
from cpmcu.serving.errors import server_stopping
from cpmcu.serving.generation import PrefillProgress
from cpmcu.serving.http import sse
from cpmcu.serving.messages.blocks import BlockWriter, blocks_of
from cpmcu.serving.messages.conversation import to_chat
from cpmcu.serving.protocol.base import ERRORS
from cpmcu.serving.protocol.messages import (
    CountRequest,
    CountResponse,
    MessagesError,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    OutputTokensDetails,
)
from cpmcu.serving.replies import answer, service_of, written
from cpmcu.serving.service import Service
from cpmcu.text.token_text import tokens_up_to

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**error, "model": MessagesError} for status, error in ERRORS.items()
}

router = APIRouter(tags=["messages"], prefix="/v1/messages")

T = TypeVar("T")


@router.post(
    "",
    response_model=MessagesResponse,
    responses={**_ERRORS, 200: {"content": sse.CONTENT}},
)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answers a conversation."""
    service = service_of(request)
    body.check_extra()
    service.check_model(body.model)
    loop = asyncio.get_running_loop()
    job = await service.workers.run(request, body.text_length, _prepare, service, body, loop)
    reply = _Reply(body, service, job)
    return await answer(
        request,
        job.generation,
        body.stream,
        reply.events,
        lambda outputs: written(reply.whole(outputs)),
        ending=_ENDING,
    )


@router.post("/count_tokens", responses=_ERRORS)
async def count_tokens(body: CountRequest, request: Request) -> CountResponse:
    """Counts the tokens of a conversation's prompt."""
    service = service_of(request)
    body.check_extra()
    service.check_model(body.model)
    count = await service.workers.run(request, body.text_length, _count, service, body)
    return CountResponse(input_tokens=count)


def _prepare(service: Service, body: MessagesRequest, loop: asyncio.AbstractEventLoop) -> ChatJob:
    chat, origin = to_chat(body)
    return prepare(service, chat, loop, origin)


def _count(service: Service, body: CountRequest) -> int:
    return num_prompt_tokens(service, *to_chat(body))


def _event(type: str, **fields: Any) -> bytes:
    """Returns one event of a stream."""
    return f"event: {type}\n".encode() + sse.event({"type": type, **fields})


_ENDING = sse.Ending(
    failed=lambda error: _event(**error.messages_body()),
    last=b"",
    ping=_event("ping"),
)


class _Reply:
    """Formats the response to a request."""

    def __init__(self, body: MessagesRequest, service: Service, job: ChatJob) -> None:
        self._body = body
        self._job = job
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = body.model or service.names[0]
        self._reasoning: list[str] = []
        wanted = body.return_metrics
        self._wants_metrics = service.config.return_metrics if wanted is None else wanted

    def whole(self, outputs: Sequence[CompletionOutput]) -> MessagesResponse:
        """Returns the response as one object."""
        (output,) = outputs
        parser = self._job.new_parser()
        part = parser.push(output.text, final=True)
        self._reasoning.append(part.reasoning)
        return MessagesResponse(
            id=self._id,
            model=self._model,
            content=[] if self._only_prefill else blocks_of(part, self._body.thinking_shown),
            usage=self._usage(self._num_tokens),
            metrics=metrics_of(outputs) if self._wants_metrics else None,
            **self._stop(output.finish_reason, output.stop_reason, parser),
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the events of the stream."""
        parser = self._job.new_parser()
        writer = BlockWriter(self._body.thinking_shown, self._body.eager_tools)
        begun = False
        async for _, item in self._job.generation.items():
            if isinstance(item, PrefillProgress):
                continue
            if not begun:  # not earlier: only now the number of cached tokens is known
                begun = True
                yield self._start()
            final = item.finish_reason is not None
            part = parser.push(item.text, final=final)
            self._reasoning.append(part.reasoning)
            if not self._only_prefill:
                for block in writer.push(part, final=final):
                    yield _event(**block)
            if item.finish_reason is not None:
                yield self._end(self._stop(item.finish_reason, item.stop_reason, parser))
        yield _event("message_stop")

    def _start(self) -> bytes:
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0).model_dump(),
        }
        return _event("message_start", message=message)

    def _end(self, stop: dict[str, Any]) -> bytes:
        more = {}
        if self._wants_metrics:
            outputs = [request.output() for request in self._job.generation.requests]
            more["metrics"] = metrics_of(outputs)
        usage = self._usage(self._num_tokens).model_dump()
        return _event("message_delta", delta=stop, usage=usage, **more)

    @property
    def _only_prefill(self) -> bool:
        """True if max_tokens is 0. The engine still samples one token, which is dropped."""
        return self._body.max_tokens == 0

    @property
    def _num_tokens(self) -> int:
        return 0 if self._only_prefill else self._job.generation.num_tokens

    def _usage(self, num_tokens: int) -> MessagesUsage:
        generation = self._job.generation
        cached = generation.cached_tokens
        tokens = generation.requests[0].output_tokens[:num_tokens]
        return MessagesUsage(
            input_tokens=len(generation.prompts[0]) - cached,
            cache_read_input_tokens=cached,
            output_tokens=num_tokens,
            output_tokens_details=OutputTokensDetails(
                thinking_tokens=tokens_up_to(self._job.texts, tokens, "".join(self._reasoning))
            ),
        )

    def _stop(
        self, reason: FinishReason, stop: int | str | None, parser: AnswerParser
    ) -> dict[str, Any]:
        """Returns stop_reason and stop_sequence. Raises ApiError (503) if the server ended it."""
        if reason == "abort":
            raise server_stopping()
        found, sequence = "end_turn", None
        if self._only_prefill:
            found = "max_tokens"
        elif reason == "length":
            full = self._num_tokens < self._body.max_tokens
            found = "model_context_window_exceeded" if full else "max_tokens"
        elif parser.has_calls:
            found = "tool_use"
        elif isinstance(stop, str):
            found, sequence = "stop_sequence", stop
        return {"stop_reason": found, "stop_sequence": sequence}
