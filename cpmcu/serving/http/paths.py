"""Paths of requests: whole URLs, the prefix behind a proxy, and names without /v1."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

# Clients whose base address has no /v1 send these.
_NAMES = ("chat/completions", "completions", "responses", "messages", "models")
_WITHOUT_V1 = tuple(f"/{name}" for name in _NAMES)


class Paths:
    """ASGI middleware: gives each request the path of its route.

    A target may be a whole URL, as proxies send it (RFC 9112, section 3.2.2); its host then counts
    as the Host header. `root` is removed from paths that have it.
    """

    def __init__(self, app: ASGIApp, root: str = "") -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on with its route's path and with `root_path`."""
        if scope["type"] == "http":
            scope = _without_host(scope)
            path = scope["path"]
            if self._root:
                if path == self._root:  # the page's relative addresses need the slash
                    await RedirectResponse(f"{self._root}/")(scope, receive, send)
                    return
                if path.startswith(f"{self._root}/"):
                    path = path.removeprefix(self._root)
            if path.startswith(_WITHOUT_V1) and _has_end(path):
                path = f"/v1{path}"
            scope = {**scope, "path": path, "root_path": self._root}
        await self._app(scope, receive, send)


def _has_end(path: str) -> bool:
    return any(path == each or path.startswith(f"{each}/") for each in _WITHOUT_V1)


def _without_host(scope: Scope) -> Scope:
    """Returns the request with only the path as its target."""
    if not scope["path"].startswith(("http://", "https://")):
        return scope
    url = urlsplit(scope["path"])
    headers = [pair for pair in scope["headers"] if pair[0] != b"host"]
    headers.append((b"host", url.netloc.encode("ascii", "replace")))
    return {**scope, "path": url.path or "/", "headers": headers}
