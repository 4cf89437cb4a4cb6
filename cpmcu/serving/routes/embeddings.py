"""/v1/embeddings: refused, with the reason."""

from __future__ import annotations

from fastapi import APIRouter

from cpmcu.serving.errors import ApiError
from cpmcu.serving.protocol.base import ERRORS

router = APIRouter(tags=["generation"], responses={k: ERRORS[k] for k in (400, 401)})


@router.post("/v1/embeddings")
async def embeddings() -> None:
    """Refuses the request: the engine gives tokens, and no hidden states."""
    raise ApiError(
        400,
        "This server generates text; its engine does not return hidden states, so it makes no "
        "embeddings. Use a server with an embedding model.",
        code="unsupported_endpoint",
    )
