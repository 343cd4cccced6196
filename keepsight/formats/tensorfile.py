"""One file of tensors with one JSON record: the base format of `.sight`, `.keep` and snapshots.

The file is plain safetensors, so any safetensors reader opens it; our record is in its metadata
under the key `keepsight`. The record holds a digest of every tensor and of itself, so any flipped
bit is found. Reading trusts nothing: sizes are checked before memory is allocated, and a truncated
or inconsistent file raises a named error. Writing goes to a temporary sibling that is renamed into
place, because a rename happens completely or not at all.

Reader and writer are our own. The writer of safetensors 0.8 orders the metadata differently each
time, so equal content would not give equal bytes, and it hides why a disk refused. Its reader maps
the file, which may change after it was checked, or copies every tensor from bytes read before: 64
MiB take 81 or 170 ms instead of 28, and an entry of a store is often read while somebody waits for
a first token. It cannot read a header alone.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from keepsight.errors import (
    DamagedFile,
    InputError,
    KeepsightError,
    NotKeepsightFile,
    StoreError,
    WrongFormatVersion,
)
from keepsight.kinds import Record
from keepsight.system import digests, private_files

if TYPE_CHECKING:  # a record is read without PyTorch
    import torch

Where = Path | str
MAX_HEADER = 64 << 20
_HEAD = 64 << 10  # bytes within which the record of a file usually ends
_LARGE = 2 << 20  # size of a huge page
_MAX_DIMENSIONS = 64
_KEY = "keepsight"
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def spelled(
    kind: str, version: int, tensors: Mapping[str, torch.Tensor], record: Record
) -> Iterator[bytes | memoryview]:
    """The parts of the file in order; equal content gives equal bytes."""
    tensors = {name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}
    body = dict(record, kind=kind, format=version)
    body["tensors"] = {name: digests.digest("tensor", t) for name, t in tensors.items()}
    text = digests.canonical_json(body)
    metadata = {"format": "pt", _KEY: text, "digest": digests.digest("record", text)}
    header, order = _spell(tensors, metadata)
    body_parts = (digests.tensor_bytes(tensors[name]) for name in order)
    return itertools.chain([header], body_parts)


def _spell(
    tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]
) -> tuple[bytes, list[str]]:
    """The header, and the tensors in file order: widest elements first, so that each tensor starts
    at a multiple of its element size, then by name."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: Record = {"__metadata__": metadata}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        dtype = _NAMES.get(str(tensor.dtype).removeprefix("torch."))
        if name == "__metadata__" or dtype is None:
            raise InputError(
                f"tensor {name!r} ({tensor.dtype}) cannot be written: safetensors has no such name "
                "or dtype"
            )
        end += tensor.nbytes
        places = {"shape": list(tensor.shape), "data_offsets": [start, end]}
        header[name] = {"dtype": dtype, **places}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def save(
    path: Path, kind: str, version: int, tensors: Mapping[str, torch.Tensor], record: Record
) -> None:
    """Write a file that a person named: the error says why it cannot be written."""
    parts = spelled(kind, version, tensors, record)
    try:
        private_files.write_whole(path, parts)
    except (OSError, ValueError) as error:  # a ValueError: no path at all
        raise StoreError(f"{path} cannot be written: {_why(error)}") from error


def load(path: Path, kind: str, version: int) -> tuple[dict[str, torch.Tensor], Record]:
    """`read` for a file that a person named: the error says why it cannot be read."""
    try:
        return read(path, kind, version)
    except KeepsightError:
        raise
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {_why(error)}") from error


