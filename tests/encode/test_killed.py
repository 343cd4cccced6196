"""A run that is killed at any moment, again and again, ends as if it had never been.

Real processes and kill -9. What a run reported as encoded must be there for the next one, which may
do again only what was never reported, and in the end every package is there, byte for byte.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.encode_parts import files, png, table, tar
from support.hostile import finished, start

import keepsight as ks
from keepsight.encode import encode

IMAGES = 32
RUN = """
import json, sys, torch
torch.set_num_threads(1)
import keepsight as ks
from keepsight.encode import encode
with ks.load("demo", dtype="float32", store=sys.argv[2]) as vlm:
    print("loaded", flush=True)
    for result in encode([sys.argv[1]], vlm):
        print(json.dumps(result.to_dict()), flush=True)
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files, an archive and a table; some images twice, some broken."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(IMAGES - 12):
        (folder / f"p{number:03}.png").write_bytes(png(number))
    (folder / "broken.png").write_bytes(b"nothing")
    tar(folder / "t.tar", [(f"{n}.png", png(n)) for n in range(16, 26)])
    table(folder / "t.parquet", {"image": [png(n) for n in range(24, IMAGES)]}, row_group_size=4)
    return folder


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run leaves that nobody interrupts."""
    store = tmp_path_factory.mktemp("whole")
    ran(photos, store)
    found = files(store)
    assert len(found) == IMAGES
    return found


def ran(photos: Path, store: Path) -> list[dict[str, Any]]:
    """What a whole run reports."""
    with ks.load("demo", dtype="float32", store=store) as vlm:
        return [result.to_dict() for result in encode([photos], vlm)]


def loaded(photos: Path, store: Path) -> subprocess.Popen[str]:
    """A process that has its model, and goes on to encode."""
    process = start(RUN, photos, store)
    if process.stdout is None or process.stdout.readline() != "loaded\n":
        raise RuntimeError(process.communicate()[1])
    return process


def interrupted(photos: Path, store: Path, seconds: float) -> list[dict[str, Any]]:
    """What a run reports until it is killed, some time after it has loaded its model."""
    process = loaded(photos, store)
    time.sleep(seconds)
    process.kill()
    said, _ = process.communicate(timeout=60)
    lines = said.rsplit("\n", 1)[0].split("\n")
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def crash(photos: Path, store: Path, whole: dict[str, bytes], kills: int, seed: int) -> None:
    moment = random.Random(seed)
    reported: set[str] = set()
    for _ in range(kills):
        told = interrupted(photos, store, moment.uniform(0.0, 0.8))
        encoded = {result["feature_id"] for result in told if result["status"] == "encoded"}
        assert not encoded & reported, "what was reported before was encoded again"
        reported |= encoded
        there = files(store)
        assert {f"{feature_id}.sight" for feature_id in reported} <= there.keys()
        assert there.items() <= whole.items(), "a file that is half, or other"
    last = ran(photos, store)
    assert [r["status"] for r in last].count("broken") == 1 and len(last) == 39
    assert not {r["feature_id"] for r in last if r["status"] == "encoded"} & reported
    assert files(store) == whole
    with ks.load("demo", dtype="float32", store=store) as vlm:
        assert vlm.runtime.store.check() == []
        assert {r.status for r in encode([photos / "p*.png"], vlm)} == {"kept"}


@pytest.mark.parametrize(
    ("seed", "kills"), [(1, 2), *(pytest.param(n, 8, marks=pytest.mark.slow) for n in range(4))]
)
def test_a_run_that_is_killed_is_as_one_that_was_not(
    photos: Path, whole: dict[str, bytes], tmp_path: Path, seed: int, kills: int
) -> None:
    crash(photos, tmp_path, whole, kills, seed)


def test_two_machines_may_do_the_same_work_at_once(
    photos: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    other = loaded(photos, tmp_path)
    ran(photos, tmp_path)
    assert finished(other).endswith("done\n")
    assert files(tmp_path) == whole
