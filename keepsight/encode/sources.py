"""Splits sources that a user names into pieces, and pieces into items.

A piece is one file (or one line of a list) as plain data, so it can be sent to another machine;
finding pieces opens only lists. A piece is read when its turn comes, by the reader of its kind, and
an error in it becomes an item.
"""

from __future__ import annotations

import csv
import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeAlias

from keepsight.encode import archives, documents, tables
from keepsight.encode.items import At, Item, ReadOptions, broken, of_text
from keepsight.errors import InputError
from keepsight.media.sources import open_source
from keepsight.system.suffixes import kind_of

MAX_LINE = 64 << 20  # may contain a data URI
Sources: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"


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


# -- sources to pieces ---------------------------------------------------------------------------


def find(sources: Sources, column: str = "image") -> SourceScan:
    """Files, folders (with their contents), globs and lists, in a stable order."""
    found, seen = SourceScan(), set()
    # A text is also a sequence, of letters: of "/", for one.
    several = isinstance(sources, Iterable) and not isinstance(sources, str | os.PathLike)
    given: Iterable[Any] = sources if several else [sources]  # type: ignore[assignment]
    for source in given:
        if not isinstance(source, str | os.PathLike):
            raise InputError(
                f"a {type(source).__name__} is no source; expected the path of a file or a folder, "
                "an address, or several of those"
            )
        for piece in _pieces_of(os.fspath(source), column, found.left_out):
            mark = (piece.path, piece.place if piece.kind in ("text", "broken") else "")
            if mark not in seen:
                seen.add(mark)
                found.pieces.append(piece)
    return found


def _pieces_of(source: str, column: str, left_out: list[str]) -> Iterator[SourcePiece]:
    path = os.path.expanduser(source)
    if source.startswith(("http://", "https://")):
        yield SourcePiece(source, "text", source)
    elif os.path.isdir(path):
        yield from _inside(path, "", left_out)
    elif os.path.lexists(path):
        yield from _named(path, os.path.basename(path), column)
    else:
        yield from _matches(source, path, column, left_out)


def _matches(source: str, pattern: str, column: str, left_out: list[str]) -> Iterator[SourcePiece]:
    """The matches of a glob: all if it has a suffix, otherwise as from a folder."""
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
        raise InputError(f"{source}: there is no such file or folder, and nothing matches it")
    root = os.path.dirname(re.split(r"[*?\[]", pattern, maxsplit=1)[0])
    for path in paths:
        place = os.path.relpath(path, root or ".")
        if os.path.isdir(path):
            yield from _inside(path, place, left_out)
        elif os.path.splitext(pattern)[1]:
            yield from _named(path, place, column)
        else:
            yield from _taken(path, place, left_out)


def _named(path: str, place: str, column: str) -> Iterator[SourcePiece]:
    """A file that is named: of whatever suffix, it is tried."""
    kind = kind_of(path) or "image"
    if kind == "list":
        yield from _lines(path, place, column)
    else:
        yield SourcePiece(path, kind, place)


def _inside(folder: str, place: str, left_out: list[str]) -> Iterator[SourcePiece]:
    """The usable files in a folder, without hidden ones."""
    for root, folders, files in os.walk(os.path.normpath(folder)):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = os.path.join(place, os.path.relpath(root, folder))
        saved = tables.saved_tables(root)
        # Other tables beside those of `datasets` are its caches.
        for path in saved or ():
            yield SourcePiece(path, "arrow", _below(here, os.path.basename(path)))
        for name in sorted(files) if saved is None else ():
            if not name.startswith("."):
                yield from _taken(_below(root, name), _below(here, name), left_out)


def _below(folder: str, name: str) -> str:
    return os.path.normpath(os.path.join(folder, name))


def _taken(path: str, place: str, left_out: list[str]) -> Iterator[SourcePiece]:
    """A file of a folder, if its kind is known; lists are taken only if they are named."""
    kind = kind_of(path)
    if kind is None or kind == "list":
        left_out.append(place)
    else:
        yield SourcePiece(path, kind, place)


# -- lists ---------------------------------------------------------------------------------------


