"""Fetches pictures from the web, without access to the network around the server.

A name is resolved once. Every address it gives must be public, and the connection goes to one of
exactly those, so a second answer of the resolver is never used (DNS rebinding). Redirects follow
the same rule. Bytes and time are limited. Only http and https.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.parse
from dataclasses import dataclass

from keepsight.server.errors import ApiError

_REDIRECTS = 5
_CHUNK = 1 << 16
_MOVED = (301, 302, 303, 307, 308)
# Reserved networks without hosts of the public internet, and tunnels to IPv4. Versions of Python
# know different parts of this list. Public IPv6 starts with 2000::/3.
_UNICAST = ipaddress.ip_network("2000::/3")
_SET_APART = [
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
        "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16",
        "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
        "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
    )
]  # fmt: skip
_ISATAP = (0x00005EFE, 0x02005EFE)  # prefix before an embedded IPv4 address


@dataclass(frozen=True)
class Fetcher:
    max_bytes: int
    seconds: float
    allow_private: bool = False

    def fetch(self, url: str) -> bytes:
        deadline = time.monotonic() + self.seconds
        for _ in range(_REDIRECTS + 1):
            answer = self._once(url, deadline)
            if isinstance(answer, bytes):
                return answer
            url = urllib.parse.urljoin(url, answer)
        raise _problem(url, f"more than {_REDIRECTS} redirects")

    def _once(self, url: str, deadline: float) -> bytes | str:
        """One request: the bytes, or the redirect target."""
        parts = _split(url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = self._resolve(host, port, url, deadline)
        left = self._left(deadline, url)
        connection = _Pinned(parts.scheme, host, port, address, left)
        # A socket's timeout restarts with each byte; this one does not.
        watch = threading.Timer(left, connection.abort)
        watch.start()
        try:
            path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
            query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
            headers = {"User-Agent": "keepsight", "Accept": "image/*,*/*", "Connection": "close"}
            connection.request("GET", path + (f"?{query}" if query else ""), headers=headers)
            response = connection.getresponse()
            if response.status in _MOVED and (target := response.getheader("Location")):
                return target
            if response.status != 200:
                raise _problem(url, f"it answered with status {response.status}")
            return self._read(response, url)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._left(deadline, url)
            raise _problem(url, f"it could not be fetched ({type(error).__name__})") from None
        finally:
            watch.cancel()
            connection.close()

    def _read(self, response: http.client.HTTPResponse, url: str) -> bytes:
        data = bytearray()
        expected = response.length or 0
        while expected <= self.max_bytes and (part := response.read1(_CHUNK)):
            data += part
            expected = max(expected, len(data))
        if expected > self.max_bytes:
            raise _problem(url, f"it is larger than {self.max_bytes} bytes")
        if response.length:  # fewer bytes than announced
            raise http.client.IncompleteRead(b"", response.length)
        return bytes(data)

    def _resolve(self, host: str, port: int, url: str, deadline: float) -> str:
        addresses: list[str] = []

        def ask() -> None:  # a resolver takes no timeout
            with contextlib.suppress(OSError, ValueError):
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses.extend(str(row[4][0]) for row in found)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(self._left(deadline, url))
        if asking.is_alive():
            raise self._late(url)
        if not addresses:
            raise _problem(url, "there is no such host")
        if not (self.allow_private or all(map(is_public, addresses))):
            # Do not tell which address: the caller must learn nothing about the network here.
            what = "it is not a public address, and this server fetches no others; send the picture"
            raise _problem(url, f"{what} itself as a data URI, or upload it to /v1/files")
        return addresses[0]

    def _left(self, deadline: float, url: str) -> float:
        if (left := deadline - time.monotonic()) <= 0:
            raise self._late(url)
        return left

    def _late(self, url: str) -> ApiError:
        return _problem(url, f"it took longer than {self.seconds:.0f} s")


def is_public(text: str) -> bool:
    """Whether an address belongs to the public internet, in any notation."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if address.version == 6:
        tunnel = int(address) >> 32 & 0xFFFFFFFF in _ISATAP
        if tunnel or address not in _UNICAST:
            return False
    return address.is_global and not any(address in network for network in _SET_APART)


class _Pinned(http.client.HTTPConnection):
    """A connection to a checked address, under the name of the requested host."""

    def __init__(self, scheme: str, host: str, port: int, address: str, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self.default_port = 443 if scheme == "https" else 80  # which a Host header leaves out
        self._address, self._scheme = address, scheme

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._scheme == "https":
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(
                self.sock, server_hostname=self.host, do_handshake_on_connect=False
            )
            self.sock.do_handshake()

    def abort(self) -> None:
        """Abort the connection; called from another thread when time is up."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


def _split(url: str) -> urllib.parse.SplitResult:
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port
    except ValueError:
        raise _problem(url, "it is not a URL") from None
    if parts.scheme not in ("http", "https"):
        raise _problem(url, "only http and https are fetched")
    if not parts.hostname or parts.username is not None or parts.password is not None:
        raise _problem(url, "it names no host, or comes with a password")
    return parts


def _problem(url: str, why: str) -> ApiError:
    """The error for a URL, which is shown without possible secrets: scheme, host and path."""
    text = url.split("?")[0].split("#")[0]
    if "@" in text:
        text = text.partition("//")[0] + "//…@" + text.rpartition("@")[2]
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    text = text if len(text) <= 120 else f"{text[:120]}…"
    return ApiError(400, f"{text}: {why}", param="image_url", code="invalid_image_url")
