"""The path under which a proxy offers the server."""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware that takes `root` off the paths of requests, if a proxy left it there."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on with its path and `root_path`."""
        if scope["type"] == "http":
            path = scope["path"]
            if path == self._root:  # the page's own addresses begin behind a slash
                await RedirectResponse(f"{self._root}/")(scope, receive, send)
                return
            if path.startswith(f"{self._root}/"):
                path = path.removeprefix(self._root)
            scope = {**scope, "path": path, "root_path": self._root}
        await self._app(scope, receive, send)
