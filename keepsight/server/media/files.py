"""Uploaded files: sent once, then referenced by id in later requests of the same tenant.

An id is a digest of the content and the tenant, so the same file sent twice is one file, and other
tenants' files look like absent ones. Files stay within a budget until they expire: in memory, or in
the store's folder if there is one, so that ids survive a restart. Otherwise pictures are not
written to disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from keepsight import digests
from keepsight.server.errors import ApiError, invalid
from keepsight.store.layout import CLOCK_SLACK

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
