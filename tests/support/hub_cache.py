"""A cache of the Hub made by hand, for tests of models that come from a hub id."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from keepsight.models.loading import model_path

NAME = "somebody/seeing"


def cached(home: Path, commit: str, folder: str | Path = "demo") -> Path:
    """The files of one commit of `NAME`, which is that of its main branch from now on."""
    own = home / "hub" / f"models--{NAME.replace('/', '--')}"
    (own / "refs").mkdir(parents=True, exist_ok=True)
    (own / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(model_path(str(folder)), own / "snapshots" / commit))


def run_offline(home: Path, *words: str, **more: str) -> str:
    """What a new process prints that has this cache and no network."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", **more}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, *words],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
