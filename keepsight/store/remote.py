"""A store at any fsspec address: s3, gcs, a shared folder, sftp, memory.

Files and names are the same as in a folder, so a bucket can be copied to a disk and back. There is
no index: what needs all entries lists the address and reads their headers. A bucket keeps what it
is given: its own lifecycle rules remove what is old. An address that does not answer is named in
one warning and left alone for a while; meanwhile the store seems empty, and `flush` says what was
not written. How long one call may take is for its file system to say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from keepsight.errors import (
    DamagedFile,
    FileError,
    InputError,
    MissingExtra,
    StoreError,
    WrongFormatVersion,
)
from keepsight.formats import tensorfile
from keepsight.kinds import Options, Record
from keepsight.store import layout
from keepsight.store.contract import About, Below, Content, Entry, EntryName, Found, layers
from keepsight.store.files import together
from keepsight.store.health import UNREACHABLE
from keepsight.store.view import Store
from keepsight.store.writer import REFUSED, ROOM, THERE, WRITTEN, Job, Sum, Writer
from keepsight.system import private_files
from keepsight.system.lock import Mutex
from keepsight.system.places import LIBRARIES
from keepsight.system.private_files import PART

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = logging.getLogger(__name__)

# These protocols write whole objects; a sibling and a rename would only cost a second copy.
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "ossfs", "oci", "memory"}
_ABSENT = FileNotFoundError, NotADirectoryError, IsADirectoryError
_MOST = 200_000  # names kept in memory
_SURE, _DOUBTFUL = 600.0, 5.0  # seconds for which "present" and "absent" are believed
T = TypeVar("T")


class RemoteStore(Store):
    """Tensor files and small JSON notes at an address. `options` go to the file system
    (credentials, an endpoint, timeouts)."""

    def __init__(
        self, address: str, *, options: Options | None = None, waiting: int = ROOM
    ) -> None:
        super().__init__(Remote(Address(address, options), waiting))


class Object(NamedTuple):
    """One object in a listing."""

    name: str  # relative to the address
    nbytes: int
    written: float  # seconds since the epoch, 0.0 if the address does not tell


class Address:
    """Read, write, remove and list objects below one address. An object appears whole or not at
    all. fsspec's listing cache is off, because other machines write to the same address."""

    def __init__(self, address: str, options: Options | None) -> None:
        if not isinstance(address, str) or "://" not in address:
            raise InputError(f"{address!r} is no address; expected one such as s3://bucket/name")
        self.shown = re.sub(r"//[^/@]*@", "//", address)  # without passwords
        self._address, self._options = address, dict(options or {})
        self._open()

    def _open(self) -> None:
        import fsspec

        protocol = self._address.split("://", 1)[0]
        try:
            # A separate instance: fsspec's cache in it is not shared.
            fs, root = fsspec.url_to_fs(self._address, skip_instance_cache=True, **self._options)
        except ImportError as error:
            if protocol in LIBRARIES:
                raise MissingExtra.named(*LIBRARIES[protocol]) from None
            raise MissingExtra(f"{protocol}:// needs another library: {error}") from None
        except Exception as error:
            raise StoreError(f"{self.shown} cannot be opened: {error}") from error
        if getattr(fs, "dircache", None) is not None:
            fs.dircache.use_listings_cache = False
        self._fs, self._root, self._process = fs, str(root).rstrip("/"), os.getpid()
        self._protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._folders: set[str] = set()  # that are there

    @property
    def fs(self) -> AbstractFileSystem:
        """The file system; opened again in a forked child, where the parent's does not work."""
        if self._process != os.getpid():
            self._open()
        return self._fs

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """An object, or some bytes of it; FileNotFoundError if it is absent."""
        data: bytes = self.fs.cat_file(self._path(name), start=start, end=end)
        return data

    def info(self, name: str) -> Object:
        """The listing of an object; FileNotFoundError if it is absent."""
        info = self.fs.info(self._path(name))
        if info.get("type", "file") != "file":
            raise FileNotFoundError(f"{self.shown}/{name} is no object")
        return _object(name, info)

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write an object, whole or not at all."""
        path = self._path(name)
        if self._protocols & {"file", "local"}:
            private_files.write_whole(Path(path), parts)
            return
        data = b"".join(parts)
        if self._protocols & _WHOLE:
            self.fs.pipe_file(path, data)
            return
        folder, _, last = path.rpartition("/")
        part = f"{folder}/{PART}{uuid.uuid4().hex}-{last}"
        try:
            if folder not in self._folders:
                self.fs.makedirs(folder, exist_ok=True)
                self._folders.add(folder)
            self.fs.pipe_file(part, data)
            self.fs.mv(part, path)
        except BaseException:
            self._folders.clear()
            with contextlib.suppress(Exception):
                self.fs.rm_file(part)
            raise

    def remove(self, name: str) -> bool:
        """Remove an object; False if it was absent."""
        try:
            self.fs.rm_file(self._path(name))
        except _ABSENT:
            return False
        return True

    def listed(self, folders: list[str]) -> Iterator[Object]:
        """All objects in these folders, each listed by its own request, several at once."""
        for found in together(self._ls, folders):
            yield from (_object(name, info) for name, info in found if _is(info, "file"))

    def folders(self, folder: str) -> list[str]:
        """The folders in a folder, relative to the address."""
        return [name for name, info in self._ls(folder) if _is(info, "directory")]

    def _ls(self, folder: str) -> list[tuple[str, Record]]:
        root = f"{self._root}/"
        try:
            listed = self.fs.ls(self._path(folder), detail=True)
        except _ABSENT:
            return []
        named = [(str(info["name"]).rstrip("/"), info) for info in listed]
        return [(name.removeprefix(root), info) for name, info in named if name.startswith(root)]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class Seen:
    """What this process recently learned about names: their metadata, or that they are absent."""

    def __init__(self) -> None:
        self._lock = Mutex()
        self._known: dict[EntryName, tuple[Record | None, float]] = {}
        self.removals = 0

    def find(self, name: EntryName) -> tuple[bool, Record | None]:
        """Whether anything is known about it, and its metadata if it is present."""
        found, until = self._known.get(name, (None, 0.0))
        if time.monotonic() >= until:
            return False, None
        return True, None if found is None or layout.expired(found) else found

    def note(self, name: EntryName, metadata: Record | None, seconds: float = _DOUBTFUL) -> None:
        """Record that it is present, or absent: then another process may write it at any time."""
        with self._lock:
            self._known.pop(name, None)
            self._known[name] = (metadata, time.monotonic() + seconds)
            if len(self._known) > _MOST:
                del self._known[next(iter(self._known))]

    def removed(self, name: EntryName) -> None:
        """Record that it was removed; what reads that began before say does not count."""
        self.removals += 1
        self.note(name, None)


class Remote(Writer):
    """The entries of all tenants at one address. `Store` says what its methods promise."""

    def __init__(self, link: Address, waiting: int) -> None:
        super().__init__(link.shown, waiting, UNREACHABLE)
        self._link, self._seen = link, Seen()
        self._counted: dict[str | None, tuple[list[Sum], float | None]] = {}  # and when
        data = self._asked(lambda: link.read(layout.MARKER))
        self._is_marked = data is not None
        try:
            layout.check_marker(data or layout.marker_bytes(), self.label)
        except DamagedFile as error:
            logger.warning("%s; written anew", error)
            self._is_marked = False

    # -- reading ---------------------------------------------------------------------------------

    def tier(self, name: EntryName) -> str | None:
        if self.waiting(name) or self._asked(lambda: self._look(name)) is not None:
            return "remote"
        return None

    def find(self, names: list[EntryName]) -> dict[EntryName, Found]:
        found = together(self._read_one, names)
        return {name: it for name, it in zip(names, found, strict=True) if it is not None}

    def _read_one(self, name: EntryName) -> Found | None:
        def read() -> Found | None:
            try:
                return self._fetched(name, self._whole)
            except WrongFormatVersion as error:
                # Another version's entry is intact, and somebody may still want it.
                logger.warning("%s; left as it is", error)
                return None

        return None if self._seen.find(name) == (True, None) else self._asked(read)

    def _asked(self, ask: Callable[[], T]) -> T | None:
        """The result of a call to the address; None on any failure."""
        if self.reads.is_aside:
            return None
        answer = None
        try:
            answer = ask()
        except (WrongFormatVersion, *_ABSENT):
            pass  # an entry of another version is unusable here, and not to be replaced
        except Exception as error:
            self.reads.failed(error)
            return None
        self.reads.worked()
        return answer

    def _fetched(self, name: EntryName, fetch: Callable[[EntryName], Found]) -> Found | None:
        """An entry, or its header; None if it is absent, over or damaged. Remembers what it is."""
        since = self._seen.removals
        try:
            found = fetch(name)
        except WrongFormatVersion:
            raise
        except _ABSENT:
            self._seen.note(name, None)
            return None
        except FileError as error:
            # Its bytes may have been damaged on the way; then others can read it.
            logger.warning("a damaged entry is passed over: %s", error)
            self._seen.note(name, None, float("inf"))
            return None
        if layout.expired(found[1]):
            self._seen.note(name, None)
            return None
        if since == self._seen.removals:
            self._seen.note(name, found[1], _SURE)
        return found

    def _look(self, name: EntryName, ask: bool = False) -> Record | None:
        """The metadata of an entry, from memory or by one small read; None if it is not there.
        `ask`: others may have removed it."""
        known, metadata = self._seen.find(name)
        if known and not (ask and metadata is not None):
            return metadata
        found = self._fetched(name, self._header)
        return found and found[1]

    def _whole(self, name: EntryName) -> Found:
        place = layout.place(*name)
        return layout.read_entry(self._link.read(place), name, f"{self.label}/{place}")

    def _header(self, name: EntryName) -> Found:
        """Record and metadata of an entry; its tensors are neither read nor checked."""
        if name.kind in layout.NOTES:
            return self._whole(name)
        place = layout.place(*name)
        where, head = f"{self.label}/{place}", partial(self._link.read, place, 0)
        record = tensorfile.fetch_record(head, where, name.kind, layout.FORMAT)
        return layout.of_its_name(name, ({}, record), where)

    def reject(self, name: EntryName, why: str) -> None:
        """Treat an entry as absent here until it is written again, and remove it if that works."""
        logger.warning("damaged entry set aside: %s/%s (%s)", self.label, layout.place(*name), why)
        with contextlib.suppress(Exception):  # the address may be read-only
            self._link.remove(layout.place(*name))
        self._seen.note(name, None, float("inf"))

    def below(self, tenant: str, kind: str, base: str | None, count: int) -> Below:
        """The newest dependents of an entry, from the names of empty objects beside them."""

        def header(key: str) -> Found | None:
            name = EntryName(kind, key, tenant)
            with contextlib.suppress(WrongFormatVersion):
                if self._seen.find(name) != (True, None):
                    return self._fetched(name, self._header)
            return None

        def find() -> Below:
            there = self._link.listed([layout.dependents_folder(kind, base, tenant)])
            marks = ((one.written, layout.marked_dependent(one.name, base)) for one in there)
            keys = [key for _, key in sorted((at, key) for at, key in marks if key)[-count:]]
            found = zip(keys, together(header, keys), strict=True)
            return {base: [(key, it[0][1]) for key, it in found if it is not None]}

        return self._asked(find) or {}

    # -- writing ---------------------------------------------------------------------------------

    def put(self, name: EntryName, content: Content, about: About, account: str) -> None:
        """Hand over an entry to the writer."""
        if self._seen.find(name)[1] is None:
            super().put(name, content, about, account)

    def write(self, jobs: list[Job], became: dict[EntryName, str]) -> None:
        """Write entries, several at once, but none before its base. So an interruption never leaves
        an entry without the one it depends on."""
        if not self._is_marked:
            layout.mark(self._link.read, self._link.write, self.label)
            self._is_marked = True

        def write_one(job: Job) -> None:
            became[job.name] = self._write_one(job)

        while jobs:
            left = {job.name for job in jobs}
            now = [job for job in jobs if job.base not in left] or jobs  # only damage makes circles
            together(write_one, now)
            jobs = [job for job in jobs if job not in now]

    def _write_one(self, job: Job) -> str:
        if job.base is not None and not self._is_there(job.base, ask=True):
            return REFUSED
        if self._is_there(job.name):
            return THERE
        try:
            job.ready.wait()
            parts = list(layout.spelled(job.name, job.content, job.metadata))
        except Exception as error:  # an entry that cannot be spelled is its own fault
            logger.exception("writing %s failed; going on without it", layout.place(*job.name))
            return str(error)
        if mark := layout.dependent_marker(job.name, job.about.depends_on):
            self._link.write(mark, [b"{}"])
        self._link.write(layout.place(*job.name), parts)
        self._seen.note(job.name, job.metadata, _SURE)
        return WRITTEN

    def _is_there(self, name: EntryName, ask: bool = False) -> bool:
        """Whether it exists and need not be written."""
        try:
            return self._look(name, ask) is not None
        except WrongFormatVersion:
            return True

    # -- many entries ----------------------------------------------------------------------------

    def entry(self, name: EntryName) -> Entry | None:
        """An entry from its file's header; None if absent or expired."""
        if job := self.waiting(name):
            return job.entry(job.nbytes)
        metadata = self._asked(lambda: self._look(name))
        if metadata is None:
            return None
        return self._asked(lambda: _entry(self._link.info(layout.place(*name)), metadata))

    def entries(self, tenant: str | None) -> Iterator[Entry]:
        """All entries that are not over, nor depend on one that is."""
        table = self._table(tenant)
        over = [name for name, entry in table.items() if entry.is_over(time.time())]
        gone = {name for layer in _depths(table, over) for name in layer}
        yield from (entry for name, entry in table.items() if name not in gone)

    def _table(self, tenant: str | None) -> dict[EntryName, Entry]:
        """Every entry with what its header says, including expired and damaged ones."""
        self.drain()
        with self._named_errors("listed"):
            found = list(self._found(tenant))
            entries = together(self._as_found, found)
            return {entry.name: entry for entry in entries}

    def _as_found(self, one: Object) -> Entry:
        name = layout.parse(one.name)
        try:
            return _entry(one, self._header(name)[1])  # type: ignore[arg-type]
        except (FileError, *_ABSENT):
            return _entry(one, {})  # `check` reports it; here it only counts

    def _found(self, tenant: str | None) -> Iterator[Object]:
        """Each entry in a listing; no object is read."""
        return (one for one in self._link.listed(self._shards(tenant)) if layout.parse(one.name))

    def _shards(self, tenant: str | None, kinds: Iterable[str] = layout.KINDS) -> list[str]:
        """The folders in those of some kinds."""
        whose = [layout.tenant_prefix(tenant or "")]
        if tenant is None:
            whose += [f"{folder}/" for folder in self._link.folders("tenants")]
        folders = [f"{prefix}{kind}" for prefix in whose for kind in kinds]
        return [shard for found in together(self._link.folders, folders) for shard in found]

    def pin(self, name: EntryName, pinned: bool) -> bool:
        """A bucket keeps what it is given; False if the entry is absent."""
        return self.tier(name) is not None

    def gc(self, tenant: str | None, budget: int) -> int:
        """Refused: a bucket keeps what it is given."""
        raise InputError(
            f"{self.label}: a bucket keeps what it is given; let its lifecycle rules remove what "
            "is old, or remove entries by name"
        )

    def remove(
        self, tenant: str | None, names: Iterable[EntryName] | None = None, image: str | None = None
    ) -> int:
        """Remove entries with all their dependents, these first; return the bytes freed."""
        table = self._table(tenant)
        doomed: Iterable[EntryName] = table if names is None else names
        if image is not None:
            doomed = [name for name, entry in table.items() if image in entry.media]
        freed = 0
        with self._named_errors("removed"):
            for layer in reversed(_depths(table, doomed)):
                gone = together(lambda name: self._remove_one(table[name]), layer)
                freed += sum(table[n].nbytes for n, was in zip(layer, gone, strict=True) if was)
            if names is None and image is None:
                self._remove_rest(tenant)
        return freed

    def _remove_one(self, entry: Entry) -> bool:
        was_there = self._link.remove(layout.place(*entry.name))
        self._seen.removed(entry.name)
        if mark := layout.dependent_marker(entry.name, entry.depends_on):
            self._link.remove(mark)
        return was_there

    def _remove_rest(self, tenant: str | None) -> None:
        """Remove the marks of dependents, and what killed writers left."""
        kinds = [f"{layout.UPON}/snapshot", *layout.KINDS]
        listed = [one.name for one in self._link.listed(self._shards(tenant, kinds))]
        together(self._link.remove, [n for n in listed if PART in n or f"{layout.UPON}/" in n])

    def stats(self, tenant: str | None, whose: str | None, wait: float) -> Record:
        """Counts since it was opened; and entries and bytes, counted now for a caller who waits at
        least a second, because that lists the address (`counted` says when)."""
        self.drain(wait)
        found = None if wait < 1 else self._asked(lambda: list(self._found(tenant)))
        if found is not None:
            named = ((layout.parse(one.name), one.nbytes) for one in found)
            ones = [(name.tenant, name.kind, 1, nbytes) for name, nbytes in named if name]
            self._counted[tenant] = ones, time.time()
        sums, at = self._counted.get(tenant, ([], None))
        return self.told("remote", sums, at, whose)

    def check(self, tenant: str | None, repair: bool) -> list[str]:
        """Read everything; return one line per damaged entry or entry without its base. An address
        that does not answer is a line, too."""
        try:
            table = self._table(tenant)
            wrong = dict(zip(table, together(self._wrong, list(table)), strict=True))
            for name, entry in table.items():
                if entry.base is not None and entry.base not in table:
                    missing = f"{self.label}/{layout.place(*name)}: what it depends on is absent"
                    wrong[name] = wrong[name] or missing
            found = {name: why for name, why in wrong.items() if why}
            if repair and found:
                self.remove(tenant, found)
        except Exception as error:
            return [f"{self.label} cannot be checked: {error}"]
        return list(found.values())

    def _wrong(self, name: EntryName) -> str | None:
        try:
            self._whole(name)
        except (WrongFormatVersion, FileNotFoundError):
            pass  # intact, of another version; or removed just now
        except FileError as error:
            return str(error)
        return None

    @contextlib.contextmanager
    def _named_errors(self, what: str) -> Iterator[None]:
        """A caller must not believe that something was listed or removed."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{self.label}: entries cannot be {what}: {error}") from error


def _depths(table: dict[EntryName, Entry], names: Iterable[EntryName]) -> list[list[EntryName]]:
    """These entries, if they are in the table, and all their dependents, in layers."""
    upon: dict[EntryName | None, list[EntryName]] = {}
    for name, entry in table.items():
        upon.setdefault(entry.base, []).append(name)
    found = layers(names, lambda name: upon.get(name, ()))
    return [[name for name in layer if name in table] for layer in found]


def _entry(one: Object, metadata: Record) -> Entry:
    written = min(one.written, time.time())  # a time in the future is wrong
    return layout.entry_of(layout.parse(one.name), metadata, one.nbytes, written)  # type: ignore[arg-type]


def _is(info: Record, kind: str) -> bool:
    return bool(info.get("type", "file") == kind)


def _object(name: str, info: Record) -> Object:
    """What a listing says; file systems differ in name and type of the time."""
    written = 0.0
    for key in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        moment = info.get(key)
        with contextlib.suppress(ValueError, OverflowError, OSError):
            if isinstance(moment, str):
                moment = datetime.fromisoformat(moment)
            written = moment.timestamp() if isinstance(moment, datetime) else float(moment or 0)
        if written:
            break
    return Object(name, int(info.get("size") or 0), written)
