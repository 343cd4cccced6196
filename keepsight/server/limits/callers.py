"""Identifies callers and limits them: keys to tenants, requests and tokens per minute.

A salt divides a tenant further: entries under one salt are never seen under another, nor without
one. Keys are compared in constant time. Callers without keys share one memory; for fair shares of
model time they are told apart by address.
"""

from __future__ import annotations

import hmac
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from keepsight import digests as digests
from keepsight.server.config import ApiKey
from keepsight.server.errors import ApiError
from keepsight.system.accounts import under_salt

_OWN = (".localhost", ".local", ".internal", ".home.arpa")  # not on the public web


def host_of(text: str) -> str:
    """The name or address in a Host header, without port, in lower case."""
    text = text.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def is_own_name(name: str) -> bool:
    """Whether no public site can have this name: an address, a name without a dot, or a name
    reserved for local networks."""
    return "." not in name or name.endswith(_OWN) or _address(name) is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def network_of(host: str) -> str:
    """Network that one client may control: an IPv4 address itself, the /64 of an IPv6 address."""
    address = _address(host)
    if not isinstance(address, ipaddress.IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


@dataclass
class Bucket:
    """A token bucket: a number per minute, used at once or spread."""

    per_minute: float
    clock: Callable[[], float] = time.monotonic
    level: float = field(init=False)
    at: float = field(init=False)

    def __post_init__(self) -> None:
        self.level, self.at = self.per_minute, self.clock()

    def wait(self, needed: float) -> float:
        """Seconds until the bucket holds this many; 0 if it does."""
        now = self.clock()
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now
        return max(0.0, (needed - self.level) * 60 / self.per_minute)

    def take(self, count: float) -> None:
        """Take what was used; the level may fall below zero, and then later requests wait."""
        self.wait(0)
        self.level -= count


class Caller:
    """One tenant, with its token buckets; or one address, if there are no keys."""

    def __init__(
        self,
        key: ApiKey | None,
        clock: Callable[[], float] = time.monotonic,
        host: str = "",
        tenant: str = "",
    ) -> None:
        self.key = key
        self.tenant = key.whose if key is not None else tenant
        self.account = self.tenant if key is not None else account_from(host)
        self.name = key.name if key is not None else None
        self.admin = key is None or key.admin
        limits = (
            (key.requests_per_minute, key.tokens_per_minute) if key is not None else (None,) * 2
        )
        self._requests, self._tokens = (Bucket(n, clock) if n else None for n in limits)

    def admit(self) -> None:
        """Admit one request, or raise 429 with the seconds to wait."""
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            wait = bucket.wait(1) if bucket is not None else 0.0
            if wait > 0 and bucket is not None:
                raise ApiError(
                    429,
                    f"more than {bucket.per_minute:.0f} {what} a minute; try again in {wait:.0f} s",
                    code="rate_limit_exceeded",
                    retry_after=wait,
                )
        if self._requests is not None:
            self._requests.take(1)

    def spend(self, tokens: int) -> None:
        """Count the tokens that an answer used."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def salted(self, salt: str | None) -> str:
        """The tenant for this key and a salt. It is a digest, so no names can collide; its stored
        entries count against the key's own quota."""
        if salt is None:
            return self.tenant
        return under_salt(self.tenant, digests.digest("salted tenant", self.tenant, salt))


def account_from(host: str) -> str:
    """The account of a client known only by address."""
    return f"from {network_of(host)}"


class Callers:
    """All callers; those without keys share the tenant that the model was loaded for."""

    def __init__(self, keys: tuple[ApiKey, ...], tenant: str = "") -> None:
        self._tenant = tenant
        self._known = [(key.key.encode(), Caller(key)) for key in keys]

    def find(self, authorization: str | None, host: str = "") -> Caller:
        """The caller that a header names; without keys every caller is accepted."""
        if not self._known:
            return Caller(None, host=host, tenant=self._tenant)
        scheme, _, shown = (authorization or "").partition(" ")
        found = None
        for secret, caller in self._known:  # compare all, so that timing reveals nothing
            if hmac.compare_digest(secret, shown.strip().encode(errors="replace")):
                found = caller
        if found is None or scheme.lower() != "bearer":
            what = "no API key" if not authorization else "this API key is not known"
            raise ApiError(
                401, f"{what}; send it as: Authorization: Bearer KEY", code="invalid_api_key"
            )
        return found