def _why(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def read(path: Path, kind: str, version: int) -> tuple[dict[str, torch.Tensor], Record]:
    """Tensors and record, with every byte checked. The tensors are views of one buffer."""
    with open(path, "rb") as file:
        return _read(file, os.fstat(file.fileno()).st_size, path, kind, version)


def parse(
    data: bytes | bytearray | memoryview, where: str, kind: str, version: int
) -> tuple[dict[str, torch.Tensor], Record]:
    """`read` for the bytes of a whole file; the tensors do not share them."""
    return _read(io.BytesIO(data), len(data), where, kind, version)


def read_record(path: Path) -> Record:
    """The record alone, of any kind; tensors are neither read nor checked."""
    with open(path, "rb") as file:
        header, _ = _header(file, os.fstat(file.fileno()).st_size, path)
    return _record(header.get("__metadata__"), path, None, None)


def fetch_record(fetch: Callable[[int], bytes], where: str, kind: str, version: int) -> Record:
    """The record alone, where `fetch` gives as many first bytes as are asked for."""
    data = fetch(asked := _HEAD)
    needed = 8 + int.from_bytes(data[:8], "little")
    if len(data) == asked < needed <= 8 + MAX_HEADER:
        data = fetch(asked := needed)
    size = len(data) if len(data) < asked else 1 << 62  # a shorter answer is the whole file
    header, _ = _header(io.BytesIO(data), size, where)
    return _record(header.get("__metadata__"), where, kind, version)


def _read(
    file: BinaryIO, size: int, where: Where, kind: str, version: int
) -> tuple[dict[str, torch.Tensor], Record]:
    import torch

    header, start = _header(file, size, where)
    record = _record(header.pop("__metadata__", None), where, kind, version)
    places = _places(header, size - start, where)
    buffer = _room(size - start)
    if file.readinto(buffer.numpy().data) != size - start:  # type: ignore[attr-defined]
        raise DamagedFile(f"{where}: the file ends early; delete it and make it again")
    try:
        tensors = {
            name: buffer[a:b].view(d).reshape(shape) if b > a else torch.empty(shape, dtype=d)
            for name, (d, shape, a, b) in places.items()
        }
    except (RuntimeError, TypeError) as error:  # an absurd shape, or an unaligned place
        raise DamagedFile(f"{where}: a tensor cannot be laid out: {error}") from None
    _check_digests(tensors, record.get("tensors"), where)
    return tensors, record


def _room(size: int) -> torch.Tensor:
    """Memory for the tensors of a file, in huge pages if available.

    For a file in the page cache, allocating small pages takes longer than reading. The file itself
    is not mapped: it may be changed or truncated after it was checked.
    """
    import torch

    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=torch.uint8)


def _header(file: BinaryIO, size: int, path: Where) -> tuple[Record, int]:
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > MAX_HEADER or length < 2:
        raise NotKeepsightFile(f"{path}: not a Keepsight file (no safetensors header)")
    if 8 + length > size:
        raise DamagedFile(f"{path}: the header says {length} bytes, the file has {size - 8}")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError):
        raise NotKeepsightFile(f"{path}: not a Keepsight file (its header is not JSON)") from None
    if not isinstance(header, dict):
        raise NotKeepsightFile(f"{path}: not a Keepsight file (its header is not an object)")
    return header, 8 + length


def _record(metadata: object, path: Where, kind: str | None, version: int | None) -> Record:
    metadata = metadata if isinstance(metadata, dict) else {}
    text = metadata.get(_KEY)
    if not isinstance(text, str):
        raise NotKeepsightFile(f"{path}: a safetensors file, but without a Keepsight record")
    if metadata.get("digest") != digests.digest("record", text):
        raise DamagedFile(f"{path}: the record does not match its digest; make the file again")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise DamagedFile(f"{path}: the record is not readable")
    if kind is not None and record["kind"] != kind:
        raise NotKeepsightFile(f"{path}: this is a {record['kind']!r} file, expected {kind!r}")
    if version is not None and record.get("format") != version:
        raise WrongFormatVersion(
            f"{path}: format {record.get('format')!r}, this Keepsight reads format {version}; "
            "make the file again, or use the Keepsight that wrote it"
        )
    return record


def _places(
    header: Record, data: int, path: Where
) -> dict[str, tuple[torch.dtype, list[int], int, int]]:
    """The place of each tensor. The ranges must tile the data exactly: no gaps, no overlaps."""
    import torch

    places = {}
    for name, entry in header.items():
        try:
            dtype = getattr(torch, _DTYPES[entry["dtype"]])
            shape = _integers(entry["shape"])
            start, end = _integers(entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise DamagedFile(f"{path}: tensor {name!r} is not described properly") from None
        count = 1
        for n in shape:
            count *= n
        if end - start != count * dtype.itemsize:
            raise DamagedFile(f"{path}: tensor {name!r} lies about its shape or size")
        places[name] = (dtype, shape, start, end)
    cursor = 0
    for _, _, start, end in sorted(places.values(), key=lambda place: place[2:]):
        if start != cursor:
            raise DamagedFile(f"{path}: the tensors leave a gap or overlap")
        cursor = end
    if cursor != data:
        raise DamagedFile(
            f"{path}: the file holds {data} bytes of tensors, its header describes {cursor}"
        )
    return places


def _integers(values: object) -> list[int]:
    """Accept few integers below 2^63, cheap to multiply; a bool is no integer here."""
    if not isinstance(values, list) or len(values) > _MAX_DIMENSIONS:
        raise TypeError("expected a short list")
    if any(type(n) is not int or n >> 63 for n in values):
        raise TypeError("expected integers from zero on")
    return values


def _check_digests(tensors: dict[str, torch.Tensor], expected: object, path: Where) -> None:
    if not isinstance(expected, dict) or expected.keys() != tensors.keys():
        raise DamagedFile(f"{path}: the record and the file do not list the same tensors")
    for name, tensor in tensors.items():
        if digests.digest("tensor", tensor) != expected[name]:
            raise DamagedFile(f"{path}: tensor {name!r} does not match its digest")
