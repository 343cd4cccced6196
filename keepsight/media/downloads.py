"""What URLs gave, for one tenant: its name for long, its bytes while they fit a budget.

A URL is resolved once: what came is named by its digest, and a picture that is known by that name
is not fetched again. Where it has to be decoded after all and its bytes have gone, it is fetched
and compared with its name, as a file is.
"""

from __future__ import annotations

from collections.abc import Callable

from keepsight.errors import MediaChanged
from keepsight.kinds import Decoded
from keepsight.media import sources
from keepsight.media.sources import Source
from keepsight.store import SharedMemoryCache

_LONGEST = 4096  # characters of a URL that is remembered


class Downloads:
    """What one tenant fetched. Safe in several threads; the memory is that of all tenants."""

    def __init__(
        self,
        bytes_of: SharedMemoryCache[bytes],
        names: SharedMemoryCache[str],
        tenant: str = "",
        fetch: Callable[[str], bytes] = sources.fetch,
    ) -> None:
        self._bytes, self._names, self._tenant, self._fetch = bytes_of, names, tenant, fetch

    def get(self, url: str) -> bytes:
        """What a URL gives, from memory or from there."""
        data = self._bytes.get(self._tenant, url)
        if data is None:
            data = self._fetch(url)
            if len(url) <= _LONGEST:
                self._bytes.put(self._tenant, url, data)
        return data

    def source(self, url: str) -> Source:
        """The picture behind a URL."""
        known = self._names.get(self._tenant, url)
        fresh = [] if known is not None else [self.get(url)]
        name = sources.file_name(fresh[0]) if known is None else known
        if known is None and len(url) <= _LONGEST:
            self._names.put(self._tenant, url, name)

        def decode() -> Decoded:
            return sources.decode_bytes(self._same(url, name, fresh), url)

        return Source(name, decode, url, fresh, file=sources.file_label(url))

    def _same(self, url: str, name: str, fresh: list[bytes]) -> bytes:
        """The bytes that were named."""
        first = next(iter(fresh), None)
        data = self.get(url) if first is None else first
        if sources.file_name(data) != name:
            if self._names.get(self._tenant, url) == name:
                self._names.pop(self._tenant, url)
            raise MediaChanged(f"{url} gives something else than when it was named; ask again")
        return data

    def clear(self) -> None:
        """Forget what all URLs gave."""
        self._bytes.clear(self._tenant)
        self._names.clear(self._tenant)
