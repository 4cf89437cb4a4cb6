"""/v1/models."""

from __future__ import annotations

import datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from cpmcu.serving.protocol.base import ERRORS
from cpmcu.serving.protocol.codex import codex_model
from cpmcu.serving.protocol.other import ModelInfo, ModelList
from cpmcu.serving.replies import service_of

router = APIRouter(tags=["models"])


@router.get("/v1/models", response_model=ModelList, responses={503: ERRORS[503]})
async def models(request: Request) -> ModelList | Response:
    """The served model under each of its names.

    In Anthropic's shape if the request has the header anthropic-version.
    """
    service = service_of(request)
    max_length = service.model.llm.max_length
    if _asks_as_anthropic(request):
        names = service.names
        data = [_anthropic_info(request, name) for name in names]
        page = {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse(page)
    return ModelList(
        data=[_info(request, name) for name in service.names],
        models=[codex_model(name, max_length, i) for i, name in enumerate(service.names)],
    )


@router.get(
    "/v1/models/{name:path}",
    response_model=ModelInfo,
    responses={404: ERRORS[404], 503: ERRORS[503]},
)
async def model(request: Request, name: str) -> ModelInfo | Response:
    """The served model under one of its names, in the shape of /v1/models."""
    service = service_of(request)
    service.check_model(name)
    if _asks_as_anthropic(request):
        return JSONResponse(_anthropic_info(request, name))
    return _info(request, name)


def _info(request: Request, name: str) -> ModelInfo:
    service = service_of(request)
    return ModelInfo(
        id=name,
        created=service.created,
        root=service.root,
        max_model_len=service.model.llm.max_length,
    )


def _asks_as_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _anthropic_info(request: Request, name: str) -> dict[str, Any]:
    service = service_of(request)
    created = datetime.datetime.fromtimestamp(service.created, datetime.timezone.utc)
    max_length = service.model.llm.max_length
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_length,
        "max_tokens": max_length,
    }
