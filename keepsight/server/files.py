"""`/v1/files`: send a picture or a PDF once, and reference it by id afterwards.

Uploads are parsed in memory. The parser's usual way, a temporary file for large parts, would write
pictures to disk although the operator named no folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from keepsight.kinds import Record
from keepsight.server.access import visit_of
from keepsight.server.errors import ApiError, invalid, missing, refused, unknown
from keepsight.store import Store
from keepsight.store.contract import CLOCK_SLACK
from keepsight.store.files import Folder, left_over
from keepsight.system import digests
from keepsight.system.private_files import PART

if TYPE_CHECKING:
    from keepsight.server.service import Service

logger = logging.getLogger("keepsight.server")

_MOST = 10_000  # files per tenant: each takes memory and time, however small it is
_ABOVE, _SUFFIX, _FORMAT = "uploads", ".upload", 1
_HEAD = 8192  # most bytes of the first line
_NAMES = re.compile(r"[0-9a-f]{64}/file-[0-9a-f]{64}")


@dataclass(frozen=True)
class Upload:
    """One file of one tenant. Times are seconds since 1970, as in OpenAI's API."""

    id: str
    owner: str  # the digest of the tenant
    nbytes: int
    filename: str
    purpose: str
    created_at: int
    expires_at: int

    def about(self) -> Record:
        names = ("filename", "purpose", "created_at", "expires_at")
        return {"bytes": self.nbytes, **{name: getattr(self, name) for name in names}}

    def as_json(self) -> Record:
        return {"id": self.id, **self.about(), "object": "file", "status": "processed"}

    def over(self, now: float) -> bool:
        """Whether it is expired. A file dated in the future comes from a wrong clock and would live
        too long."""
        return not now < self.expires_at or self.created_at > now + CLOCK_SLACK

    def head(self) -> bytes:
        """The first line of its file; the digest covers tenant and id."""
        header: Record = {"keepsight": "upload", "format": _FORMAT, **self.about()}
        sealed = digests.canonical_json(header)
        header["digest"] = digests.digest("upload", self.owner, self.id, sealed)
        return digests.canonical_json(header).encode() + b"\n"


class InMemory:
    """The bytes of files in memory only."""

    def __init__(self) -> None:
        self._data: dict[tuple[str, str], tuple[Upload, bytes]] = {}

    def known(self, now: float) -> list[Upload]:
        return [upload for upload, _ in list(self._data.values())]

    def find(self, owner: str, file_id: str, whole: bool = False) -> tuple[Upload, bytes] | None:
        """A file, and with `whole` its bytes."""
        return self._data.get((owner, file_id))

    def write(self, upload: Upload, data: bytes) -> None:
        self._data[upload.owner, upload.id] = upload, data

    def remove(self, upload: Upload) -> None:
        self._data.pop((upload.owner, upload.id), None)

    def tidy(self) -> None:
        """Nothing to do in memory."""


