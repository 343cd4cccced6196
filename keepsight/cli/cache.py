"""`keepsight cache`: look after a store, without a model: a folder, or an address such as s3://...

Only files that a store wrote are listed or removed. Store modules are imported inside the commands,
because this table is loaded for every `--help`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import RenderableType
from rich.text import Text

from keepsight.cli.options import JSON, grouped, option
from keepsight.cli.terminal import age_text, console, facts, json_line, plain, say, table
from keepsight.errors import FileError, InputError, StoreError
from keepsight.kinds import Record
from keepsight.system.places import check_store_folder, expanded
from keepsight.system.units import bytes_text, parse_bytes

if TYPE_CHECKING:
    from keepsight.store import Entry, Store

app = typer.Typer(help="Look after a store.", no_args_is_help=True)

Named = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A picture's file or key, or KIND/KEY of any entry; a start of a key is enough.",
    ),
]
YES = option("Do not ask for confirmation.", "--yes", "-y", default=False)
_LEAST = 8  # characters of a digest
_TENANTS = 20  # largest entries in a table
_SHOWN = 5  # largest and most used entries, dependents of an entry, files of an entry
_WHAT = {
    "package": "the features of one image",
    "snapshot": "what a model remembers of one stretch of a prompt",
    "state": "the states of fixed size at the end of a snapshot",
    "alias": "a note: these pixels or file bytes are that image",
    "made": "a note: in which making the features of an image are here",
    "weights": "a note: the fingerprint of a folder of weights",
    "kernels": "a note: by which kernels a model is exact on a machine",
}


@dataclass
class Where:
    """Which store a command is about, and whose part of it."""

    panel: ClassVar[str] = "Store"
    store: str = option(
        "The store: a folder or an address.",
        envvar="KEEPSIGHT_STORE",
        show_default=False,
        default="",
    )
    tenant: str | None = option(
        "Only what belongs to this tenant: its name, or the first 8 or more characters of its "
        "digest. Without it: all tenants."
    )

    def open(self) -> Look:
        """Open it."""
        if not self.store:
            raise InputError("which store? give --store FOLDER, or set KEEPSIGHT_STORE")
        check_store_folder(self.store)
        if "://" not in self.store and not expanded(self.store).is_dir():
            raise StoreError(f"{expanded(self.store)}: there is no such folder")
        from keepsight.store import open_store

        opened = open_store(self.store)
        one = None if self.tenant is None else _digest_of(self.tenant, opened.tenants())
        return Look(opened.of(one))


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


class Look:
    """A store, and what is in it; read when it is asked for."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @cached_property
    def entries(self) -> list[Entry]:
        """All entries, sorted by kind; the last used first."""
        return sorted(self.store.entries(), key=lambda entry: (entry.kind, -entry.used))

    @cached_property
    def pictures(self) -> dict[tuple[str, str], list[Entry]]:
        """All that was made of each picture, by tenant and image key."""
        found: dict[tuple[str, str], list[Entry]] = {}
        for entry in self.entries:
            for key in entry.media:
                found.setdefault((entry.tenant, key), []).append(entry)
        return found

    @cached_property
    def files(self) -> dict[tuple[str, str], list[str]]:
        """The file names that notes record for each picture. Reading them counts as no use."""
        from keepsight.store.files import Folder

        found: dict[tuple[str, str], list[str]] = {}
        if self.store.root is None:
            return found
        folder = Folder(self.store.root)
        for entry in self.entries:
            try:
                note = folder.read(entry.name)[0][1] if entry.kind == "alias" else {}
                name = str(note.get("file", ""))
            except (FileError, OSError):
                continue  # listed unchanged; `check` reports it
            for key in entry.media if name else ():
                names = found.setdefault((entry.tenant, key), [])
                names += [] if name in names else [name]
        return found

    def _path(self, entry: Entry) -> Path | None:
        """The file of an entry; None for an address, of which only its listing is known."""
        from keepsight.store import layout

        root = self.store.root
        return None if root is None else root / layout.place(*entry.name)

    def record(self, entry: Entry) -> Record:
        """One entry as JSON; `age_s` counts from its last use."""
        return {
            "kind": entry.kind,
            "key": entry.key,
            "bytes": entry.nbytes,
            "tenant": entry.tenant,
            "age_s": round(time.time() - entry.used, 1),
            "created": entry.created,
            "uses": entry.uses,
            "cost_ms": entry.cost,
            "pinned": entry.pinned,
            "stands_on": entry.depends_on,
            "media": list(entry.media),
            "expires": entry.expires,
        }

    def about(self, entry: Entry) -> Record:
        """Model and tokens of a package, from its record alone, and the files of any entry."""
        from keepsight.formats import tensorfile

        files = [n for key in entry.media for n in self.files.get((entry.tenant, key), ())]
        about: Record = {"files": list(dict.fromkeys(files))} if files else {}
        path = self._path(entry) if entry.kind == "package" else None
        try:
            if path is not None:
                record = tensorfile.read_record(path)
                model = str(record["about"].get("model_type"))
                about |= {"model": model, "tokens": record["tokens"]}
        except (FileError, OSError, KeyError, AttributeError) as error:
            about["damaged"] = f"damaged: {error}"
        return about

    def picture(self, tenant: str, key: str) -> Record:
        """One picture as JSON: what its features are."""
        of = self.pictures[tenant, key]
        packages = [entry for entry in of if entry.kind == "package"]
        tokens = [about["tokens"] for p in packages if "tokens" in (about := self.about(p))]
        tiers = [self.store.of(p.tenant).tier(p.kind, p.key) for p in packages]
        return {
            "key": key,
            "files": self.files.get((tenant, key), []),
            "tenant": tenant,
            "bytes": sum(package.nbytes for package in packages),
            "tokens": list(dict.fromkeys(tokens)),
            "age_s": round(time.time() - max(entry.used for entry in of), 1),
            "where": list(dict.fromkeys(tier for tier in tiers if tier is not None)),
        }

    def meant(self, named: str) -> list[tuple[str, list[Entry]]]:
        """What a name may refer to: pictures by their keys, with all that was made of them, and
        entries without a key."""
        found: dict[str, list[Entry]] = {}
        kind, _, key = named.rpartition("/")
        if not key:
            return []
        for image, of in self.pictures.items():
            if named in map(plain, self.files.get(image, ())) or image[1].startswith(named):
                found.setdefault(image[1], []).extend(of)
        entries = [e for e in self.entries if e.key.startswith(key) and kind in ("", e.kind)]
        return [*found.items(), *(("", [entry]) for entry in entries)]

    def find(self, named: str) -> Entry:
        """The one entry of a name; that of a picture is its features."""
        meant = self.meant(named)
        found = {e: None for key, of in meant for e in of if not key or e.kind == "package"}
        if len(found) != 1:
            raise _unclear(named, [_spelled(entry) for entry in found])
        return next(iter(found))


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


