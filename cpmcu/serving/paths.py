"""The path prefix of the server behind a proxy."""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware: removes the prefix `root` from request paths that have it."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on with the shorter path and with `root_path`."""
        if scope["type"] == "http":
            path = scope["path"]
            if path == self._root:  # the page's relative addresses need the slash
                await RedirectResponse(f"{self._root}/")(scope, receive, send)
                return
            if path.startswith(f"{self._root}/"):
                path = path.removeprefix(self._root)
            scope = {**scope, "path": path, "root_path": self._root}
        await self._app(scope, receive, send)
