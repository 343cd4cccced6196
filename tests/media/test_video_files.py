"""Videos through the real video processors, in a process that has torchvision: video_checks.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TORCHVISION = Path(sys.prefix) / "torchvision"  # where the Makefile puts it, out of everyone's way


@pytest.mark.skipif(not TORCHVISION.exists(), reason="`make test` installs torchvision for this")
def test_videos_are_as_stock_sees_them() -> None:
    tests = Path(__file__).parents[1]
    checks = tests / "support" / "video_checks.py"
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            str(checks),
            str(TORCHVISION),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"},
    )
    assert "videos are as stock sees them" in done.stdout, done.stdout + done.stderr
