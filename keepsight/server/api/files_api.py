"""`/v1/files`: send a picture or a PDF once, and reference it by id afterwards.

Uploads are parsed in memory. The parser's usual way, a temporary file for large parts, would write
pictures to disk although the operator named no folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from keepsight.kinds import Record
from keepsight.server.errors import ApiError, invalid, refused, unknown
from keepsight.server.limits.callers import Caller
from keepsight.server.media.files import Upload
from keepsight.server.service import Service, visit_of
from keepsight.system.units import parse_bytes

_PURPOSES = ("vision", "user_data", "assistants")
_FIELDS = {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}
_PIECE = 1 << 18  # bytes parsed at once
_LEAST, _LONGEST = 60, 30 * 86400  # seconds of life that a client may ask for
_UPLOAD = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "additionalProperties": False,
                "properties": {
                    "file": {"type": "string", "format": "binary", "minLength": 1},
                    "purpose": {"type": "string", "enum": list(_PURPOSES)},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {
                        "type": "integer",
                        "minimum": _LEAST,
                        "maximum": _LONGEST,
                    },
                },
            }
        }
    },
}


class _InMemory(MultiPartParser):
    spool_max_size = 1 << 40  # never to disk; the middleware limits the body


def routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["files"])
    files = service.files

    @router.post("/v1/files", operation_id="upload", openapi_extra={"requestBody": _UPLOAD})
    async def upload(request: Request) -> dict[str, object]:
        """Store a file for later requests of this key."""
        caller = visit_of(request).who()
        form = await _form(request)
        data, name = await _file(form)
        quota = _quota(caller, service)
        upload: Upload = await service.with_files(
            lambda: files.put(caller.tenant, data, name, _purpose(form), _ttl(form), quota)
        )
        return upload.as_json()

    @router.get("/v1/files", operation_id="list_files")
    async def listed(
        request: Request,
        purpose: str | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
    ) -> Record:
        """The files of this key, newest first; oldest first with `order=asc`."""
        tenant = visit_of(request).who().tenant
        found: list[Upload] = await service.with_files(lambda: files.of(tenant))
        own = [f for f in found if purpose in (None, f.purpose)]
        if order == "asc":
            own.reverse()
        if after is not None:
            spots = [i for i, f in enumerate(own) if f.id == after]
            if not spots:
                raise invalid("after", f"after: no file {after[:100]!r} in this list")
            own = own[spots[0] + 1 :]
        ends = {"first_id": own[0].id, "last_id": own[:limit][-1].id} if own else {}
        data = [f.as_json() for f in own[:limit]]
        return {"object": "list", "data": data, "has_more": len(own) > limit, **ends}

    _add_one(router, service)
    return router


def _add_one(router: APIRouter, service: Service) -> None:
    files = service.files

    @router.get("/v1/files/{file_id}", operation_id="file")
    async def one(file_id: str, request: Request) -> dict[str, object]:
        """The description of a file."""
        tenant = visit_of(request).who().tenant
        found: Upload = await service.with_files(lambda: files.get(tenant, file_id, "file_id"))
        return found.as_json()

    @router.get(
        "/v1/files/{file_id}/content",
        operation_id="file_content",
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    async def content(file_id: str, request: Request) -> Response:
        """The bytes of a file."""
        tenant = visit_of(request).who().tenant
        data: bytes = await service.with_files(lambda: files.read(tenant, file_id, "file_id"))
        headers = {"x-content-type-options": "nosniff", "content-disposition": "attachment"}
        return Response(data, media_type="application/octet-stream", headers=headers)

    @router.delete("/v1/files/{file_id}", operation_id="delete_file")
    async def delete(file_id: str, request: Request) -> dict[str, object]:
        """Delete a file. /v1/cache/reset forgets what was computed from it."""
        tenant = visit_of(request).who().tenant
        await service.with_files(lambda: files.delete(tenant, file_id))
        return {"id": file_id, "object": "file", "deleted": True}


async def _pieces(request: Request) -> AsyncGenerator[bytes, None]:
    """The body in pieces, so that other tasks run between them."""
    async for data in request.stream():
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]
            await asyncio.sleep(0)


async def _form(request: Request) -> FormData:
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise invalid("file", "expected multipart/form-data with the fields file and purpose")
    try:
        form = await _InMemory(request.headers, _pieces(request), max_files=1, max_fields=8).parse()
    except (MultiPartException, KeyError, ValueError, UnicodeError) as error:
        reason = getattr(error, "message", None) or "it is damaged"
        raise invalid("file", f"the form cannot be read: {reason}") from None
    if others := sorted(set(form) - _FIELDS):
        raise unknown(others[0], _FIELDS)
    return form


async def _file(form: FormData) -> tuple[bytes, str]:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise ApiError(
            400,
            "missing required parameter: 'file', a part with a file name",
            param="file",
            code="missing_required_parameter",
        )
    name = "".join(c for c in file.filename or "file" if c.isprintable())
    return await file.read(), name.replace("\\", "/").rpartition("/")[2]


def _purpose(form: FormData) -> str:
    purpose = form.get("purpose")
    if purpose not in _PURPOSES:
        raise refused("purpose", f"expected one of {', '.join(_PURPOSES)}")
    return str(purpose)


def _ttl(form: FormData) -> float | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor not in (None, "created_at"):
        raise refused("expires_after[anchor]", "expected 'created_at'")
    if seconds is None:
        if anchor is not None:
            raise invalid("expires_after[seconds]", "expires_after needs its seconds")
        return None
    text = str(seconds)
    if not (text.isascii() and text.isdigit() and _LEAST <= int(text[:12]) <= _LONGEST):
        raise invalid(
            "expires_after[seconds]", f"expected a whole number from {_LEAST} to {_LONGEST}"
        )
    return float(text)


def _quota(caller: Caller, service: Service) -> int | None:
    """The most bytes of uploads for a key: its own limit, or an equal share."""
    if caller.key is None:
        return None
    own = caller.key.files_bytes
    return service.files.budget // max(1, service.owners) if own is None else parse_bytes(own)
