"""`keepsight cache`: look after a store, without a model: a folder, or an address such as s3://...

Only files that a store wrote are listed or removed. Store modules are imported inside the commands,
because this table is loaded for every `--help`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from keepsight.cli.options import Json, grouped, option
from keepsight.cli.terminal import age_text, console, facts, json_line, plain, table
from keepsight.errors import FileError, InputError, StoreError
from keepsight.kinds import Record
from keepsight.system.places import check_store_folder, expanded
from keepsight.system.units import bytes_text, parse_bytes

if TYPE_CHECKING:
    from keepsight.store import Entry
    from keepsight.store.tenants import AllTenants

app = typer.Typer(help="Look after a store.", no_args_is_help=True)

Named = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A picture's file or key, or KIND/KEY of any entry; a start of a key is enough.",
    ),
]
Yes = Annotated[bool, option("Do not ask for confirmation.", "--yes", "-y")]
_TENANTS = 20  # largest entries in a table
_SHOWN = 5  # largest and most used entries, dependents of an entry, files of an entry
_WHAT = {
    "package": "the features of one medium",
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
    store: Annotated[
        str,
        option("The store: a folder or an address.", envvar="KEEPSIGHT_STORE", show_default=False),
    ] = ""
    tenant: Annotated[
        str | None,
        option(
            "Only what belongs to this tenant: its name, or the first 8 or more characters of its "
            "digest. Without it: all tenants."
        ),
    ] = None

    def open(self, named: str | None = None) -> AllTenants:
        """Open it; an impossible NAME is refused first."""
        if named is not None:
            _parse_name(named)
        if not self.store:
            raise InputError("which store? give --store FOLDER, or set KEEPSIGHT_STORE")
        check_store_folder(self.store)
        if "://" not in self.store and not expanded(self.store).is_dir():
            raise StoreError(f"{expanded(self.store)}: there is no such folder")
        from keepsight.store import open_store
        from keepsight.store.tenants import AllTenants

        return AllTenants(open_store(self.store), self.tenant)


# -- looking -----------------------------------------------------------------------------------


@app.command()
@grouped
def stats(where: Where, as_json: Json = False) -> None:
    """Show tiers, entries, bytes and hit rates, what each tenant has, and the largest and the most
    used entries. Tenants are named by digests: a store does not know their names."""
    opened, out = where.open(), console()
    entries = list(opened.entries())  # first: then the index has all of them
    stats = opened.stats()
    largest = sorted(entries, key=lambda e: -e.nbytes)[:_SHOWN]
    used = sorted(entries, key=lambda e: -e.uses)[:_SHOWN]
    if as_json:
        best = {"largest": [_record(e) for e in largest], "most_used": [_record(e) for e in used]}
        json_line(stats | best)
        return
    kinds = sorted(stats["kinds"].items())
    rows = [(kind, of["entries"], bytes_text(of["bytes"])) for kind, of in kinds]
    rows.append(("all", stats["entries"], bytes_text(stats["bytes"])))
    out.print(table("kind", "entries", "bytes", right=("entries", "bytes"), rows=rows))
    for tier in stats.get("tiers", ()):
        name, count = tier.get("tier", "tier"), tier["entries"]
        out.print(plain(f"{name}: {count} entries, {bytes_text(tier['bytes'])}"))
    counts = stats["ever"]
    hits, asked = counts["hits"], counts["hits"] + counts["misses"]
    rate = f"{100 * hits / asked:.0f} % of {asked} reads found" if asked else "nothing read yet"
    out.print(f"{rate}, {counts['evictions']} entries evicted, {counts['refused']} refused")
    tenants = sorted(stats["tenants"].items(), key=lambda item: -item[1]["bytes"])
    if any(stats["tenants"]):  # not everything belongs to the default tenant
        rows = [(_short(t), of["entries"], bytes_text(of["bytes"])) for t, of in tenants[:_TENANTS]]
        if rest := tenants[_TENANTS:]:
            entries_, nbytes = (sum(of[what] for _, of in rest) for what in ("entries", "bytes"))
            rows.append((f"{len(rest)} more", entries_, bytes_text(nbytes)))
        out.print(table("tenant", "entries", "bytes", right=("entries", "bytes"), rows=rows))
    for title, chosen in (("largest", largest), ("most used", used)):
        if chosen:
            cells = [(e.kind, e.key[:16], bytes_text(e.nbytes), e.uses) for e in chosen]
            right = ("size", "uses")
            out.print(table("kind", "key", "size", "uses", right=right, title=title, rows=cells))


def _short(tenant: str) -> str:
    return tenant[:16] or "(default)"


def _ago(when: float) -> str:
    return f"{age_text(time.time() - when)} ago"


@app.command("list")
@grouped
def list_entries(
    where: Where,
    every: Annotated[bool, option("List every entry instead.", "--all")] = False,
    kind: Annotated[
        str | None, option("List the entries of this kind instead, such as package.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the pictures: the files that they came from, their keys, and the size, the tokens, the
    last use and the place of their features. `delete`, `explain` and `pin` take these names."""
    opened = where.open()
    entries = sorted(opened.entries(), key=lambda entry: (entry.kind, -entry.used))
    kinds = sorted({entry.kind for entry in entries})
    if kind is not None and kind not in kinds:
        raise InputError(f"--kind {kind}: the store has {', '.join(kinds) or 'nothing'}")
    files = _files_of_media(opened, entries)
    whole = every or kind is not None
    if whole:
        shown = [entry for entry in entries if kind in (None, entry.kind)]
        records = [_record(entry) | _about(opened, entry, files) for entry in shown]
    else:
        records = [_picture(opened, image, of, files) for image, of in _pictures(entries).items()]
        records.sort(key=lambda record: record["age_s"])
    if as_json:
        for record in records:
            json_line(record)
        return
    columns = {  # in the order in which they are shown
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
        "about": _about_text,
    }
    hidden = (
        {"picture", "tokens", "last use", "where"} if whole else {"kind", "age", "uses", "about"}
    )
    hidden |= set() if any(record["tenant"] for record in records) else {"tenant"}
    names = [name for name in columns if name not in hidden]
    cells = [[columns[name](record) for name in names] for record in records]
    right = ("size", "age", "uses", "tokens", "last use")
    console().print(table(*names, right=right, rows=cells))


