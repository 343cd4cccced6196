"""A store's index opened while another process has it: whoever comes second waits a moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from keepsight.store import open_store

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
