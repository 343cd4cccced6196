"""`keepsight cache`: looking at a store, and removing from it, with and without tenants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from support.commands import last_json, refused, run

from keepsight.store import layout, open_store


@pytest.fixture
def store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with two pictures, one of which came from a folder whose name is nobody's concern."""
    Path("secret").mkdir()
    Path("a.png").rename("secret/cat.png")
    monkeypatch.setenv("KEEPSIGHT_STORE", "memory")
    run("ask", "secret/cat.png", "b.png", "Hello!")
    return folder / "memory"


def listed(*words: str) -> list[dict[str, Any]]:
    shown = run("cache", "list", "--json", *words).stdout
    return [json.loads(line) for line in shown.splitlines()]


def counted(*words: str) -> Any:
    return last_json(run("cache", "stats", "--json", *words).stdout)


def cells(text: str) -> str:
    return " ".join(text.split())


def test_what_is_in_a_store_is_listed_by_its_pictures(store: Path) -> None:
    written = b"".join(path.read_bytes() for path in store.rglob("*") if path.is_file())
    assert b"cat.png" in written and b"secret" not in written
    said = run("ask", "secret/cat.png", "b.png", "Hello!")
    assert "not encoded again: image 1, image 2" in said.stderr
    run("ask", "b.png", "Hello!", "--tenant", "ada")
    rows = listed()
    of_all = [(row["files"], row["tokens"]) for row in rows if not row["tenant"]]
    assert sorted(of_all) == [(["b.png"], [12]), (["cat.png"], [9])] and len(rows) == 3
    assert all(row["where"] == ["disk"] and row["bytes"] > 0 for row in rows)
    shown = run("cache", "list").stdout
    assert cells(shown.splitlines()[0]) == "picture key tenant size tokens last use where"
    assert len(shown.splitlines()) == 4 and all(row["key"][:16] in shown for row in rows)
    every = run("cache", "list", "--all").stdout
    assert "cat.png, qwen3_vl, 9 tokens" in every and "12 tokens" in every
    packages = listed("--kind", "package")
    assert {row["model"] for row in packages} == {"qwen3_vl"}
    total = counted()["kinds"]["package"]
    assert (total["entries"], total["bytes"]) == (3, sum(row["bytes"] for row in packages))
    assert any(row.get("files") for row in listed("--all") if row["kind"] == "snapshot")
    for words in (("cache", "stats"), ("show", "memory")):
        assert "package 3" in cells(run(*words).stdout)
    key = next(row["key"] for row in packages if row["files"] == ["cat.png"])
    told = last_json(run("cache", "explain", f"package/{key[:20]}", "--json").stdout)
    assert (told["key"], told["tokens"], told["tier"]) == (key, 9, "disk")
    for name in (f"package/{key}", "cat.png"):
        shown = run("cache", "explain", name).stdout
        assert "the features of one image" in shown and "when a budget is exceeded" in shown


def test_what_is_pinned_stays_until_somebody_says_otherwise(store: Path) -> None:
    key = next(row["key"] for row in listed("--kind", "package") if row["files"] == ["cat.png"])
    run("cache", "pin", f"package/{key}")
    run("cache", "gc", "--budget", "0")
    assert [(row["key"], row["pinned"]) for row in listed("--all")] == [(key, True)]
    assert "never by itself" in run("cache", "explain", key).stdout
    asked = run("cache", "delete", key, given="n\n", code=1)
    assert f"package/{key[:16]}: pinned. Remove all the same?" in asked.output
    run("cache", "unpin", key)
    assert "B freed" in run("cache", "delete", key).stdout
    assert counted()["bytes"] == 0 and "no such entry" in refused("cache", "explain", key)


