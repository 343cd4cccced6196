"""`encode` into a store: what lies there answers afterwards, and nothing is done twice.

The model's counters tell what was computed. A package must hold the bits that encoding the image
alone gives, whatever ran beside it.
"""

from __future__ import annotations

import itertools
import pickle
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.encode_parts import (
    film,
    pdf,
    picture,
    png,
    special,
    statuses,
    table,
    tar,
    towers,
    zipped,
)
from support.hostile import bounded

import keepsight as ks
from keepsight.encode import encode
from keepsight.encode.encoder import Encoder
from keepsight.encode.run import work_ahead
from keepsight.errors import InputError, NotStored, StoreError
from keepsight.system import digests

QUESTION = "Describe the picture."


def open_vlm(parts: dict[str, Any], store: Path | None, **options: Any) -> Any:
    return ks.wrap(*parts["demo"], store=store, **options)


@pytest.fixture
def vlm(demo_parts: dict[str, Any], tmp_path: Path) -> Iterator[Any]:
    with open_vlm(demo_parts, tmp_path / "store") as wrapped:
        yield wrapped


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three different pictures, one of them twice, once in other bytes, and a broken file."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        (folder / f"p{number}.png").write_bytes(png(number))
    shutil.copy(folder / "p0.png", folder / "z-copy.png")
    Image.open(folder / "p0.png").save(folder / "z-same.bmp")
    (folder / "a-broken.png").write_bytes(b"not an image")
    return folder


def packages(vlm: Any, tenant: str = "") -> dict[str, str]:
    """Every package in a store: feature id, and a digest of its tensors."""
    store, found = vlm.runtime.store_of(tenant), {}
    for entry in store.entries():
        if entry.kind == "package":
            tensors, _ = store.get("package", entry.key)
            found[entry.key] = digest(tensors)
    return found


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return digests.digest("test", *itertools.chain(*sorted(tensors.items())))


# -- one run, and what it leaves -----------------------------------------------------------------


def test_what_was_encoded_answers_without_looking(
    vlm: Any, photos: Path, tmp_path: Path, demo_parts: dict[str, Any]
) -> None:
    results = list(encode([photos], vlm))
    assert [Path(result.image).name for result in results] == sorted(
        p.name for p in photos.iterdir()
    )
    assert statuses(results) == {
        "a-broken.png": "broken",
        "p0.png": "encoded",
        "p1.png": "encoded",
        "p2.png": "encoded",
        "z-copy.png": "duplicate",
        "z-same.bmp": "duplicate",
    }
    assert towers(vlm)[0] == 3
    vlm.close()
    with open_vlm(demo_parts, None) as plain, open_vlm(demo_parts, tmp_path / "store") as again:
        for name in ("p0.png", "p1.png", "p2.png", "z-copy.png", "z-same.bmp"):
            reply = again.ask(photos / name, QUESTION)
            assert reply.usage.images_encoded == 0 and reply.usage.images_reused == 1
            assert reply.text == plain.ask(photos / name, QUESTION).text
        assert towers(again) == (0, 0), "neither encoded nor preprocessed"


def test_bits_are_those_of_one_image_alone(
    vlm: Any, tmp_path: Path, demo_parts: dict[str, Any]
) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(12):
        side = 32 * (1 + number % 4)
        (folder / f"{number:02}.png").write_bytes(png(number, (side, 96)))
    results = list(encode([folder], vlm, threads=4))
    found = packages(vlm)
    with open_vlm(demo_parts, None) as alone:
        for result in results:
            package = alone.encode(Path(result.image))
            assert package.feature_id == result.feature_id and package.tokens == result.tokens
            assert digest(package.tensors) == found[result.feature_id]
    assert len(found) == 12


