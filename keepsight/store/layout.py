"""Names and file contents of entries, the same in a folder and in a bucket.

So any tool that copies files can copy a store from one to the other. A name consists only of a
known kind and a digest, so no input can point outside the store.
"""

from __future__ import annotations

import json
import math
import re
import time

from keepsight.errors import DamagedFile, InputError, WrongFormatVersion
from keepsight.kinds import Record
from keepsight.store.contract import CLOCK_SLACK, About, EntryName, Name
from keepsight.system import digests
from keepsight.system.accounts import account_of

# File name extensions: notes are only JSON, the others are tensor files.
KINDS = {
    "package": ".sight",
    "snapshot": ".keep",
    "state": ".keep",
    "alias": ".json",
    "made": ".json",
    "weights": ".json",
    "kernels": ".json",
}
NOTES = tuple(kind for kind, suffix in KINDS.items() if suffix == ".json")
MARKER = "store.json"
STORE_FORMAT = 1

_KEY = re.compile(r"[0-9a-f]{64}")
_PLACE = re.compile(r"(?:tenants/([0-9a-f]{64})/)?([a-z]+)/([0-9a-f]{2})/([0-9a-f]{64})(\.[a-z]+)")


def tenant_digest(name: str | None) -> str:
    """The folder of a tenant; empty for the default tenant."""
    return "" if name is None else digests.digest("tenant", name)


def account_digest(name: str | None) -> str:
    """The folder of the tenant whose quota a tenant's entries count against."""
    account = account_of(name or "")
    return tenant_digest(name if account == name else account or None)


def checked(kind: str, key: str) -> None:
    """Refuse an impossible name."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"a store has no kind {kind!r}; expected one of {', '.join(KINDS)}")
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise InputError(f"{key!r} is no key; expected a digest, 64 hexadecimal characters")


def is_name(kind: object, key: object) -> bool:
    """Whether these can form the name of an entry."""
    known = isinstance(kind, str) and kind in KINDS
    return known and isinstance(key, str) and _KEY.fullmatch(key) is not None


def is_tenant(digest: object) -> bool:
    """Whether this can be a tenant's folder, or the default tenant's."""
    return isinstance(digest, str) and (not digest or _KEY.fullmatch(digest) is not None)


def place(kind: str, key: str, tenant: str = "") -> str:
    """The file of an entry, relative to the root of its store."""
    checked(kind, key)
    return f"{tenant_prefix(tenant)}{kind}/{key[:2]}/{key}{KINDS[kind]}"


def tenant_prefix(tenant: str) -> str:
    """The common prefix of all names of one tenant."""
    return f"tenants/{tenant}/" if tenant else ""


def parse(name: str) -> EntryName | None:
    """Parse the name of a file in a store; None for a name that no store writes."""
    found = _PLACE.fullmatch(name)
    if found is None:
        return None
    tenant, kind, folder, key, suffix = found.groups()
    if KINDS.get(kind) != suffix or folder != key[:2]:
        return None
    return EntryName(kind, key, tenant or "")


# -- dependents, at an address -------------------------------------------------------------------

UPON = "upon"  # a folder of empty objects, whose names say which snapshot depends on which
_FIRST = "first"  # stands for the base of entries without one


def dependents_folder(kind: str, base: str | None, tenant: str = "") -> str:
    """The folder with the names of all dependents of an entry, of its own kind."""
    return f"{tenant_prefix(tenant)}{UPON}/{kind}/{base[:2] if base else _FIRST}"


def dependent_marker(name: EntryName, base: Name | None) -> str | None:
    """The empty object that records an entry's base; None if none is needed."""
    if name.kind != "snapshot" or (base is not None and base[0] != name.kind):
        return None
    upon = None if base is None else base[1]
    return f"{dependents_folder(name.kind, upon, name.tenant)}/{upon or _FIRST}-{name.key}"


def marked_dependent(name: str, base: str | None) -> str | None:
    """The dependent's key in such a name; None for other names."""
    upon, _, key = name.rpartition("/")[2].partition("-")
    return key if upon == (base or _FIRST) and _KEY.fullmatch(key) else None


# -- the metadata of a file -----------------------------------------------------------------------


