"""Bytes under a key: a bounded memory, and a folder that outlives the process.

A key names its content, so writers never need locks: whoever writes the same key writes the same
bytes. Writing happens in one background thread, so no answer waits for a disk; `flush()` returns
when everything handed over before it is on the disk. A folder that cannot be written is given up
with one warning and everything goes on without it. A damaged entry is named in a warning, moved
aside and reported as absent, so it is computed again.

This module knows nothing of images, models or prompts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from keepsight import keys, tensorfile
from keepsight.errors import DamagedFile, FileError, StoreError, WrongFormatVersion

logger = logging.getLogger(__name__)

FORMAT = 1
_NOTES = ("alias", "made", "weights")  # the kinds that are JSON alone
T = TypeVar("T")


@dataclass
class _Job:
    """One write that has not reached the disk yet."""

    kind: str
    key: str
    record: dict[str, Any]
    tensors: dict[str, torch.Tensor] | None  # None: a note, JSON alone


class DiskStore:
    """A folder of tensor files and small JSON notes, each under a kind and a key."""

    def __init__(self, root: str | Path, budget: int | None = None) -> None:
        if "://" in str(root):
            raise StoreError(f"{root}: only local folders can be a store so far")
        self.root = Path(root).expanduser()
        self.budget = budget
        self.broken: str | None = None
        self._lost: str | None = None  # what one write failed of, until a `flush` has told it
        self._unreadable = False
        self._pending: dict[tuple[str, str], _Job] = {}
        self._queue: queue.Queue[_Job | None] = queue.Queue()
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._written = 0

    # -- reading ---------------------------------------------------------------------------------

    def has(self, kind: str, key: str) -> bool:
        """Whether a read of this entry can be expected to work."""
        return (kind, key) in self._pending or os.path.exists(self._path(kind, key))

    def get(self, kind: str, key: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """Tensors and record, or None when absent or damaged."""
        job = self._pending.get((kind, key))
        if job is not None and job.tensors is not None:
            return job.tensors, job.record
        return self._careful(self._read, kind, key)

    def note(self, kind: str, key: str) -> dict[str, Any] | None:
        """A small JSON record, or None when absent or damaged."""
        job = self._pending.get((kind, key))
        if job is not None:
            return job.record
        return self._careful(self._read_note, kind, key)

    def reject(self, kind: str, key: str, why: str) -> None:
        """Set aside an entry whose content turned out not to be what its key says."""
        self._set_aside(self._path(kind, key), why)

    def _careful(self, read: Callable[[str, str], T], kind: str, key: str) -> T | None:
        """What can be read. Only a file that is wrong is set aside, not one out of reach."""
        path = self._path(kind, key)
        try:
            found = read(kind, key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except WrongFormatVersion as error:
            # Another version's entry is sound, and somebody may still want it.
            logger.warning("%s; left as it is", error)
            return None
        except FileError as error:
            self._set_aside(path, error)
            return None
        except OSError as error:
            if not self._unreadable:
                self._unreadable = True
                logger.warning("the store %s cannot be read (%s); going on", self.root, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the age that `gc` goes by
        return found

    def _read(self, kind: str, key: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        path = self._path(kind, key)
        tensors, record = tensorfile.read(path, kind, FORMAT)
        if record.get("entry") != key:
            raise DamagedFile(f"{path}: this is the entry {record.get('entry')!r}")
        return tensors, record

    def _read_note(self, kind: str, key: str) -> dict[str, Any]:
        path = self._path(kind, key)
        data = path.read_bytes()
        try:
            wrapped = json.loads(data)
            body: dict[str, Any] = dict(wrapped["body"])
            if wrapped["digest"] != _note_digest(kind, key, body):
                raise ValueError("the note does not match its digest")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedFile(f"{path}: {error}") from None
        return body

    # -- writing ---------------------------------------------------------------------------------

    def put(
        self, kind: str, key: str, tensors: dict[str, torch.Tensor], record: dict[str, Any]
    ) -> None:
        """Hand an entry to the writer; the tensors must not change afterwards."""
        self._hand_over(_Job(kind, key, record, tensors))

    def put_note(self, kind: str, key: str, body: dict[str, Any]) -> None:
        """Hand a small JSON record to the writer."""
        self._hand_over(_Job(kind, key, body, None))

    def flush(self) -> None:
        """Return when everything handed over before is on the disk, or say that it is not."""
        self._queue.join()
        lost, self._lost = self._lost, None
        if self.broken or lost:
            raise StoreError(f"{self.root} could not be written: {self.broken or lost}")

    def close(self) -> None:
        """Finish writing and stop the writer."""
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join()
            self._writer = None

    def _hand_over(self, job: _Job) -> None:
        if self.broken is not None or self.has(job.kind, job.key):
            return
        with self._lock:
            self._pending[job.kind, job.key] = job
            if self._writer is None:
                self._writer = threading.Thread(
                    target=self._write_all, name="keepsight-store", daemon=True
                )
                self._writer.start()
        self._queue.put(job)

    def _write_all(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if self.broken is None:
                    self._write(job)
                    self._keep_budget()
            except OSError as error:
                self.broken = str(error)
                logger.warning(
                    "the store %s cannot be written (%s); going on without it", self.root, error
                )
            except Exception as error:
                self._lost = f"{job.kind}/{job.key}: {error}"
                logger.exception("writing %s/%s failed; going on without it", job.kind, job.key)
            finally:
                self._pending.pop((job.kind, job.key), None)
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, job: _Job) -> None:
        path = self._path(job.kind, job.key)
        if job.tensors is not None:
            record = dict(job.record, entry=job.key)
            self._written += tensorfile.write(path, job.kind, FORMAT, job.tensors, record)
            return
        digest = _note_digest(job.kind, job.key, job.record)
        text = keys.canonical_json({"body": job.record, "digest": digest})
        self._written += tensorfile.write_whole(path, [text.encode()])

    # -- housekeeping ----------------------------------------------------------------------------

    def entries(self) -> Iterator[tuple[str, str, int, float]]:
        """(kind, key, bytes, last use) of everything on the disk."""
        for path in self.root.glob("*/??/*"):
            if path.name.startswith(".") or path.suffix == ".damaged":
                continue
            with contextlib.suppress(OSError):
                status = path.stat()
                yield path.parts[-3], path.stem, status.st_size, status.st_mtime

    def stats(self) -> dict[str, Any]:
        """Entries and bytes per kind."""
        kinds: dict[str, dict[str, int]] = {}
        for kind, _, size, _ in self.entries():
            counted = kinds.setdefault(kind, {"entries": 0, "bytes": 0})
            counted["entries"] += 1
            counted["bytes"] += size
        total = sum(k["bytes"] for k in kinds.values())
        return {"root": str(self.root), "bytes": total, "kinds": kinds, "broken": self.broken}

    def clear(self) -> int:
        """Remove every entry; the number of bytes freed."""
        self._queue.join()
        freed = 0
        for kind, key, size, _ in list(self.entries()):
            with contextlib.suppress(OSError):
                self._path(kind, key).unlink()
                freed += size
        self._sweep(0.0)
        return freed

    def gc(self, budget: int) -> int:
        """Remove the least recently used entries until the rest fits; bytes freed."""
        entries = sorted(self.entries(), key=lambda entry: entry[3])
        total, freed = sum(entry[2] for entry in entries), 0
        for kind, key, size, _ in entries:
            if total - freed <= budget:
                break
            with contextlib.suppress(OSError):
                self._path(kind, key).unlink()
                freed += size
        self._sweep(7 * 86400.0)
        return freed

    def _sweep(self, age: float) -> None:
        """Remove damaged entries of that age, and what killed writers left behind."""
        for pattern, seconds in (("*.damaged", age), (".part-*", 3600.0)):
            for leftover in self.root.glob(f"*/??/{pattern}"):
                with contextlib.suppress(OSError):
                    if leftover.stat().st_mtime <= time.time() - seconds:
                        leftover.unlink()

    def check(self) -> list[str]:
        """Read every entry in full; what is wrong, one line each."""
        wrong = []
        for kind, key, _, _ in self.entries():
            read: Callable[[str, str], Any] = self._read_note if kind in _NOTES else self._read
            try:
                read(kind, key)
            except (FileError, OSError) as error:
                wrong.append(str(error))
        return wrong

    def _keep_budget(self) -> None:
        # A scan costs time, so it runs after each sixteenth of the budget that was written.
        if self.budget is not None and self._written > self.budget // 16:
            self._written = 0
            self.gc(self.budget)

    def _set_aside(self, path: Path, error: object) -> None:
        logger.warning("damaged entry set aside: %s (%s)", path, error)
        with contextlib.suppress(OSError):
            os.replace(path, path.with_suffix(".damaged"))

    def _path(self, kind: str, key: str) -> Path:
        suffix = ".json" if kind in _NOTES else ".sight" if kind == "package" else ".keep"
        return self.root / kind / key[:2] / f"{key}{suffix}"


def _note_digest(kind: str, key: str, body: dict[str, Any]) -> str:
    """The key is part of it, so that no note can pass for another."""
    return keys.digest("note", kind, key, keys.canonical_json(body))
