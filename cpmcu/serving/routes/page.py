"""/: a page to chat with the model, for people."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()
PUBLIC = ("/",)  # it holds nothing secret, and is where a key is typed in

_FILE = Path(__file__).parents[1] / "page.html"
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@router.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    """The page. It talks to nothing but this server."""
    text, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


@functools.cache
def _page() -> tuple[str, str]:
    """The HTML, and the policy that lets its own script and style run and no others."""
    text = _FILE.read_text("utf-8")
    sources = {"script": "", "style": ""}
    for kind, body in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(body.encode("utf-8")).digest()).decode("ascii")
        sources[kind] += f" 'sha256-{digest}'"
    policy = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
    policy += "form-action 'none'; frame-ancestors 'none'"
    for kind, found in sources.items():
        policy += f"; {kind}-src{found}"
    return text, policy
