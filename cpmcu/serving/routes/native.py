"""/infill, /completion, /apply-template and counts of tokens, as llama.cpp's server has them.

Editors complete code at the cursor with /infill.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from cpmcu.outputs import CompletionOutput, StreamChunk
from cpmcu.serving.chat.answers import metrics_of, timings_of
from cpmcu.serving.chat.conversation import checked, render
from cpmcu.serving.chat.job import num_prompt_tokens
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
from cpmcu.serving.logprobs import entries
from cpmcu.serving.protocol.base import ERRORS
from cpmcu.serving.protocol.chat import ChatRequest
from cpmcu.serving.protocol.native import (
    InfillRequest,
    NativeCompletion,
    NativePrompt,
    NativeRequest,
    RenderedTemplate,
    TemplateRequest,
    TextPrompt,
)
from cpmcu.serving.protocol.response_object import InputTokens
from cpmcu.serving.replies import answer, progress_members, service_of
from cpmcu.serving.service import Service

router = APIRouter(tags=["llama.cpp"], responses=ERRORS)
_ENDING = sse.Ending(lambda error: sse.event(error.body()), b"")
_ABSENT = object()
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": sse.CONTENT}}


@router.post("/infill", responses=_STREAM)
async def infill(body: InfillRequest, request: Request) -> Response:
    """Fills the gap between two texts."""
    return await _generate(body, request, body.text_length, _gap)


@router.post("/completion", responses=_STREAM)
async def completion(body: NativeCompletion, request: Request) -> Response:
    """Continues texts."""
    return await _generate(body, request, body.text_length, _texts)


@router.post("/apply-template")
async def apply_template(body: TemplateRequest, request: Request) -> RenderedTemplate:
    """The prompt of a conversation, without an answer."""
    service = service_of(request)
    body.check_extra()
    text = await service.workers.run(request, body.text_length, _rendered, service, body)
    return RenderedTemplate(prompt=text)


@router.post("/v1/chat/completions/input_tokens")
async def count_chat_tokens(body: ChatRequest, request: Request) -> InputTokens:
    """Counts the tokens of a conversation's prompt."""
    service = service_of(request)
    body.check()
    service.check_model(body.model)
    count = await service.workers.run(request, body.text_length, num_prompt_tokens, service, body)
    return InputTokens(input_tokens=count)


async def _generate(body: Any, request: Request, size: int, prompts_of: Any) -> Response:
    service = service_of(request)
    body.check_extra()
    body.check_stream()
    service.check_model(body.model)
    loop = asyncio.get_running_loop()
    run = service.workers.run
    generation = await run(request, size, _prepare, service, body, prompts_of, loop)

    shape = _Shape(service, body, generation)

    async def events() -> AsyncIterator[bytes]:
        async for number, item in generation.items():
            if isinstance(item, PrefillProgress):
                yield sse.event(shape.progress(item))
                continue
            end = item.finish_reason is not None
            if item.text or not end:
                yield sse.event(shape.chunk(number, item))
            if end:
                output = dataclasses.replace(generation.requests[number].output(), text="")
                yield sse.event(shape.whole(number, output))

    def whole(outputs: Sequence[CompletionOutput]) -> Response:
        found = [shape.whole(number, output) for number, output in enumerate(outputs)]
        return JSONResponse(found[0] if len(found) == 1 else found)

    return await answer(request, generation, body.stream, events, whole, ending=_ENDING)


def _prepare(
    service: Service, body: NativeRequest, prompts_of: Any, loop: asyncio.AbstractEventLoop
) -> Generation:
    prompts, ends = prompts_of(service, body)
    service.check_size(len(prompts) * body.num_choices, "prompt")
    tokenizer = service.model.llm.tokenizer
    check_limits(body, None)
    fields = body.sampling_fields(names=lambda: service.model.llm.named_tokens)
    fields["stop_token_ids"] = (*fields["stop_token_ids"], *ends)
    fields["logit_bias"] = body.biases(
        lambda text: encode(tokenizer, text, "logit_bias", special=False)
    )
    params = sampling_params(max_tokens=body.token_limit, logprobs=body.n_probs or None, **fields)
    return Generation(
        service,
        prompts,
        params,
        loop,
        grammar_field=body.grammar_field,
        progress=bool(body.stream) and body.return_progress,
    )


def _gap(service: Service, body: InfillRequest) -> tuple[list[list[int]], Sequence[int]]:
    """The prompts, and the tokens that end a filling."""
    for name in ("input_prefix", "input_suffix", "prompt"):
        check_text(getattr(body, name), name, service.config.max_text_length)
    fill = find_fill(service.model.llm.tokenizer, "input_suffix")
    files = [(file.filename, file.text) for file in body.input_extra or ()]
    return [fill.prompt(body.input_prefix + body.prompt, body.input_suffix, files)], fill.ends


