"""Videos through the real video processors, in a pytest that has torchvision: video_checks.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TORCHVISION = Path(sys.prefix) / "torchvision"  # where the Makefile puts it, out of everyone's way
TESTS = Path(__file__).parents[1]
RUN = """
import sys, pytest, torchvision_operators
sys.path.insert(0, sys.argv[1])
sys.exit(pytest.main(["-p", "no:cacheprovider", "-m", *sys.argv[2:]]))
"""


@pytest.mark.skipif(not TORCHVISION.exists(), reason="`make test` installs torchvision for this")
@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_videos_are_as_stock_sees_them(marked: str) -> None:
    checks = str(TESTS / "support" / "video_checks.py")
    run = [sys.executable, "-W", "ignore", "-c", RUN, str(TORCHVISION), marked, checks]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    own = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}
    done = subprocess.run(run, capture_output=True, text=True, env={**own, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout
