"""File systems of their own for tests, where this machine lets them be mounted; else tests skip."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def mount(*arguments: str | Path) -> None:
    """Run mount; the test is skipped where that is not allowed."""
    try:
        done = subprocess.run(["mount", *arguments], check=False, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip("no file systems can be mounted here")


def unmount(folder: Path) -> None:
    """Take it away, whoever has files open in it."""
    subprocess.run(["umount", "-l", folder], check=False, capture_output=True)


@contextlib.contextmanager
def mounted(folder: Path, size: str = "8m") -> Iterator[None]:
    """A small file system in memory at a folder."""
    folder.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={size}", "none", folder)
    try:
        yield
    finally:
        unmount(folder)


def allow_writing(folder: Path, allowed: bool) -> None:
    """Mount it anew, to be read only or not."""
    mount("-o", f"remount,{'rw' if allowed else 'ro'}", folder)


def fill_up(folder: Path, but: int) -> Path:
    """A file that takes all room of a file system but so many bytes."""
    ballast = folder / "ballast"
    state = os.statvfs(folder)
    with ballast.open("wb", buffering=0) as file:
        try:
            file.write(b"\0" * max(0, state.f_bavail * state.f_frsize - but))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return ballast
