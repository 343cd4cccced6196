"""Detects replaced code of a processor: it decides the pixels that enter a tower.

A user's own class, a method replaced in a library's class or on one object, and a function that
such a class finds in its module are described like code of a model. Objects that cannot be watched
are assumed to stay the same.
"""

from __future__ import annotations

from keepsight import digests
from keepsight.kinds import Processor
from keepsight.models.fingerprint.describe import Describer
from keepsight.models.fingerprint.patches import LibraryCode, digest_of, is_users
from keepsight.models.fingerprint.undescribed import ObjectNumbers
from keepsight.models.fingerprint.watch import Watch
from keepsight.models.partial_processor import NotLoaded

_PARTS = ("image_processor", "video_processor", "feature_extractor")


class ProcessorCode:
    """How a live processor's code differs from its library's; checked before each call."""

    def __init__(self, processor: Processor | None) -> None:
        self._processor = processor
        self._private = ObjectNumbers()
        self._code = LibraryCode(self._private, steady=True)
        self._watch: Watch | None = None
        self._put: list[tuple[int, str, object]] = []
        self._digest = ""

    def look(self) -> str:
        """The digest of the differences; empty if there are none."""
        if self._processor is None:
            return ""
        own = [getattr(self._processor, name, None) for name in _PARTS]
        parts = [self._processor, *(part for part in own if part is not None)]
        # Attributes set on the objects themselves; the parts of a processor are checked separately.
        put = [
            (number, name, value)
            for number, part in enumerate(parts)
            for name, value in vars(part).items()
            if callable(value) and not _is_processor(value)
        ]
        anew = self._code.refresh(frozenset(map(type, parts)), "")
        moved = set() if self._watch is None else self._watch.moved()
        for owner in moved:
            if isinstance(owner, int):
                self._private.changes[owner] += 1
        if anew or moved or put != self._put:
            self._put, self._digest = put, self._described(put)
        return self._digest

    def _described(self, put: list[tuple[int, str, object]]) -> str:
        self._watch = Watch()
        describer = Describer(self._watch, {}, digest_of, self._private)
        found = [(number, name, describer.value(value, "put")) for number, name, value in put]
        self._watch.seal()
        replaced = [row for rows in self._code.replaced.values() for row in rows if is_users(row)]
        rows = repr(sorted([*replaced, *found], key=repr))
        differs = self._code.differs
        return (
            digests.digest("processor code", rows, differs) if found or replaced or differs else ""
        )


def _is_processor(value: object) -> bool:
    """Whether it is a tokenizer or a processor; these are callable too, but checked separately."""
    return hasattr(value, "save_pretrained") or isinstance(value, NotLoaded)