def _texts(service: Service, body: NativeCompletion) -> tuple[list[list[int]], Sequence[int]]:
    return [_tokens(service, prompt) for prompt in body.prompts()], ()


def _tokens(service: Service, prompt: NativePrompt) -> list[int]:
    """The tokens of a prompt. The tokenizer adds special tokens to its first part only."""
    llm = service.model.llm
    found: list[int] = []
    for i, part in enumerate(prompt if isinstance(prompt, list) else [prompt]):
        if isinstance(part, int):
            found.append(part)
            continue
        text = part.prompt_string if isinstance(part, TextPrompt) else part
        check_text(text, "prompt", service.config.max_text_length)
        limit = llm.max_length
        found += encode(llm.tokenizer, text, "prompt", special=i == 0, max_length=limit)
    return found


def _rendered(service: Service, body: TemplateRequest) -> str:
    return render(
        service.model.template,
        checked(body.messages, service.config),
        tools=body.tools or [],
        variables=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=False,
    )


class _Shape:
    """The members of a reply."""

    def __init__(self, service: Service, body: NativeRequest, generation: Generation) -> None:
        self._body = body
        self._llm = service.model.llm
        self._generation = generation
        self._model = service.names[0]

    def part(self, number: int, item: StreamChunk | CompletionOutput) -> dict[str, Any]:
        """The members that all events of a stream have."""
        found = {"index": number, "content": item.text, "tokens": list(item.token_ids)}
        if item.logprobs is not None:
            texts = self._llm.token_texts
            found["completion_probabilities"] = entries(texts, item.logprobs, with_ids=True)
        return found

    def chunk(self, number: int, item: StreamChunk) -> dict[str, Any]:
        """The members of an event during decoding."""
        found = {"stop": False, **self.part(number, item)}
        if self._body.timings_per_token:
            found["timings"] = timings_of(self._generation.requests[number].timings())
        return found

    def progress(self, item: PrefillProgress) -> dict[str, Any]:
        """The members of an event during prefill."""
        found = {"index": item.prompt_index, "content": "", "tokens": [], "stop": False}
        return found | progress_members(item, timings=self._body.timings_per_token)

    def whole(self, number: int, output: CompletionOutput) -> dict[str, Any]:
        """The members of an ended output, those that `response_fields` names."""
        body, request = self._body, self._generation.requests[number]
        word = output.stop_reason if isinstance(output.stop_reason, str) else ""
        kind = "limit" if output.finish_reason != "stop" else "word" if word else "eos"
        found = self.part(number, output)
        if body.stream or not body.return_tokens:
            found["tokens"] = []
        found |= {
            "model": self._model,
            "prompt": self._llm.tokenizer.decode(request.prompt, skip_special_tokens=False),
            "generation_settings": self._settings(request.sampling.seed),
            "stop": True,
            "stop_type": kind,
            "stopping_word": word,
            "has_new_line": "\n" in request.output().text,
            "truncated": self._is_full(output),
            "tokens_predicted": output.timings.output_tokens,
            "tokens_evaluated": output.timings.prompt_tokens,
            "tokens_cached": output.timings.cached_tokens,
            "timings": metrics_of([output])["timings"],
        }
        return _named(found, body.response_fields) if body.response_fields else found

    def _is_full(self, output: CompletionOutput) -> bool:
        """Whether the context ended the output before the limit of the request."""
        limit = self._body.token_limit
        return output.finish_reason == "length" and (
            limit is None or output.timings.output_tokens < limit
        )

    def _settings(self, seed: int) -> dict[str, Any]:
        params = self._generation.params.resolve(self._llm.generation_config)
        limit = -1 if self._body.token_limit is None else params.max_tokens
        names = ("temperature", "top_k", "top_p", "min_p", "stop", "ignore_eos")
        penalties = ("presence_penalty", "frequency_penalty")
        return {
            **{name: getattr(params, name) for name in (*names, *penalties)},
            "seed": seed,
            "repeat_penalty": params.repetition_penalty,
            "n_predict": limit,
            "n_probs": self._body.n_probs,
            "stream": bool(self._body.stream),
        }


def _named(found: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The members at `paths`, each under its path; those that are not there are left out."""
    chosen = {}
    for path in paths:
        value: Any = found
        for name in path.split("/"):
            value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is not _ABSENT:
            chosen[path] = value
    return chosen