_Image = tuple[str, str]  # a tenant and an image key
_Files = dict[_Image, tuple[str, ...]]


def _pictures(entries: Iterable[Entry]) -> dict[_Image, list[Entry]]:
    """All that was made of each image, for each tenant."""
    found: dict[_Image, list[Entry]] = {}
    for entry in entries:
        for key in entry.media:
            found.setdefault((entry.tenant, key), []).append(entry)
    return found


def _picture(store: AllTenants, image: _Image, entries: list[Entry], files: _Files) -> Record:
    packages = [entry for entry in entries if entry.kind == "package"]
    abouts = [_about(store, package, files) for package in packages]
    tiers = [store.view(package).tier(package.kind, package.key) for package in packages]
    return {
        "key": image[1],
        "files": list(files.get(image, ())),
        "tenant": image[0],
        "bytes": sum(package.nbytes for package in packages),
        "tokens": list(dict.fromkeys(about["tokens"] for about in abouts if "tokens" in about)),
        "age_s": round(time.time() - max(entry.used for entry in entries), 1),
        "where": list(dict.fromkeys(tier for tier in tiers if tier is not None)),
    }


def _record(entry: Entry) -> Record:
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


def _path(store: AllTenants, entry: Entry) -> Path | None:
    """The file of an entry; None for an address, of which only its listing is known."""
    from keepsight.store import layout

    root = store.view(entry).root
    return None if root is None else root / layout.place(*entry.name)


def _files_of_media(store: AllTenants, entries: Iterable[Entry]) -> _Files:
    """The file names that notes record for each image. Reading them does not count as use."""
    from keepsight.media.naming import FILE
    from keepsight.store.files import read

    found: dict[tuple[str, str], dict[str, None]] = {}
    for entry in entries:
        path = _path(store, entry) if entry.kind == "alias" else None
        try:
            name = None if path is None else read(path, entry.name)[0][1].get(FILE)
        except (FileError, OSError):
            continue  # listed unchanged; `check` reports it
        if isinstance(name, str) and name:
            for key in entry.media:
                found.setdefault((entry.tenant, key), {})[name] = None
    return {image: tuple(names) for image, names in found.items()}


def _about(store: AllTenants, entry: Entry, files: _Files) -> Record:
    """Model and tokens of a package, from its record alone, and the source files of any entry."""
    from keepsight.formats import tensorfile

    names = dict.fromkeys(n for key in entry.media for n in files.get((entry.tenant, key), ()))
    about: Record = {"files": list(names)} if names else {}
    path = _path(store, entry) if entry.kind == "package" else None
    try:
        if path is not None:
            record = tensorfile.read_record(path)
            model = str(record["about"].get("model_type"))
            about |= {"model": model, "tokens": record["tokens"]}
    except (FileError, OSError, KeyError, AttributeError) as error:
        about["damaged"] = f"damaged: {error}"
    return about


def _about_text(record: Record) -> str:
    names = record.get("files", [])
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    model = [f"{record['model']}, {record['tokens']} tokens"] if "model" in record else []
    damaged = [record["damaged"]] if "damaged" in record else []
    pinned = " (pinned)" if record["pinned"] else ""
    return ", ".join([*names[:_SHOWN], *more, *model, *damaged]) + pinned


# -- names -------------------------------------------------------------------------------------


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


