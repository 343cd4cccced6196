"""aiperf: a benchmark with pictures from its start to its report, in streams of a set length."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import URL, check

_REVISION = "0" * 40


def as_if_fetched(home: Path) -> str:
    """The tokenizer under the name and in the folder of one that came from a hub: aiperf takes no
    other, and nothing is fetched here."""
    model = home / "hub" / "models--keepsight--demo"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(_REVISION)
    shutil.copytree(
        os.environ["KEEPSIGHT_TOKENIZER"],
        model / "snapshots" / _REVISION,
        ignore=shutil.ignore_patterns("*.safetensors"),
    )
    return "keepsight/demo"


with tempfile.TemporaryDirectory() as folder:
    home, out = Path(folder) / "home", Path(folder) / "out"
    options = {
        "--model-names": "demo",
        "--url": URL.removesuffix("/v1"),
        "--endpoint-type": "chat",
        "--tokenizer": as_if_fetched(home),
        "--synthetic-input-tokens-mean": "16",
        "--output-tokens-mean": "8",
        "--request-count": "4",
        "--concurrency": "2",
        "--image-width-mean": "96",
        "--image-height-mean": "96",
        "--ui-type": "none",
        "--output-artifact-dir": str(out),
    }
    command = [str(Path(sys.executable).parent / "aiperf"), "profile", "--streaming"]
    command += ["--use-server-token-count"]
    command += [word for pair in options.items() for word in pair]
    for extra in ("ignore_eos:true", "min_tokens:8"):
        command += ["--extra-inputs", extra]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "HF_HOME": str(home)},
    )
    check(done.returncode == 0, f"it ends: {done.stdout[-3000:]}" if done.returncode else "it ends")
    report = json.loads((out / "profile_export_aiperf.json").read_text())
    check(report["request_count"]["avg"] == 4, "every request")
    check(report["output_sequence_length"]["avg"] == 8, "answers of the length that was asked for")