def test_a_second_run_only_looks_up_and_makes_again_what_is_gone(
    vlm: Any, photos: Path, tmp_path: Path, demo_parts: dict[str, Any]
) -> None:
    first = list(encode([photos], vlm))
    before = packages(vlm)
    (gone,) = (result for result in first if Path(result.image).name == "p1.png")
    vlm.runtime.store.delete("package", gone.feature_id)
    vlm.close()
    (photos / "new.png").write_bytes(png(9))
    with open_vlm(demo_parts, tmp_path / "store") as again:
        said = statuses(encode([photos], again))
        assert Counter(said.values()) == {"kept": 2, "duplicate": 2, "encoded": 2, "broken": 1}
        assert said["new.png"] == said["p1.png"] == "encoded" and towers(again) == (2, 2)
        assert before.items() < packages(again).items()


def test_every_kind_of_source_ends_in_one_store(
    vlm: Any, tmp_path: Path, demo_parts: dict[str, Any]
) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    zipped(folder / "a.zip", [("x.png", png(1)), ("../y.png", png(2))])
    tar(folder / "b.tar", [("x.png", png(1)), special("l.png", b"2", "/etc/passwd")])
    table(folder / "c.parquet", {"image": [{"bytes": png(3), "path": None}, None]})
    pdf(folder / "d.pdf", 2)
    film(folder / "e.mp4")
    said = statuses(encode([folder], vlm, fps=1, dpi=72))
    assert said == {
        "a.zip#x.png": "encoded",
        "y.png": "encoded",
        "b.tar#x.png": "duplicate",
        "b.tar#l.png": "broken",
        "c.parquet#row=0": "encoded",
        "c.parquet#row=1": "broken",
        "d.pdf#page=1": "encoded",
        "d.pdf#page=2": "encoded",
        "e.mp4#frame=0": "encoded",
        "e.mp4#frame=4": "encoded",
    }
    again = Counter(r.status for r in encode([folder], vlm, fps=1, dpi=72))
    assert again == {"kept": 7, "duplicate": 1, "broken": 2}
    # The bytes in an archive are those of a file.
    assert vlm.ask(png(2), QUESTION).usage.images_encoded == 0
    assert not list(tmp_path.rglob("y.png")), "nothing is unpacked"


def test_a_video_goes_to_the_family_or_says_why_not(vlm: Any, tmp_path: Path) -> None:
    (result,) = encode([film(tmp_path / "film.mp4")], vlm)
    if result.status == "broken":  # the video processor is upstream's, and needs torchvision
        assert "video" in result.error
    else:
        assert result.status == "encoded" and result.tokens > 0


# -- options ---------------------------------------------------------------------------------------


def test_too_many_tokens_are_skipped_with_the_reason(vlm: Any, tmp_path: Path) -> None:
    (tmp_path / "big.png").write_bytes(png(1, (256, 256)))
    (tmp_path / "small.png").write_bytes(png(2, (64, 64)))
    results = list(encode([tmp_path / "*.png"], vlm, max_tokens=15))
    assert statuses(results) == {"big.png": "skipped", "small.png": "encoded"}
    assert "16 tokens, more than 15; --max-pixels" in results[0].error
    assert towers(vlm)[0] == 1


def test_one_path_is_one_source(vlm: Any, photos: Path) -> None:
    """Not the files behind each of its letters."""
    for one in (photos, str(photos)):
        assert [r.image for r in encode(one, vlm)] == [r.image for r in encode([photos], vlm)]