def _meant(store: AllTenants, named: str) -> tuple[dict[str, list[Entry]], list[Entry]]:
    """The pictures, by key, with what was made of them, and the entries that a name may mean."""
    kind, key = _parse_name(named) or ("", "")
    every = list(store.entries())
    entries = [e for e in every if key and e.key.startswith(key) and kind in ("", e.kind)]
    files = _files_of_media(store, every)
    pictures: dict[str, list[Entry]] = {}
    for image, made in _pictures(every).items():
        is_file = named in map(plain, files.get(image, ()))
        if is_file or (named == key and image[1].startswith(key)):
            pictures.setdefault(image[1], []).extend(made)
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


def _find(store: AllTenants, named: str) -> Entry:
    """The one entry that a name refers to; a picture's name means its features."""
    pictures, entries = _meant(store, named)
    made = [entry for of in pictures.values() for entry in of if entry.kind == "package"]
    entries += [package for package in made if package not in entries]
    if len(entries) != 1:
        raise _unclear(named, [_spelled(entry) for entry in entries])
    return entries[0]


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
def explain(where: Where, entry: Named, as_json: Json = False) -> None:
    """Show what an entry is, what it depends on, what depends on it, its cost, and its eviction."""
    store = where.open(entry)
    it = _find(store, entry)
    view = store.view(it)
    others = list(view.entries())
    upon = [e for e in others if e.depends_on == (it.kind, it.key)]
    first = sum(e.used < it.used and not e.pinned for e in others)
    bases = _bases(others, it)
    about = _about(store, it, _files_of_media(store, others))
    tier = view.tier(it.kind, it.key)
    if as_json:
        of = {"tier": tier, "bases": len(bases), "upon": [[e.kind, e.key] for e in upon]}
        json_line(_record(it) | about | of | {"go_first": first})
        return
    after = f", and after the {len(upon)} that depend on it" if upon else ""
    goes = f"when a budget is exceeded: {first} of {len(others)} entries were last used before it"
    goes += after
    if it.expires is not None:
        goes = f"in {age_text(it.expires - time.time())}, its time is over then"
    elif it.pinned:
        goes = "never by itself: it is pinned"
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
    console().print(facts(said))


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
    store = where.open(named)
    it = _find(store, named)
    if not store.view(it).pin(it.kind, it.key, pinned):
        raise InputError(f"{it.kind}/{it.key} is gone")
    console().print(f"{it.kind}/{it.key} is {'pinned' if pinned else 'no longer pinned'}")


@app.command()
@grouped
def delete(where: Where, entry: Named, yes: Yes = False) -> None:
    """Remove all that was made of a picture, or an entry and all that depends on it; from every
    tier. Asks first if anything of it is pinned."""
    store = where.open(entry)
    pictures, found = _meant(store, entry)
    if len(pictures) + len(found) != 1:
        raise _unclear(entry, [*(f"picture {key[:16]}" for key in pictures), *map(_spelled, found)])
    if found:
        (it,) = found
        others = list(store.view(it).entries())
        going = [e for e in others if e == it or (it.kind, it.key) in _bases(others, e)]
    else:
        ((key, going),) = pictures.items()
    if not yes and (pinned := [f"{e.kind}/{e.key[:16]}" for e in going if e.pinned]):
        more = f" and {len(pinned) - _SHOWN} more" if len(pinned) > _SHOWN else ""
        names = ", ".join(pinned[:_SHOWN])
        typer.confirm(f"{names}{more}: pinned. Remove all the same?", abort=True)
    freed = store.view(it).delete(it.kind, it.key) if found else store.delete_media(key)
    console().print(f"{bytes_text(freed)} freed")


@app.command()
@grouped
def clear(where: Where, yes: Yes = False) -> None:
    """Remove every entry, of every tenant or of one; asks first."""
    store = where.open()
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
    budget: Annotated[str, option("Bytes that may stay, for example 2GiB.")],
) -> None:
    """Remove the least recently used entries until the rest fits, of all tenants or of one."""
    store = where.open()
    freed = store.gc(parse_bytes(int(budget) if budget.isdigit() else budget))
    console().print(f"{bytes_text(freed)} freed, {bytes_text(store.stats()['bytes'])} stay")


@app.command()
@grouped
def check(
    where: Where,
    repair: Annotated[bool, option("Repair what is wrong.", "--repair")] = False,
    as_json: Json = False,
) -> None:
    """Read every entry in full, and name what is wrong; exit code 1 if anything is left wrong."""
    store = where.open()
    entries = sum(1 for _ in store.entries())
    wrong = store.check(repair)
    left = store.check() if repair and wrong else wrong
    if as_json:
        json_line({"entries": entries, "wrong": wrong, "left": left, "repaired": repair})
        raise typer.Exit(1 if left else 0)
    for line in wrong:
        console().print(plain(line), style="red")
    mended = f", {len(wrong) - len(left)} put right" if repair else ""
    count = f"{entries} entries checked, {len(wrong)} damaged{mended} in {where.store}"
    console().print(plain(count))
    raise typer.Exit(1 if left else 0)
