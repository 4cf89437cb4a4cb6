"""Refuses requests from other web pages, by their Host and Origin headers.

A browser sends requests of any page to any address. Two headers tell them apart:

| attack | what tells it |
|---|---|
| a page of another site sends a POST | Origin is not the server's own address |
| DNS rebinding: another site's name leads to 127.0.0.1 | Host is that name |
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from cpmcu.serving.errors import ApiError

_READING = ("GET", "HEAD", "OPTIONS")


class Origins:
    """ASGI middleware: refuses requests of other sites' pages with 403.

    `hosts`: names that Host may have; None: any. `origins`: other sites whose pages may call.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None, origins: Sequence[str]) -> None:
        self._app = app
        self._hosts = None if hosts is None or "*" in hosts else [name.lower() for name in hosts]
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or refuses it without reading its body."""
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error.response(scope["path"])(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
        host = headers.get(b"host", "")
        if self._hosts is not None and not self._may_be(_name_of(host)):
            return ApiError(
                403,
                f"The header Host is {host[:128]!r}, which is not a name of this server; if it is, "
                "start the server with --allowed-hosts and the name.",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin")
        if scope["method"] in _READING or origin is None or "*" in self._origins:
            return None
        if headers.get(b"sec-fetch-site") in ("same-origin", "none") or origin in self._origins:
            return None
        # Pages cannot set Host, and cannot set X-Forwarded-Host without asking first (CORS).
        if origin.partition("://")[2] in (host, headers.get(b"x-forwarded-host")):
            return None
        return ApiError(
            403,
            f"A page of {origin[:128]!r} may not call this server; if it should, start the server "
            "with --cors-origin and this origin.",
            code="origin_not_allowed",
        )

    def _may_be(self, name: str) -> bool:
        return is_loopback(name) or name in (self._hosts or ())


def _name_of(host: str) -> str:
    """The name in a Host header, without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def is_loopback(name: str) -> bool:
    """Is it a name or an address of the machine itself?"""
    if not name or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