class OnDisk(InMemory):
    """The bytes of files in a folder, which servers may share: what is there counts."""

    def __init__(self, root: str | Path) -> None:
        self._folder = Folder(root)
        self._seen: dict[str, Upload] = {}  # by path

    def _paths(self) -> Iterator[str]:
        for owner in self._folder.names(_ABOVE):
            yield from (f"{owner}/{name}" for name in self._folder.names(f"{_ABOVE}/{owner}"))

    def known(self, now: float) -> list[Upload]:
        """All files by their names; the first line is read of new ones, and of those that have
        expired, which another server may have prolonged."""
        seen = {}
        for path in self._paths():
            found = self._seen.get(path)
            if (found is None or found.over(now)) and path.endswith(_SUFFIX):
                owner, _, file_id = path.removesuffix(_SUFFIX).partition("/")
                looked = self.find(owner, file_id)
                found = None if looked is None else looked[0]
            if found is not None:
                seen[path] = found
        self._seen = seen
        return list(seen.values())

    def find(self, owner: str, file_id: str, whole: bool = False) -> tuple[Upload, bytes] | None:
        """A file, and with `whole` its bytes. A wrong file is removed, an unreachable one stays."""
        if not _NAMES.fullmatch(f"{owner}/{file_id}"):
            return None
        name = f"{_ABOVE}/{owner}/{file_id}{_SUFFIX}"
        try:
            status = self._folder.status(name)
            if status is not None and not stat.S_ISREG(status.st_mode):
                raise ValueError("it is a link, or no regular file")
            with self._folder.path(name).open("rb") as file:
                return _parsed(file, owner, file_id), file.read() if whole else b""
        except ValueError as error:
            logger.warning("an upload is damaged and is removed: %s (%s)", name, error)
            with contextlib.suppress(OSError):  # it stays, and stays refused
                self._folder.remove(name)
        except FileNotFoundError:
            pass  # never there, or just deleted
        except OSError as error:
            logger.warning("an upload cannot be read: %s (%s)", name, error)
        return None

    def write(self, upload: Upload, data: bytes) -> None:
        path = f"{upload.owner}/{upload.id}{_SUFFIX}"
        self._folder.write(f"{_ABOVE}/{path}", [upload.head(), data])
        self._seen[path] = upload

    def remove(self, upload: Upload) -> None:
        path = f"{upload.owner}/{upload.id}{_SUFFIX}"
        self._folder.remove(f"{_ABOVE}/{path}")
        self._seen.pop(path, None)

    def tidy(self) -> None:
        """Remove leftovers of killed writers."""
        for path in self._paths():
            name = f"{_ABOVE}/{path}"
            status = self._folder.status(name) if f"/{PART}" in path else None
            if status is not None and left_over(status):
                self._folder.remove(name)


def _parsed(file: BinaryIO, owner: str, file_id: str) -> Upload:
    line = file.readline(_HEAD)
    try:
        header = json.loads(line)
        del header["keepsight"], header["format"], header["digest"]
        size = len(line) + header["bytes"]
        upload = Upload(file_id, owner, header.pop("bytes"), **header)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its first line lacks a field: {error}") from error
    if upload.head() != line or os.fstat(file.fileno()).st_size != size:
        raise ValueError("its first line does not match its digest or its size")
    return upload


def contents_for(store: Store | None) -> InMemory:
    """On disk if a store with a folder is used, otherwise in memory."""
    root = None if store is None else store.root
    return InMemory() if root is None else OnDisk(root)


def _owner_of(tenant: str) -> str:
    """Digest that files use for their tenant, so that no person's name becomes a folder name."""
    return digests.digest("owner of uploads", tenant)


