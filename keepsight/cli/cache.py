"""`keepsight cache`: look after a store, without a model: a folder, or an address such as s3://...

Only files that a store wrote are listed or removed. Store modules are imported inside the commands,
because this table is loaded for every `--help`.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from keepsight.cli.terminal import age_text, console, json_line, plain, table
from keepsight.errors import InputError, StoreError
from keepsight.kinds import Record
from keepsight.system.places import check_store_folder, expanded
from keepsight.system.units import bytes_text

if TYPE_CHECKING:
    from keepsight.store import Entry
    from keepsight.store import Store as OpenStore

app = typer.Typer(help="Look after a store.", no_args_is_help=True)

Store = Annotated[
    str,
    typer.Option(
        envvar="KEEPSIGHT_STORE", help="The store: a folder or an address.", show_default=False
    ),
]
Tenant = Annotated[
    str | None,
    typer.Option(
        help="Only what belongs to this tenant: its name, or the first 8 or more characters of its "
        "digest. Without it: all tenants."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON for machines instead of text.")]
Named = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A picture's file or key, or KIND/KEY of any entry; a start of a key is enough.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
_TENANTS = 20  # largest entries in a table
_LEAST = 8  # characters of a digest
_SHOWN = 5  # largest and most used entries, and dependents of an entry


def _open(address: str, tenant: str | None, named: str | None = None) -> OpenStore:
    """Open the store for all tenants or for one; an impossible NAME is refused first."""
    if named is not None:
        _parse_name(named)
    if not address:
        raise InputError("which store? give --store FOLDER, or set KEEPSIGHT_STORE")
    check_store_folder(address)
    if "://" not in address and not expanded(address).is_dir():
        raise StoreError(f"{expanded(address)}: there is no such folder")
    from keepsight.store import open_store

    opened = open_store(address)
    return opened.of(None if tenant is None else _digest_of(tenant, opened.tenants()))


def _digest_of(name: str, digests: list[str]) -> str:
    """The tenant with this name; if nothing is stored under it, the one whose digest begins so."""
    from keepsight.store.layout import tenant_digest

    named = tenant_digest(name)
    found = [digest for digest in digests if digest.startswith(name)]
    if named in digests or len(name) < _LEAST or not found:
        return named
    if len(found) > 1:
        raise InputError(f"--tenant {name}: the digests of {len(found)} tenants begin with it")
    return found[0]


# -- looking -----------------------------------------------------------------------------------


@app.command()
def stats(store: Store = "", tenant: Tenant = None, as_json: Json = False) -> None:
    """Show tiers, entries, bytes and reads, what each tenant has, and the largest and the most
    used entries. Tenants are named by digests: a store does not know their names."""
    opened = _open(store, tenant)
    entries = list(opened.entries())  # first: then the index has all of them
    stats = opened.stats()
    largest = sorted(entries, key=lambda e: -e.nbytes)[:_SHOWN]
    used = sorted(entries, key=lambda e: -e.uses)[:_SHOWN]
    if as_json:
        best = {"largest": [_plain(e) for e in largest], "most_used": [_plain(e) for e in used]}
        json_line(stats | best)
        return
    _show_totals(stats, sum(e.uses - 1 for e in entries))
    _show_tenants(stats["tenants"])
    for title, chosen in (("largest", largest), ("most used", used)):
        if chosen:
            shown = table("kind", "key", "size", "uses", right=("size", "uses"), title=title)
            for e in chosen:
                shown.add_row(e.kind, e.key[:16], bytes_text(e.nbytes), str(e.uses))
            console().print(shown)


def _show_tenants(tenants: dict[str, dict[str, int]]) -> None:
    if not any(tenants):
        return  # everything belongs to the default tenant
    shown = table("tenant", "entries", "bytes", right=("entries", "bytes"))
    largest = sorted(tenants.items(), key=lambda item: -item[1]["bytes"])
    for digest, counted in largest[:_TENANTS]:
        shown.add_row(_short(digest), str(counted["entries"]), bytes_text(counted["bytes"]))
    if rest := largest[_TENANTS:]:
        entries, nbytes = (sum(t[what] for _, t in rest) for what in ("entries", "bytes"))
        shown.add_row(f"{len(rest)} more", str(entries), bytes_text(nbytes))
    console().print(shown)


def _short(tenant: str) -> str:
    return tenant[:16] or "(default)"


def _show_totals(stats: Record, reads: int) -> None:
    shown = table("kind", "entries", "bytes", right=("entries", "bytes"))
    for kind, counted in sorted(stats["kinds"].items()):
        shown.add_row(kind, str(counted["entries"]), bytes_text(counted["bytes"]))
    shown.add_row("all", str(stats["entries"]), bytes_text(stats["bytes"]), style="bold")
    console().print(shown)
    for tier in stats.get("tiers", ()):
        line = f"{tier.get('tier', 'tier')}: {tier['entries']} entries, {bytes_text(tier['bytes'])}"
        console().print(plain(line))
    console().print(f"{reads} reads of what is here")


@app.command("list")
def list_pictures(
    store: Store = "",
    every: Annotated[bool, typer.Option("--all", help="List every entry instead.")] = False,
    kind: Annotated[
        str | None, typer.Option(help="List the entries of this kind instead, such as package.")
    ] = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """List the pictures: the files that they came from, their keys, and the size, the tokens, the
    last use and the place of their features. `delete`, `explain` and `pin` take these names."""
    opened = _open(store, tenant)
    if every or kind is not None:
        _list_entries(opened, kind, as_json)
        return
    from keepsight.cli.entry_about import about_entry

    pictures = sorted(_pictures(opened), key=lambda picture: -picture.used)
    whose = ["tenant"] if any(picture.tenant for picture in pictures) else []
    names = ("picture", "key", *whose, "size", "tokens", "last use", "where")
    shown = table(*names, right=("size", "tokens", "last use"))
    for it in pictures:
        views = [(opened.of(package.tenant), package) for package in it.packages]
        abouts = [about_entry(view, package, {}) for view, package in views]
        tokens = list(dict.fromkeys(about["tokens"] for about in abouts if "tokens" in about))
        tiers = (view.tier(package.kind, package.key) for view, package in views)
        where = list(dict.fromkeys(tier for tier in tiers if tier is not None))
        nbytes, age = sum(package.nbytes for package in it.packages), time.time() - it.used
        if as_json:
            record: Record = {"key": it.key, "files": list(it.files), "tenant": it.tenant}
            record |= {"bytes": nbytes, "tokens": tokens, "age_s": round(age, 1), "where": where}
            json_line(record)
            continue
        cells = [plain(", ".join(it.files)), it.key[:16], *(_short(it.tenant) for _ in whose)]
        cells += [bytes_text(nbytes), ", ".join(map(str, tokens)), f"{age_text(age)} ago"]
        shown.add_row(*cells, ", ".join(where))
    if not as_json:
        console().print(shown)


@dataclass
class _Picture:
    """What a store has of one image key, for one tenant."""

    key: str
    tenant: str
    files: tuple[str, ...]
    used: float = 0.0  # when anything that was made of it was last used
    packages: list[Entry] = field(default_factory=list)


def _pictures(store: OpenStore) -> list[_Picture]:
    from keepsight.cli.entry_about import files_of_media

    entries = list(store.entries())
    files = files_of_media(store, entries)
    found: dict[tuple[str, str], _Picture] = {}
    for entry in entries:
        for key in entry.media:
            image = (entry.tenant, key)
            it = found.setdefault(image, _Picture(key, entry.tenant, files.get(image, ())))
            it.used = max(it.used, entry.used)
            if entry.kind == "package":
                it.packages.append(entry)
    return list(found.values())


def _list_entries(opened: OpenStore, kind: str | None, as_json: bool) -> None:
    """List entries: kind, size, age, tenant, the files that their pictures came from, and of
    packages the model and the tokens."""
    from keepsight.cli.entry_about import about_entry, about_text, files_of_media

    rows = sorted(opened.entries(), key=lambda entry: (entry.kind, -entry.used))
    files = files_of_media(opened, rows)
    if kind is not None:
        kinds = sorted({row.kind for row in rows})
        if kind not in kinds:
            raise InputError(f"--kind {kind}: the store has {', '.join(kinds) or 'nothing'}")
        rows = [row for row in rows if row.kind == kind]
    whose = ["tenant"] if any(row.tenant for row in rows) else []
    names = ("kind", "key", *whose, "size", "age", "uses", "about")
    shown = table(*names, right=("size", "age", "uses"))
    for row in rows:
        about = about_entry(opened.of(row.tenant), row, files)
        if as_json:
            json_line(_plain(row) | about)
            continue
        words = about_text(about) + (" (pinned)" if row.pinned else "")
        age = age_text(time.time() - row.used)
        cells = [row.kind, row.key[:16], *(_short(row.tenant) for _ in whose)]
        shown.add_row(*cells, bytes_text(row.nbytes), age, str(row.uses), plain(words))
    if not as_json:
        console().print(shown)


def _plain(entry: Entry) -> Record:
    """One entry as JSON; `age_s` counts from its last use."""
    record: Record = {"kind": entry.kind, "key": entry.key, "bytes": entry.nbytes}
    record |= {"tenant": entry.tenant}
    record |= {"age_s": round(time.time() - entry.used, 1), "created": entry.created}
    record |= {"uses": entry.uses, "cost_ms": entry.cost, "pinned": entry.pinned}
    record |= {"stands_on": entry.depends_on, "media": list(entry.media), "expires": entry.expires}
    return record


def _parse_name(named: str) -> tuple[str, str] | None:
    """Kind and key of KIND/KEY, the kind empty if left out; None for what may be a file's name."""
    kind, _, key = named.rpartition("/")
    if re.fullmatch("[0-9a-f]{1,64}", key):
        return kind, key
    if named and "/" not in named:
        return None
    raise InputError(
        f"{named!r} names no entry; KEY of KIND/KEY is up to 64 digits of 0-9 and a-f; "
        "`keepsight cache list --all` shows all"
    )