def test_a_picture_is_removed_by_its_name(store: Path) -> None:
    key = next(row["key"] for row in listed() if row["files"] == ["cat.png"])
    run("cache", "pin", "cat.png")
    run("cache", "delete", "cat.png", given="n\n", code=1)
    run("cache", "delete", "cat.png", "--yes")
    assert key not in run("cache", "list", "--all", "--json").stdout
    Path("more").mkdir()
    PIL.Image.new("RGB", (64, 64)).save("more/b.png")
    run("encode", "more/b.png", "--to", "memory")
    run("encode", "b.png", "--to", "memory", "--tenant", "ada")
    told = refused("cache", "delete", "b.png")
    assert "may be any of 2" in told and all(row["key"][:16] in told for row in listed())
    for key in {row["key"] for row in listed()}:
        run("cache", "delete", key[:16])  # every tenant's
    assert listed() == [] and "no such entry" in refused("cache", "delete", "b.png")


def test_a_store_is_made_smaller_and_emptied(store: Path) -> None:
    (store / "mine.txt").write_text("not the store's")
    half = counted()["bytes"] // 2
    run("cache", "gc", "--budget", str(half))
    rest = counted()["bytes"]
    assert 0 < rest <= half
    run("cache", "clear", given="n\n", code=1)
    assert counted()["bytes"] == rest
    run("cache", "clear", given="y\n")
    assert counted()["bytes"] == 0 and (store / "mine.txt").exists()


@pytest.mark.parametrize("repair", [False, True])
def test_damage_is_named_and_repaired(store: Path, repair: bool) -> None:
    assert "0 damaged" in run("cache", "check").stdout
    path = next((store / "package").rglob("*.sight"))
    path.write_bytes(path.read_bytes()[:-1])
    said = run("cache", "check", *["--repair"] * repair, code=not repair).stdout
    assert "1 damaged" in said and path.name[:30] in said and ("1 put right" in said) == repair
    told = last_json(run("cache", "check", "--json", code=not repair).stdout)
    assert len(told["wrong"]) == (not repair) and told["entries"] > 0


@pytest.mark.parametrize("address", ["memory", "a file system"])
def test_tenants_are_seen_and_looked_after_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    where = "memory" if address == "memory" else f"file://{folder}/memory"
    store = open_store(where)
    for tenant, count in ((None, 1), ("one", 2), ("two", 3)):
        for number in range(count):
            key = f"1{number}{count}{'0' * 61}"
            store.tenant(tenant).put_note("alias", key, {"n": number})
    store.close()
    one, two = layout.tenant_digest("one"), layout.tenant_digest("two")
    monkeypatch.setenv("KEEPSIGHT_STORE", where)

    def each() -> dict[str, int]:
        told = counted()
        assert told["entries"] == sum(of["entries"] for of in told["tenants"].values())
        return {name: of["entries"] for name, of in told["tenants"].items()}

    assert each() == {"": 1, one: 2, two: 3}
    shown = run("cache", "stats").stdout
    assert one[:16] in shown and "(default)" in shown
    rows = listed("--all")
    assert sorted(row["tenant"] for row in rows) == sorted(["", one, one, two, two, two])
    assert one[:16] in run("cache", "list", "--all").stdout
    for name in ("one", one[:8]):
        assert list(counted("--tenant", name)["tenants"]) == [one]
    assert "0 damaged" in run("cache", "check").stdout
    assert "tenant" in refused("cache", "explain", "1")
    key = next(row["key"] for row in rows if row["tenant"] == one)
    explained = last_json(run("cache", "explain", key, "--json").stdout)
    assert explained["tenant"] == one and explained["tier"]
    run("cache", "clear", "--tenant", "two", "--yes")
    assert each() == {"": 1, one: 2}
    if address != "memory":
        assert "lifecycle rules" in refused("cache", "gc", "--budget", "0")
    else:
        run("cache", "gc", "--budget", "0", "--tenant", "one")
        assert each() == {"": 1}
    run("cache", "clear", "--yes")
    assert each() == {}


def test_nothing_is_written_without_a_store(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    run("ask", "a.png", "Hello!")
    run("chat", given="Hello!\n")
    assert sorted(folder.rglob("*")) == before
