"""/metrics for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from cpmcu.serving.replies import service_of

router = APIRouter(tags=["server"])


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """Counters and histograms in Prometheus' text format, with vLLM's names."""
    return Response(service_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)
