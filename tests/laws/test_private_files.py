"""What Keepsight writes is its owner's alone, unless a folder was given to a group on purpose."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.encode_parts import picture, png
from typer.testing import CliRunner

import keepsight as ks
from keepsight.cli.app import app
from keepsight.cli.line_editor import history_at
from keepsight.formats import tensorfile
from keepsight.server.files import Files, OnDisk
from keepsight.store import DiskStore
from keepsight.store.remote import RemoteStore

KEY = "ab" * 32


@pytest.fixture(autouse=True, params=[0o022, 0o002, 0o077], ids=oct)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes(root: Path) -> dict[bool, set[int]]:
    """The modes of all folders (True) and of all files (False) below a folder."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for path in root.rglob("*"):
        found[path.is_dir()].add(mode(path))
    return found


PRIVATE = {True: {0o700}, False: {0o600}}


def filled(store: Any) -> Any:
    """A store with a package, a note, and a tenant with a package."""
    for view in (store, store.tenant("ann")):
        view.put("package", KEY, {"a": torch.ones(2)}, {})
        view.put_note("alias", KEY, {"n": 1})
        view.flush()
    return store


def test_a_store_is_its_owners_alone(tmp_path: Path) -> None:
    store = filled(DiskStore(tmp_path / "new" / "store"))
    store.pin("package", KEY)
    names = {path.name for path in (tmp_path / "new" / "store").iterdir()}
    assert {"index.sqlite", "index.sqlite-wal", "index.sqlite-shm"} <= names
    assert modes(tmp_path) == PRIVATE
    store.close()


def test_an_index_that_is_made_anew_is_too(tmp_path: Path) -> None:
    filled(DiskStore(tmp_path / "store")).close()
    for path in (tmp_path / "store").glob("index.sqlite*"):
        path.unlink()
    store = DiskStore(tmp_path / "store")
    assert len(list(store.entries())) == 2 and modes(tmp_path) == PRIVATE
    store.close()


def test_a_store_at_a_local_address_is_too(tmp_path: Path) -> None:
    filled(RemoteStore(f"file://{tmp_path}/new/store")).close()
    assert modes(tmp_path) == PRIVATE


def test_uploads_are_too(tmp_path: Path) -> None:
    files = Files(1 << 20, 100, contents=OnDisk(tmp_path / "store"))
    files.put("ann", b"a picture", "cat.png", "vision", None, None)
    assert modes(tmp_path) == PRIVATE


def test_packages_and_sessions_are_too(tmp_path: Path, demo_parts: dict[str, Any]) -> None:
    with ks.wrap(*demo_parts["demo"]) as vlm:
        vlm.encode(picture(1)).save(tmp_path / "new" / "cat.sight")
        chat = vlm.session()
        chat.ask("What is it?", [picture(1)], max_new_tokens=2)
        chat.save(tmp_path / "talks" / "today" / "talk.keep")
    assert modes(tmp_path) == PRIVATE


def test_what_the_encode_command_writes_is_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.png").write_bytes(png(1))
    Path("b.png").write_bytes(b"not an image")
    for words in (["--files", "--to", "out/packs"], ["--to", "out/store"]):
        words += ["--errors", "left.jsonl"]
        assert CliRunner().invoke(app, ["encode", "a.png", "b.png", *words]).exit_code == 1
    assert modes(Path("out")) == PRIVATE and mode(Path("out")) == 0o700
    assert mode(Path("left.jsonl")) == 0o600


def test_the_questions_of_a_chat_are_too(tmp_path: Path) -> None:
    pytest.importorskip("prompt_toolkit")
    history_at(tmp_path / "store" / "chat-lines").store_string("What is it?")
    assert modes(tmp_path) == PRIVATE


# -- what was there before -------------------------------------------------------------------------


def test_modes_of_before_stay(tmp_path: Path) -> None:
    """Of the store's folder, of a file that is written anew, and of what lies beside it."""
    tmp_path.chmod(0o755)
    root, beside, file = tmp_path / "store", tmp_path / "store" / "mine", tmp_path / "a.keep"
    root.mkdir()
    root.chmod(0o755)
    beside.write_text("x")
    beside.chmod(0o644)
    file.write_text("x")
    file.chmod(0o640)
    tensorfile.save(file, "session", 1, {}, {})
    filled(DiskStore(root)).close()
    assert [mode(path) for path in (tmp_path, root, beside, file)] == [0o755, 0o755, 0o644, 0o640]
    beside.unlink()
    assert modes(root) == PRIVATE


def test_a_folder_of_a_group_stays_one(tmp_path: Path) -> None:
    """The set-group-ID bit says that its owner meant it: `chmod 2770 store`."""
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o2770)
    store = filled(DiskStore(root))
    assert (root / "index.sqlite-wal").exists()
    assert modes(root) == {True: {0o2770}, False: {0o660}}
    store.close()
    for path in root.glob("index.sqlite*"):
        path.unlink()
    tensorfile.save(root / "more" / "a.sight", "package", 1, {}, {})
    assert modes(root) == {True: {0o2770}, False: {0o660}}


def test_a_group_that_may_only_read_may_only_read(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o2755)
    filled(DiskStore(root)).close()
    assert modes(root) == {True: {0o2750}, False: {0o640}}, "and others never"
