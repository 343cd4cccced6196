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
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal, Protocol

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from keepsight import digests
from keepsight.kinds import Record
from keepsight.server.access import Caller, visit_of
from keepsight.server.errors import ApiError, invalid, refused, unknown
from keepsight.store import Store
from keepsight.store.contract import CLOCK_SLACK
from keepsight.store.files import PART, Folder, left_over
from keepsight.system.units import parse_bytes

if TYPE_CHECKING:
    from keepsight.server.service import Service


_MOST = 10_000  # files per tenant: each takes memory and time, however small it is


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

    def as_json(self) -> dict[str, object]:
        """The file as OpenAI describes it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.nbytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }

    def over(self, now: float) -> bool:
        """Whether it is expired. A file dated in the future comes from a wrong clock and would live
        too long."""
        return not now < self.expires_at or self.created_at > now + CLOCK_SLACK


Uploads = Mapping[tuple[str, str], Upload]  # (digest of the tenant, id)
NONE: Uploads = {}


class Contents(Protocol):
    """Where the bytes of files are."""

    def known(self, have: Uploads = NONE) -> Iterable[Upload]:
        """The existing files; those in `have` are not examined again."""

    def look(self, owner: str, file_id: str) -> Upload | None:
        """A file that another process added; None if there is none."""

    def write(self, upload: Upload, data: bytes) -> None:
        """Store the bytes of a file, whole or not at all."""

    def read(self, upload: Upload) -> bytes | None:
        """The bytes; None if they are gone or do not match the id."""

    def remove(self, upload: Upload) -> None:
        """Delete the bytes of an upload."""

    def tidy(self) -> None:
        """Remove leftovers of interrupted writes."""


class InMemory:
    """The bytes of files in memory only."""

    def __init__(self) -> None:
        self._data: dict[tuple[str, str], tuple[Upload, bytes]] = {}

    def known(self, have: Uploads = NONE) -> Iterable[Upload]:
        """All that were written; none at first."""
        return [upload for upload, _ in list(self._data.values())]

    def look(self, owner: str, file_id: str) -> Upload | None:
        """None: no other process writes here."""
        return None

    def write(self, upload: Upload, data: bytes) -> None:
        """Keep the bytes."""
        self._data[upload.owner, upload.id] = upload, data

    def read(self, upload: Upload) -> bytes | None:
        """The bytes."""
        found = self._data.get((upload.owner, upload.id))
        return None if found is None else found[1]

    def remove(self, upload: Upload) -> None:
        """Delete the bytes of an upload."""
        self._data.pop((upload.owner, upload.id), None)

    def tidy(self) -> None:
        """Nothing to do in memory."""


def owner_of(tenant: str) -> str:
    """Digest that files use for their tenant, so that no person's name becomes a folder name."""
    return digests.digest("owner of uploads", tenant)


def id_of(tenant: str, data: bytes) -> str:
    """The id of some content for a tenant."""
    return f"file-{digests.digest('uploaded file', owner_of(tenant), data)}"


