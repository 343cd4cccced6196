"""One fsspec address: whole objects in and out, each in bounded time.

An object appears whole or not at all. Object stores guarantee that; elsewhere a temporary sibling
is written first and then renamed. Nothing here knows what the objects are. fsspec's listing cache
is off, because other machines write to the same address.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from keepsight.errors import InputError, MissingExtra, StoreError
from keepsight.formats import tensorfile
from keepsight.kinds import Options, Record
from keepsight.store.health import reason
from keepsight.system.exits import begin
from keepsight.system.lock import Mutex

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = logging.getLogger(__name__)

# These protocols write whole objects; a sibling and a rename would only cost a second copy.
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "ossfs", "oci", "memory"}
# The library for a protocol, and the extra that installs it.
_LIBRARIES = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "sftp": ("paramiko", None),
    "ssh": ("paramiko", None),
    "abfs": ("adlfs", None),
    "az": ("adlfs", None),
}
PART = ".part-"
_FOLDERS = 100_000  # folders known to exist
_AT_ONCE = 16  # concurrent requests of housekeeping
T = TypeVar("T")
S = TypeVar("S")


class RemoteObject(NamedTuple):
    """One object in a listing."""

    name: str  # relative to the address
    nbytes: int
    written: float  # seconds since the epoch, 0.0 if the address does not tell

    @property
    def is_part(self) -> bool:
        """Whether it is a temporary sibling that was never renamed."""
        return self.name.rpartition("/")[2].startswith(PART)


class Address:
    """Read, write, remove and list objects below one address."""

    def __init__(self, address: str, options: Options | None, timeout: float) -> None:
        if not isinstance(address, str) or "://" not in address:
            raise InputError(f"{address!r} is no address; expected one such as s3://bucket/name")
        self.shown = re.sub(r"//[^/@]*@", "//", address)  # without passwords
        self.timeout = timeout
        self._address, self._options = address, dict(options or {})
        self._process = 0
        self._folders: set[str] = set()
        self._lock = Mutex()
        self._open()

    def _open(self) -> None:
        import fsspec

        protocol = self._address.split("://", 1)[0]
        try:
            # A separate instance: fsspec's cache in it is not shared.
            fs, root = fsspec.url_to_fs(self._address, skip_instance_cache=True, **self._options)
        except ImportError as error:
            raise _missing(protocol, error) from None
        except Exception as error:
            raise StoreError(f"{self.shown} cannot be opened: {error}") from error
        if getattr(fs, "dircache", None) is not None:
            fs.dircache.use_listings_cache = False
        self._fs, self.root, self._process = fs, str(root).rstrip("/"), os.getpid()
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._whole = bool(protocols & _WHOLE)
        self._local = bool(protocols & {"file", "local"})

    @property
    def fs(self) -> AbstractFileSystem:
        """The file system; opened again in a forked child, where the parent's does not work."""
        if self._process != os.getpid():
            self._open()
        return self._fs

    # -- one object ------------------------------------------------------------------------------

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """An object, or some bytes of it; FileNotFoundError if it is absent."""
        path = self._path(name)
        data: bytes = self.bounded(lambda: self.fs.cat_file(path, start=start, end=end))
        return data

    def info(self, name: str) -> RemoteObject:
        """The listing entry of an object; FileNotFoundError if it is absent."""
        info = self.bounded(lambda: self.fs.info(self._path(name)))
        if not _is_file(info):
            raise FileNotFoundError(f"{self.shown}/{name} is no object")
        return _found(name, info)

    def exists(self, name: str) -> bool:
        """Whether this object exists."""
        try:
            self.info(name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def write(
        self, name: str, parts: list[bytes | memoryview], unwanted: Callable[[], bool]
    ) -> None:
        """Write an object, whole or not at all. If it is no longer wanted when the write ends, even
        after a timeout, it is removed again."""

        def work() -> None:
            self._put(name, parts)
            if unwanted():
                self._remove(name)

        # A large object takes time on a slow line: allow for 1 MiB/s.
        self.bounded(work, self.timeout + sum(len(part) for part in parts) / (1 << 20))

    def _put(self, name: str, parts: list[bytes | memoryview]) -> None:
        path = self._path(name)
        if self._local:
            tensorfile.write_whole(Path(path), parts)
            return
        data = b"".join(parts)
        if self._whole:
            self.fs.pipe_file(path, data)
            return
        folder, _, last = path.rpartition("/")
        if folder not in self._folders:
            if len(self._folders) >= _FOLDERS:
                self._folders.clear()
            self.fs.makedirs(folder, exist_ok=True)
            self._folders.add(folder)
        part = f"{folder}/{PART}{uuid.uuid4().hex}-{last}"
        try:
            self.fs.pipe_file(part, data)
            self.fs.mv(part, path)
        except BaseException:
            self._folders.discard(folder)
            with contextlib.suppress(Exception):
                self.fs.rm_file(part)
            raise

    def remove(self, name: str) -> bool:
        """Remove an object; False if it was absent."""
        return self.bounded(lambda: self._remove(name))

    def _remove(self, name: str) -> bool:
        try:
            self.fs.rm_file(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    # -- many objects ----------------------------------------------------------------------------

    def listed(self, folders: list[str]) -> Iterator[RemoteObject]:
        """All objects in these folders. Each folder is listed by its own request, several at once,
        so a large store never fills memory with one answer."""
        for found in self.each(self._below, folders):
            yield from found

    def folders(self, folder: str) -> list[str]:
        """The folders in a folder, relative to the address."""
        return [name for name, info in self._ls(folder) if info.get("type") == "directory"]

    def _below(self, folder: str) -> list[RemoteObject]:
        return [_found(name, info) for name, info in self._ls(folder) if _is_file(info)]

    def _ls(self, folder: str) -> list[tuple[str, Record]]:
        path, root = self._path(folder), f"{self.root}/"

        def work() -> list[Record]:
            try:
                found: list[Record] = self.fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return found

        found = []
        for info in self.bounded(work, 4 * self.timeout):
            name = str(info["name"]).rstrip("/")
            if name.startswith(root):
                found.append((name.removeprefix(root), info))
        return found

    def each(self, work: Callable[[S], T], items: list[S]) -> Iterator[T]:
        """Run `work` for each item, several at once; each call is bounded, so this ends too."""
        if len(items) < 2:
            yield from map(work, items)
            return
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="keepsight-remote") as crew:
            yield from crew.map(work, items)

    def bounded(self, work: Callable[[], T], seconds: float | None = None) -> T:
        """Run a call, or raise TimeoutError; a hanging call stays behind in a daemon thread."""
        seconds = self.timeout if seconds is None else seconds
        done: Future[T] = Future()
        handed = [done]

        def run() -> None:
            theirs = handed.pop()
            try:
                theirs.set_result(work())
            except BaseException as error:
                theirs.set_exception(error)
            finally:  # an error references this frame, and so the data to be written
                del theirs

        if begin(run, "keepsight-remote") is None:
            run()
        try:
            return done.result(seconds)
        except TimeoutError:
            if done.done():  # the work itself raised it
                raise
            raise TimeoutError(f"no answer within {seconds:g} s") from None
        finally:
            del done


class Breaker:
    """A circuit breaker: pauses calls to an address that fails, for a second, then twice as long.

    Only one call at a time then tries whether it answers again, so that nothing waits in a row.
    """

    LONGEST = 60.0

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._failures, self._until = 0, 0.0
        self.why: str | None = None  # what it failed of, while it does
        self.since: float | None = None  # when that began, in seconds since the epoch
        self._lock = Mutex()

    def allows(self, patience: float) -> bool:
        """Whether to try now; the caller must report the result within `patience` seconds."""
        with self._lock:
            if not self._failures:
                return True
            now = self._clock()
            if now < self._until:
                return False
            self._until = now + patience
            return True

    def failed(self, error: BaseException) -> None:
        """Report a failure; the first one in a row is logged."""
        with self._lock:
            self._failures += 1
            first, self.why = self._failures == 1, f"{type(error).__name__}: {reason(error)}"
            self.since = self.since or time.time()
            pause = min(self.LONGEST, 2.0 ** min(self._failures - 1, 10))
            self._until = self._clock() + pause
        if first:
            logger.warning("%s (%s); going on without it", self._what, self.why)

    def worked(self) -> None:
        """Report success."""
        if self._failures:
            with self._lock:
                self._failures, self.why, self.since = 0, None, None
            logger.info("over: %s", self._what)


def _missing(protocol: str, error: ImportError) -> MissingExtra:
    """Name the library that an address needs; for unknown protocols use fsspec's own message."""
    if protocol in _LIBRARIES:
        return MissingExtra.named(*_LIBRARIES[protocol])
    return MissingExtra(f"{protocol}:// needs another library: {error}")


def _is_file(info: Record) -> bool:
    return bool(info.get("type", "file") == "file")


def _found(name: str, info: Record) -> RemoteObject:
    return RemoteObject(name, int(info.get("size") or 0), _moment(info))


def _moment(info: Record) -> float:
    """When an object was written; file systems differ in name and type of this field."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        moment = info.get(name)
        with contextlib.suppress(ValueError, OverflowError, OSError):
            if isinstance(moment, datetime):
                return moment.timestamp()
            if isinstance(moment, int | float):
                return float(moment)
            if isinstance(moment, str):
                return datetime.fromisoformat(moment).timestamp()
    return 0.0
