"""Sizes and times as people write them: `"2GiB"`, `"7d"`, or a plain number.

Imports little: the command line checks its options with these before it imports PyTorch.
"""

from __future__ import annotations

import contextlib

from keepsight.errors import InputError

_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_bytes(size: int | str) -> int:
    """`"2GiB"`, `"500 MB"` or a plain number of bytes."""
    value = _parsed(size, _BYTES, "kmgtib")
    if value is None or not 0 <= value < 1 << 62 or isinstance(size, float):
        raise InputError(f"{size!r} is not a size; write bytes as a number, or as in '2GiB'")
    return int(value)


def parse_seconds(time: float | str) -> float:
    """`"7d"`, `"36 h"`, `"90s"` or a plain number of seconds."""
    value = _parsed(time, _SECONDS, "smindhw")
    if value is None or not 0 < value < float("inf"):
        raise InputError(f"{time!r} is not a time; write seconds as a number, or as in '7d'")
    return float(value)


def bytes_text(size: float) -> str:
    """`1536` as `1.5 KiB`."""
    step = 0
    while size >= 1024 and step < len(_UNITS) - 1:
        size, step = size / 1024, step + 1
    return f"{size:.{1 if step else 0}f} {_UNITS[step]}"


def _parsed(value: float | str, units: dict[str, int], letters: str) -> float | None:
    """The number in its smallest unit; None if it is none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = value.strip().lower().replace(" ", "")
        number = text.rstrip(letters)
        with contextlib.suppress(ValueError, KeyError):
            return float(number) * units[text[len(number) :]]
    return None
