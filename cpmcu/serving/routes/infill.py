"""/infill, as llama.cpp's server has it: editors complete code at the cursor with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from cpmcu.outputs import CompletionOutput
from cpmcu.serving import sse
from cpmcu.serving.answers import metrics_of
from cpmcu.serving.fill import find_fill
from cpmcu.serving.generation import Generation, PrefillProgress, sampling_params
from cpmcu.serving.limits import check_text
from cpmcu.serving.protocol.base import ERRORS
from cpmcu.serving.protocol.infill import InfillRequest
from cpmcu.serving.responses import answer, service_of
from cpmcu.serving.service import Service

router = APIRouter(tags=["generation"])
_ENDING = sse.Ending(lambda error: sse.event(error.body()), b"")


@router.post("/infill", responses={**ERRORS, 200: {"content": sse.CONTENT}})
async def infill(body: InfillRequest, request: Request) -> Response:
    """Fills the gap between two texts."""
    service = service_of(request)
    body.check_extra()
    service.check_model(body.model)
    loop = asyncio.get_running_loop()
    run = service.workers.run
    generation = await run(request, body.text_length, _prepare, service, body, loop)

    async def events() -> AsyncIterator[bytes]:
        async for _, item in generation.items():
            assert not isinstance(item, PrefillProgress)  # not requested
            end = item.finish_reason is not None
            fields = _whole(generation.requests[0].output()) if end else {"stop": False}
            yield sse.event(
                {"index": 0, **fields, "content": item.text, "tokens": list(item.token_ids)}
            )

    def whole(outputs: Sequence[CompletionOutput]) -> Response:
        return JSONResponse({"index": 0, "content": outputs[0].text, **_whole(outputs[0])})

    return await answer(request, generation, body.stream, events, whole, ending=_ENDING)


def _prepare(service: Service, body: InfillRequest, loop: asyncio.AbstractEventLoop) -> Generation:
    llm = service.model.llm
    for name in ("input_prefix", "input_suffix", "prompt"):
        check_text(getattr(body, name), name, service.config.max_text_length)
    fill = find_fill(llm.tokenizer, "input_suffix")
    files = [(file.filename, file.text) for file in body.input_extra or ()]
    ids = fill.prompt(body.input_prefix + body.prompt, body.input_suffix, files)
    fields = body.sampling_fields()
    fields["stop_token_ids"] = (*fields["stop_token_ids"], *fill.ends)
    params = sampling_params(max_tokens=body.token_limit, **fields)
    return Generation(service, [ids], params, loop, grammar_field=body.grammar_field)


def _whole(output: CompletionOutput) -> dict[str, Any]:
    """The members of an ended filling but its text, under llama.cpp's names."""
    stopped = output.finish_reason == "stop"
    word = output.stop_reason if isinstance(output.stop_reason, str) else ""
    kind = "limit" if not stopped else "word" if word else "eos"
    return {
        "tokens": list(output.token_ids),
        "stop": True,
        "stop_type": kind,
        "stopping_word": word,
        "truncated": False,
        "tokens_predicted": output.timings.output_tokens,
        "tokens_evaluated": output.timings.prompt_tokens,
        "tokens_cached": output.timings.cached_tokens,
        "timings": metrics_of([output])["timings"],
    }
