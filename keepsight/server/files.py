"""Uploaded files: sent once, meant by an id in any later request of the same tenant.

An id is a digest of the content under its tenant, so the same file sent twice is one file, and what
another tenant holds looks exactly like what nobody holds. Files are kept in memory, within a
budget, until they expire: people's pictures are not written to disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from keepsight import keys
from keepsight.server.problems import ApiError, invalid


@dataclass(frozen=True)
class Upload:
    """One file of one tenant. Times are seconds since 1970, as OpenAI has them."""

    id: str
    tenant: str
    data: bytes
    filename: str
    purpose: str
    created_at: int
    expires_at: int

    def told(self) -> dict[str, object]:
        """As OpenAI describes a file."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": len(self.data),
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class Files:
    """All uploads, of all tenants, under one lock."""

    def __init__(self, budget: int, ttl: float, clock: Callable[[], float] = time.time) -> None:
        self.budget, self._ttl, self._clock = budget, ttl, clock
        self._files: dict[tuple[str, str], Upload] = {}
        self._lock = threading.Lock()

    def put(
        self,
        tenant: str,
        data: bytes,
        name: str,
        purpose: str,
        ttl: float | None,
        quota: int | None,
    ) -> Upload:
        """Keep a file. One that is there already is kept as long as the new one would be."""
        if not data:
            raise invalid("file", "the file is empty")
        now = self._clock()
        until = int(now + (self._ttl if ttl is None else min(ttl, self._ttl)))
        file_id = f"file-{keys.digest('uploaded file', tenant, data)}"
        new = Upload(file_id, tenant, data, name[:255] or "file", purpose, int(now), until)
        with self._lock:
            self._drop_expired(now)
            old = self._files.get((tenant, file_id))
            if old is not None:
                new = replace(old, expires_at=max(old.expires_at, until))
            else:
                self._check_room(tenant, len(data), quota)
            self._files[tenant, file_id] = new
        return new

    def _check_room(self, tenant: str, size: int, quota: int | None) -> None:
        own = sum(len(f.data) for f in self._files.values() if f.tenant == tenant)
        if quota is not None and own + size > quota:
            raise ApiError(
                413,
                f"the files of this key would come to {own + size} bytes, allowed are {quota}; "
                "delete some with DELETE /v1/files/ID",
                param="file",
                code="files_quota_exceeded",
            )
        if self.nbytes + size > self.budget:
            raise ApiError(
                413,
                "this server has no room for more files; delete some, or send pictures as data "
                "URIs",
                param="file",
                code="files_full",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(len(f.data) for f in self._files.values())

    def get(self, tenant: str, file_id: str, param: str | None = None) -> Upload:
        """A file of this tenant; anything else is unknown, whoever else may have it."""
        with self._lock:
            self._drop_expired(self._clock())
            found = self._files.get((tenant, file_id))
        if found is None:
            raise ApiError(
                404,
                f"no such file: {file_id[:100]!r}; it was never uploaded here, was deleted, or has "
                "expired",
                param=param,
                code="file_not_found",
            )
        return found

    def of(self, tenant: str) -> list[Upload]:
        """The files of a tenant, newest first."""
        with self._lock:
            self._drop_expired(self._clock())
            own = [f for f in self._files.values() if f.tenant == tenant]
        return sorted(own, key=lambda f: (-f.created_at, f.id))

    def delete(self, tenant: str, file_id: str) -> None:
        """Remove a file."""
        self.get(tenant, file_id)
        with self._lock:
            self._files.pop((tenant, file_id), None)

    def _drop_expired(self, now: float) -> None:
        for key in [k for k, f in self._files.items() if f.expires_at <= now]:
            del self._files[key]
