"""/: the chat page."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()
PUBLIC = ("/",)  # the page has no secrets; the user enters the API key on it

_FOLDER = Path(__file__).parents[1] / "page"
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w-]+\.css)">')
_SCRIPT = re.compile(r'<script src="((?:vendor/)?[\w-]+\.js)"></script>')
_SOURCE_MAP = re.compile(r"^//# sourceMappingURL=.*\n?", re.MULTILINE)
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page() -> HTMLResponse:
    """The chat page. It connects to no other server. Claude Code asks for its head first."""
    return HTMLResponse(_TEXT, headers=_HEADERS)


def _assemble() -> tuple[str, str]:
    """Returns index.html with inlined styles and scripts, and its Content-Security-Policy.

    The policy allows no other scripts and styles. Trusted Types forbid HTML and scripts made
    from strings.
    """
    sources: dict[str, list[str]] = {"script": [], "style": []}

    def inline(kind: str, name: str) -> str:
        body = "\n" + _SOURCE_MAP.sub("", (_FOLDER / name).read_text("utf-8"))
        digest = base64.b64encode(hashlib.sha256(body.encode("utf-8")).digest()).decode("ascii")
        sources[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{body}</{kind}>"

    text = (_FOLDER / "index.html").read_text("utf-8")
    text = _STYLE.sub(lambda found: inline("style", found[1]), text)
    text = _SCRIPT.sub(lambda found: inline("script", found[1]), text)
    return text, "; ".join(
        [_POLICY, *(f"{kind}-src {' '.join(found)}" for kind, found in sources.items())]
    )


_TEXT, _CONTENT_POLICY = _assemble()
_HEADERS = {
    "Content-Security-Policy": _CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