class Files:
    """All uploads of all tenants. Writes take turns; reads wait for no write."""

    def __init__(
        self,
        budget: int,
        ttl: float,
        clock: Callable[[], float] = time.time,
        contents: Contents | None = None,
        most: int = _MOST,
    ) -> None:
        self.budget, self._ttl, self._clock, self._most = budget, ttl, clock, most
        self._contents: Contents = InMemory() if contents is None else contents
        self._files = {(f.owner, f.id): f for f in self._contents.known()}
        self._lock = threading.Lock()  # guards the list only
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
        now, owner, file_id = self._clock(), owner_of(tenant), id_of(tenant, data)
        until = int(now + (self._ttl if ttl is None else min(ttl, self._ttl)))
        name = name[:255] or "file"
        new = Upload(file_id, owner, len(data), name, purpose, int(now), until)
        with self._writing:
            self._drop_expired()
            old = self._find(owner, file_id)
            try:
                if old is not None:
                    new = replace(old, expires_at=max(old.expires_at, until))
                else:
                    self._learn(self._files)  # files added by other servers count too
                    self._check_room(owner, len(data), quota)
                self._contents.write(new, data)
            except OSError as error:
                raise _not_kept(error) from error
            with self._lock:
                self._files[owner, file_id] = new
        return new

    def _check_room(self, owner: str, size: int, quota: int | None) -> None:
        sizes = [f.nbytes for f in self._all() if f.owner == owner]
        own = sum(sizes)
        why, code, what = "", "files_quota_exceeded", "delete some with DELETE /v1/files/ID"
        if len(sizes) >= self._most:
            why = f"there are {len(sizes)} files of this key already, as many as there may be"
        elif quota is not None and own + size > quota:
            why = f"the files of this key would come to {own + size} bytes, allowed are {quota}"
        elif self.nbytes + size > self.budget:
            why, code = "this server has no room for more files", "files_full"
            what = "delete some, or send pictures as data URIs"
        if why:
            raise ApiError(413, f"{why}; {what}", param="file", code=code)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(f.nbytes for f in self._all())

    def get(self, tenant: str, file_id: str, param: str | None = None) -> Upload:
        """A file of this tenant; those of others are unknown."""
        found = self._find(owner_of(tenant), file_id)
        if found is None:
            raise _unknown(file_id, param)
        return found

    def read(self, tenant: str, file_id: str, param: str | None = None) -> bytes:
        """The bytes of a file of this tenant, exactly as sent."""
        found = self.get(tenant, file_id, param)
        data = self._contents.read(found)
        if data is None:  # unreachable now, or removed by another process
            with self._lock:
                self._files.pop((found.owner, found.id), None)
        elif id_of(tenant, data) == found.id:
            return data
        else:  # the id is a digest of the bytes: these were never sent
            with self._writing:
                self._remove(found)
        raise _unknown(file_id, param)

    def of(self, tenant: str) -> list[Upload]:
        """The files of a tenant, newest first."""
        owner, now = owner_of(tenant), self._clock()
        own = [f for f in self._all() if f.owner == owner and not f.over(now)]
        return sorted(own, key=lambda f: (-f.created_at, f.id))

    def delete(self, tenant: str, file_id: str) -> None:
        """Remove a file from every place."""
        with self._writing:
            found = self.get(tenant, file_id)
            try:
                self._remove(found)
            except OSError as error:
                raise _not_kept(error) from error

    def sweep(self) -> None:
        """Remove expired files, even without requests. Uploads do not wait for its reading."""
        before = {(f.owner, f.id): f for f in self._all()}
        read = {(f.owner, f.id): f for f in self._contents.known()}
        with self._writing:
            mine = {(f.owner, f.id): f for f in self._all()}
            changed = {name: f for name, f in mine.items() if f != before.get(name)}
            self._learn(read | changed)
            failed = self._drop_expired()
            self._contents.tidy()
        if failed is not None:
            raise failed

    def _learn(self, have: Uploads) -> None:
        """Learn what other servers that share the folder added to these, or removed."""
        known = {(f.owner, f.id): f for f in self._contents.known(have)}
        with self._lock:
            self._files = known

    def _all(self) -> list[Upload]:
        with self._lock:
            return list(self._files.values())

    def _find(self, owner: str, file_id: str) -> Upload | None:
        with self._lock:
            found = self._files.get((owner, file_id))
        if found is None or found.over(self._clock()):  # another server may keep it, or for longer
            found = self._contents.look(owner, file_id)
            if found is not None:
                with self._lock:
                    self._files[owner, file_id] = found
        return None if found is None or found.over(self._clock()) else found

    def _drop_expired(self) -> OSError | None:
        """Remove expired uploads; return the error of a refusing disk. The next sweep tries
        again."""
        now, failed = self._clock(), None
        for upload in self._all():
            try:
                if upload.over(now) and not self._kept_longer(upload, now):
                    self._remove(upload)
            except OSError as error:
                failed = error
        return failed

    def _kept_longer(self, upload: Upload, now: float) -> bool:
        """Whether another server that shares the folder extended the file's life."""
        there = self._contents.look(upload.owner, upload.id)
        if there is None or there.over(now):
            return False
        with self._lock:
            self._files[there.owner, there.id] = there
        return True

    def _remove(self, upload: Upload) -> None:
        self._contents.remove(upload)
        with self._lock:
            self._files.pop((upload.owner, upload.id), None)


def _unknown(file_id: str, param: str | None) -> ApiError:
    return ApiError(
        404,
        f"no such file: {file_id[:100]!r}; it was never uploaded here, was deleted, or has expired",
        param=param,
        code="file_not_found",
    )


def _not_kept(error: OSError) -> ApiError:
    return ApiError(
        503,
        f"the disk of this server refused ({error.strerror or 'no reason given'}); nothing was "
        "changed. Try again later, or send pictures as data URIs",
        param="file",
        code="files_unavailable",
    )


logger = logging.getLogger("keepsight.server")

_ABOVE, _SUFFIX, _FORMAT = "uploads", ".upload", 1
_OPEN = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_HEAD = 8192  # most bytes of the first line
_ID = re.compile(r"file-[0-9a-f]{64}")
_OWNER = re.compile(r"[0-9a-f]{64}")


def contents_for(store: Store | None) -> Contents:
    """On disk if a store with a folder is used, otherwise in memory."""
    root = None if store is None else store.root
    return InMemory() if root is None else OnDisk(root)


