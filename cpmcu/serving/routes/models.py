"""/v1/models."""

from __future__ import annotations

from fastapi import APIRouter, Request

from cpmcu.serving.protocol.base import ERRORS
from cpmcu.serving.protocol.codex import codex_model
from cpmcu.serving.protocol.other import ModelInfo, ModelList
from cpmcu.serving.responses import service_of

router = APIRouter(tags=["models"])


@router.get("/v1/models", responses={503: ERRORS[503]})
async def models(request: Request) -> ModelList:
    """The served model under each of its names."""
    service = service_of(request)
    max_length = service.model.llm.max_length
    return ModelList(
        data=[_info(request, name) for name in service.names],
        models=[codex_model(name, max_length, i) for i, name in enumerate(service.names)],
    )


@router.get("/v1/models/{name:path}", responses={404: ERRORS[404], 503: ERRORS[503]})
async def model(request: Request, name: str) -> ModelInfo:
    """The served model under one of its names."""
    service = service_of(request)
    service.check_model(name)
    return _info(request, name)


def _info(request: Request, name: str) -> ModelInfo:
    service = service_of(request)
    return ModelInfo(
        id=name,
        created=service.created,
        root=service.root,
        max_model_len=service.model.llm.max_length,
    )
