"""The page at `/`: the files in `page/`, under a strict content security policy.

The browser refuses scripts from elsewhere, inline scripts, and anything loaded from other places.
So nothing that a model or a file name says can ever run.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from keepsight.server.errors import ApiError

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
FILES = {f"/page/{path.name}": path for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}


def routes() -> APIRouter:
    """The page and its files; other names are not found."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page() -> Response:
        return _sent(_FOLDER / "index.html")

    @router.get("/docs")
    async def docs() -> Response:
        return _sent(_FOLDER / "docs.html")

    @router.get("/page/{name}")
    async def beside(name: str) -> Response:
        path = FILES.get(f"/page/{name}")
        if path is None:
            raise ApiError(404, "there is no such file beside the page", code="not_found")
        return _sent(path)

    return router


def _sent(path: Path) -> Response:
    return FileResponse(path, media_type=_TYPES[path.suffix], headers=_HEADERS)