def _short(tenant: str) -> str:
    return tenant[:16] or "(default)"


def _spelled(entry: Entry) -> str:
    whose = f" of tenant {_short(entry.tenant)}" if entry.tenant else ""
    return f"{entry.kind}/{entry.key[:16]}{whose}"


def _ago(when: float) -> str:
    return f"{age_text(time.time() - when)} ago"


# -- looking -----------------------------------------------------------------------------------


@app.command()
@grouped
def stats(where: Where, as_json: bool = JSON) -> None:
    """Show tiers, entries, bytes and reads, what each tenant has, and the largest and the most
    used entries. Tenants are named by digests: a store does not know their names."""
    look = where.open()
    largest = sorted(look.entries, key=lambda e: -e.nbytes)[:_SHOWN]
    used = sorted(look.entries, key=lambda e: -e.uses)[:_SHOWN]
    stats = look.store.stats()  # after the entries: then the index has all of them
    best = {"largest": largest, "most used": used}
    told = stats | {n.replace(" ", "_"): [*map(look.record, of)] for n, of in best.items()}
    shown: list[RenderableType] = []
    kinds = {**dict(sorted(stats["kinds"].items())), "all": stats}
    tiers = {tier.get("tier", "tier"): tier for tier in stats.get("tiers", ())}
    tenants = sorted(stats["tenants"].items(), key=lambda item: -item[1]["bytes"])
    several = any(stats["tenants"])  # else everything belongs to the default tenant
    owners = {_short(name): of for name, of in tenants[:_TENANTS]} if several else {}
    for what, sizes in (("kind", kinds), ("tier", tiers), ("tenant", owners)):
        rows = [(name, of["entries"], bytes_text(of["bytes"])) for name, of in sizes.items()]
        if rows:
            shown.append(table(what, "entries", "bytes", right=("entries", "bytes"), rows=rows))
    if (more := len(tenants) - _TENANTS) > 0:
        shown.append(f"and {more} more")
    shown.append(f"{sum(e.uses - 1 for e in look.entries)} reads of what is here")
    for title, chosen in best.items():
        cells = [(e.kind, e.key[:16], bytes_text(e.nbytes), e.uses) for e in chosen]
        names = ("kind", "key", "size", "uses")
        if cells:
            shown.append(table(*names, right=names[2:], title=title, rows=cells))
    say(as_json, told, *shown)


