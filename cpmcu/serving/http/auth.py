"""API keys: `Authorization: Bearer KEY` or `x-api-key: KEY`, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from cpmcu.serving.errors import ApiError


class Authentication:
    """ASGI middleware: a request without a known key gets a 401, except on `public` paths."""

    def __init__(self, app: ASGIApp, keys: Collection[str], public: Collection[str]) -> None:
        self._app = app
        self._keys = [key.encode("ascii") for key in keys]
        self._public = frozenset(public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or refuses it without reading its body."""
        # A browser's preflight request (OPTIONS) has no key.
        free = scope["type"] != "http" or scope["method"] == "OPTIONS"
        if free or not self._keys or scope["path"] in self._public or self._known(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "A valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response(scope["path"])(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        headers = dict(reversed(scope["headers"]))  # if a header occurs twice, the first counts
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = [key.strip() if scheme.lower() == b"bearer" else b""]
        given.append(headers.get(b"x-api-key", b"").strip())
        # All keys are compared, so the response time does not reveal a partial match.
        matches = [hmac.compare_digest(key, known) for key in given for known in self._keys]
        return any(matches)
