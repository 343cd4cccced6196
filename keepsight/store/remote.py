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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
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
from keepsight.store import files, layout
from keepsight.store.contract import About, Below, Content, Entry, EntryName, Found
from keepsight.store.health import UNREACHABLE, Health, summary
from keepsight.store.tenants import Store
from keepsight.store.writer import (
    REFUSED,
    ROOM,
    THERE,
    WRITTEN,
    Job,
    Writer,
)
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
_ABSENT = FileNotFoundError, NotADirectoryError, IsADirectoryError
_AT_ONCE = 16  # concurrent requests
_HEAD = 64 << 10  # bytes within which the record of a file usually ends
_MOST = 200_000  # names and folders kept in memory
_SURE, _DOUBTFUL = 600.0, 5.0  # seconds for which "present" and "absent" are believed
Kinds = dict[str, dict[str, int]]  # entries and bytes of each kind
Table = dict[EntryName, tuple[Entry, Record]]  # with the metadata in its file
T = TypeVar("T")
S = TypeVar("S")


class RemoteStore(Store):
    """Tensor files and small JSON notes at an address. `options` go to the file system
    (credentials, an endpoint, timeouts)."""

    def __init__(
        self, address: str, *, options: Options | None = None, waiting: int = ROOM
    ) -> None:
        super().__init__(Remote(RemoteAddress(address, options), waiting))


class RemoteObject(NamedTuple):
    """One object in a listing."""

    name: str  # relative to the address
    nbytes: int
    written: float  # seconds since the epoch, 0.0 if the address does not tell


class RemoteAddress:
    """Read, write, remove and list objects below one address. An object appears whole or not at
    all. fsspec's listing cache is off, because other machines write to the same address."""

    def __init__(self, address: str, options: Options | None) -> None:
        if not isinstance(address, str) or "://" not in address:
            raise InputError(f"{address!r} is no address; expected one such as s3://bucket/name")
        self.shown = re.sub(r"//[^/@]*@", "//", address)  # without passwords
        self._address, self._options = address, dict(options or {})
        self._folders: set[str] = set()
        self._open()

    def _open(self) -> None:
        import fsspec

        protocol = self._address.split("://", 1)[0]
        try:
            # A separate instance: fsspec's cache in it is not shared.
            fs, root = fsspec.url_to_fs(self._address, skip_instance_cache=True, **self._options)
        except ImportError as error:
            if protocol in _LIBRARIES:
                raise MissingExtra.named(*_LIBRARIES[protocol]) from None
            raise MissingExtra(f"{protocol}:// needs another library: {error}") from None
        except Exception as error:
            raise StoreError(f"{self.shown} cannot be opened: {error}") from error
        if getattr(fs, "dircache", None) is not None:
            fs.dircache.use_listings_cache = False
        self._fs, self._root, self._process = fs, str(root).rstrip("/"), os.getpid()
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._is_whole = bool(protocols & _WHOLE)
        self._is_local = bool(protocols & {"file", "local"})

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

    def info(self, name: str) -> RemoteObject:
        """The listing of an object; FileNotFoundError if it is absent."""
        info = self.fs.info(self._path(name))
        if info.get("type", "file") != "file":
            raise FileNotFoundError(f"{self.shown}/{name} is no object")
        return _found(name, info)

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        """Write an object, whole or not at all; return its bytes."""
        path = self._path(name)
        if self._is_local:
            return tensorfile.write_whole(Path(path), parts)
        data = b"".join(parts)
        if self._is_whole:
            self.fs.pipe_file(path, data)
            return len(data)
        folder, _, last = path.rpartition("/")
        if folder not in self._folders:
            if len(self._folders) >= _MOST:
                self._folders.clear()
            self.fs.makedirs(folder, exist_ok=True)
            self._folders.add(folder)
        part = f"{folder}/{files.PART}{uuid.uuid4().hex}-{last}"
        try:
            self.fs.pipe_file(part, data)
            self.fs.mv(part, path)
        except BaseException:
            self._folders.discard(folder)
            with contextlib.suppress(Exception):
                self.fs.rm_file(part)
            raise
        return len(data)

    def remove(self, name: str) -> bool:
        """Remove an object; False if it was absent."""
        try:
            self.fs.rm_file(self._path(name))
        except _ABSENT:
            return False
        return True

    def listed(self, folders: list[str]) -> Iterator[RemoteObject]:
        """All objects in these folders, each listed by its own request, several at once."""
        for found in self.each(self._ls, folders):
            yield from (_found(name, info) for name, info in found if _is(info, "file"))

    def folders(self, folder: str) -> list[str]:
        """The folders in a folder, relative to the address."""
        return [name for name, info in self._ls(folder) if _is(info, "directory")]

    def each(self, work: Callable[[S], T], items: list[S]) -> Iterator[T]:
        """Run `work` for each item, several at once."""
        if len(items) < 2:
            yield from map(work, items)
            return
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="keepsight-remote") as crew:
            try:
                begun = [crew.submit(work, item) for item in items]
            except RuntimeError:  # at exit the interpreter starts no threads
                begun = []
            yield from (one.result() for one in begun) if begun else map(work, items)

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
        self._known: OrderedDict[EntryName, tuple[Record | None, float]] = OrderedDict()
        self.removals = 0

    def find(self, name: EntryName) -> tuple[bool, Record | None]:
        """Whether anything is known about it, and its metadata if it is present."""
        found, until = self._known.get(name, (None, -1.0))
        if time.monotonic() >= until:
            return False, None
        return True, None if layout.expired(found) else found

    def there(self, name: EntryName, metadata: Record, since: int | None = None) -> None:
        """Record that it is present: written, or seen by a read that began at this count of
        removals. A later removal may concern it."""
        if since is None or since == self.removals:
            self._put(name, metadata, _SURE)

    def absent(self, name: EntryName, seconds: float = _DOUBTFUL) -> None:
        """Record that it was absent; another process may write it at any time."""
        self._put(name, None, seconds)

    def removed(self, name: EntryName) -> None:
        """Record that it was removed."""
        self.removals += 1
        self.absent(name)

    def _put(self, name: EntryName, metadata: Record | None, seconds: float) -> None:
        with self._lock:
            self._known.pop(name, None)
            self._known[name] = (metadata, time.monotonic() + seconds)
            while len(self._known) > _MOST:
                self._known.popitem(last=False)


