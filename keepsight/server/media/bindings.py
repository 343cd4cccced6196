"""Names that clients give to their pictures (`uuid`), each bound to its first content.

Names are never used for lookup: pictures are known by their bytes. A name is only checked, so that
a client learns when it uses one name for two pictures.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from keepsight import digests
from keepsight.server.errors import ApiError

_MOST = 20_000  # names per key; the least recently used is dropped


class Bindings:
    """Names with the digests of their content. Each salt has separate names; the limit applies to
    the key."""

    def __init__(self) -> None:
        self._known: dict[str, OrderedDict[tuple[str, str], str]] = {}
        self._lock = threading.Lock()

    def bind(self, owner: str, whose: str, name: str, data: bytes, place: str) -> None:
        """Bind a tenant's name to some bytes, or refuse it if it is bound to others."""
        digest = digests.digest("named by a client", data)
        key = (whose, digests.digest("name of a client", name))
        with self._lock:
            known = self._known.setdefault(owner, OrderedDict())
            bound = known.setdefault(key, digest)
            known.move_to_end(key)
            while len(known) > _MOST:
                known.popitem(last=False)
        if bound != digest:
            text = (
                f"{place}: this uuid was sent with other content before; a name means one picture"
            )
            raise ApiError(409, text, param=place, code="uuid_conflict")

    def forget(self, whose: str | None = None) -> None:
        """Drop the names of one tenant, or of all."""
        with self._lock:
            if whose is None:
                self._known.clear()
            for owner, known in self._known.items():
                left = ((key, bound) for key, bound in known.items() if key[0] != whose)
                self._known[owner] = OrderedDict(left)