def _meant(store: OpenStore, named: str) -> tuple[dict[str, _Picture], list[Entry]]:
    """The pictures, by key, and the entries that a name may refer to."""
    kind, key = _parse_name(named) or ("", "")
    entries = [e for e in store.entries() if key and e.key.startswith(key) and kind in ("", e.kind)]
    pictures = {
        it.key: it
        for it in _pictures(store)
        if named in map(plain, it.files) or (named == key and it.key.startswith(key))
    }
    return pictures, entries


def _unclear(named: str, names: list[str]) -> InputError:
    """Why a name is refused that refers to none or to several."""
    if not names:
        return InputError(
            f"{named}: the store has no such entry; `keepsight cache list` shows the pictures, and "
            "with --all everything"
        )
    shown = ", ".join(names[:_SHOWN])
    return InputError(
        f"{named} may be any of {len(names)}: {shown}; write more of a key, or name a --tenant"
    )


def _spelled(entry: Entry) -> str:
    whose = f" of tenant {_short(entry.tenant)}" if entry.tenant else ""
    return f"{entry.kind}/{entry.key[:16]}{whose}"


def _find(store: OpenStore, named: str) -> Entry:
    """The one entry that a name refers to; a picture's name means its features."""
    pictures, entries = _meant(store, named)
    entries += [p for it in pictures.values() for p in it.packages if p not in entries]
    if len(entries) != 1:
        raise _unclear(named, [_spelled(entry) for entry in entries])
    return entries[0]