class Remote:
    """The entries of all tenants at one address. `Keeper` says what its methods promise."""

    root = budget = quota = None

    def __init__(self, link: RemoteAddress, waiting: int) -> None:
        self._link, self.label, self._seen = link, link.shown, Seen()
        self._reads = Health(f"the store {self.label} cannot be read")
        self._writer = Writer(self.label, waiting, self._write)
        self.drain, self.flush = self._writer.drain, self._writer.flush
        self.close, self.retire = self._writer.close, self._writer.retire
        self._counted: dict[str, tuple[Kinds, float]] = {}  # by tenant, and when
        self._is_marked = False
        data = self._asked(None, lambda: link.read(layout.MARKER))
        try:
            if data is not None:
                layout.check_marker(data, self.label)
                self._is_marked = True
        except DamagedFile:
            if self._asked(None, lambda: self._came_whole(layout.MARKER, data or b"")):
                raise

    # -- reading ---------------------------------------------------------------------------------

    def has(self, name: EntryName) -> bool:
        return self._writer.waiting(name) is not None or self._look(name) is not None

    def tier(self, name: EntryName) -> str | None:
        return "remote" if self.has(name) else None

    def read(self, names: Iterable[EntryName]) -> dict[EntryName, Found]:
        wanted = list(names)
        found: dict[EntryName, Found] = {}
        for name, content in zip(wanted, self._link.each(self._read_one, wanted), strict=True):
            self._writer.counts.count(name.tenant, "misses" if content is None else "hits")
            if content is not None:
                found[name] = content
        return found

    def _read_one(self, name: EntryName) -> Found | None:
        job = self._writer.waiting(name)
        if job is not None:
            job.ready.wait()
            return job.content, job.metadata
        known, found = self._seen.find(name)
        if known and found is None:
            return None
        since, place = self._seen.removals, layout.place(*name)
        data = self._asked(name, lambda: self._link.read(place))
        if data is None:
            return None
        try:
            content, metadata = files.parse(data, name, f"{self.label}/{place}")
        except WrongFormatVersion as error:
            # Another version's entry is intact, and somebody may still want it.
            logger.warning("%s; left as it is", error)
            return None
        except FileError as error:
            # Damage on the way is no reason to remove what others can read.
            if self._asked(name, lambda: self._came_whole(place, data)):
                self.reject(name, str(error))
            return None
        return (content, metadata) if self._is_live(name, metadata, since) else None

    def _came_whole(self, place: str, data: bytes) -> bool:
        size, again = self._link.info(place).nbytes, self._link.read(place)
        if again != data or size != len(data):
            raise OSError(f"received {len(data)} bytes of {place} out of {size}")
        return True

    def _look(self, name: EntryName) -> Record | None:
        """The metadata of an entry, from memory or by one small read."""
        known, found = self._seen.find(name)
        if known:
            return found
        since = self._seen.removals
        metadata = self._asked(name, lambda: self._metadata(name))
        return metadata if metadata is not None and self._is_live(name, metadata, since) else None

    def _metadata(self, name: EntryName) -> Record | None:
        try:
            return self._header(name)[1]
        except WrongFormatVersion:
            pass  # unusable here, and not to be replaced
        except FileError:
            self._read_one(name)  # damaged, or the connection broke: a full read finds out which
        return None

    def _header(self, name: EntryName) -> tuple[Content, Record]:
        """Record and metadata of an entry; its tensors are neither read nor checked."""
        place = layout.place(*name)
        where = f"{self.label}/{place}"
        if name.kind in layout.NOTES:
            return files.parse(self._link.read(place), name, where)
        data = self._link.read(place, 0, _HEAD)
        size = len(data) if len(data) < _HEAD else 1 << 62  # a shorter answer is the whole object
        kind = name.kind, files.FORMAT
        record = tensorfile.parse_record(data, size, where, *kind)
        if isinstance(record, int):
            record = tensorfile.parse_record(self._link.read(place, 0, record), size, where, *kind)
        if isinstance(record, int):
            raise DamagedFile(f"{where}: its record is longer than it says")
        return files.of_its_name(name, ({}, record), where)

    def _is_live(self, name: EntryName, metadata: Record, since: int) -> bool:
        if layout.expired(metadata):
            self._seen.absent(name)
            return False
        self._seen.there(name, metadata, since)
        return True

    def _asked(self, name: EntryName | None, ask: Callable[[], T]) -> T | None:
        """The result of a call to the address; None on any failure."""
        if self._reads.is_aside:
            return None
        try:
            answer = ask()
        except _ABSENT:
            if name is not None:
                self._seen.absent(name)
            answer = None
        except Exception as error:
            self._reads.failed(error, UNREACHABLE)
            return None
        self._reads.worked()
        return answer

    def reject(self, name: EntryName, why: str) -> None:
        """Treat an entry as absent here, and remove it for all if the address allows."""
        logger.warning("damaged entry set aside: %s/%s (%s)", self.label, layout.place(*name), why)
        self._seen.absent(name, float("inf"))
        with contextlib.suppress(Exception):  # it may be read-only
            self._link.remove(layout.place(*name))
            self._seen.absent(name)

    def below(self, tenant: str, kind: str, base: str | None, count: int) -> Below:
        """The newest dependents of an entry, from the names of empty objects beside them."""

        def find() -> Below:
            there = self._link.listed([layout.dependents_folder(kind, base, tenant)])
            marks = ((one.written, layout.marked_dependent(one.name, base)) for one in there)
            keys = [key for _, key in sorted((at, key) for at, key in marks if key)[-count:]]
            records = self._link.each(lambda key: self._record(EntryName(kind, key, tenant)), keys)
            found = zip(keys, records, strict=True)
            return {base: [(key, record) for key, record in found if record is not None]}

        return self._asked(None, find) or {}

    def _record(self, name: EntryName) -> Record | None:
        since = self._seen.removals
        try:
            (_, record), metadata = self._header(name)
        except (FileError, *_ABSENT):
            return None
        return record if self._is_live(name, metadata, since) else None

    # -- writing ---------------------------------------------------------------------------------

    def put(self, name: EntryName, content: Content, about: About, account: str) -> None:
        """Hand over an entry to the writer."""
        if self._writer.waiting(name) is None and self._seen.find(name)[1] is None:
            self._writer.hand_over(Job.of(name, content, about, account), None)

    def _write(self, jobs: list[Job]) -> dict[EntryName, str]:
        """Write entries, several at once, but none before its base. So an interruption never leaves
        an entry without the one it depends on."""
        if not self._is_marked:
            with contextlib.suppress(FileNotFoundError):
                self._is_marked = bool(self._link.info(layout.MARKER))
            if not self._is_marked:
                self._link.write(layout.MARKER, [layout.marker_bytes()])
            self._is_marked = True
        became: dict[EntryName, str] = {}
        failed: list[Exception] = []

        def attempt(job: Job) -> str:
            try:
                return self._write_one(job)
            except Exception as error:
                failed.append(error)
                return f"{self.label} cannot be written: {error}"

        for layer in _layers(jobs):
            if failed:
                became |= {job.name: str(failed[0]) for job in layer}
            else:
                results = zip(layer, self._link.each(attempt, layer), strict=True)
                became |= {job.name: what for job, what in results}
        if failed:
            self._writer.health.failed(failed[0], UNREACHABLE)
        return became

    def _write_one(self, job: Job) -> str:
        on = job.about.depends_on
        base = None if on is None else EntryName(*on, job.name.tenant)
        if base is not None and not self._is_there(base, ask=True):
            return REFUSED
        if self._is_there(job.name):
            return THERE
        try:
            job.ready.wait()
            parts = list(files.spelled(job.name, job.content, job.metadata))
        except Exception as error:  # an entry that cannot be spelled is its own fault
            logger.exception("writing %s failed; going on without it", layout.place(*job.name))
            return str(error)
        if mark := layout.dependent_marker(job.name, on):
            self._link.write(mark, [b"{}"])
        self._link.write(layout.place(*job.name), parts)
        self._seen.there(job.name, job.metadata)
        return WRITTEN

    def _is_there(self, name: EntryName, ask: bool = False) -> bool:
        """Whether it exists and need not be written. `ask`: others may have removed it."""
        known, found = self._seen.find(name)
        if known and not (ask and found is not None):
            return found is not None
        since = self._seen.removals
        try:
            return self._is_live(name, self._header(name)[1], since)
        except WrongFormatVersion:
            return True
        except (FileError, *_ABSENT):
            self._seen.removed(name)
            return False

    # -- many entries ----------------------------------------------------------------------------

    def entry(self, name: EntryName) -> Entry | None:
        """An entry from its file's header; None if absent or expired."""
        job = self._writer.waiting(name)
        if job is not None:
            return job.entry(job.nbytes)
        metadata = self._look(name)
        if metadata is None:
            return None
        place = layout.place(*name)
        return self._asked(name, lambda: _entry(name, self._link.info(place), metadata))

    def entries(self, tenant: str | None) -> Iterator[Entry]:
        """All entries that are not over, nor depend on one that is."""
        for whose in self.tenants() if tenant is None else [tenant]:
            table = self._table(whose)
            over = [name for name, (_, metadata) in table.items() if layout.expired(metadata)]
            gone = {up for layer in _depths(table, over) for up in layer}
            yield from (entry for name, (entry, _) in table.items() if name not in gone)

    def _table(self, tenant: str) -> Table:
        """Every entry with what its header says, including expired and damaged ones."""
        self.drain()
        with self._named_errors("listed"):
            found = list(self._found(tenant))
            heads = self._link.each(self._head_of, [name for name, _ in found])
            return {n: (_entry(n, one, h), h) for (n, one), h in zip(found, heads, strict=True)}

    def _head_of(self, name: EntryName) -> Record:
        try:
            return self._header(name)[1]
        except (FileError, *_ABSENT):
            return {}  # `check` reports it; here it only counts

    def _found(self, tenant: str) -> Iterator[tuple[EntryName, RemoteObject]]:
        """Name and listing of each entry; no object is read. Names that no store writes are passed
        over."""
        for one in self._link.listed(self._folders(tenant)):
            name = layout.parse(one.name)
            if name is not None and name.tenant == tenant:
                yield name, one

    def _folders(self, tenant: str) -> list[str]:
        kinds = [f"{layout.tenant_prefix(tenant)}{kind}" for kind in layout.KINDS]
        return [folder for found in self._link.each(self._link.folders, kinds) for folder in found]

    def tenants(self) -> list[str]:
        self.drain()
        with self._named_errors("listed"):
            return ["", *(name.rpartition("/")[2] for name in self._link.folders("tenants"))]

    def pin(self, name: EntryName, pinned: bool) -> bool:
        """A bucket keeps what it is given; False if the entry is absent."""
        return self.has(name)

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
        if tenant is None:
            return sum(self.remove(whose) for whose in self.tenants())
        table = self._table(tenant)
        if image is not None:
            doomed = [name for name, (entry, _) in table.items() if image in entry.media]
        else:
            doomed = list(table if names is None else names)
        freed = 0
        with self._named_errors("removed"):
            for layer in reversed(_depths(table, doomed)):
                gone = self._link.each(lambda n: self._remove_one(n, table[n][0]), layer)
                freed += sum(table[n][0].nbytes for n, was in zip(layer, gone, strict=True) if was)
            if names is None and image is None:
                self._remove_rest(tenant)
        return freed

    def _remove_one(self, name: EntryName, entry: Entry | None) -> bool:
        was_there = self._link.remove(layout.place(*name))
        self._seen.removed(name)
        if mark := layout.dependent_marker(name, entry.depends_on if entry else None):
            self._link.remove(mark)
        return was_there

    def _remove_rest(self, tenant: str) -> None:
        """Remove the marks of dependents, and what killed writers left."""
        marks = self._link.folders(f"{layout.tenant_prefix(tenant)}{layout.UPON}/snapshot")
        listed = self._link.listed([*marks, *self._folders(tenant)])
        rest = [one.name for one in listed if layout.parse(one.name) is None]
        parts = [n for n in rest if files.PART in n or f"{layout.UPON}/" in n]
        for _ in self._link.each(self._link.remove, parts):
            pass

    def stats(self, tenant: str, whose: str | None, wait: float) -> Record:
        """Counts since it was opened; and entries and bytes, counted now for a caller who waits at
        least a second, because that lists the address (`counted` says when)."""
        self._writer.drain(wait)
        if wait >= 1:
            found = self._asked(None, lambda: list(self._found(tenant)))
            if found is not None:
                self._counted = {tenant: (_sizes(found), time.time())}
        kinds, at = self._counted.get(tenant, (Kinds(), None))
        healths = (self._reads, self._writer.health)
        return {
            **summary(self.label, "remote", kinds, at, healths),
            "ever": self._writer.counts.of(tenant),
            **self._writer.stats(whose),
            "budget": None,
            "quota": None,
        }

    def check(self, tenant: str | None, repair: bool) -> list[str]:
        """Read everything; return one line per damaged entry or entry without its base. An address
        that does not answer is a line, too."""
        lines: list[str] = []
        try:
            for whose in self.tenants() if tenant is None else [tenant]:
                lines += self._check(whose, repair)
        except Exception as error:
            lines.append(f"{self.label} cannot be checked: {error}")
        return lines

    def _check(self, tenant: str, repair: bool) -> list[str]:
        table = self._table(tenant)
        read = zip(table, self._link.each(self._wrong, list(table)), strict=True)
        wrong = {name: why for name, why in read if why is not None}
        for name, (entry, _) in table.items():
            on = entry.depends_on
            if on is not None and EntryName(*on, tenant) not in table:
                wrong.setdefault(
                    name, f"{_spelled(name)}: depends on {_spelled(on)}, which is absent"
                )
        if repair and wrong:
            self.remove(tenant, wrong)
        return list(wrong.values())

    def _wrong(self, name: EntryName) -> str | None:
        place = layout.place(*name)
        try:
            files.parse(self._link.read(place), name, f"{self.label}/{place}")
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


