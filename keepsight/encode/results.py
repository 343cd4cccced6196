"""Results of encoding, and the interface of a place for packages.

Nothing here knows where packages go.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from keepsight.encode.items import Item
from keepsight.kinds import Record
from keepsight.media.naming import Inspected


@dataclass(frozen=True)
class Encoded:
    """The result of one image."""

    image: str  # name of the item
    status: str  # "encoded", "kept" (was there before), "duplicate" (of this run), or one of:
    # "skipped" (too many tokens), "refused" (by the store) and "broken", where `error` says why
    feature_id: str | None = None
    tokens: int = 0
    nbytes: int = 0  # bytes written for this image
    error: str | None = None
    package: Path | None = None  # if packages are files

    def to_dict(self) -> Record:
        """Plain data for JSON."""
        package = None if self.package is None else str(self.package)
        return {**vars(self), "package": package}


class EncodeTarget(Protocol):
    """Where packages go."""

    batch: int  # pictures in a pass of the tower

    def look(self, item: Item) -> Any:
        """Do everything that needs no tower, in a thread: open, name, decode and preprocess."""

    def settle(self, look: Any, beside: Sequence[Inspected] = ()) -> Encoded:
        """Do the rest, in the order of the items: run the tower and hand over the package. Those
        `beside` it come next, and may share its pass."""

    def flush(self) -> None:
        """Return when everything settled is safe, except what the place refused."""

    def confirm(self, result: Encoded) -> Encoded:
        """The final result of an image, after `flush`: whether its package really exists."""

    def look_back(self, most: int | None) -> None:
        """Raise if packages confirmed earlier are gone; checks the first `most`, or all."""


class CountedPackages:
    """Which packages this run has counted, up to a limit, so that memory stays bounded."""

    def __init__(self, most: int = 1_000_000) -> None:
        self._most = most
        self._seen: dict[bytes, None] = {}

    def first(self, feature_id: str) -> bool:
        """Whether this is the first time; after a million others it may be True again."""
        mark = bytes.fromhex(feature_id)
        if mark in self._seen:
            return False
        if len(self._seen) >= self._most:
            del self._seen[next(iter(self._seen))]
        self._seen[mark] = None
        return True

    def forget(self, feature_id: str) -> None:
        """Forget it, because it was not kept."""
        self._seen.pop(bytes.fromhex(feature_id), None)

    def earliest(self, most: int | None) -> Iterator[str]:
        """The first that were counted, `most` or all."""
        yield from (mark.hex() for mark in list(itertools.islice(self._seen, most)))


def too_many(tokens: int, most: int | None) -> str | None:
    """Why an image is skipped, or None if it is not."""
    if most is None or tokens <= most:
        return None
    return f"{tokens} tokens, more than {most}; --max-pixels would make it smaller"
