"""/infill, /completion and /apply-template, as llama.cpp's server has them.

Editors complete code at the cursor with /infill.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from cpmcu.outputs import CompletionOutput
from cpmcu.serving import sse
from cpmcu.serving.answers import metrics_of
from cpmcu.serving.conversation import checked, render
from cpmcu.serving.fill import find_fill
from cpmcu.serving.generation import Generation, PrefillProgress, encode, sampling_params
from cpmcu.serving.limits import check_text
from cpmcu.serving.protocol.base import ERRORS
from cpmcu.serving.protocol.native import (
    InfillRequest,
    NativeCompletion,
    NativeRequest,
    RenderedTemplate,
    TemplateRequest,
)
from cpmcu.serving.responses import answer, service_of
from cpmcu.serving.service import Service

router = APIRouter(tags=["llama.cpp"], responses=ERRORS)
_ENDING = sse.Ending(lambda error: sse.event(error.body()), b"")
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": sse.CONTENT}}


@router.post("/infill", responses=_STREAM)
async def infill(body: InfillRequest, request: Request) -> Response:
    """Fills the gap between two texts."""
    return await _generate(body, request, body.text_length, _gap)


@router.post("/completion", responses=_STREAM)
async def completion(body: NativeCompletion, request: Request) -> Response:
    """Continues a text."""
    return await _generate(body, request, len(body.prompt), _text)


@router.post("/apply-template")
async def apply_template(body: TemplateRequest, request: Request) -> RenderedTemplate:
    """The prompt of a conversation, without an answer."""
    service = service_of(request)
    body.check_extra()
    text = await service.workers.run(request, body.text_length, _rendered, service, body)
    return RenderedTemplate(prompt=text)


async def _generate(body: Any, request: Request, size: int, prompt_of: Any) -> Response:
    service = service_of(request)
    body.check_extra()
    body.check_stream()
    service.check_model(body.model)
    loop = asyncio.get_running_loop()
    run = service.workers.run
    generation = await run(request, size, _prepare, service, body, prompt_of, loop)

    async def events() -> AsyncIterator[bytes]:
        async for number, item in generation.items():
            assert not isinstance(item, PrefillProgress)  # not requested
            end = item.finish_reason is not None
            more = _end(generation.requests[number].output()) if end else {"stop": False}
            tokens = list(item.token_ids)
            yield sse.event({**more, "index": number, "content": item.text, "tokens": tokens})

    def whole(outputs: Sequence[CompletionOutput]) -> Response:
        found = [
            {"index": i, "content": output.text, "tokens": list(output.token_ids), **_end(output)}
            for i, output in enumerate(outputs)
        ]
        return JSONResponse(found[0] if len(found) == 1 else found)

    return await answer(request, generation, body.stream, events, whole, ending=_ENDING)


def _prepare(
    service: Service, body: NativeRequest, prompt_of: Any, loop: asyncio.AbstractEventLoop
) -> Generation:
    ids, ends = prompt_of(service, body)
    fields = body.sampling_fields()
    fields["stop_token_ids"] = (*fields["stop_token_ids"], *ends)
    params = sampling_params(max_tokens=body.token_limit, **fields)
    return Generation(service, [ids], params, loop, grammar_field=body.grammar_field)


def _gap(service: Service, body: InfillRequest) -> tuple[list[int], Sequence[int]]:
    """The tokens of the prompt, and the tokens that end a filling."""
    for name in ("input_prefix", "input_suffix", "prompt"):
        check_text(getattr(body, name), name, service.config.max_text_length)
    fill = find_fill(service.model.llm.tokenizer, "input_suffix")
    files = [(file.filename, file.text) for file in body.input_extra or ()]
    return fill.prompt(body.input_prefix + body.prompt, body.input_suffix, files), fill.ends


def _text(service: Service, body: NativeCompletion) -> tuple[list[int], Sequence[int]]:
    llm = service.model.llm
    if not isinstance(body.prompt, str):
        return body.prompt, ()
    check_text(body.prompt, "prompt", service.config.max_text_length)
    length = llm.max_length
    return encode(llm.tokenizer, body.prompt, "prompt", special=True, max_length=length), ()


def _rendered(service: Service, body: TemplateRequest) -> str:
    return render(
        service.model.template,
        checked(body.messages, service.config),
        tools=body.tools or [],
        variables=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=False,
    )


def _end(output: CompletionOutput) -> dict[str, Any]:
    """The members of an ended output but its text."""
    word = output.stop_reason if isinstance(output.stop_reason, str) else ""
    kind = "limit" if output.finish_reason != "stop" else "word" if word else "eos"
    return {
        "stop": True,
        "stop_type": kind,
        "stopping_word": word,
        "truncated": False,
        "tokens_predicted": output.timings.output_tokens,
        "tokens_evaluated": output.timings.prompt_tokens,
        "tokens_cached": output.timings.cached_tokens,
        "timings": metrics_of([output])["timings"],
    }