_COLUMNS: dict[str, Callable[[Record], Any]] = {
    "picture": lambda r: ", ".join(r["files"]),
    "kind": lambda r: r["kind"],
    "key": lambda r: r["key"][:16],
    "tenant": lambda r: _short(r["tenant"]),
    "size": lambda r: bytes_text(r["bytes"]),
    "age": lambda r: age_text(r["age_s"]),
    "uses": lambda r: r["uses"],
    "tokens": lambda r: ", ".join(map(str, r["tokens"])),
    "last use": lambda r: f"{age_text(r['age_s'])} ago",
    "where": lambda r: ", ".join(r["where"]),
    "about": lambda r: _about_text(r),
}
_OF_PICTURES = ("picture", "key", "tenant", "size", "tokens", "last use", "where")
_OF_ENTRIES = ("kind", "key", "tenant", "size", "age", "uses", "about")


@app.command("list")
@grouped
def list_entries(
    where: Where,
    every: bool = option("List every entry instead.", "--all", default=False),
    kind: str | None = option("List the entries of this kind instead, such as package."),
    as_json: bool = JSON,
) -> None:
    """List the pictures: the files that they came from, their keys, and the size, the tokens, the
    last use and the place of their features. `delete`, `explain` and `pin` take these names."""
    look = where.open()
    kinds = sorted({entry.kind for entry in look.entries})
    if kind is not None and kind not in kinds:
        raise InputError(f"--kind {kind}: the store has {', '.join(kinds) or 'nothing'}")
    if every or kind is not None:
        names = list(_OF_ENTRIES)
        shown = [entry for entry in look.entries if kind in (None, entry.kind)]
        records = [look.record(entry) | look.about(entry) for entry in shown]
    else:
        names = list(_OF_PICTURES)
        records = sorted((look.picture(*it) for it in look.pictures), key=lambda r: r["age_s"])
    if as_json:
        for record in records:
            json_line(record)
        return
    if not any(record["tenant"] for record in records):
        names.remove("tenant")
    cells = [[_COLUMNS[name](record) for name in names] for record in records]
    right = ("size", "age", "uses", "tokens", "last use")
    console().print(table(*names, right=right, rows=cells))


