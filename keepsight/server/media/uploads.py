"""Uploaded files in the folder of a store, so that their ids survive the process.

One file each, below `uploads/`, in one folder per tenant (named by a digest): a line of metadata
with the expiry, then the bytes. A file appears whole or not at all, and is on the disk before the
upload is answered. A damaged upload is deleted, not moved aside: pictures of people must not lie
where no deletion finds them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from keepsight import digests
from keepsight.server.media.files import NONE, Contents, InMemory, Upload, Uploads
from keepsight.store import Store
from keepsight.store.files import PART, Folder, left_over

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
