"""`encode --ray`: two workers, one of them killed in the middle, and the same packages as alone.

Ray takes its time to start, so one cluster of this machine's own serves all of it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from support.encode_parts import files, png, table, zipped

import keepsight as ks
from keepsight import encode as room
from keepsight.encode import on_ray
from keepsight.errors import InputError

ray = pytest.importorskip("ray")
MODEL = {"model": "demo", "dtype": "float32"}


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    """A cluster of two processors."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # it would write a token into the home folder
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()
    del os.environ["RAY_AUTH_MODE"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Pictures in files, a table and an archive, one of them twice, and broken ones."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(24):
        (folder / f"p{number:02}.png").write_bytes(png(number))
    (folder / os.fsdecode(b"caf\xe9.png")).write_bytes(png(30))
    (folder / "a-broken.png").write_bytes(b"nothing")
    table(folder / "t.parquet", {"image": [png(3), png(31), b"nothing"]})
    zipped(folder / "z.zip", [("../x.png", png(32))])
    return folder


def alone(photos: Path, store: Path) -> Counter[str]:
    with ks.load("demo", dtype="float32", store=store) as vlm:
        return Counter(result.status for result in room.encode([photos], vlm))


def workers() -> list[psutil.Process]:
    """The worker processes of the cluster that this process started."""
    mine = psutil.Process().children(recursive=True)
    return [p for p in mine if "MapWorker" in " ".join(p.cmdline()[:1])]


def kill_one(done: list[int], store: Path) -> None:
    """Kill -9 one worker, once some packages are there and others are not."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not done:
        if len(files(store)) >= 3 and (found := workers()):
            os.kill(found[0].pid, signal.SIGKILL)
            done.append(len(files(store)))
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("running")
def test_two_workers_one_killed_give_the_packages_of_a_plain_run(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_ray, "_TOGETHER", 4)
    pieces = room.find([photos]).pieces
    options = {**MODEL, "store": str(tmp_path / "ray")}
    done: list[int] = []
    killer = threading.Thread(target=kill_one, args=(done, tmp_path / "ray"), daemon=True)
    killer.start()
    results = list(on_ray.run_on_ray(pieces, room.ReadOptions(), options, workers=2))
    killer.join(timeout=1)
    assert done and done[0] < 27, "no worker was killed in the middle"
    plain = alone(photos, tmp_path / "alone")
    counts = Counter(result.status for result in results)
    assert sum(counts.values()) == sum(plain.values()) == 30
    assert counts["broken"] == plain["broken"] == 2
    assert files(tmp_path / "ray") == files(tmp_path / "alone")
    assert len(files(tmp_path / "ray")) == 27

    # Again, with everything there; and a worker that refuses is heard here.
    again = on_ray.run_on_ray(pieces, room.ReadOptions(), options, workers=1)
    assert {result.status for result in again} == {"kept", "duplicate", "broken"}
    with pytest.raises(InputError, match="no column 'photo'.*image"):
        list(on_ray.run_on_ray(pieces, room.ReadOptions(column="photo"), options, workers=1))


@pytest.mark.slow
@pytest.mark.usefixtures("running")
def test_an_encoder_maps_over_ray_data(tmp_path: Path) -> None:
    import ray.data

    rows = [{"image": png(n % 3), "id": n} for n in range(6)]
    told = ray.data.from_items(rows).map_batches(
        ks.Encoder,
        fn_constructor_args=("demo",),
        fn_constructor_kwargs={"store": str(tmp_path), "torch_threads": torch.get_num_threads()},
        batch_size=3,
        concurrency=1,
    )
    found = sorted(told.take_all(), key=lambda row: row["id"])
    assert len({row["feature_id"] for row in found}) == 3
    assert all(row["tokens"] > 0 and row["error"] is None for row in found)


def test_pieces_are_grouped_and_containers_go_alone() -> None:
    kinds = ["image"] * 70 + ["pdf", "pdf"] + ["text", "image"]
    pieces = [room.SourcePiece(str(n), kind, str(n)) for n, kind in enumerate(kinds)]
    groups = list(on_ray.grouped(pieces))
    assert [len(group) for group in groups] == [32, 32, 6, 1, 1, 2]
    assert [piece for group in groups for piece in group] == pieces


def test_without_ray_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ks.errors.MissingExtra, match=r"extra 'ray'\); run: pip install"):
        list(on_ray.run_on_ray([], room.ReadOptions(), MODEL))