def _lines(path: str, place: str, column: str) -> Iterator[SourcePiece]:
    """The lines of a list: paths relative to the list, or URLs."""
    folder = os.path.dirname(path)
    for number, entry in _entries(path, column):
        spot = f"{place}#line={number}"
        if isinstance(entry, InputError):
            yield SourcePiece(f"{path}#line={number}", "broken", spot, error=str(entry))
            continue
        whole = os.path.join(folder, entry)
        kind = kind_of(entry) if "://" not in entry and not entry.startswith("data:") else None
        if kind == "list" or os.path.isdir(whole):
            error = f"{path}, line {number}: {entry} is a list or a folder; name it as a source"
            yield SourcePiece(whole, "broken", spot, error=error)
        elif kind in (None, "image"):
            yield SourcePiece(entry, "text", spot, folder)
        else:
            yield SourcePiece(whole, kind, spot)


def _entries(path: str, column: str) -> Iterator[tuple[int, str | InputError]]:
    """The number and the entry of each line that is not blank, or what is wrong with it."""
    suffix = os.path.splitext(path)[1].lower()
    try:
        # File names may hold any bytes; they are restored unchanged.
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            if suffix in (".csv", ".tsv"):
                yield from _rows(path, file, column, "\t" if suffix == ".tsv" else ",")
                return
            number = 0
            while line := file.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE and not line.endswith("\n"):
                    raise InputError(f"{path}, line {number} is longer than {MAX_LINE} characters")
                if line.strip():
                    as_json = suffix in (".jsonl", ".ndjson")
                    yield number, _of_json(line, column) if as_json else line.rstrip("\r\n")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _of_json(line: str, column: str) -> str | InputError:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return InputError(f"this line is not JSON: {error}")
    if isinstance(record, dict) and column in record:
        return _of_cell(record[column], column)
    names = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
    return InputError(f"this line has no {column!r}, only: {names}; choose with --column")


def _of_cell(value: object, column: str) -> str | InputError:
    if isinstance(value, str) and value.strip():
        return value
    return InputError(f"{column!r} is {value!r:.80} in this line, expected a path or a URL")


def _rows(
    path: str, file: IO[str], column: str, comma: str
) -> Iterator[tuple[int, str | InputError]]:
    rows = csv.DictReader(file, delimiter=comma, strict=True)
    try:
        tables.check_column(path, column, list(rows.fieldnames or ()))
        for row in rows:
            yield rows.line_num, _of_cell(row.get(column), column)
    except csv.Error as error:
        raise InputError(f"{path}, line {rows.line_num}: {error}") from None


# -- pieces to items -----------------------------------------------------------------------------


_READERS: dict[str, Callable[[SourcePiece, At, ReadOptions], Iterable[Item]]] = {
    "image": lambda _, at, how: [Item(*at, lambda: open_source(Path(at.name)))],
    "text": lambda piece, at, _: [of_text(piece.path, piece.folder, at)],
    "broken": lambda piece, at, _: [broken(at, piece.error)],
    "pdf": lambda _, at, how: documents.pdf_items(at, how.dpi),
    "video": lambda _, at, how: documents.video_items(at, how.fps),
    "parquet": lambda _, at, how: tables.table_items(at, "parquet", how.column),
    "arrow": lambda _, at, how: tables.table_items(at, "arrow", how.column),
    "zip": lambda _, at, how: archives.zip_items(at),
    "tar": lambda _, at, how: archives.tar_items(at),
}
_COUNTS = {"pdf": documents.page_count, "parquet": tables.row_count, "zip": archives.zip_count}


def items(pieces: Iterable[SourcePiece], reading: ReadOptions) -> Iterator[Item]:
    """The items in some pieces, in order, read on demand."""
    for piece in pieces:
        yield from _READERS[piece.kind](piece, At(piece.path, piece.place), reading)


def count(pieces: Iterable[SourcePiece], reading: ReadOptions) -> int | None:
    """The number of items in some pieces, as far as it is known without reading them."""
    total = 0
    for piece in pieces:
        if piece.kind in ("tar", "arrow") or (piece.kind == "video" and reading.fps):
            return None
        number = _COUNTS[piece.kind](piece.path) if piece.kind in _COUNTS else 1
        total += 1 if number is None else number
    return total
