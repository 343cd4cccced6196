"""`encode` to files: one for each different image, found again by what files say, never by names.

The model's counters tell what was computed; a package must equal what `vlm.encode` gives, bit for
bit. Stores are tested in test_encode_store.py, what may be named in test_sources.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.encode_parts import png, statuses, towers

import keepsight as ks
from keepsight.encode import encode
from keepsight.errors import StoreError


@pytest.fixture
def vlm(demo_parts: dict[str, Any]) -> Iterator[Any]:
    with ks.wrap(*demo_parts["demo"]) as wrapped:
        yield wrapped


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


# -- encoding ----------------------------------------------------------------------------------


def test_each_different_image_is_encoded_once(vlm: Any, photos: Path, out: Path) -> None:
    shutil.copy(photos / "p0.png", photos / "z-copy.png")  # the same bytes
    Image.open(photos / "p0.png").save(photos / "z-same.bmp")  # the same pixels
    damaged = {"a.png": b"not an image", "b.png": b"", "c.gif": b"GIF89a", "d.mp4": b"....ftyp"}
    for name, content in damaged.items():
        (photos / name).write_bytes(content)
    results = list(encode([photos], vlm, files=out))
    assert statuses(results) == {
        **dict.fromkeys(damaged, "broken"),
        "p0.png": "encoded",
        "p1.png": "encoded",
        "p2.png": "encoded",
        "z-copy.png": "duplicate",
        "z-same.bmp": "duplicate",
    }
    assert towers(vlm)[0] == 3
    by_name = {Path(result.image).name: result for result in results}
    assert by_name["z-same.bmp"].package == by_name["p0.png"].package
    assert "not an image" in by_name["a.png"].error and by_name["a.png"].package is None
    assert "video" in by_name["d.mp4"].error
    files = sorted(out.iterdir())
    assert len(files) == 3 and all(file.suffix == ".sight" for file in files)
    assert sum(result.nbytes for result in results) == sum(file.stat().st_size for file in files)


def test_a_written_package_is_what_encode_gives(vlm: Any, photos: Path, out: Path) -> None:
    (result,) = encode([photos / "p0.png"], vlm, files=out)
    assert result.package.name.startswith("p0-")
    written = ks.Package.load(result.package)
    vlm.clear()
    fresh = vlm.encode(photos / "p0.png")
    assert written.feature_id == fresh.feature_id
    assert written.tensors.keys() == fresh.tensors.keys()
    for name, tensor in fresh.tensors.items():
        assert torch.equal(tensor, written.tensors[name])
    reply = vlm.ask(written, "Describe the picture.")
    assert reply.usage.images_encoded == 0
    assert reply.text == vlm.ask(photos / "p0.png", "Describe the picture.").text


def test_any_name_gives_a_file_of_its_own(vlm: Any, photos: Path, out: Path) -> None:
    (photos / "trip" / "p1.png").rename(photos / "trip" / "p0.png")
    (photos / "trip" / "day" / "p2.png").rename(photos / f"{'ü' * 120}.png")
    results = list(encode([photos], vlm, files=out))
    assert len({result.package for result in results}) == 3
    assert all(result.package.exists() for result in results)


def test_a_folder_that_cannot_be_written_is_named(vlm: Any, photos: Path, out: Path) -> None:
    out.write_text("in the way")
    with pytest.raises(StoreError, match="cannot be made"):
        list(encode([photos], vlm, files=out))


# -- resuming ----------------------------------------------------------------------------------


def test_names_do_not_matter(vlm: Any, photos: Path, out: Path, demo_parts: dict[str, Any]) -> None:
    (first, second, _) = encode([photos], vlm, files=out)
    key = ks.Package.load(second.package).key
    first.package.rename(out / "renamed.sight")
    second.package.write_bytes((out / "renamed.sight").read_bytes())  # another image's package
    again = ks.wrap(*demo_parts["demo"])
    results = list(encode([photos], again, files=out))
    assert statuses(results) == {"p0.png": "kept", "p1.png": "encoded", "p2.png": "kept"}
    assert towers(again) == (1, 1)
    assert ks.Package.load(results[1].package).key == key != ks.Package.load(second.package).key


def test_other_content_under_the_same_name_is_encoded(vlm: Any, photos: Path, out: Path) -> None:
    (before, *_) = encode([photos], vlm, files=out)
    (photos / "p0.png").write_bytes(png(7))
    results = list(encode([photos], vlm, files=out))
    assert statuses(results)["p0.png"] == "encoded"
    assert results[0].package != before.package and before.package.exists()


@pytest.mark.parametrize("spot", [-1, 40, 2000])
def test_what_is_damaged_is_made_again_and_what_is_foreign_left_alone(
    vlm: Any, photos: Path, out: Path, spot: int
) -> None:
    (result, other, _) = encode([photos], vlm, files=out)
    sound = result.package.read_bytes()
    damaged = bytearray(sound)
    damaged[spot] ^= 1
    result.package.write_bytes(damaged)
    other.package.rename(out / ".part-x.sight")  # as a killed process leaves it
    (out / "foreign.sight").write_bytes(b"something else")
    said = statuses(encode([photos], vlm, files=out))
    assert said == {"p0.png": "encoded", "p1.png": "encoded", "p2.png": "kept"}
    assert result.package.read_bytes() == sound
    assert (out / "foreign.sight").read_bytes() == b"something else"


@pytest.mark.parametrize("other", ["weights", "settings", "threads"])
def test_what_is_made_otherwise_is_encoded_beside(
    vlm: Any, photos: Path, out: Path, demo_parts: dict[str, Any], other: str
) -> None:
    list(encode([photos], vlm, files=out))
    options: dict[str, Any] = {}
    threads = torch.get_num_threads()
    if other == "settings":
        size = {"shortest_edge": 128 * 128, "longest_edge": 128 * 128}
        options["image_options"] = {"size": size}
    if other == "threads":  # part of how features are made on a CPU
        torch.set_num_threads(threads + 1)
        lenient = ks.wrap(*demo_parts["demo"], accept_features="any")
        assert set(statuses(encode([photos], lenient, files=out)).values()) == {"kept"}
    parts = demo_parts["demo-hybrid" if other == "weights" else "demo"]
    results = list(encode([photos], ks.wrap(*parts, **options), files=out))
    assert {result.status for result in results} == {"encoded"}
    assert len(list(out.glob("*.sight"))) == 6
    torch.set_num_threads(threads)
    assert set(statuses(encode([photos], vlm, files=out)).values()) == {"kept"}
