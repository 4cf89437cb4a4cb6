"""/health, /ping, /load and /version."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

import cpmcu
from cpmcu.serving.protocol.other import Health, Load, Version
from cpmcu.serving.replies import service_of

router = APIRouter(tags=["server"])
PUBLIC = ("/health", "/ping")


@router.get("/health", response_model=Health, responses={503: {"model": Health}})
async def health(request: Request) -> JSONResponse:
    """200 if the server is ready. 503 while it loads or stops, and after the engine failed."""
    state = service_of(request).state
    status = "ok" if state == "ready" else state
    body = {"status": status, "model_loaded": state != "loading"}
    return JSONResponse(body, 200 if state == "ready" else 503)


@router.get("/ping", response_model=Health, responses={503: {"model": Health}})
@router.post("/ping", response_model=Health, responses={503: {"model": Health}})
async def ping(request: Request) -> JSONResponse:
    """As /health, under the name that hosting services ask for."""
    return await health(request)


@router.get("/load")
async def load(request: Request) -> Load:
    """The number of outputs that wait or run, under vLLM's name."""
    return Load(server_load=service_of(request).num_busy)


@router.get("/version", response_model=Version)
async def version() -> Version:
    """The version of cpmcu."""
    return Version(version=cpmcu.__version__)
