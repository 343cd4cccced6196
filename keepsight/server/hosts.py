"""What a server may be called by clients on its own machine, and whose address is whose.

Knows addresses and names as texts; nothing is resolved here.
"""

from __future__ import annotations

import ipaddress

_OWN = (".localhost", ".local", ".internal", ".home.arpa")  # of no site on the web


def host_of(text: str) -> str:
    """The name or address in a Host header, without its port and in small letters."""
    text = text.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def is_own_name(name: str) -> bool:
    """Whether no site on the web can have this name: an address, a name without a dot, and those
    that are set apart for one's own network."""
    return "." not in name or name.endswith(_OWN) or _address(name) is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def network_of(host: str) -> str:
    """Whom an address stands for: itself, or of IPv6 its /64, all of which one client may have."""
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
