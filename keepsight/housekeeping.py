"""`keepsight cache`: look after a store folder, without a model.

Only files that a store wrote are ever listed or removed; whatever else lies in the folder stays.
Imports of the store wait inside the commands, because this table is loaded for every `--help`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keepsight.errors import FileError, InputError, StoreError
from keepsight.terminal import age_text, bytes_text, console, json_line, plain, table

if TYPE_CHECKING:
    from keepsight.store import DiskStore

app = typer.Typer(help="Look after a store folder.", no_args_is_help=True)

Store = Annotated[
    str, typer.Option(envvar="KEEPSIGHT_STORE", help="The store folder.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="JSON for machines instead of text.")]


def _open(folder: str) -> DiskStore:
    from keepsight.store import DiskStore as Opened

    if not folder:
        raise InputError("which store? give --store FOLDER, or set KEEPSIGHT_STORE")
    store = Opened(folder)
    if not store.root.is_dir():
        raise StoreError(f"{store.root}: there is no such folder")
    return store


@app.command()
def stats(store: Store = "", as_json: Json = False) -> None:
    """Entries and bytes, per kind."""
    told = _open(store).stats()
    if as_json:
        json_line(told)
        return
    shown = table("kind", "entries", "bytes", right=("entries", "bytes"))
    for kind, counted in sorted(told["kinds"].items()):
        shown.add_row(kind, str(counted["entries"]), bytes_text(counted["bytes"]))
    entries = sum(counted["entries"] for counted in told["kinds"].values())
    shown.add_row("all", str(entries), bytes_text(told["bytes"]), style="bold")
    console().print(shown)


@app.command("list")
def list_entries(
    store: Store = "",
    kind: Annotated[str | None, typer.Option(help="Only this kind, for example package.")] = None,
    as_json: Json = False,
) -> None:
    """Every entry: kind, size, age, and for packages the model and the tokens."""
    opened = _open(store)
    rows = sorted(opened.entries(), key=lambda row: (row[0], -row[3]))
    if kind is not None:
        kinds = sorted({row[0] for row in rows})
        if kind not in kinds:
            raise InputError(f"--kind {kind}: the store has {', '.join(kinds) or 'nothing'}")
        rows = [row for row in rows if row[0] == kind]
    shown = table("kind", "key", "size", "age", "about", right=("size", "age"))
    for row_kind, key, size, used in rows:
        age = time.time() - used
        about = _about(opened, key) if row_kind == "package" else {}
        if as_json:
            entry = {"kind": row_kind, "key": key, "bytes": size, "age_s": round(age, 1)}
            json_line(entry | about)
            continue
        words = f"{about['model']}, {about['tokens']} tokens" if "model" in about else ""
        words = about.get("damaged", words)
        shown.add_row(row_kind, key[:16], bytes_text(size), age_text(age), plain(words))
    if not as_json:
        console().print(shown)


def _about(store: DiskStore, key: str) -> dict[str, Any]:
    """Whose features a package holds, from its record alone."""
    from keepsight import tensorfile

    path = store.root / "package" / key[:2] / f"{key}.sight"
    try:
        record = tensorfile.read_record(path)
        return {"model": str(record["about"].get("model_type")), "tokens": record["tokens"]}
    except (FileError, OSError, KeyError, AttributeError) as error:
        return {"damaged": f"damaged: {error}"}


@app.command()
def clear(
    store: Store = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove every entry; asks first."""
    opened = _open(store)
    told = opened.stats()
    entries = sum(counted["entries"] for counted in told["kinds"].values())
    if not yes:
        question = f"Remove {entries} entries ({bytes_text(told['bytes'])}) from {opened.root}?"
        typer.confirm(question, abort=True)
    console().print(f"{bytes_text(opened.clear())} freed")


@app.command()
def gc(
    budget: Annotated[str, typer.Option(help="What may stay, for example 2GiB.")],
    store: Store = "",
) -> None:
    """Remove the least recently used entries until the rest fits."""
    from keepsight.store import parse_bytes

    opened = _open(store)
    freed = opened.gc(parse_bytes(int(budget) if budget.isdigit() else budget))
    console().print(f"{bytes_text(freed)} freed, {bytes_text(opened.stats()['bytes'])} stay")


@app.command()
def check(store: Store = "") -> None:
    """Read every entry in full; what is damaged is named, and the exit code is 1."""
    opened = _open(store)
    entries = sum(1 for _ in opened.entries())
    wrong = opened.check()
    for line in wrong:
        console().print(plain(line), style="red")
    console().print(f"{entries} entries checked, {len(wrong)} damaged in {Path(opened.root)}")
    raise typer.Exit(1 if wrong else 0)
