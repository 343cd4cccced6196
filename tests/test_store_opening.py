"""A store's catalogue opened while another process has it: whoever comes second waits a moment."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from keepsight.store import open_store
from keepsight.store.folders import retry
from keepsight.store.folders.catalogue import NAME

KEY = "a" * 64


def held(path: Path) -> sqlite3.Connection:
    """Another process in the middle of making the catalogue, not journalled yet as it will be."""
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE other (a)")
    other.execute("BEGIN IMMEDIATE")
    return other


def test_a_lock_of_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, asked = held(tmp_path / NAME), threading.Event()
    tried = retry.Catalogue

    def note(path: Path) -> retry.Catalogue:
        try:
            return tried(path)
        finally:
            asked.set()  # SQLite said "locked" at once

    monkeypatch.setattr(retry, "Catalogue", note)

    def let_go() -> None:
        asked.wait(30)
        other.execute("ROLLBACK")

    thread = threading.Thread(target=let_go)
    thread.start()
    retry.opened(tmp_path / NAME).close()
    thread.join()
    store = open_store(tmp_path)
    store.put("package", KEY, {"a": torch.ones(2)}, {})
    assert store.stats()["entries"] == 1
    store.close()
    assert open_store(tmp_path).check() == []


def test_a_lock_that_stays_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = held(tmp_path / NAME)
    monkeypatch.setattr(retry, "_PATIENCE", 0.1)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        retry.opened(tmp_path / NAME)
    other.close()


def test_what_is_no_lock_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        retry.opened(tmp_path / "no such folder" / NAME)


_OPEN = """
import sys
import torch
from keepsight.store import open_store
sys.stdin.readline()
store = open_store(sys.argv[1])
store.put("package", sys.argv[2] * 64, {"a": torch.ones(2)}, {})
store.flush()
print(store.stats()["broken"])
store.close()
"""


def test_processes_that_open_a_new_store_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _OPEN, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, digit], **pipes) for digit in "bcde"]  # type: ignore[call-overload]
    for process in processes:
        process.stdin.write("now\n")
        process.stdin.flush()
    assert [process.communicate(timeout=120)[0] for process in processes] == ["None\n"] * 4
    store = open_store(tmp_path)
    assert store.stats()["entries"] == 4 and store.check() == []
