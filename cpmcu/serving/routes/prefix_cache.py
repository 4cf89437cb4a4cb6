"""/reset_prefix_cache."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response

from cpmcu.serving.protocol.base import ERRORS
from cpmcu.serving.replies import service_of

router = APIRouter(tags=["server"])


@router.post(
    "/reset_prefix_cache",
    response_class=Response,
    responses={200: {"content": {}, "description": "It is empty"}, 503: ERRORS[503]},
)
async def reset_prefix_cache(request: Request) -> Response:
    """Forgets all cached prompts, on disk too; running requests go on. The answer has no body."""
    await asyncio.to_thread(service_of(request).reset_prefix_cache)
    return Response()
