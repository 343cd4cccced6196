"""What the entries of a store are about: a model, tokens, and the files that pictures came from.

Read from the files of a store in a folder without counting as use. For an address, only what its
listing says is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from keepsight.errors import FileError
from keepsight.formats import tensorfile
from keepsight.kinds import Record
from keepsight.media.naming import FILE
from keepsight.store import Entry, Store, layout
from keepsight.store.files import read

_SHOWN = 3  # names shown per entry

# File names by tenant and image key, in the store's order.
Files = Mapping[tuple[str, str], tuple[str, ...]]


def files_of_media(store: Store, entries: Iterable[Entry]) -> Files:
    """The file names that notes record for each image; unreadable notes have none."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for entry in entries:
        path = _path(store, entry) if entry.kind == "alias" else None
        if path is None:
            continue
        try:
            name = read(path, entry.name)[0][1].get(FILE)
        except (FileError, OSError):
            continue  # listed unchanged; `check` reports it
        if isinstance(name, str) and name:
            for key in entry.media:
                found.setdefault((entry.tenant, key), {})[name] = None
    return {image: tuple(names) for image, names in found.items()}


def about_entry(store: Store, entry: Entry, files: Files) -> Record:
    """Model and tokens of a package, from its record alone, and the source files of any entry."""
    names = dict.fromkeys(n for key in entry.media for n in files.get((entry.tenant, key), ()))
    about: Record = {"files": list(names)} if names else {}
    path = _path(store, entry) if entry.kind == "package" else None
    if path is None:
        return about
    try:
        record = tensorfile.read_record(path)
        model = str(record["about"].get("model_type"))
        return about | {"model": model, "tokens": record["tokens"]}
    except (FileError, OSError, KeyError, AttributeError) as error:
        return about | {"damaged": f"damaged: {error}"}


def about_text(about: Record) -> str:
    """The same facts as text for one cell of a table."""
    names = about.get("files", [])
    words = [", ".join(names[:_SHOWN])] if names else []
    if len(names) > _SHOWN:
        words.append(f"{len(names) - _SHOWN} more")
    if "damaged" in about:
        words.append(about["damaged"])
    elif "model" in about:
        words.append(f"{about['model']}, {about['tokens']} tokens")
    return ", ".join(words)


def _path(store: Store, entry: Entry) -> Path | None:
    return None if store.root is None else store.root / layout.place(*entry.name)
