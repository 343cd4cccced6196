"""Refuses what `keepsight show` cannot show, by its first bytes and without PyTorch.

Whether a file that passes is sound, reading it shows.
"""

from __future__ import annotations

from pathlib import Path

from keepsight.errors import InputError, NotKeepsightFile

_HEADER = 8  # bytes that say how long the record is, before its first brace
MANIFEST = "keepsight.json"  # of an export
_PARTS = (MANIFEST, "graphs")  # of an export, whole or damaged


def check_shown(path: Path) -> None:
    """Pass what may be a file of ours or an export; whether it is sound, reading it shows."""
    try:
        if path.is_dir():
            _check_folder(path)
            return
        with path.open("rb") as file:
            start = file.read(_HEADER + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(start) <= _HEADER or start[_HEADER:] != b"{":
        raise NotKeepsightFile(f"{path}: not a Keepsight file (no safetensors header)")


def _check_folder(path: Path) -> None:
    if any((path / part).exists() for part in _PARTS):
        return
    what = "neither a store nor an export"
    if (path / "config.json").is_file():
        raise InputError(f"{path} is {what}; what a model takes: keepsight plan {path}")
    found = next((f for end in ("sight", "keep") for f in sorted(path.glob(f"*.{end}"))), None)
    hint = f"one of its files: keepsight show {found}" if found else "name a .sight or .keep file"
    raise InputError(f"{path} is {what}; {hint}")
