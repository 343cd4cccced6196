"""One entry as one file: tensors with a record, or a note; and its metadata.

The file is the truth. It contains its key, its base, the images it depends on and its expiry, so
everything here works without a catalogue.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from keepsight.errors import DamagedFile
from keepsight.formats import tensorfile
from keepsight.kinds import Record
from keepsight.store import layout
from keepsight.store.contract import NOTHING, About, Tensors

FORMAT = 1
Parts = Iterable[bytes | memoryview]


def spelled(
    kind: str, key: str, tensors: Tensors | None, record: Record, metadata: Record
) -> Parts:
    """The parts of the file. A note has no tensors."""
    if tensors is None:
        return [layout.note_bytes(kind, key, record, metadata)]
    record = dict(record, entry=key, kept=metadata)
    return tensorfile.spelled(kind, FORMAT, tensors, record)


def read(path: Path, kind: str, key: str) -> tuple[Tensors, Record]:
    """Tensors and record, with every byte and the key checked."""
    _refuse_pipes(path)
    tensors, record = tensorfile.read(path, kind, FORMAT)
    if record.get("entry") != key:
        raise DamagedFile(f"{path}: this is the entry {record.get('entry')!r}")
    return tensors, record


def read_note(path: Path, kind: str, key: str) -> tuple[Record, Record]:
    """Body and metadata of a note."""
    _refuse_pipes(path)
    return layout.read_note(kind, key, path.read_bytes(), str(path))


def _refuse_pipes(path: Path) -> None:
    """Refuse pipes and devices: opening one may block forever."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DamagedFile(f"{path} is a pipe or a device and no file")


def read_metadata(path: Path, kind: str, key: str) -> Record:
    """The metadata in the file; tensors are neither read nor checked."""
    if kind in layout.NOTES:
        data = path.read_bytes()
        body, metadata = layout.read_note(kind, key, data, str(path))
        return metadata if "kept" in json.loads(data) else older(kind, key, body)
    record = tensorfile.read_record(path)
    found = record.get("kept")
    return found if isinstance(found, dict) else older(kind, key, record)


def read_record(path: Path, kind: str, key: str) -> Record:
    """The record of an entry; its tensors are neither read nor checked."""
    _refuse_pipes(path)
    record = tensorfile.read_record(path)
    if record.get("entry") != key:
        raise DamagedFile(f"{path}: this is the entry {record.get('entry')!r}")
    return record


def verify(path: Path, kind: str, key: str) -> None:
    """Read every byte; raise a named error if the file does not match its name."""
    if kind in layout.NOTES:
        read_note(path, kind, key)
    else:
        read(path, kind, key)


def live(status: os.stat_result, now: float) -> bool:
    """Whether the entry is not expired, judged without reading it.

    A file with an expiry carries it as its modification time. Only such a file can have a
    modification time after its last status change, which cannot be set. If a copy lost this mark,
    the file itself gives the expiry when it is read, as on Windows, which knows no such change.
    """
    if os.name == "nt" or status.st_mtime <= status.st_ctime + 0.01:
        return True
    lifetime = status.st_mtime - status.st_ctime + layout.CLOCK_SLACK
    return now < status.st_mtime <= now + lifetime


def about(metadata: Record, cost: float = 0.0) -> About:
    """The metadata as given to `put`."""
    return layout.about_of(metadata, cost) if metadata else NOTHING


def older(kind: str, key: str, record: Record) -> Record:
    """The metadata of entries older than file metadata, as far as their content tells."""
    media: list[object] = []
    base: list[object] | None = None
    if kind in ("package", "alias"):
        media = [record.get("key")]
    elif kind == "made":
        base = ["package", record.get("feature_id")]
    elif kind == "state":
        base = ["snapshot", key]
    elif kind == "snapshot":
        spans = record.get("spans")
        rows = spans if isinstance(spans, list) else []
        # Their spans name features, and `delete_media` maps an image to its features.
        media = [row[2] for row in rows if isinstance(row, list) and len(row) > 2]
        if record.get("start"):
            base = ["snapshot", record.get("parent")]
    metadata: Record = {"media": [name for name in media if isinstance(name, str)]}
    if base is not None and layout.is_name(*base):
        metadata["stands_on"] = base
    return metadata
