"""Reads from an address that may be slow, unreachable, or lose bytes in transfer.

After a failed read the entry counts as absent for now. It is set aside only if its bytes at the
address are wrong; damage in transfer does not count.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TypeVar

from keepsight.errors import DamagedFile, FileError, WrongFormatVersion
from keepsight.formats import tensorfile
from keepsight.kinds import Record
from keepsight.store import entryfile, layout
from keepsight.store.addresses.address import Address, Breaker
from keepsight.store.addresses.listing import EntryHeader, RecentNames, head, metadata_in, note_in
from keepsight.store.contract import Tensors

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Reader:
    """Reads entries by their names at an address."""

    def __init__(self, link: Address, seen: RecentNames, ended: Callable[[str], None]) -> None:
        self._link, self._seen, self._ended = link, seen, ended
        self._breaker = Breaker(f"the store {link.shown} cannot be read")

    def is_marked(self, address: str) -> bool:
        """Whether a store of this format is known to be there. Another format is refused at once,
        if the address answers."""
        data = self.asked("", lambda: self._link.read(layout.MARKER))
        if data is None:
            return False
        try:
            layout.check_marker(data, address)
        except DamagedFile:
            if self.came_whole(layout.MARKER, data):
                raise
            return False
        return True

    @property
    def broken(self) -> str | None:
        """Why nothing can currently be read, or None."""
        return self._breaker.why

    @property
    def since(self) -> float | None:
        """Since when, in seconds since the epoch."""
        return self._breaker.since

    def look(self, name: str, kind: str, key: str) -> EntryHeader | None:
        """The header of an entry, from memory or by one small read."""
        known, found = self._seen.find(name)
        if known:
            return found
        since = self._seen.removals
        found = self.asked(name, lambda: self._head(name, kind, key))
        if found is None or self._is_over(name, found.metadata):
            return None
        self._seen.there(name, found, since)
        return found

    def _is_over(self, name: str, metadata: Record) -> bool:
        if not layout.expired(metadata):
            return False
        self._seen.absent(name)
        self._ended(name)
        return True

    def tensors(self, name: str, kind: str, key: str) -> tuple[Tensors, Record] | None:
        """Tensors and record, every byte checked."""
        return self._fetch(name, lambda data: self._parse(name, kind, key, data))

    def note(self, name: str, kind: str, key: str) -> Record | None:
        """Fetch and parse a note; None if it is absent or incomplete."""
        return self._fetch(
            name, lambda data: note_in(kind, key, data, f"{self._link.shown}/{name}")
        )

    def discard(self, name: str) -> None:
        """Treat an entry as absent here, and remove it for all if the address allows."""
        self._seen.rejected(name)
        with contextlib.suppress(Exception):  # it may be read-only
            self._link.remove(name)
            self._seen.absent(name)

    def asked(self, name: str, ask: Callable[[], T]) -> T | None:
        """The result of a call to the address; None on any failure."""
        if not self._breaker.allows(self._link.timeout):
            return None
        try:
            answer = ask()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._breaker.worked()
            self._seen.absent(name)
            return None
        except Exception as error:
            self._breaker.failed(error)
            return None
        self._breaker.worked()
        return answer

    def _head(self, name: str, kind: str, key: str) -> EntryHeader | None:
        try:
            return head(self._link, name, kind, key)
        except WrongFormatVersion:
            self._seen.foreign(name)
        except FileError:
            # Damaged, or the connection broke: a full read finds out which.
            (self.note if kind in layout.NOTES else self.tensors)(name, kind, key)
        return None

    def _parse(
        self, name: str, kind: str, key: str, data: bytes
    ) -> tuple[tuple[Tensors, Record], Record]:
        where = f"{self._link.shown}/{name}"
        tensors, record = tensorfile.parse(data, where, kind, entryfile.FORMAT)
        if record.get("entry") != key:
            raise DamagedFile(f"{where}: this is the entry {record.get('entry')!r}")
        return (tensors, record), metadata_in(kind, key, record)

    def _fetch(self, name: str, parse: Callable[[bytes], tuple[T, Record]]) -> T | None:
        known, found = self._seen.find(name)
        if known and found is None:
            return None
        since = self._seen.removals
        data = self.asked(name, lambda: self._link.read(name))
        if data is None:
            return None
        try:
            content, metadata = parse(data)
        except WrongFormatVersion as error:
            # Another version's entry is intact, and somebody may still want it.
            logger.warning("%s; left as it is", error)
            self._seen.foreign(name)
            return None
        except FileError as error:
            self._doubt(name, data, error)
            return None
        if self._is_over(name, metadata):
            return None
        self._seen.there(
            name, EntryHeader(metadata, found.cost if found is not None else 0.0), since
        )
        self._seen.touch(name)
        return content

    def _doubt(self, name: str, data: bytes, error: FileError) -> None:
        if self.came_whole(name, data):
            logger.warning("damaged entry set aside: %s", error)
            self.discard(name)

    def came_whole(self, name: str, data: bytes) -> bool:
        """Whether these are the bytes at the address, by reading it again. Damage on the way is no
        reason to remove an entry there, which others can read."""
        again = self.asked(name, lambda: (self._link.info(name).nbytes, self._link.read(name)))
        if again is None:
            return False
        size, twice = again
        if twice != data or size != len(data):
            self._breaker.failed(OSError(f"received {len(data)} bytes of {name} out of {size}"))
            return False
        return True
