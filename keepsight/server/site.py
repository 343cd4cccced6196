"""The page at `/`, its files, and the policy that the browser holds it to.

What answers say is hostile: only scripts of this folder run, and markup is made by DOMPurify alone.
"""

from __future__ import annotations

import functools
import io
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from keepsight.demo.scene import Scene
from keepsight.kinds import Record
from keepsight.server.errors import ApiError

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "font-src": "'self'",
    "img-src": "'self' blob: data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'self'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "dompurify",
}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
FILES = {
    f"/page/{path.relative_to(_FOLDER).as_posix()}": path
    for path in sorted(_FOLDER.rglob("*"))
    if path.suffix in _TYPES
}
# What there is to try with a demo model, and what to ask about it.
_SCENES = {
    f"{color}-{shape}.png": Scene.of(
        color=color,
        shape=shape,
        scale="large",
        background=background,
        row="middle",
        col="center",
        size=(128, 128),
    )
    for color, shape, background in (("red", "star", "white"), ("blue", "ring", "black"))
}
_SAMPLES: list[Record] = [
    {"question": "What is in the picture?", "pictures": ["red-star.png"]},
    {"question": "What color is the shape in the picture?", "pictures": ["blue-ring.png"]},
    {"question": "Compare the two pictures.", "pictures": ["red-star.png", "blue-ring.png"]},
]


def routes(demo: bool) -> APIRouter:
    """The page and its files; with pictures and questions to try if a demo model is served."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page() -> Response:
        return _sent(_FOLDER / "index.html")

    @router.get("/docs")
    async def docs() -> Response:
        return _sent(_FOLDER / "docs.html")

    @router.get("/page/samples.json")
    async def samples() -> list[Record]:
        return _SAMPLES if demo else []

    @router.get("/page/{name:path}")
    def beside(name: str) -> Response:
        if demo and name in _SCENES:
            return Response(_drawn(name), media_type="image/png", headers=_HEADERS)
        if (path := FILES.get(f"/page/{name}")) is None:
            raise ApiError(404, "there is no such file beside the page", code="not_found")
        return _sent(path)

    return router


@functools.cache
def _drawn(name: str) -> bytes:
    buffer = io.BytesIO()
    _SCENES[name].draw().save(buffer, "PNG")
    return buffer.getvalue()


def _sent(path: Path) -> Response:
    return FileResponse(path, media_type=_TYPES[path.suffix], headers=_HEADERS)
