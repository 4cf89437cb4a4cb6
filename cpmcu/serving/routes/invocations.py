"""/invocations: the path that hosting services send every request to."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ValidationError

from cpmcu.serving.errors import ApiError, of_body
from cpmcu.serving.http import sse
from cpmcu.serving.protocol.base import ERRORS
from cpmcu.serving.protocol.chat import ChatRequest
from cpmcu.serving.protocol.completion import CompletionRequest
from cpmcu.serving.routes.chat import chat_completions
from cpmcu.serving.routes.completions import completions

router = APIRouter(tags=["generation"])


@router.post("/invocations", responses={**ERRORS, 200: {"content": sse.CONTENT}})
async def invocations(body: dict[str, Any], request: Request) -> Response:
    """Answers a request of /v1/chat/completions or /v1/completions, whichever it is."""
    try:
        if "messages" in body:
            return await chat_completions(ChatRequest.model_validate(body), request)
        if "prompt" in body:
            return await completions(CompletionRequest.model_validate(body), request)
    except ValidationError as error:
        raise of_body(error) from error
    raise ApiError(
        400,
        "The request has neither messages nor prompt: send a body of /v1/chat/completions or "
        "/v1/completions.",
        code="invalid_body",
    )