def test_what_cannot_be_is_refused_by_name(
    vlm: Any, photos: Path, demo_parts: dict[str, Any]
) -> None:
    for wrong, said in (
        ({"max_tokens": 0}, "max_tokens=0; expected a number of tokens"),
        ({"max_tokens": "9"}, "max_tokens='9'"),
        ({"threads": "2"}, "threads='2'"),
        ({"dpi": "a"}, "dpi='a'"),
        ({"fps": "a"}, "fps='a'"),
        ({"shard": (1, 2)}, r"shard \(1, 2\); expected i/n"),
        ({"codec": "zip"}, "no codec 'zip'"),
    ):
        with pytest.raises(InputError, match=said):
            encode([photos], vlm, **wrong)
    for wrong in (None, 3, vlm, b"photos", [picture(1)]):
        with pytest.raises(InputError, match="is no source; expected the path"):
            encode(wrong, vlm)
    with open_vlm(demo_parts, None) as other, pytest.raises(InputError, match="has no store"):
        encode([photos], other)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_packed_packages_are_found_and_used_when_any_are_accepted(
    vlm: Any, photos: Path, tmp_path: Path, demo_parts: dict[str, Any], codec: str
) -> None:
    results = list(encode([photos / "p0.png", photos / "p1.png"], vlm, codec=codec))
    exact = open_vlm(demo_parts, None).encode(photos / "p0.png")
    assert {result.status for result in results} == {"encoded"}
    assert results[0].feature_id != exact.feature_id
    assert 0 < results[0].nbytes < exact.nbytes
    assert len(packages(vlm)) == 2, "no exact package beside a packed one"
    assert {r.status for r in encode([photos / "p0.png"], vlm, codec=codec)} == {"kept"}
    other = "int8" if codec == "bf16" else "bf16"
    assert {r.status for r in encode([photos / "p2.png"], vlm, codec=other)} == {"encoded"}
    assert {r.status for r in encode([photos / "p2.png"], vlm, codec=codec)} == {"encoded"}
    vlm.close()
    with open_vlm(demo_parts, tmp_path / "store", accept_features="any") as lenient:
        assert lenient.ask(photos / "p0.png", QUESTION).usage.images_encoded == 0
    with open_vlm(demo_parts, tmp_path / "store") as strict:
        assert {r.status for r in encode([photos / "p0.png"], strict, codec=codec)} == {"kept"}
        assert {r.status for r in encode([photos / "p0.png"], strict)} == {"encoded"}


def test_tenants_share_nothing(vlm: Any, photos: Path) -> None:
    for tenant in (None, "ann", "bob"):
        said = Counter(r.status for r in encode([photos / "p?.png"], vlm, tenant=tenant))
        assert said == {"encoded": 3}, tenant
    assert Counter(r.status for r in encode([photos / "p?.png"], vlm, tenant="ann")) == {"kept": 3}
    assert vlm.ask(photos / "p1.png", QUESTION, tenant="ann").usage.images_encoded == 0


def test_shards_together_are_the_whole(
    photos: Path, tmp_path: Path, demo_parts: dict[str, Any]
) -> None:
    seen: list[str] = []
    for number in (1, 2, 3):
        with open_vlm(demo_parts, tmp_path / "shared") as part:
            seen += statuses(encode([photos], part, shard=f"{number}/3"))
    with (
        open_vlm(demo_parts, tmp_path / "whole") as whole,
        open_vlm(demo_parts, tmp_path / "shared") as shared,
    ):
        assert sorted(seen) == sorted(statuses(encode([photos], whole)))
        assert packages(shared) == packages(whole)


def test_a_store_that_cannot_be_written_ends_the_run(
    vlm: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise StoreError("no space left")

    monkeypatch.setattr(vlm.runtime.store, "flush", full)
    results = []
    with pytest.raises(StoreError, match="no space left"):
        results += encode([photos], vlm)
    assert not results, "nothing is reported that is not safe"


# -- what the store does not take -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "said"),
    [("store_budget", "budget of the store, 2,000"), ("tenant_quota", "quota of a tenant, 2,000")],
)
def test_what_the_store_refuses_was_not_encoded(
    photos: Path, tmp_path: Path, demo_parts: dict[str, Any], limit: str, said: str
) -> None:
    with open_vlm(demo_parts, tmp_path / "store", **{limit: 2000}) as vlm:
        results = list(encode([photos], vlm, tenant="ann"))
        assert Counter(result.status for result in results) == {"broken": 1, "refused": 5}
        for result in results[1:]:
            assert result.feature_id is None and result.nbytes == 0
            assert said in str(result.error)
        assert packages(vlm, "ann") == {}
    with open_vlm(demo_parts, tmp_path / "store") as vlm:
        assert Counter(r.status for r in encode([photos], vlm, tenant="ann"))["encoded"] == 3


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten different pictures."""
    folder = tmp_path_factory.mktemp("album")
    for number in range(10):
        (folder / f"{number}.png").write_bytes(png(number))
    return folder


@pytest.fixture(scope="module")
def room(demo_parts: dict[str, Any], album: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes for less than half of their packages in a store."""
    with open_vlm(demo_parts, tmp_path_factory.mktemp("trial")) as vlm:
        list(encode([album / "0.png"], vlm))
        return int(4.5 * vlm.stats()["store"]["kinds"]["package"]["bytes"])