def _sizes(found: Iterable[tuple[EntryName, RemoteObject]]) -> Kinds:
    kinds: Kinds = {}
    for name, one in found:
        sizes = kinds.setdefault(name.kind, {"entries": 0, "bytes": 0})
        sizes["entries"] += 1
        sizes["bytes"] += one.nbytes
    return kinds


def _layers(jobs: list[Job]) -> list[list[Job]]:
    """Writes that may run side by side; each layer needs the ones before."""
    depth: dict[EntryName, int] = {}
    layers: list[list[Job]] = []
    for job in jobs:
        on = job.about.depends_on
        level = 0 if on is None else 1 + depth.get(EntryName(*on, job.name.tenant), -1)
        depth[job.name] = level
        layers += [[] for _ in range(level + 1 - len(layers))]
        layers[level].append(job)
    return layers


def _depths(table: Table, names: Iterable[EntryName]) -> list[list[EntryName]]:
    """These entries and all their dependents, in layers: each depends on earlier ones."""
    above: dict[EntryName, list[EntryName]] = {}
    for name, (entry, _) in table.items():
        if entry.depends_on is not None:
            above.setdefault(EntryName(*entry.depends_on, name.tenant), []).append(name)
    depth: dict[EntryName, int] = {}
    layer, level = list(names), 0
    while layer and level <= len(table) + 1:  # a wrong table may hold a circle
        depth |= dict.fromkeys(layer, level)
        layer = [up for name in layer for up in above.get(name, ())]
        level += 1
    layers: list[list[EntryName]] = [[] for _ in range(level)]
    for name, deep in depth.items():
        if name in table:
            layers[deep].append(name)
    return layers


def _spelled(name: tuple[str, ...]) -> str:
    return "/".join(name[:2])


def _entry(name: EntryName, one: RemoteObject, metadata: Record) -> Entry:
    about = layout.about_of(metadata)
    written = min(one.written, time.time())  # a time in the future is wrong
    return Entry(
        name.kind,
        name.key,
        nbytes=one.nbytes,
        used=written,
        created=written,
        depends_on=about.depends_on,
        media=about.media,
        expires=layout.expiry(metadata),
        tenant=name.tenant,
        account=layout.account_in(metadata, name.tenant),
    )


def _is(info: Record, kind: str) -> bool:
    return bool(info.get("type", "file") == kind)


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