@app.command()
def explain(entry: Named, store: Store = "", tenant: Tenant = None, as_json: Json = False) -> None:
    """Show what an entry is, what it depends on, what depends on it, its cost, and its eviction."""
    opened = _open(store, tenant, entry)
    from keepsight.cli.entry_about import about_entry, files_of_media

    it = _find(opened, entry)
    opened_by = opened.of(it.tenant)
    others = list(opened_by.entries())
    upon = [e for e in others if e.depends_on == (it.kind, it.key)]
    first = sum(e.used < it.used and not e.pinned for e in others)
    bases = _bases(others, it)
    about = about_entry(opened_by, it, files_of_media(opened, others))
    record = _plain(it) | about | {"tier": opened_by.tier(it.kind, it.key)}
    record |= {"bases": len(bases), "upon": [[e.kind, e.key] for e in upon], "go_first": first}
    if as_json:
        json_line(record)
        return
    now = time.time()
    shown = table("", "")
    shown.add_row("entry", f"{it.kind}/{it.key}")
    if it.tenant:
        shown.add_row("tenant", it.tenant)
    shown.add_row("what", _WHAT.get(it.kind, it.kind))
    shown.add_row("where", f"{record['tier']}, {bytes_text(it.nbytes)}")
    if "model" in record:
        shown.add_row("of", plain(f"{record['model']}, {record['tokens']} tokens"))
    shown.add_row("made", f"{age_text(now - it.created)} ago, used {it.uses} times")
    shown.add_row("last used", f"{age_text(now - it.used)} ago")
    shown.add_row("costs", f"{it.cost:.0f} ms to make again" if it.cost else "not measured")
    chain = (
        f"{it.depends_on[0]}/{it.depends_on[1]} ({len(bases)} deep)" if it.depends_on else "nothing"
    )
    shown.add_row("depends on", chain)
    names = ", ".join(f"{e.kind}/{e.key[:16]}" for e in upon[:_SHOWN])
    shown.add_row("upon it", f"{len(upon)}: {names}" if upon else "nothing")
    shown.add_row("images", plain(", ".join(it.media)) or "none known")
    shown.add_row("files", plain(", ".join(about.get("files", ()))) or "none known")
    shown.add_row("goes", _when(it, upon, first, len(others), now))
    console().print(shown)


