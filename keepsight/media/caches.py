"""The memory of one model's tenants for media, and its budgets.

Everything that outlives a call is here and counted: packages, pixels waiting for the tower,
downloads, and names. The caller's budget is for the first three; names have a separate one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keepsight.errors import MediaChanged
from keepsight.formats.package import Package
from keepsight.kinds import Decoded, Record
from keepsight.media import sources
from keepsight.media.sources import Source
from keepsight.models.families import Pixels
from keepsight.store import MemoryCache, SharedMemoryCache

_LONGEST = 4096  # longest URL that is remembered


class Downloads:
    """Downloads of one tenant by URL; thread-safe, in memory shared by all tenants.

    A URL is fetched once, and its content is named by a digest. If its bytes were dropped and are
    needed, it is fetched again and compared with its name.
    """

    def __init__(
        self,
        bytes_of: SharedMemoryCache[bytes],
        names: SharedMemoryCache[str],
        tenant: str = "",
        fetch: Callable[[str], bytes] = sources.fetch,
    ) -> None:
        self._bytes, self._names, self._tenant, self._fetch = bytes_of, names, tenant, fetch

    def get(self, url: str) -> bytes:
        """The content of a URL, from memory or the network."""
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
        """Fetch the named bytes again; refuse others."""
        first = next(iter(fresh), None)
        data = self.get(url) if first is None else first
        if sources.file_name(data) != name:
            if self._names.get(self._tenant, url) == name:
                self._names.pop(self._tenant, url)
            raise MediaChanged(f"{url} gives something else than when it was named; ask again")
        return data

    def clear(self) -> None:
        """Forget the contents of all URLs."""
        self._bytes.clear(self._tenant)
        self._names.clear(self._tenant)


_ALIASES = 64 << 20  # bytes for names of media, of all tenants
_NAMES = 16 << 20  # the same for names of URLs, and for contents of packages given to callers
_TEXT = 256  # approximate bytes of a name with its key
_SHARE = 16  # share of the budget for downloads


@dataclass
class MediaCaches:
    """The memory of one model's tenants for media."""

    pixels: MemoryCache[Pixels]
    packages: MemoryCache[Package]
    aliases: SharedMemoryCache[Record]
    downloads: SharedMemoryCache[bytes]
    urls: SharedMemoryCache[str]
    given: SharedMemoryCache[str]  # contents of packages given to callers, by feature id

    @classmethod
    def of(cls, budget: int, quota: int | None = None, ttl: float | None = None) -> MediaCaches:
        """Half of the budget for packages, and the rest for data not encoded yet. Names have a
        separate budget."""
        part = None if quota is None else quota // 2
        small = None if quota is None else quota // _SHARE
        waiting, fetched = budget // 2 - budget // _SHARE, budget // _SHARE
        return cls(
            MemoryCache(waiting, lambda pixels: pixels.nbytes, part, ttl),
            MemoryCache(budget - waiting - fetched, lambda package: package.nbytes, part, ttl),
            SharedMemoryCache(_ALIASES, lambda entry: 4 * _TEXT + len(repr(entry))),
            SharedMemoryCache(fetched, len, small, ttl),
            SharedMemoryCache(_NAMES, lambda name: _TEXT, None, ttl),
            SharedMemoryCache(_NAMES, lambda content: _TEXT),
        )

    def downloads_of(self, tenant: str) -> Downloads:
        """The downloads of one tenant."""
        return Downloads(self.downloads, self.urls, tenant)

    def stats(self, tenant: str | None) -> dict[str, int | None]:
        """Bytes and packages, of all tenants or of one."""
        packages, names = self.packages, (self.aliases, self.urls, self.given)

        def nbytes(*caches: MemoryCache | SharedMemoryCache) -> int:
            return sum(s.nbytes if tenant is None else s.bytes_of(tenant) for s in caches)

        return {
            "bytes": nbytes(packages),
            "budget": packages.budget if tenant is None else packages.quota,
            "packages": len(packages) if tenant is None else sum(1 for _ in packages.items(tenant)),
            "pixel_bytes": nbytes(self.pixels),
            "url_bytes": nbytes(self.downloads),
            "name_bytes": nbytes(*names),
        }

    def check(self) -> None:
        """Raise AssertionError if a count is wrong or a budget is exceeded."""
        for cache in (self.pixels, self.packages):
            cache.check()
        for shared in (self.aliases, self.downloads, self.urls, self.given):
            shared.check()