def metadata_of(about: About, account: str = "", tenant: str = "") -> Record:
    """The metadata in an entry's file, with which it can be read without an index.

    Times and costs differ per writer, and are left out if nothing is lost: so all writers of equal
    content write equal files.
    """
    metadata: Record = {}
    if account != tenant:
        metadata["account"] = account
    if about.depends_on is not None:
        metadata["stands_on"] = list(about.depends_on)
    if about.media:
        metadata["media"] = sorted(set(about.media))
    if about.ttl is not None:
        # Whole milliseconds with a fixed width, so an entry has one size everywhere.
        metadata |= {"created": int(time.time() * 1000), "ttl": float(about.ttl)}
    return metadata


def checked_about(about: About) -> None:
    """Refuse values that no store can honour."""
    if about.depends_on is not None:
        checked(*about.depends_on)
    if about.ttl is not None and not 0 <= about.ttl < math.inf:
        raise InputError(f"a time to live of {about.ttl!r}; expected zero or more seconds")
    if not 0 <= about.cost < math.inf:
        raise InputError(f"a cost of {about.cost!r}; expected zero or more milliseconds")
    if any(not isinstance(key, str) for key in about.media):
        raise InputError("media are named by their image keys, which are strings")


def account_in(metadata: Record, tenant: str) -> str:
    """The account in an entry's file; the tenant itself if none is there."""
    account = metadata.get("account")
    return str(account) if is_tenant(account) else tenant


def about_of(metadata: Record) -> About:
    """The inverse of `metadata_of`; invalid values in a file count as absent."""
    base, media, end = metadata.get("stands_on"), metadata.get("media"), expiry(metadata)
    if not (isinstance(base, list) and len(base) == 2 and is_name(*base)):
        base = None
    if not (isinstance(media, list) and all(isinstance(key, str) for key in media)):
        media = []
    depends_on = None if base is None else (base[0], base[1])
    return About(0.0, depends_on, tuple(media), None if end is None else float(metadata["ttl"]))


def expiry(metadata: object) -> float | None:
    """When an entry expires, according to its file; None for never."""
    if not isinstance(metadata, dict):
        return None
    try:
        end = float(metadata["created"]) / 1000 + float(metadata["ttl"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return end


def expired(metadata: object, now: float | None = None) -> bool:
    """Whether it is expired. An entry dated in the future comes from a wrong clock and would live
    too long, so it counts as expired."""
    end = expiry(metadata)
    if end is None or not isinstance(metadata, dict):
        return False
    now = time.time() if now is None else now
    return not now < end or end > now + float(metadata["ttl"]) + CLOCK_SLACK


# -- notes ---------------------------------------------------------------------------------------


def note_bytes(kind: str, key: str, body: Record, metadata: Record) -> bytes:
    """The bytes of a note's file."""
    wrapped = {"body": body, "kept": metadata, "digest": _note_digest(kind, key, body, metadata)}
    return digests.canonical_json(wrapped).encode()


def read_note(kind: str, key: str, data: bytes, where: str) -> tuple[Record, Record]:
    """Body and metadata of a note; the digest is checked, and covers the key."""
    try:
        wrapped = json.loads(data)
        body, metadata = dict(wrapped["body"]), dict(wrapped.get("kept", {}))
        if wrapped["digest"] != _note_digest(kind, key, body, metadata):
            raise ValueError("the note does not match its digest")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{where}: {error}") from None
    return body, metadata


def _note_digest(kind: str, key: str, body: Record, metadata: Record) -> str:
    """The digest covers the key, so no note can pass for another. Notes of the first format have no
    metadata and keep their old digest."""
    parts = [digests.canonical_json(body)] + (
        [digests.canonical_json(metadata)] if metadata else []
    )
    return digests.digest("note", kind, key, *parts)


# -- the marker ----------------------------------------------------------------------------------


def marker_bytes() -> bytes:
    """The content of `store.json`."""
    return digests.canonical_json({"keepsight": "store", "format": STORE_FORMAT}).encode()


def check_marker(data: bytes, where: str) -> None:
    """Refuse a store with another version's layout."""
    try:
        metadata = json.loads(data)
        format_ = metadata["format"] if metadata["keepsight"] == "store" else None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedFile(f"{where}/{MARKER}: not readable; delete it to use the store") from None
    if format_ != STORE_FORMAT:
        raise WrongFormatVersion(
            f"{where}: a store of format {format_!r}, this Keepsight has format {STORE_FORMAT}; "
            "use another address, or the Keepsight that made it"
        )
