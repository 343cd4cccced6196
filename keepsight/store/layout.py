"""Names and file contents of entries, the same in a folder and in a bucket.

So any tool that copies files can copy a store from one to the other. A name consists only of a
known kind and a digest, so no input can point outside the store. An entry's file is the truth: it
holds its key, its base, the images it depends on and its expiry.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable

from keepsight.errors import DamagedFile, InputError, WrongFormatVersion
from keepsight.formats import tensorfile
from keepsight.kinds import Record
from keepsight.store.contract import CLOCK_SLACK, About, Content, Entry, EntryName, Found, Name
from keepsight.system import digests
from keepsight.system.accounts import account_of

FORMAT = 1  # of entries
STORE_FORMAT = 1  # of their places
MARKER = "store.json"
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
UPON = "upon"  # at an address: empty objects, whose names say which snapshot depends on which
_FIRST = "first"  # stands for the base of entries without one

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
    """The entry of a file's name; None for a name that no store writes."""
    found = _PLACE.fullmatch(name)
    if found is None:
        return None
    tenant, kind, folder, key, suffix = found.groups()
    if KINDS.get(kind) != suffix or folder != key[:2]:
        return None
    return EntryName(kind, key, tenant or "")


def pin_place(name: EntryName) -> str:
    """The file that is an entry's pin."""
    return f"{tenant_prefix(name.tenant)}pins/{name.kind}/{name.key}.json"


def dependents_folder(kind: str, base: str | None, tenant: str = "") -> str:
    """At an address: the folder with the names of all dependents of an entry, of its own kind."""
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


# -- contents --------------------------------------------------------------------------------------


def spelled(name: EntryName, content: Content, metadata: Record) -> Iterable[bytes | memoryview]:
    """The parts of an entry's file."""
    tensors, record = content
    if tensors is None:
        return [_note_bytes(name, record, metadata)]
    record = dict(record, entry=name.key, kept=metadata)
    return tensorfile.spelled(name.kind, FORMAT, tensors, record)


def read_entry(data: bytes, name: EntryName, where: str) -> Found:
    """Content and metadata, with every byte and the key checked."""
    if name.kind in NOTES:
        return _read_note(name, data, where)
    return of_its_name(name, tensorfile.parse(data, where, name.kind, FORMAT), where)


def of_its_name(name: EntryName, content: Content, where: str) -> Found:
    """Content and metadata, if the record is that of the entry."""
    record = content[1]
    if record.get("entry") != name.key:
        raise DamagedFile(f"{where}: this is the entry {record.get('entry')!r}")
    metadata = record.get("kept")
    return content, metadata if isinstance(metadata, dict) else {}


def _note_bytes(name: EntryName, body: Record, metadata: Record) -> bytes:
    wrapped = {"body": body, "kept": metadata, "digest": note_digest(name, body, metadata)}
    return digests.canonical_json(wrapped).encode()


def _read_note(name: EntryName, data: bytes, where: str) -> Found:
    try:
        wrapped = json.loads(data)
        body, metadata = dict(wrapped["body"]), dict(wrapped.get("kept", {}))
        if wrapped["digest"] != note_digest(name, body, metadata):
            raise ValueError("the note does not match its digest")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{where}: {error}") from None
    return (None, body), metadata


def note_digest(name: EntryName, body: Record, metadata: Record) -> str:
    """The digest covers the key, so no note can pass for another. Notes of the first format have no
    metadata and keep their old digest."""
    parts = map(digests.canonical_json, (body, metadata) if metadata else (body,))
    return digests.digest("note", name.kind, name.key, *parts)


# -- metadata --------------------------------------------------------------------------------------


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


def about_of(metadata: Record) -> About:
    """The inverse of `metadata_of`; invalid values in a file count as absent."""
    base, media = metadata.get("stands_on"), metadata.get("media")
    if not (isinstance(base, list) and len(base) == 2 and is_name(*base)):
        base = None
    if not (isinstance(media, list) and all(isinstance(key, str) for key in media)):
        media = []
    times = lifetime(metadata)
    on = None if base is None else (base[0], base[1])
    return About(0.0, on, tuple(media), None if times is None else times[1])


def account_in(metadata: Record, tenant: str) -> str:
    """The account in an entry's file; the tenant itself if none is there."""
    account = metadata.get("account")
    return str(account) if is_tenant(account) else tenant


def entry_of(
    name: EntryName, metadata: Record, nbytes: int, created: float, used: float = 0.0
) -> Entry:
    """An entry as its file has it; `created` counts unless the file says more."""
    about, times = about_of(metadata), lifetime(metadata)
    if times is not None:
        created = times[0]
    return Entry(
        name.kind,
        name.key,
        nbytes=nbytes,
        used=max(used, created),
        created=created,
        uses=1,
        depends_on=about.depends_on,
        media=about.media,
        expires=None if times is None else sum(times),
        tenant=name.tenant,
        account=account_in(metadata, name.tenant),
    )


def lifetime(metadata: Record) -> tuple[float, float] | None:
    """From when and for how many seconds an entry may be used, according to its file; None for
    ever. Impossible numbers are over."""
    try:
        created, ttl = float(metadata["created"]) / 1000, float(metadata["ttl"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return (created, ttl) if math.isfinite(created + ttl) else (0.0, 0.0)


def expired(metadata: Record) -> bool:
    """Whether it is expired. An entry dated in the future comes from a wrong clock and would live
    too long, so it counts as expired."""
    created, ttl = lifetime(metadata) or (0.0, math.inf)
    return not created - CLOCK_SLACK <= time.time() < created + ttl


# -- the marker ------------------------------------------------------------------------------------


def marker_bytes() -> bytes:
    """The content of `store.json`."""
    return digests.canonical_json({"keepsight": "store", "format": STORE_FORMAT}).encode()


def mark(
    read: Callable[[str], bytes], write: Callable[[str, Iterable[bytes]], object], where: str
) -> None:
    """Check the marker of a store before anything else is written; write it if there is none."""
    try:
        check_marker(read(MARKER), where)
    except (FileNotFoundError, NotADirectoryError, DamagedFile):
        write(MARKER, [marker_bytes()])


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
