"""What becomes of an image, and what a place for packages must do.

Nothing here knows where packages go.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from keepsight.encode.items import Item
from keepsight.kinds import Record


@dataclass(frozen=True)
class Encoded:
    """What became of one image."""

    image: str  # its name
    status: str  # "encoded", "kept" (was there before), "duplicate" (of this run), or one of:
    # "skipped" (too many tokens), "refused" (by the store) and "broken", where `error` says why
    feature_id: str | None = None
    tokens: int = 0
    nbytes: int = 0  # written by this image
    error: str | None = None
    package: Path | None = None  # where packages are files

    def to_dict(self) -> Record:
        """Plain data for JSON."""
        package = None if self.package is None else str(self.package)
        return {**vars(self), "package": package}


class EncodeTarget(Protocol):
    """Where packages go."""

    def look(self, item: Item) -> Any:
        """Do all that needs no tower, in a thread: open, name, decode and preprocess."""

    def settle(self, look: Any) -> Encoded:
        """Do the rest, in the order of the items: run the tower and hand the package over."""

    def flush(self) -> None:
        """Return when all that was settled is safe, but for what the place refuses."""

    def confirm(self, result: Encoded) -> Encoded:
        """What became of an image, after `flush`: whether its package is really there."""

    def look_back(self, most: int | None) -> None:
        """Raise an error if packages that were confirmed before are gone again; of so many of the
        first, or of all."""


class Once:
    """Which packages this run has counted, up to a number: memory must not grow without end."""

    def __init__(self, most: int = 1_000_000) -> None:
        self._most = most
        self._seen: dict[bytes, None] = {}

    def first(self, feature_id: str) -> bool:
        """Whether this is the first time; after a million others it may be so again."""
        mark = bytes.fromhex(feature_id)
        if mark in self._seen:
            return False
        if len(self._seen) >= self._most:
            del self._seen[next(iter(self._seen))]
        self._seen[mark] = None
        return True

    def forget(self, feature_id: str) -> None:
        """It was not kept after all."""
        self._seen.pop(bytes.fromhex(feature_id), None)

    def earliest(self, most: int | None) -> Iterator[str]:
        """The first that were counted, so many or all."""
        yield from (mark.hex() for mark in list(itertools.islice(self._seen, most)))


def too_many(tokens: int, most: int | None) -> str | None:
    """Why an image is skipped, or None where it is not."""
    if most is None or tokens <= most:
        return None
    return f"{tokens} tokens, more than {most}; --max-pixels would make it smaller"