_WHAT = {
    "package": "the features of one medium",
    "snapshot": "what a model remembers of one stretch of a prompt",
    "state": "the states of fixed size at the end of a snapshot",
    "alias": "a note: these pixels or file bytes are that image",
    "made": "a note: in which making the features of an image are here",
    "weights": "a note: the fingerprint of a folder of weights",
    "kernels": "a note: by which kernels a model is exact on a machine",
}


def _bases(entries: list[Entry], it: Entry) -> list[tuple[str, str]]:
    """Everything an entry depends on, the nearest first."""
    known = {(e.kind, e.key): e.depends_on for e in entries}
    found: list[tuple[str, str]] = []
    base = it.depends_on
    while base is not None and base not in found:
        found.append(base)
        base = known.get(base)
    return found


def _when(it: Entry, upon: list[Entry], first: int, count: int, now: float) -> str:
    if it.expires is not None:
        return f"in {age_text(it.expires - now)}, its time is over then"
    if it.pinned:
        return "never by itself: it is pinned"
    after = f", and after the {len(upon)} that depend on it" if upon else ""
    return f"when a budget is exceeded: {first} of {count} entries were last used before it{after}"


# -- pinning and removing ----------------------------------------------------------------------


@app.command()
def pin(entry: Named, store: Store = "", tenant: Tenant = None) -> None:
    """Pin an entry, and what it depends on: no budget evicts them."""
    _pin(_open(store, tenant, entry), entry, True)


