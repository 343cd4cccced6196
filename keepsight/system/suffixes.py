"""What can be looked at, by the suffixes of files: one list for commands and for data sets."""

from __future__ import annotations

import re

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


def kind_of(path: str) -> str | None:
    """The kind of a file by its suffix, or None."""
    return next((kind for kind, suffixes in _KINDS.items() if suffixes.fullmatch(path)), None)


def is_package(path: str) -> bool:
    """Whether a file is called as a package is."""
    return path.lower().endswith(".sight")


def can_be_looked_at(path: str) -> bool:
    """Whether a file is called as one of any kind."""
    return kind_of(path) is not None or is_package(path)


def is_picture(path: str) -> bool:
    """Whether a file is called as one that goes into a question."""
    return kind_of(path) in ("image", "pdf") or is_package(path)
