"""Splits sources that a user names into pieces, and pieces into items.

A piece is one file (or one line of a list) as plain data, so it can be sent to another machine;
finding pieces opens only lists. A piece is read when its turn comes, and an error in it becomes an
item.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keepsight.encode import documents, tables
from keepsight.encode.archives import tar_items, zip_items
from keepsight.encode.items import Item, ReadOptions, broken, of_file, of_text
from keepsight.errors import InputError

# File types taken from a folder; a file named directly or by a glob with a suffix is always tried.
_SUFFIXES = {
    "image": r"avif|bmp|gif|heic|heif|jfif|jpe|jpeg|jpg|pbm|pgm|png|pnm|ppm|tga|tif|tiff|webp",
    "pdf": "pdf",
    "video": r"mp4|mov|mkv|webm|avi|m4v",
    "parquet": "parquet|pq",
    "arrow": "arrow|feather|ipc",
    "zip": "zip",
    "tar": r"tar|tgz|tbz2|tar\.gz|tar\.bz2|tar\.xz|tar\.zst",
    "list": "txt|lst|csv|tsv|jsonl|ndjson",
}
_KINDS = {kind: re.compile(rf".*\.(?:{s})", re.I | re.S) for kind, s in _SUFFIXES.items()}
MAX_LINE = 64 << 20  # may contain a data URI


@dataclass(frozen=True)
class SourcePiece:
    """One file, or one line of a list, that holds items."""

    path: str
    kind: str
    place: str  # equal on all machines
    folder: str = ""  # base of a line's relative path
    error: str = ""  # error of an invalid line


@dataclass
class SourceScan:
    """The pieces of some sources, each file once, and the places of ignored files."""

    pieces: list[SourcePiece] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def find(sources: Sequence[str | os.PathLike[str]], column: str = "image") -> SourceScan:
    """Files, folders (with their contents), globs and lists, in a stable order."""
    found, seen = SourceScan(), set()
    for source in sources:
        for piece in _pieces_of(os.fspath(source), column, found):
            mark = (piece.path, piece.place if piece.kind in ("text", "broken") else "")
            if mark not in seen:
                seen.add(mark)
                found.pieces.append(piece)
    return found


def _pieces_of(source: str, column: str, found: SourceScan) -> Iterator[SourcePiece]:
    if source.startswith(("http://", "https://")):
        yield SourcePiece(source, "text", source)
        return
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        yield from _inside(path, "", found)
    elif os.path.lexists(path):
        yield from _file(path, os.path.basename(path), column)
    else:
        yield from _matches(source, path, column, found)


def _matches(source: str, pattern: str, column: str, found: SourceScan) -> Iterator[SourcePiece]:
    """The matches of a glob: all if it has a suffix, otherwise as from a folder."""
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
        raise InputError(f"{source}: there is no such file or folder, and nothing matches it")
    fixed = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    root = os.path.dirname(fixed)
    all_of_it = bool(os.path.splitext(pattern)[1])
    for path in paths:
        place = os.path.relpath(path, root or ".")
        if os.path.isdir(path):
            yield from _inside(path, place, found)
        elif all_of_it:
            yield from _file(path, place, column)
        else:
            yield from _taken(path, place, found)


def _inside(folder: str, place: str, found: SourceScan) -> Iterator[SourcePiece]:
    """The usable files in a folder, without hidden ones."""
    for root, folders, files in os.walk(os.path.normpath(folder)):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = os.path.normpath(os.path.join(place, os.path.relpath(root, folder)))
        saved = tables.saved_tables(root)
        if saved is not None:  # other tables in there are caches of `datasets`
            for path in saved:
                yield SourcePiece(path, "arrow", os.path.join(here, os.path.basename(path)))
            continue
        for name in sorted(files):
            if not name.startswith("."):
                path = os.path.normpath(os.path.join(root, name))
                yield from _taken(path, os.path.normpath(os.path.join(here, name)), found)


def _taken(path: str, place: str, found: SourceScan) -> Iterator[SourcePiece]:
    kind = kind_of(path)
    if kind in (None, "list"):
        found.left_out.append(place)
    else:
        yield SourcePiece(path, str(kind), place)


def kind_of(path: str) -> str | None:
    """The kind of a file by its suffix, or None."""
    return next((kind for kind, suffixes in _KINDS.items() if suffixes.fullmatch(path)), None)


def _file(path: str, place: str, column: str) -> Iterator[SourcePiece]:
    kind = kind_of(path) or "image"
    if kind == "list":
        yield from _lines(path, place, column)
    else:
        yield SourcePiece(path, kind, place)


# -- lists ---------------------------------------------------------------------------------------


def _lines(path: str, place: str, column: str) -> Iterator[SourcePiece]:
    """The lines of a list: paths relative to the list, or URLs."""
    folder = os.path.dirname(path)
    for number, (text, error) in _entries(path, column):
        spot = f"{place}#line={number}"
        if error:
            yield SourcePiece(f"{path}#line={number}", "broken", spot, error=error)
            continue
        whole = os.path.join(folder, text)
        kind = kind_of(text) if "://" not in text and not text.startswith("data:") else None
        if kind == "list" or os.path.isdir(whole):
            error = f"{path}, line {number}: {text} is a list or a folder; name it as a source"
            yield SourcePiece(whole, "broken", spot, error=error)
        elif kind in (None, "image"):
            yield SourcePiece(text, "text", spot, folder)
        else:
            yield SourcePiece(whole, kind, spot)


def _entries(path: str, column: str) -> Iterator[tuple[int, tuple[str, str]]]:
    """(line number, (entry, error)) for each line that is not blank."""
    suffix = os.path.splitext(path)[1].lower()
    try:
        # File names may hold any bytes; they are restored unchanged.
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            if suffix in (".csv", ".tsv"):
                yield from _table(path, file, column, "\t" if suffix == ".tsv" else ",")
            else:
                read = _json_entry if suffix in (".jsonl", ".ndjson") else _plain_entry
                yield from _each_line(path, file, lambda line: read(line, column))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _each_line(
    path: str, file: io.TextIOBase, read: Callable[[str], tuple[str, str]]
) -> Iterator[tuple[int, tuple[str, str]]]:
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE and not line.endswith("\n"):
            raise InputError(f"{path}, line {number} is longer than {MAX_LINE} characters")
        if line.strip():
            yield number, read(line)


def _plain_entry(line: str, column: str) -> tuple[str, str]:
    return line.rstrip("\r\n"), ""


def _json_entry(line: str, column: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return "", f"this line is not JSON: {error}"
    if not isinstance(record, dict) or column not in record:
        names = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        return "", f"this line has no {column!r}, only: {names}; choose with --column"
    value = record[column]
    if isinstance(value, str) and value.strip():
        return value, ""
    return "", f"{column!r} is {value!r:.80}, expected a path or a URL"


def _table(
    path: str, file: Iterable[str], column: str, comma: str
) -> Iterator[tuple[int, tuple[str, str]]]:
    rows = csv.DictReader(file, delimiter=comma, strict=True)
    try:
        names = list(rows.fieldnames or ())
        if column not in names:
            raise InputError(
                f"{path} has no column {column!r}; name one of these with --column: "
                f"{', '.join(names)}"
            )
        for row in rows:
            value = row.get(column) or ""
            error = "" if value.strip() else f"the column {column!r} is empty in this line"
            yield rows.line_num, (value, error)
    except csv.Error as error:
        raise InputError(f"{path}, line {rows.line_num}: {error}") from None


# -- pieces to items -----------------------------------------------------------------------------


def items(pieces: Iterable[SourcePiece], reading: ReadOptions) -> Iterator[Item]:
    """The items in some pieces, in order, read on demand."""
    for piece in pieces:
        yield from _items(piece, reading)


def _items(piece: SourcePiece, reading: ReadOptions) -> Iterator[Item]:
    path, place, kind = piece.path, piece.place, piece.kind
    if kind == "pdf":
        yield from documents.pdf_items(path, place, reading.dpi)
    elif kind == "video" and reading.fps is None:
        yield from documents.clip_items(path, place)
    elif kind == "video":
        yield from documents.frame_items(path, place, reading.fps or 1.0)
    elif kind == "parquet":
        yield from tables.parquet_items(path, place, reading.column)
    elif kind == "arrow":
        yield from tables.arrow_items(path, place, reading.column)
    elif kind == "zip":
        yield from zip_items(path, place, _is_image)
    elif kind == "tar":
        yield from tar_items(path, place, _is_image)
    elif kind == "text":
        yield of_text(path, piece.folder, path, place)
    elif kind == "broken":
        yield broken(path, place, piece.error)
    else:
        yield of_file(path, place)


def _is_image(name: str) -> bool:
    return kind_of(name) == "image" and not os.path.basename(name).startswith(".")


def count(pieces: Iterable[SourcePiece], reading: ReadOptions) -> int | None:
    """The number of items in some pieces, as far as it is known without reading them."""
    total = 0
    for piece in pieces:
        number: int | None = 1
        if piece.kind == "pdf":
            number = documents.page_count(piece.path)
        elif piece.kind == "parquet":
            number = tables.row_count(piece.path)
        elif piece.kind == "zip":
            number = _members(piece.path)
        elif piece.kind in ("tar", "arrow") or (piece.kind == "video" and reading.fps):
            return None
        total += 1 if number is None else number
    return total


def _members(path: str) -> int | None:
    try:
        with zipfile.ZipFile(Path(path)) as archive:
            return sum(_is_image(name) for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return None
