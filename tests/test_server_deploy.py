"""What the container is made of and how it starts, as far as no Docker is needed to see it."""

from __future__ import annotations

import fnmatch
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_harness import served

from keepsight.cli import serve
from keepsight.errors import InputError
from keepsight.server.config import read_config

ROOT = Path(__file__).resolve().parents[1]
LINES = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()


def steps(word: str) -> list[str]:
    return [line.strip().removeprefix(word).strip() for line in LINES if word in line.split()[:2]]


def test_what_is_copied_is_there_and_is_sent() -> None:
    text = (ROOT / "deploy/Dockerfile.dockerignore").read_text(encoding="utf-8")
    rules = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    sources = [source for step in steps("COPY") for source in step.split()[:-1]]
    assert {"pyproject.toml", "constraints.txt", "keepsight"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in rules
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in re.findall(r'(?:readme = |license-files = \[)"([^"]+)"', project):
        assert name in sources, "the build reads it"
    assert not any(fnmatch.fnmatch("keepsight", rule) for rule in rules[1:])


def test_the_container_starts_ends_and_tells_its_health() -> None:
    [entry], [health] = steps("ENTRYPOINT"), steps("HEALTHCHECK")
    assert json.loads(entry) == ["keepsight"], "a shell between would keep signals to itself"
    flags = json.loads(next(line for line in LINES if line.startswith("CMD"))[3:])
    assert flags[:2] == ["serve", "demo"]
    code = re.search(r'python -c "(.*)"', health)
    assert code is not None
    check = [sys.executable, "-c"]
    with served(*flags[2:]) as server:
        there = code[1].replace(":8000/", f":{server.port}/")
        assert subprocess.run([*check, there], timeout=60).returncode == 0
        assert server.stop(signal.SIGTERM) == 0
        assert subprocess.run([*check, there], timeout=60, stderr=-3).returncode == 1


def test_a_server_that_loads_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of a container gets no signal that it has no handler for."""
    seen: list[Any] = []

    def load(name: str, settings: dict[str, Any]) -> None:
        seen.append(signal.getsignal(signal.SIGTERM))
        raise InputError("enough")

    monkeypatch.setattr(serve, "_loaded", load)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(InputError, match="enough"):
        serve.run({"model": "demo"})
    assert signal.getsignal(signal.SIGTERM) is before
    ended: list[int] = []
    monkeypatch.setattr(serve.os, "_exit", ended.append)
    assert callable(seen[0])
    seen[0](signal.SIGTERM, None)
    assert ended == [143]


def test_the_configuration_beside_it_is_read() -> None:
    settings = read_config(str(ROOT / "deploy/keepsight.toml"), serve._OF_MODEL)
    assert settings["model"] == "demo" and [key.admin for key in settings["keys"]] == [False, True]