class Files:
    """All uploads of all tenants. Writes take turns; reads wait for no write."""

    def __init__(
        self,
        budget: int,
        ttl: float,
        clock: Callable[[], float] = time.time,
        contents: InMemory | None = None,
        most: int = _MOST,
    ) -> None:
        self.budget, self._ttl, self._clock, self._most = budget, ttl, clock, most
        self._contents = InMemory() if contents is None else contents
        self._writing = threading.Lock()  # held while files are added or removed

    def put(
        self,
        tenant: str,
        data: bytes,
        name: str,
        purpose: str,
        ttl: float | None,
        quota: int | None,
    ) -> Upload:
        """Store a file. An existing one is kept as long as the new one would be."""
        if not data:
            raise invalid("file", "the file is empty")
        now, owner, file_id = self._clock(), _owner_of(tenant), _id_of(tenant, data)
        until = int(now + (self._ttl if ttl is None else min(ttl, self._ttl)))
        new = Upload(file_id, owner, len(data), name[:255] or "file", purpose, int(now), until)
        with self._writing, _kept():
            if (old := self._find(owner, file_id)) is not None:
                new = replace(old[0], expires_at=max(old[0].expires_at, until))
            else:
                self._check_room(owner, len(data), quota)
            self._contents.write(new, data)
        return new

    def _check_room(self, owner: str, size: int, quota: int | None) -> None:
        there = self._all()
        sizes = [f.nbytes for f in there if f.owner == owner]
        own = sum(sizes)
        why, code, what = "", "files_quota_exceeded", "delete some with DELETE /v1/files/ID"
        if len(sizes) >= self._most:
            why = f"there are {len(sizes)} files of this key already, as many as there may be"
        elif quota is not None and own + size > quota:
            why = f"the files of this key would come to {own + size} bytes, allowed are {quota}"
        elif sum(f.nbytes for f in there) + size > self.budget:
            why, code = "this server has no room for more files", "files_full"
            what = "delete some, or send pictures as data URIs"
        if why:
            raise ApiError(413, f"{why}; {what}", param="file", code=code)

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self._all())

    def get(self, tenant: str, file_id: str, param: str | None = None) -> Upload:
        found = self._find(_owner_of(tenant), file_id)
        if found is None:
            raise _unknown(file_id, param)
        return found[0]

    def read(self, tenant: str, file_id: str, param: str | None = None) -> bytes:
        """The bytes of a file of this tenant, exactly as sent."""
        found = self._find(_owner_of(tenant), file_id, whole=True)
        if found is not None and _id_of(tenant, found[1]) != file_id:
            with self._writing:  # the id is a digest of the bytes: these were never sent
                self._contents.remove(found[0])
            found = None
        if found is None:
            raise _unknown(file_id, param)
        return found[1]

    def of(self, tenant: str) -> list[Upload]:
        owner = _owner_of(tenant)
        own = [f for f in self._all() if f.owner == owner]
        return sorted(own, key=lambda f: (-f.created_at, f.id))

    def delete(self, tenant: str, file_id: str) -> None:
        with self._writing, _kept():
            self._contents.remove(self.get(tenant, file_id, "file_id"))

    def sweep(self) -> None:
        """Remove expired files, even without requests. Uploads do not wait for its reading."""
        now, failed = self._clock(), None
        for upload in self._contents.known(now):
            try:
                with self._writing:
                    if upload.over(now) and self._find(upload.owner, upload.id) is None:
                        self._contents.remove(upload)
            except OSError as error:  # of a refusing disk; the next sweep tries again
                failed = error
        self._contents.tidy()
        if failed is not None:
            raise failed

    def _all(self) -> list[Upload]:
        now = self._clock()
        return [f for f in self._contents.known(now) if not f.over(now)]

    def _find(self, owner: str, file_id: str, whole: bool = False) -> tuple[Upload, bytes] | None:
        found = self._contents.find(owner, file_id, whole)
        return None if found is None or found[0].over(self._clock()) else found


