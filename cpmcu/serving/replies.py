"""Common code of the generating routes: running a request, usage, and the chunks of a stream."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

from cpmcu.outputs import CompletionOutput, StreamChunk
from cpmcu.sampling import SamplingParams
from cpmcu.serving.chat.answers import metrics_of, timings_of
from cpmcu.serving.errors import client_left
from cpmcu.serving.generation import Generation, PrefillProgress
from cpmcu.serving.http.sse import CHUNKS, Ending, EventStream, disconnected, to_json
from cpmcu.serving.protocol.base import (
    ApiModel,
    GenerationRequest,
    PromptTokensDetails,
    UsageInfo,
)
from cpmcu.serving.service import Service

_MANY_TOKENS = 4096  # a longer response is serialised on another thread than the event loop's
_PIECE = 1 << 13  # numbers or strings that one call serialises


def service_of(request: Request) -> Service:
    """Returns the server's Service."""
    service: Service = request.app.state.service
    return service


class Reply:
    """The fields that all chunks of a response share (id, model, time), and its usage."""

    def __init__(self, body: GenerationRequest, service: Service, prefix: str, kind: str) -> None:
        self.body = body
        self.service = service
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = body.model or service.names[0]
        self._eos = frozenset(service.model.llm.tokenizer.eos_token_ids)
        self.system_fingerprint = service.fingerprint
        names = ("id", "created", "model", "system_fingerprint")
        frame = {"object": kind, **{name: getattr(self, name) for name in names}}
        self._head = f"data: {to_json(frame)[:-1]},"  # the start of every chunk of the stream

    @property
    def wants_metrics(self) -> bool:
        """True if the response must have `metrics`."""
        wanted = self.body.return_metrics
        return self.service.config.return_metrics if wanted is None else wanted

    @property
    def tokens_as_ids(self) -> bool:
        """True if log-probabilities name each token token_id:N."""
        wanted = self.body.return_tokens_as_token_ids
        return self.service.config.return_tokens_as_token_ids if wanted is None else wanted

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likeliest tokens for each token of the prompt; None: no log-probabilities."""
        return self.body.num_prompt_logprobs(self.service.config.most_logprobs)

    def usage(self, generation: Generation, tokens: int | None = None) -> UsageInfo:
        """Returns the token counts. `tokens`: number in the outputs (default: all generated)."""
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
        """Returns a chunk's `usage` member if every chunk must have it, else no member.

        `tokens`: of all outputs, up to and including this chunk.
        """
        if not self.has_usage_so_far:
            return {}
        return {"usage": self.usage(generation, tokens).model_dump()}

    @property
    def has_usage(self) -> bool:
        """True if a stream has `usage`."""
        return bool(self.body.include_usage or self._forces_usage)

    @functools.cached_property
    def has_usage_so_far(self) -> bool:
        """True if every chunk of a stream has `usage`."""
        return bool(self.body.continuous_usage or self._forces_usage)

    @property
    def _forces_usage(self) -> bool:
        return self.service.config.enable_force_include_usage

    def matched_stop(self, ended: CompletionOutput | StreamChunk) -> int | str | None:
        """Returns SGLang's `matched_stop`: the stop text or token, or the end-of-sequence token."""
        if ended.finish_reason != "stop" or ended.stop_reason is not None or not ended.token_ids:
            return ended.stop_reason
        last = ended.token_ids[-1]
        return last if last in self._eos else None  # else a grammar ended the output

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Returns one event of the stream."""
        rest = to_json({"choices": choices, **more})
        return f"{self._head}{rest[1:]}\n\n".encode()

    def progress(self, item: PrefillProgress) -> bytes:
        """Returns an event with the progress of prefill (llama.cpp's `prompt_progress`)."""
        return self.chunk([], **progress_members(item, timings=self.body.timings_per_token))

    def last(self, generation: Generation, usage: UsageInfo) -> bytes | None:
        """Returns the last event, with usage and metrics as requested, or None."""
        more: dict[str, Any] = {}
        if self.has_usage:
            more["usage"] = usage.model_dump()
        if self.wants_metrics:
            more["metrics"] = metrics_of([request.output() for request in generation.requests])
        if self.body.timings_per_token:
            more["timings"] = self.timings([generation.requests[0].output()])
        return self.chunk([], **more) if more else None

    def timings_so_far(self, generation: Generation, number: int) -> dict[str, Any]:
        """Returns the `timings` member of a chunk of output `number`, if they are requested."""
        if not self.body.timings_per_token:
            return {}
        return {"timings": timings_of(generation.requests[number].timings())}

    def timings(self, outputs: Sequence[CompletionOutput]) -> dict[str, Any] | None:
        """Returns the timings of the first output if they are requested."""
        return metrics_of(outputs)["timings"] if self.body.timings_per_token else None


def progress_members(item: PrefillProgress, *, timings: bool) -> dict[str, Any]:
    """Returns llama.cpp's `prompt_progress` and, if wanted, the `timings` so far."""
    milliseconds = 1e3 * item.seconds
    found: dict[str, Any] = {
        "prompt_progress": {
            "prompt_index": item.prompt_index,
            "total": item.total,
            "cache": item.cached,
            "processed": item.processed,
            "time_ms": round(milliseconds),
        }
    }
    if timings:
        computed = item.processed - item.cached
        spent = milliseconds if computed else 0.0  # before, the prompt waits
        found["timings"] = {
            "cache_n": item.cached,
            "prompt_n": computed,
            "prompt_ms": spent,
            "prompt_per_token_ms": spent / max(1, computed),
            "prompt_per_second": 1e3 * computed / spent if spent > 0 else 0.0,
            "predicted_n": 0,
            "predicted_ms": 0.0,
            "predicted_per_token_ms": 0.0,
            "predicted_per_second": 0.0,
        }
    return found


def written(model: ApiModel, **more: Any) -> Response:
    """Returns a response whose lists are serialised in pieces, so other threads get the GIL.

    `more`: members besides those of the model.
    """
    members = []
    fields = {name: getattr(model, name) for name in type(model).model_fields}
    for name, value in (fields | more).items():
        if isinstance(value, list):
            text = f"[{','.join(_pieces(value))}]"
        else:
            text = to_json(_plain(value))
        members.append(f"{to_json(name)}:{text}")
    return Response(f"{{{','.join(members)}}}".encode(), media_type="application/json")


def _pieces(values: list[Any]) -> Iterator[str]:
    """Yields the elements of a list as JSON, without the brackets."""
    size = _PIECE if all(isinstance(value, int | str) for value in values[:2]) else 1
    for at in range(0, len(values), size):
        yield to_json([_plain(value) for value in values[at : at + size]])[1:-1]


def _plain(value: Any) -> Any:
    """Converts the models within a value to plain objects."""
    if isinstance(value, ApiModel):
        return value.model_dump(by_alias=True)
    if isinstance(value, dict):
        return {name: _plain(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_plain(member) for member in value]
    return value


class Running(Protocol):
    """What `answer` needs of a generation, or of several together."""

    params: SamplingParams

    @property
    def num_tokens(self) -> int: ...

    def start(self) -> None: ...

    def cancel(self) -> None: ...

    async def outputs(self) -> list[CompletionOutput]: ...


async def answer(
    request: Request,
    generation: Running,
    stream: bool | None,
    events: Callable[[], AsyncIterator[bytes]],
    whole: Callable[[Sequence[CompletionOutput]], Response],
    *,
    ending: Ending = CHUNKS,
    cancel: Callable[[], None] | None = None,
) -> Response:
    """Runs a request and answers it as a stream or at once. A disconnect cancels it.

    `whole` may run on another thread. `cancel` (default: the generation's) is called at the end.
    """
    cancel = generation.cancel if cancel is None else cancel
    generation.start()
    if stream:
        interval = service_of(request).config.ping_interval
        return EventStream(events(), cancel=cancel, ping_interval=interval, ending=ending)
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
            return whole(outputs)
        return await asyncio.to_thread(whole, outputs)
    finally:
        cancel()
        watch.cancel()
        work.cancel()