@app.command()
def unpin(entry: Named, store: Store = "", tenant: Tenant = None) -> None:
    """Make a pinned entry evictable again."""
    _pin(_open(store, tenant, entry), entry, False)


def _pin(store: OpenStore, named: str, pinned: bool) -> None:
    it = _find(store, named)
    if not store.of(it.tenant).pin(it.kind, it.key, pinned):
        raise InputError(f"{it.kind}/{it.key} is gone")
    console().print(f"{it.kind}/{it.key} is {'pinned' if pinned else 'no longer pinned'}")


@app.command()
def delete(entry: Named, store: Store = "", tenant: Tenant = None, yes: Yes = False) -> None:
    """Remove all that was made of a picture, or an entry and all that depends on it; from every
    tier. Asks first if anything of it is pinned."""
    opened = _open(store, tenant, entry)
    pictures, found = _meant(opened, entry)
    if len(pictures) + len(found) != 1:
        names = [f"{it.key[:16]} ({', '.join(it.files)})" for it in pictures.values()]
        raise _unclear(entry, [*names, *map(_spelled, found)])
    for key in pictures:
        _ask_about_pins([e for e in opened.entries() if key in e.media], yes)
        console().print(f"{bytes_text(opened.delete_media(key))} freed")
    for it in found:
        others = list(opened.of(it.tenant).entries())
        upon = [e for e in others if e == it or (it.kind, it.key) in _bases(others, e)]
        _ask_about_pins(upon, yes)
        console().print(f"{bytes_text(opened.of(it.tenant).delete(it.kind, it.key))} freed")


def _ask_about_pins(going: list[Entry], yes: bool) -> None:
    pinned = [f"{e.kind}/{e.key[:16]}" for e in going if e.pinned]
    if pinned and not yes:
        more = f" and {len(pinned) - _SHOWN} more" if len(pinned) > _SHOWN else ""
        names = ", ".join(pinned[:_SHOWN])
        typer.confirm(f"{names}{more}: pinned. Remove all the same?", abort=True)


@app.command()
def clear(store: Store = "", tenant: Tenant = None, yes: Yes = False) -> None:
    """Remove every entry, of every tenant or of one; asks first."""
    opened = _open(store, tenant)
    if not yes:
        what = "everything"
        if tenant is not None:
            stats = opened.stats()
            what = f"{stats['entries']} entries of {tenant} ({bytes_text(stats['bytes'])})"
        typer.confirm(plain(f"Remove {what} from {store}?"), abort=True)
    console().print(f"{bytes_text(opened.clear())} freed")


@app.command()
def gc(
    budget: Annotated[str, typer.Option(help="Bytes that may stay, for example 2GiB.")],
    store: Store = "",
    tenant: Tenant = None,
) -> None:
    """Remove the least recently used entries until the rest fits, of all tenants or of one."""
    from keepsight.system.units import parse_bytes

    opened = _open(store, tenant)
    freed = opened.gc(parse_bytes(int(budget) if budget.isdigit() else budget))
    console().print(f"{bytes_text(freed)} freed, {bytes_text(opened.stats()['bytes'])} stay")


@app.command()
def check(
    store: Store = "",
    tenant: Tenant = None,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what is wrong.")] = False,
    as_json: Json = False,
) -> None:
    """Read every entry in full, and name what is wrong; exit code 1 if anything is left wrong."""
    opened = _open(store, tenant)
    entries = sum(1 for _ in opened.entries())
    wrong = opened.check(repair)
    left = opened.check() if repair and wrong else wrong
    if as_json:
        json_line({"entries": entries, "wrong": wrong, "left": left, "repaired": repair})
        raise typer.Exit(1 if left else 0)
    for line in wrong:
        console().print(plain(line), style="red")
    mended = f", {len(wrong) - len(left)} put right" if repair else ""
    console().print(plain(f"{entries} entries checked, {len(wrong)} damaged{mended} in {store}"))
    raise typer.Exit(1 if left else 0)