class OnDisk:
    """The bytes of files in a folder."""

    def __init__(self, root: str | Path) -> None:
        self._folder = Folder(root)

    def known(self, have: Uploads = NONE) -> Iterator[Upload]:
        """All existing files, by their first lines; for those in `have` the names suffice."""
        for owner in self._folder.names(_ABOVE):
            for last in self._folder.names(f"{_ABOVE}/{owner}"):
                file_id = last.removesuffix(_SUFFIX)
                found = have.get((owner, file_id)) or self.look(owner, file_id)
                if found is not None and last.endswith(_SUFFIX):
                    yield found

    def look(self, owner: str, file_id: str) -> Upload | None:
        """A file by its first line."""
        if not (_ID.fullmatch(file_id) and _OWNER.fullmatch(owner)):
            return None
        found = self._opened(_name(owner, file_id), owner, file_id)
        return None if found is None else found[0]

    def write(self, upload: Upload, data: bytes) -> None:
        """Write a file, whole and to the disk."""
        self._folder.write(_name(upload.owner, upload.id), [_head(upload), data])

    def read(self, upload: Upload) -> bytes | None:
        """The bytes after the first line."""
        found = self._opened(_name(upload.owner, upload.id), upload.owner, upload.id, whole=True)
        return None if found is None else found[1]

    def remove(self, upload: Upload) -> None:
        """Remove a file from the disk."""
        self._folder.remove(_name(upload.owner, upload.id))

    def tidy(self) -> None:
        """Remove leftovers of killed writers."""
        for owner in self._folder.names(_ABOVE):
            for last in self._folder.names(f"{_ABOVE}/{owner}"):
                name = f"{_ABOVE}/{owner}/{last}"
                status = self._folder.status(name) if last.startswith(PART) else None
                if status is not None and left_over(status):
                    self._folder.remove(name)

    def _opened(
        self, name: str, owner: str, file_id: str, whole: bool = False
    ) -> tuple[Upload, bytes] | None:
        """The metadata of a file, and with `whole` its bytes. A wrong file is removed, an
        unreachable one stays."""
        try:
            handle = os.open(self._folder.path(name), _OPEN)
            try:
                opened = os.fdopen(handle, "rb")
            except OSError:  # a folder; this descriptor has no other owner
                os.close(handle)
                raise
            with opened as file:
                upload = _parsed(file, owner, file_id)
                return upload, file.read() if whole else b""
        except ValueError as error:
            logger.warning("an upload is damaged and is removed: %s (%s)", name, error)
            with contextlib.suppress(OSError):  # it stays, and stays refused
                self._folder.remove(name)
        except FileNotFoundError:
            pass  # never there, or just deleted
        except OSError as error:
            logger.warning("an upload cannot be read: %s (%s)", name, error)
        return None


def _name(owner: str, file_id: str) -> str:
    return f"{_ABOVE}/{owner}/{file_id}{_SUFFIX}"


def _head(upload: Upload) -> bytes:
    header = {
        "keepsight": "upload",
        "format": _FORMAT,
        "bytes": upload.nbytes,
        "filename": upload.filename,
        "purpose": upload.purpose,
        "created_at": upload.created_at,
        "expires_at": upload.expires_at,
    }
    header["digest"] = digests.digest(
        "upload", upload.owner, upload.id, digests.canonical_json(header)
    )
    return digests.canonical_json(header).encode() + b"\n"


def _parsed(file: BinaryIO, owner: str, file_id: str) -> Upload:
    """The contents of the first line; its digest covers tenant and id."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    line = file.readline(_HEAD)
    try:
        header = json.loads(line)
        upload = Upload(
            file_id,
            owner,
            int(header["bytes"]),
            str(header["filename"]),
            str(header["purpose"]),
            int(header["created_at"]),
            int(header["expires_at"]),
        )
    except (KeyError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"its first line lacks a field: {error}") from error
    if _head(upload) != line:
        raise ValueError("its first line does not match its digest")
    if status.st_size != len(line) + upload.nbytes:
        there = status.st_size - len(line)
        raise ValueError(f"{there} bytes, its first line says {upload.nbytes}")
    return upload


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
        upload: Upload = await service.threads.wait(
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
        found: list[Upload] = await service.threads.wait(lambda: files.of(tenant))
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
        found: Upload = await service.threads.wait(lambda: files.get(tenant, file_id, "file_id"))
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
        data: bytes = await service.threads.wait(lambda: files.read(tenant, file_id, "file_id"))
        headers = {"x-content-type-options": "nosniff", "content-disposition": "attachment"}
        return Response(data, media_type="application/octet-stream", headers=headers)

    @router.delete("/v1/files/{file_id}", operation_id="delete_file")
    async def delete(file_id: str, request: Request) -> dict[str, object]:
        """Delete a file. /v1/cache/reset forgets what was computed from it."""
        tenant = visit_of(request).who().tenant
        await service.threads.wait(lambda: files.delete(tenant, file_id))
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
