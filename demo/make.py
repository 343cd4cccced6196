"""Make both demo models from nothing and measure them: one command, a machine with two cores.

Steps whose result is already in the work folder are left out, so a run that was stopped can be
started again. ``--install`` copies the new models into the package at the end.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import words
from tiny import HERE, KINDS, MODELS


def run(script: str, *arguments: str | Path) -> "subprocess.Popen[bytes]":
    """Start one of the scripts beside this one.

    The models learn side by side, one core each: on matrices this small a second core helps
    little.
    """
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    print("+", " ".join(command[1:]), flush=True)
    return subprocess.Popen(command, env=environment)


def finish(*processes: "subprocess.Popen[bytes]") -> None:
    """Wait for all; stop at the first that failed."""
    for process in processes:
        if process.wait():
            raise SystemExit(f"failed: {process.args!r}")


def make(work: Path, minutes: float, rehearse: bool) -> list[Path]:
    """Tower, tokenizer, picture bank and both models; returns the model folders."""
    short = ("--minutes", "0.3") if rehearse else ()
    few = ("--variants", "1") if rehearse else ()
    tower, bank, tokenizer = (work / n for n in ("tower.safetensors", "bank.pt", "tokenizer.json"))
    if not tower.exists():
        finish(run("pretrain.py", "--out", tower, *short))
    if not tokenizer.exists():
        words.build().save(str(tokenizer))
    if not bank.exists():
        finish(run("features.py", tower, bank, *few))
    folders = [work / kind for kind in KINDS]
    common = ("--tower", tower, "--bank", bank, "--tokenizer", tokenizer, "--minutes", minutes)
    finish(
        *(
            run("train.py", folder.name, *map(str, common), "--out", folder)
            for folder in folders
            if not (folder / "config.json").exists()
        )
    )
    return folders


def main() -> None:
    """Make, measure and, if asked, install."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--minutes", type=float, default=120, help="of stage 2, for each model")
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--rehearse", action="store_true", help="every step, too short to learn")
    options = parser.parse_args()
    if options.rehearse and options.install:
        parser.error("a rehearsal makes models that know nothing: not to be installed")
    options.work.mkdir(parents=True, exist_ok=True)
    minutes = 0.3 if options.rehearse else options.minutes
    folders = make(options.work, minutes, options.rehearse)
    models = [part for folder in folders for part in ("--model", str(folder))]
    asked = ("--conversations", "10", "--controls", "2") if options.rehearse else ()
    finish(run("measure.py", *models, "--results", options.work / "results.json", *asked))
    if options.install:
        for folder in folders:
            shutil.copytree(folder, MODELS / folder.name, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