def _about_text(record: Record) -> str:
    names = record.get("files", [])
    words = [*names[:_SHOWN], f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else [*names]
    if "model" in record:
        words.append(f"{record['model']}, {record['tokens']} tokens")
    words += [record["damaged"]] if "damaged" in record else []
    return ", ".join(words) + (" (pinned)" if record["pinned"] else "")


def _bases(entries: list[Entry], it: Entry) -> list[tuple[str, str]]:
    """Everything an entry depends on, the nearest first."""
    known = {(e.kind, e.key): e.depends_on for e in entries}
    found: list[tuple[str, str]] = []
    base = it.depends_on
    while base is not None and base not in found:
        found.append(base)
        base = known.get(base)
    return found


@app.command()
@grouped
def explain(where: Where, entry: Named, as_json: bool = JSON) -> None:
    """Show what an entry is, what it depends on, what depends on it, its cost, and its eviction."""
    look = where.open()
    it = look.find(entry)
    others = [other for other in look.entries if other.tenant == it.tenant]
    upon = [e for e in others if e.depends_on == (it.kind, it.key)]
    first = sum(e.used < it.used and not e.pinned for e in others)
    bases, about = _bases(others, it), look.about(it)
    tier = look.store.of(it.tenant).tier(it.kind, it.key)
    told = look.record(it) | about | {"tier": tier, "bases": len(bases), "go_first": first}
    told |= {"upon": [[e.kind, e.key] for e in upon]}
    if it.expires is not None:
        goes = f"in {age_text(it.expires - time.time())}, its time is over then"
    elif it.pinned:
        goes = "never by itself: it is pinned"
    else:
        count = f"{first} of {len(others)} entries were last used before it"
        after = f", and after the {len(upon)} that depend on it" if upon else ""
        goes = f"when a budget is exceeded: {count}{after}"
    names = ", ".join(f"{e.kind}/{e.key[:16]}" for e in upon[:_SHOWN])
    base = "{}/{}".format(*it.depends_on) if it.depends_on else ""
    said = {
        "entry": f"{it.kind}/{it.key}",
        "tenant": it.tenant,
        "what": _WHAT.get(it.kind, it.kind),
        "where": f"{tier}, {bytes_text(it.nbytes)}",
        "of": f"{about['model']}, {about['tokens']} tokens" if "model" in about else None,
        "made": f"{_ago(it.created)}, used {it.uses} times",
        "last used": _ago(it.used),
        "costs": f"{it.cost:.0f} ms to make again" if it.cost else "not measured",
        "depends on": f"{base} ({len(bases)} deep)" if base else "nothing",
        "upon it": f"{len(upon)}: {names}" if upon else "nothing",
        "images": ", ".join(it.media) or "none known",
        "files": ", ".join(about.get("files", ())) or "none known",
        "goes": goes,
    }
    say(as_json, told, facts(said))


# -- pinning and removing ----------------------------------------------------------------------


@app.command()
@grouped
def pin(where: Where, entry: Named) -> None:
    """Pin an entry, and what it depends on: no budget evicts them."""
    _pin(where, entry, True)


@app.command()
@grouped
def unpin(where: Where, entry: Named) -> None:
    """Make a pinned entry evictable again."""
    _pin(where, entry, False)


def _pin(where: Where, named: str, pinned: bool) -> None:
    look = where.open()
    it = look.find(named)
    if not look.store.of(it.tenant).pin(it.kind, it.key, pinned):
        raise InputError(f"{it.kind}/{it.key} is gone")
    console().print(f"{it.kind}/{it.key} is {'pinned' if pinned else 'no longer pinned'}")


@app.command()
@grouped
def delete(where: Where, entry: Named, yes: bool = YES) -> None:
    """Remove all that was made of a picture, or an entry and all that depends on it; from every
    tier. Asks first if anything of it is pinned."""
    look = where.open()
    found = look.meant(entry)
    if len(found) != 1:
        names = [f"picture {key[:16]}" if key else _spelled(of[0]) for key, of in found]
        raise _unclear(entry, names)
    ((key, going),) = found
    it = going[0]
    if not key:
        others = [other for other in look.entries if other.tenant == it.tenant]
        going = [e for e in others if e == it or (it.kind, it.key) in _bases(others, e)]
    if not yes and (pinned := [f"{e.kind}/{e.key[:16]}" for e in going if e.pinned]):
        more = f" and {len(pinned) - _SHOWN} more" if len(pinned) > _SHOWN else ""
        names = pinned[:_SHOWN]
        typer.confirm(f"{', '.join(names)}{more}: pinned. Remove all the same?", abort=True)
    view = look.store.of(it.tenant)
    freed = look.store.delete_media(key) if key else view.delete(it.kind, it.key)
    console().print(f"{bytes_text(freed)} freed")


@app.command()
@grouped
def clear(where: Where, yes: bool = YES) -> None:
    """Remove every entry, of every tenant or of one; asks first."""
    store = where.open().store
    if not yes:
        what = "everything"
        if where.tenant is not None:
            stats = store.stats()
            what = f"{stats['entries']} entries of {where.tenant} ({bytes_text(stats['bytes'])})"
        typer.confirm(plain(f"Remove {what} from {where.store}?"), abort=True)
    console().print(f"{bytes_text(store.clear())} freed")


@app.command()
@grouped
def gc(
    where: Where,
    budget: str = option("Bytes that may stay, for example 2GiB.", default=...),
) -> None:
    """Remove the least recently used entries until the rest fits, of all tenants or of one."""
    store = where.open().store
    freed = store.gc(parse_bytes(int(budget) if budget.isdigit() else budget))
    console().print(f"{bytes_text(freed)} freed, {bytes_text(store.stats()['bytes'])} stay")


@app.command()
@grouped
def check(
    where: Where,
    repair: bool = option("Repair what is wrong.", "--repair", default=False),
    as_json: bool = JSON,
) -> None:
    """Read every entry in full, and name what is wrong; exit code 1 if anything is left wrong."""
    store = where.open().store
    entries = sum(1 for _ in store.entries())
    wrong = store.check(repair)
    left = store.check() if repair and wrong else wrong
    told = {"entries": entries, "wrong": wrong, "left": left, "repaired": repair}
    mended = f", {len(wrong) - len(left)} put right" if repair else ""
    count = f"{entries} entries checked, {len(wrong)} damaged{mended} in {where.store}"
    say(as_json, told, *(Text(plain(line), "red") for line in wrong), count)
    raise typer.Exit(1 if left else 0)
