"""The memory of one model's tenants for media, and its budgets.

Everything that outlives a call is here and counted: packages, pixels waiting for the tower,
downloads, and names. The caller's budget is for the first three; names have a separate one.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

from keepsight.formats.package import Package
from keepsight.kinds import Record
from keepsight.media.sources import Download, HeldMaterial, Source, download
from keepsight.models.families import Pixels
from keepsight.store import MemoryCache
from keepsight.system.lock import Mutex

_LONGEST = 4096  # longest URL that is remembered


class KeptBySessions:
    """What sessions were given, for as long as a session has it in its history; thread-safe.

    Over the budget the oldest is let go: then it is read from its place again.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self._lock = budget, Mutex()
        self._held: WeakValueDictionary[tuple[str, str], HeldMaterial] = WeakValueDictionary()

    def keep(self, tenant: str, source: Source) -> Source:
        """The source for a history."""
        if source.held is not None:
            return source
        with self._lock:
            held = self._held.get((tenant, source.name))
            if held is None or held.data is None:
                held = HeldMaterial(source.material())
                self._held.pop((tenant, source.name), None)
                self._held[tenant, source.name] = held
                alive = list(self._held.values())
                over = sum(one.nbytes for one in alive) - self.budget
                for one in alive:
                    if over <= 0:
                        break
                    over -= one.nbytes
                    one.data = None
        return source if held.data is None else source.kept(held)

    def bytes_of(self, tenant: str | None) -> int:
        """Bytes of one tenant, or of all."""
        with self._lock:
            alive = list(self._held.items())
        return sum(held.nbytes for (whose, _), held in alive if tenant in (None, whose))


_KEPT = 1 << 30  # bytes of what sessions were given
_ALIASES = 64 << 20  # bytes for names of media, of all tenants
_NAMES = 16 << 20  # the same for contents of packages given to callers
_TEXT = 256  # approximate bytes of a name with its key
_SHARE = 16  # share of the budget for downloads


@dataclass
class MediaCaches:
    """The memory of one model's tenants for media."""

    pixels: MemoryCache[Pixels]
    packages: MemoryCache[Package]
    aliases: MemoryCache[Record]
    downloads: MemoryCache[Download]
    kept: KeptBySessions
    given: MemoryCache[str]  # contents of packages given to callers, by feature id

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
            MemoryCache(_ALIASES, lambda entry: 4 * _TEXT + len(repr(entry))),
            MemoryCache(fetched, lambda one: _TEXT + len(one.data), small, ttl),
            KeptBySessions(_KEPT),
            MemoryCache(_NAMES, lambda content: _TEXT),
        )

    def fetch(self, tenant: str, url: str) -> bytes:
        """What a URL gives now; what it gave before only if its server says that is unchanged."""
        known = self.downloads.get(tenant, url)
        now = download(url, known)
        if now is not known:
            self.downloads.pop(tenant, url)
            if now.asking and len(url) <= _LONGEST:
                self.downloads.put(tenant, url, now)
        return now.data

    def stats(self, tenant: str | None) -> dict[str, int | None]:
        """Bytes and packages, of all tenants or of one."""
        packages, names = self.packages, (self.aliases, self.given)

        def nbytes(*caches: MemoryCache) -> int:
            return sum(s.nbytes if tenant is None else s.bytes_of(tenant) for s in caches)

        return {
            "bytes": nbytes(packages),
            "budget": packages.budget if tenant is None else packages.quota,
            "packages": len(packages) if tenant is None else sum(1 for _ in packages.items(tenant)),
            "pixel_bytes": nbytes(self.pixels),
            "url_bytes": nbytes(self.downloads),
            "name_bytes": nbytes(*names),
            "session_bytes": self.kept.bytes_of(tenant),
        }
