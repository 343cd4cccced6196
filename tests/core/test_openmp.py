"""A thread that hands the model over keeps no threads of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from keepsight.system import devices

COUNTED = """
import os
import torch
from keepsight.system.devices import release_team

torch.set_num_threads(3)
count = lambda: len(os.listdir("/proc/self/task"))
product = lambda: torch.ones(2000, 2000).sqrt().add(1.0).sum().item()
before = count()
wanted = product()
with_team = count()
print(release_team(), with_team > before, count() < with_team, product() == wanted)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_the_team_of_a_thread_ends_and_comes_back() -> None:
    if not list(Path(torch.__file__).parent.glob("lib/libgomp*")):
        pytest.skip("this torch brings no OpenMP of its own")
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True"] * 4


def test_without_that_library_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__file__", "/nowhere/torch/__init__.py")
    assert devices.release_team() is False
