"""/v1/completions."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from cpmcu.outputs import CompletionOutput, StreamChunk, TokenLogprobs
from cpmcu.serving.chat.answers import metrics_of
from cpmcu.serving.fill import find_fill
from cpmcu.serving.generation import (
    Generation,
    PrefillProgress,
    check_limits,
    encode,
    sampling_params,
)
from cpmcu.serving.http import sse
from cpmcu.serving.http.limits import check_text
from cpmcu.serving.logprobs import Logprobs, Scored, of_prompt, scored
from cpmcu.serving.model import Model
from cpmcu.serving.protocol.base import ERRORS
from cpmcu.serving.protocol.completion import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
)
from cpmcu.serving.replies import Reply, answer, service_of, written
from cpmcu.serving.service import Service

router = APIRouter(tags=["generation"])


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses={**ERRORS, 200: {"content": sse.CONTENT}},
)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continues texts."""
    service = service_of(request)
    body.check()
    service.check_model(body.model)
    loop = asyncio.get_running_loop()
    job = await service.workers.run(request, body.prompt_length, _prepare, service, body, loop)
    reply = Reply(body, service, "cmpl", "text_completion")
    completion = _Completion(reply, body, job)
    return await answer(
        request,
        job.generation,
        body.stream,
        completion.events,
        lambda outputs: written(completion.whole(outputs)),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """The engine's requests and the texts of their prompts."""

    generation: Generation
    model: Model
    prompt_texts: list[str]


def _prepare(service: Service, body: CompletionRequest, loop: asyncio.AbstractEventLoop) -> _Job:
    """Tokenizes and checks a request. Slow, so it runs off the event loop."""
    model = service.model
    tokenizer, max_length = model.llm.tokenizer, model.llm.max_length
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
    ids: list[list[int]] = []
    texts: list[str] = []
    prompts = body.prompts()
    service.check_size(len(prompts) * body.num_choices, "prompt")
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text(prompt, "prompt", service.config.max_text_length)
            special = body.add_special_tokens
            limit = max_length if body.truncate_prompt_tokens is None else None
            found = encode(tokenizer, prompt, "prompt", special=special, max_length=limit)
            ids.append(body.truncated(found, max_length))
            cut = len(ids[-1]) < len(found)
            texts.append(decode(ids[-1]) if cut and body.echo else prompt)
        else:
            prompt = body.truncated(prompt, max_length)
            ids.append(prompt)
            shown = body.echo and len(prompt) < max_length  # else Generation will refuse it
            outside = any(not 0 <= token < model.llm.spec.vocab_size for token in prompt)
            texts.append(decode(prompt) if shown and not outside else "")
    check_limits(body, service.longest_limit)
    fields = body.sampling_fields(names=lambda: model.llm.named_tokens)
    if body.suffix:
        check_text(body.suffix, "suffix", service.config.max_text_length)
        fill = find_fill(tokenizer, "suffix")
        ids = [fill.prompt(prompt, body.suffix) for prompt in prompts]
        fields["stop_token_ids"] = (*fields["stop_token_ids"], *fill.ends)
    params = sampling_params(
        max_tokens=1 if body.token_limit == 0 else body.token_limit,
        logprobs=body.logprobs,
        prompt_logprobs=_most(
            body.num_prompt_logprobs(service.config.most_logprobs),
            body.logprobs if body.echo else None,
        ),
        **fields,
    )
    generation = Generation(
        service,
        ids,
        params,
        loop,
        grammar_field=body.grammar_field,
        progress=body.return_progress,
    )
    return _Job(generation, model, texts)


class _Completion:
    """Formats the response to a completion request."""

    def __init__(self, reply: Reply, body: CompletionRequest, job: _Job) -> None:
        self._reply = reply
        self._body = body
        self._job = job
        self._logprobs = [
            Logprobs(
                job.model.llm.token_texts,
                len(body.logprob_token_ids or ()) or body.logprobs,
                echo=job.prompt_texts[number // body.num_choices] if body.echo else "",
                num_echoed=len(self._prompt(number)) if body.echo else 0,
                skip_special=body.skip_special_tokens,
                as_ids=reply.tokens_as_ids,
            )
            for number in range(len(job.generation.requests))
        ]

    def whole(self, outputs: Sequence[CompletionOutput]) -> CompletionResponse:
        """Returns the response as one object."""
        reply = self._reply
        return CompletionResponse(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            system_fingerprint=reply.system_fingerprint,
            choices=[self._choice(number, output) for number, output in enumerate(outputs)],
            usage=reply.usage(self._job.generation, 0 if self._only_echo else None),
            metrics=metrics_of(outputs) if reply.wants_metrics else None,
            timings=reply.timings(outputs),
        )

    @functools.cached_property
    def _only_echo(self) -> bool:
        """True if max_tokens is 0. The engine still samples one token, which is dropped."""
        return self._body.token_limit == 0

    def _choice(self, number: int, output: CompletionOutput) -> CompletionChoice:
        text, logprobs = self._echo(number)
        token_ids = [] if self._only_echo else output.token_ids
        if not self._only_echo:
            text += output.text
            logprobs += scored(output.logprobs)
        ids = self._body.return_token_ids
        return CompletionChoice(
            index=number,
            text=text,
            logprobs=self._logprobs[number].write(logprobs),
            finish_reason="length" if self._only_echo else output.finish_reason,
            stop_reason=None if self._only_echo else output.stop_reason,
            matched_stop=None if self._only_echo else self._reply.matched_stop(output),
            prompt_logprobs=of_prompt(
                self._job.model.llm.token_texts,
                self._scores(number),
                self._reply.num_prompt_logprobs,
            ),
            token_ids=token_ids if ids else None,
            prompt_token_ids=self._prompt(number) if ids else None,
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the events of the stream."""
        reply, generation = self._reply, self._job.generation
        begun = [False] * len(generation.requests)
        tokens = 0  # tokens of all choices so far, this chunk included
        async for number, item in generation.items():
            if isinstance(item, PrefillProgress):
                yield reply.progress(item)
                continue
            first, begun[number] = not begun[number], True
            text, logprobs = self._echo(number) if first else ("", [])
            if not self._only_echo:
                tokens += len(item.token_ids)
                text += item.text
                logprobs += scored(item.logprobs)
            if text or logprobs or item.finish_reason or self._body.return_token_ids:
                choice = self._stream_choice(number, text, logprobs, item)
                if first and self._body.return_token_ids:
                    choice["prompt_token_ids"] = self._prompt(number)
                more = reply.timings_so_far(generation, number)
                yield reply.chunk([choice], **reply.usage_so_far(generation, tokens), **more)
        last = reply.last(generation, reply.usage(generation, 0 if self._only_echo else None))
        if last is not None:
            yield last

    def _stream_choice(
        self, number: int, text: str, logprobs: list[Scored], item: StreamChunk
    ) -> dict[str, Any]:
        found = self._logprobs[number].write(logprobs) if logprobs else None
        reason = "length" if self._only_echo and item.finish_reason else item.finish_reason
        choice: dict[str, Any] = {
            "index": number,
            "text": text,
            "logprobs": None if found is None else found.model_dump(),
            "finish_reason": reason,
        }
        if reason is not None:
            choice["stop_reason"] = None if self._only_echo else item.stop_reason
            choice["matched_stop"] = None if self._only_echo else self._reply.matched_stop(item)
        if self._body.return_token_ids:
            choice["token_ids"] = [] if self._only_echo else item.token_ids
        return choice

    def _prompt(self, number: int) -> list[int]:
        return self._job.generation.prompts[number // self._body.num_choices]

    def _echo(self, number: int) -> tuple[str, list[Scored]]:
        """Returns the prompt's text and log-probabilities if `echo` and `logprobs` request them."""
        if not self._body.echo:
            return "", []
        text = self._job.prompt_texts[number // self._body.num_choices]
        if self._body.logprobs is None:
            return text, []
        return text, list(zip(self._prompt(number), self._scores(number)))

    def _scores(self, number: int) -> Sequence[TokenLogprobs | None]:
        """Returns the prompt's log-probabilities. Only the first choice's request computes them."""
        n = self._body.num_choices
        return self._job.generation.requests[number // n * n].prompt_logprobs


def _most(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)
