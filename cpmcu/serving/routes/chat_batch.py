"""/v1/chat/completions/batch: several conversations in one request, as vLLM has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from cpmcu.outputs import CompletionOutput
from cpmcu.serving.chat.conversation import Origin
from cpmcu.serving.chat.job import ChatJob, prepare
from cpmcu.serving.generation import Generation
from cpmcu.serving.protocol.base import ERRORS, ChatUsage
from cpmcu.serving.protocol.chat import BatchChatRequest, ChatRequest, ChatResponse
from cpmcu.serving.replies import Reply, answer, service_of, written
from cpmcu.serving.routes.chat import ChatReply
from cpmcu.serving.service import Service

router = APIRouter(tags=["generation"])


@router.post("/v1/chat/completions/batch", response_model=ChatResponse, responses=ERRORS)
async def chat_batch(body: BatchChatRequest, request: Request) -> Response:
    """Answers conversations side by side: choice i answers conversation i."""
    service = service_of(request)
    bodies = body.conversations()
    for i, each in enumerate(bodies):
        each.check(f"messages[{i}]")
    service.check_model(body.model)
    service.check_size(len(bodies), "messages")
    loop = asyncio.get_running_loop()
    size = sum(each.text_length for each in bodies)
    jobs = await service.workers.run(request, size, _prepare, service, bodies, loop)
    reply = Reply(bodies[0], service, "chatcmpl", "chat.completion")
    replies = [ChatReply(reply, each, job) for each, job in zip(bodies, jobs)]

    def whole(outputs: Sequence[CompletionOutput]) -> Response:
        choices = [each.choice(output) for each, output in zip(replies, outputs)]
        for i, choice in enumerate(choices):
            choice.index = i
        made = ChatResponse(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            system_fingerprint=reply.system_fingerprint,
            choices=choices,
            usage=_total([each.usage() for each in replies]),
        )
        return written(made)

    together = _Together([job.generation for job in jobs])
    return await answer(request, together, False, _no_events, whole)


def _prepare(
    service: Service, bodies: Sequence[ChatRequest], loop: asyncio.AbstractEventLoop
) -> list[ChatJob]:
    return [prepare(service, body, loop, Origin(f"messages[{i}]")) for i, body in enumerate(bodies)]


class _Together:
    """The generations of several conversations as one; each has one output."""

    def __init__(self, parts: Sequence[Generation]) -> None:
        self._parts = parts
        self.params = parts[0].params

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(part.num_tokens for part in self._parts)

    def start(self) -> None:
        """Queues all; none if one is refused."""
        try:
            for part in self._parts:
                part.start()
        except Exception:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ends all."""
        for part in self._parts:
            part.cancel()

    async def outputs(self) -> list[CompletionOutput]:
        """Waits for all outputs, in the order of the conversations."""
        found = await asyncio.gather(*(part.outputs() for part in self._parts))
        return [output for outputs in found for output in outputs]


async def _no_events() -> AsyncIterator[bytes]:
    raise AssertionError("a batch is not streamed")
    yield b""


def _total(usages: Sequence[ChatUsage]) -> ChatUsage:
    total: dict[str, Any] = usages[0].model_dump()
    for usage in usages[1:]:
        for name, count in usage.model_dump().items():
            if isinstance(count, int):
                total[name] += count
            else:
                for detail, part in count.items():
                    total[name][detail] += part
    return ChatUsage.model_validate(total)