def _id_of(tenant: str, data: bytes) -> str:
    return f"file-{digests.digest('uploaded file', _owner_of(tenant), data)}"


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Say what a disk refuses."""
    try:
        yield
    except OSError as error:
        what = f"the disk of this server refused ({error.strerror or 'no reason given'})"
        text = f"{what}; nothing was changed. Try again later, or send pictures as data URIs"
        raise ApiError(503, text, param="file", code="files_unavailable") from error


def _unknown(file_id: str, param: str | None) -> ApiError:
    what = "it was never uploaded here, was deleted, or has expired"
    text = f"no such file: {file_id[:100]!r}; {what}"
    return ApiError(404, text, param=param, code="file_not_found")


# -- routes ----------------------------------------------------------------------------------------

_PURPOSES = ("vision", "user_data", "assistants")
_LEAST, _LONGEST = 60, 30 * 86400  # seconds of life that a client may ask for
_PROPERTIES: Record = {
    "file": {"type": "string", "format": "binary", "minLength": 1},
    "purpose": {"type": "string", "enum": list(_PURPOSES)},
    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
    "expires_after[seconds]": {"type": "integer", "minimum": _LEAST, "maximum": _LONGEST},
}
_SENT = {"type": "object", "required": ["file", "purpose"], "additionalProperties": False}
_CONTENT = {"multipart/form-data": {"schema": {**_SENT, "properties": _PROPERTIES}}}
_UPLOAD = {"required": True, "content": _CONTENT}


class _InMemory(MultiPartParser):
    spool_max_size = 1 << 40  # never to disk; the middleware limits the body


def page_of(found: list[Record], after: str | None, limit: int) -> Record:
    """One page of a list: what follows the record with the id `after`."""
    if after is not None:
        spots = [spot for spot, one in enumerate(found) if one["id"] == after]
        if not spots:
            raise invalid("after", f"after: {after[:100]!r} is not in this list")
        found = found[spots[-1] + 1 :]
    data = found[:limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, "has_more": len(found) > limit, **ends}


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["files"])
    files, beside, one = service.files, service.threads.wait, "/v1/files/{file_id}"

    def tenant_of(request: Request) -> str:
        return visit_of(request).who().tenant

    @router.post("/v1/files", operation_id="upload", openapi_extra={"requestBody": _UPLOAD})
    async def upload(request: Request) -> Record:
        """Store a file for later requests of this key."""
        caller, body, quota = visit_of(request).who(), await request.body(), None
        if caller.key is not None:  # its own limit, or an equal share
            share = files.budget // service.owners
            quota = share if caller.key.files_bytes is None else caller.key.files_bytes

        def put() -> Upload:
            form = asyncio.run(_form(request.headers, body))
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise missing("file", ", a part with a file name")
            name = "".join(c for c in file.filename or "file" if c.isprintable())
            name = name.replace("\\", "/").rpartition("/")[2]
            if (purpose := form.get("purpose")) not in _PURPOSES:
                raise refused("purpose", f"expected one of {', '.join(_PURPOSES)}")
            data = file.file.read()
            return files.put(caller.tenant, data, name, str(purpose), _ttl(form), quota)

        return (await beside(put)).as_json()

    @router.get("/v1/files", operation_id="list_files")
    async def listed(
        request: Request,
        purpose: str | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
    ) -> Record:
        """The files of this key, newest first; oldest first with `order=asc`."""
        tenant = tenant_of(request)
        found: list[Upload] = await beside(lambda: files.of(tenant))
        own = [f.as_json() for f in found if purpose in (None, f.purpose)]
        return page_of(own[::-1] if order == "asc" else own, after, limit)

    @router.get(one, operation_id="file")
    async def get(file_id: str, request: Request) -> Record:
        """The description of a file."""
        tenant = tenant_of(request)
        return (await beside(lambda: files.get(tenant, file_id, "file_id"))).as_json()

    @router.get(
        f"{one}/content",
        operation_id="file_content",
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    async def content(file_id: str, request: Request) -> Response:
        """The bytes of a file."""
        tenant = tenant_of(request)
        data: bytes = await beside(lambda: files.read(tenant, file_id, "file_id"))
        headers = {"x-content-type-options": "nosniff", "content-disposition": "attachment"}
        return Response(data, media_type="application/octet-stream", headers=headers)

    @router.delete(one, operation_id="delete_file")
    async def delete(file_id: str, request: Request) -> Record:
        """Delete a file. /v1/cache/reset forgets what was computed from it."""
        tenant = tenant_of(request)
        await beside(lambda: files.delete(tenant, file_id))
        return {"id": file_id, "object": "file", "deleted": True}

    return router


async def _form(headers: Headers, body: bytes) -> FormData:
    if not headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise invalid("file", "expected multipart/form-data with the fields file and purpose")

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        form = await _InMemory(headers, pieces(), max_files=1, max_fields=8).parse()
    except (MultiPartException, KeyError, ValueError, UnicodeError) as error:
        reason = getattr(error, "message", None) or "it is damaged"
        raise invalid("file", f"the form cannot be read: {reason}") from None
    if others := sorted(set(form) - set(_PROPERTIES)):
        raise unknown(others[0], _PROPERTIES)
    return form


def _ttl(form: FormData) -> float | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor not in (None, "created_at"):
        raise refused("expires_after[anchor]", "expected 'created_at'")
    if seconds is None and anchor is None:
        return None
    text = str(seconds)
    if not (text.isascii() and text.isdigit() and _LEAST <= int(text[:12]) <= _LONGEST):
        what = f"expected a whole number from {_LEAST} to {_LONGEST}"
        raise invalid("expires_after[seconds]", what)
    return float(text)