def test_what_is_let_go_of_before_it_is_reported_is_reported_so(
    album: Path, room: int, tmp_path: Path, demo_parts: dict[str, Any]
) -> None:
    with open_vlm(demo_parts, tmp_path / "store", store_budget=room) as vlm:
        results = list(encode([album], vlm))
        stored = {result.feature_id for result in results if result.status == "encoded"}
        assert stored == set(packages(vlm)) and 0 < len(stored) < 5
        lost = [result for result in results if result.status == "refused"]
        assert len(lost) + len(stored) == 10
        assert all("too small for these images" in str(result.error) for result in lost)


def test_a_budget_too_small_for_what_was_reported_ends_the_run(
    album: Path,
    room: int,
    tmp_path: Path,
    demo_parts: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each is reported by itself; the package has a function of the module's name.
    monkeypatch.setattr(sys.modules["keepsight.encode.run"], "_SECONDS", -1.0)
    with open_vlm(demo_parts, tmp_path / "store", store_budget=room) as vlm:
        results: list[Any] = []
        with pytest.raises(NotStored, match="not in the store any more.*too small") as told:
            results.extend(encode([album], vlm))
        reported = {result.feature_id for result in results} - {None}
        assert reported - set(packages(vlm)) == {key for _, key in told.value.reasons}


def test_later_batches_notice_that_earlier_ones_are_gone(
    album: Path, room: int, tmp_path: Path
) -> None:
    encoder = Encoder("demo", store=tmp_path / "store", store_budget=room)
    pictures = [str(path) for path in sorted(album.iterdir())]
    assert set(encoder({"image": pictures[:2]})["status"]) == {"encoded"}
    with pytest.raises(NotStored, match="too small"):
        for start in range(2, 10, 2):
            encoder({"image": pictures[start : start + 2]})
    encoder.close()


def test_a_small_folder_before_a_bucket_refuses_nothing(
    album: Path, tmp_path: Path, demo_parts: dict[str, Any]
) -> None:
    far = f"file://{tmp_path}/far"
    with open_vlm(demo_parts, tmp_path / "near", store_budget=2000, remote=far) as vlm:
        vlm.encode(album / "0.png")
        vlm.flush()
        assert Counter(r.status for r in encode([album], vlm)) == {"encoded": 9, "kept": 1}
        assert len(packages(vlm)) == 10


def test_what_the_model_packs_for_its_store_is_found_again(
    album: Path, tmp_path: Path, demo_parts: dict[str, Any]
) -> None:
    for status in ("encoded", "kept"):
        with open_vlm(demo_parts, tmp_path / "store", feature_codec="int8") as vlm:
            assert {r.status for r in encode([album], vlm)} == {status}
            assert len(packages(vlm)) == 10


# -- work ahead ------------------------------------------------------------------------------------


@bounded(40)
@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 4), st.integers(1, 120))
def test_work_ahead_keeps_the_order_and_its_bounds(
    sizes: list[int], threads: int, budget: int
) -> None:
    lock, held, most = threading.Lock(), 0, 0

    def work(size: int) -> int:
        nonlocal held, most
        with lock:
            held += size
            most = max(most, held)
        return size

    found = []
    for size in work_ahead(work, sizes, threads, budget, lambda _: 0, lambda size: size):
        found.append(size)
        with lock:
            held -= size
    assert found == sizes
    # What is there when a thing is let in is below the budget; those at work may come on top, and
    # the one that was just taken is counted until the next is asked for.
    assert most <= budget + (16 * threads + 1) * max(sizes, default=0)


