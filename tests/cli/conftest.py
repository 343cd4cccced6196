"""What the tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepsight.demo.scene import Scene


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two pictures and something that is none, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Scene.of(color="red", shape="circle", seed=1, size=(96, 96)).draw().save("a.png")
    Scene.of(color="blue", shape="star", seed=2, size=(128, 96)).draw().save("b.png")
    Path("bad.png").write_bytes(b"not an image")
    return tmp_path