def ahead_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("keepsight-ahead")]


def test_bytes_bound_what_is_ahead() -> None:
    started: list[int] = []
    over = work_ahead(
        lambda n: started.append(n) or n, range(100), 2, 35, lambda _: 10, lambda _: 0
    )
    assert next(over) == 0
    threading.Event().wait(0.2)
    assert len(started) <= 5
    over.close()
    for thread in ahead_threads():
        thread.join(60)  # closing waits for none of them
    assert len(started) <= 6, "closing starts nothing new"


def test_errors_of_a_source_and_of_work_reach_whoever_asks() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise InputError("torn")

    def wrong(_: int) -> int:
        raise KeyError("a bug")

    over = work_ahead(lambda n: n, numbers(), 1, 10, lambda _: 0, lambda _: 0)
    assert next(over) == 1
    with pytest.raises(InputError, match="torn"):
        next(over)
    with pytest.raises(KeyError, match="a bug"):
        list(work_ahead(wrong, [1], 1, 10, lambda _: 0, lambda _: 0))
    assert not ahead_threads()


# -- as a callable -------------------------------------------------------------------------------


def test_an_encoder_adds_columns(tmp_path: Path, demo_parts: dict[str, Any]) -> None:
    encoder = Encoder(
        "demo", store=tmp_path / "store", column="photo", dtype="float32", torch_threads=1
    )
    column = [png(0), {"bytes": png(1), "path": None}, b"broken", None, picture(2), png(0)]
    batch = encoder({"photo": column, "id": np.arange(6)})
    assert list(batch) == ["photo", "id", "feature_id", "tokens", "status", "error"]
    assert batch["status"] == ["encoded"] * 2 + ["broken"] * 2 + ["encoded", "duplicate"]
    assert batch["feature_id"][0] == batch["feature_id"][5] and batch["feature_id"][2] is None
    assert "not an image" in batch["error"][2] and batch["error"][0] is None
    assert encoder({"photo": [], "id": []})["tokens"] == []
    encoder.close()
    with open_vlm(demo_parts, tmp_path / "store") as vlm:
        assert vlm.ask(png(1), QUESTION).usage.images_encoded == 0


def test_an_encoder_travels_as_its_options(tmp_path: Path) -> None:
    encoder = Encoder("demo", store=tmp_path / "store", torch_threads=1)
    encoder({"image": [png(0)]})
    sent = pickle.dumps(encoder)
    assert len(sent) < 2000
    again = pickle.loads(sent)
    assert again({"image": [png(0)]})["status"] == ["kept"]
    encoder.close()
    again.close()


def test_an_encoder_refuses_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no place for packages"):
        Encoder("demo", store="")
    encoder = Encoder("demo", store=tmp_path / "store")
    with pytest.raises(InputError, match="no column 'image', only: x"):
        encoder({"x": []})
    with pytest.raises(InputError, match="has a column 'status' already; give a prefix"):
        encoder({"image": [], "status": []})
    for wrong in (None, 3, [png(0)]):
        with pytest.raises(InputError, match="is no batch; expected a dict of columns"):
            encoder(wrong)  # type: ignore[arg-type]
    for one in (None, "a.png", png(0), picture(2), {"bytes": png(0)}):  # map() without batched=True
        with pytest.raises(InputError, match="expected a column with one image a row"):
            encoder({"image": one})
    with pytest.raises(ks.errors.UnknownOption, match="did you mean"):
        Encoder("demo", store=tmp_path / "store", vision_budgett=1)({"image": [b""]})
