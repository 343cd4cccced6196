"""`encode` to files: one for each different image, found again by what files say, never by names.

The model's counters tell what was computed; a package must equal what `vlm.encode` gives, bit for
bit. Stores are tested in test_encode_store.py, what may be named in test_encode_sources.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from encode_parts import statuses, towers
from PIL import Image

import keepsight as ks
from keepsight.demo.scene import COLORS, Scene
from keepsight.encode import encode
from keepsight.errors import StoreError

NAMES = list(COLORS)


@pytest.fixture
def vlm(demo_parts: dict[str, Any]) -> Iterator[Any]:
    model, processor = demo_parts["demo"]
    with ks.wrap(model, processor) as wrapped:
        yield wrapped


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three pictures, two of them in a folder of their own."""
    folder = tmp_path / "photos"
    (folder / "trip" / "day").mkdir(parents=True)
    for number, place in enumerate((folder, folder / "trip", folder / "trip" / "day")):
        scene = Scene.of(color=NAMES[number], seed=number, size=(96, 96))
        scene.draw().save(place / f"p{number}.png")
    return folder


# -- encoding ----------------------------------------------------------------------------------


def test_each_different_image_is_encoded_once(vlm: Any, photos: Path, tmp_path: Path) -> None:
    shutil.copy(photos / "p0.png", photos / "z-copy.png")  # the same bytes
    Image.open(photos / "p0.png").save(photos / "z-same.bmp")  # the same pixels
    (photos / "broken.png").write_bytes(b"not an image")
    results = list(encode([photos], vlm, files=tmp_path / "out"))
    assert statuses(results) == {
        "broken.png": "broken",
        "p0.png": "encoded",
        "p1.png": "encoded",
        "p2.png": "encoded",
        "z-copy.png": "duplicate",
        "z-same.bmp": "duplicate",
    }
    assert towers(vlm)[0] == 3
    by_name = {Path(result.image).name: result for result in results}
    assert by_name["z-same.bmp"].package == by_name["p0.png"].package
    assert "not an image" in by_name["broken.png"].error and by_name["broken.png"].package is None
    files = sorted((tmp_path / "out").iterdir())
    assert len(files) == 3 and all(file.suffix == ".sight" for file in files)
    assert sum(result.nbytes for result in results) == sum(file.stat().st_size for file in files)


def test_a_written_package_is_what_encode_gives(vlm: Any, photos: Path, tmp_path: Path) -> None:
    (result,) = encode([photos / "p0.png"], vlm, files=tmp_path)
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


def test_same_stem_and_other_content_are_two_files(vlm: Any, photos: Path, tmp_path: Path) -> None:
    (photos / "trip" / "p1.png").rename(photos / "trip" / "p0.png")
    results = list(encode([photos], vlm, files=tmp_path / "out"))
    assert len({result.package for result in results}) == 3


def test_a_long_name_still_gives_a_file(vlm: Any, photos: Path, tmp_path: Path) -> None:
    long = photos / f"{'ü' * 120}.png"
    (photos / "p0.png").rename(long)
    (result,) = encode([long], vlm, files=tmp_path / "out")
    assert result.status == "encoded" and result.package.exists()


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"GIF89a"])
def test_damaged_images_are_results_and_the_rest_goes_on(
    vlm: Any, photos: Path, tmp_path: Path, content: bytes
) -> None:
    (photos / "a.png").write_bytes(content)
    results = list(encode([photos], vlm, files=tmp_path / "out"))
    assert statuses(results)["a.png"] == "broken"
    assert [result.status for result in results].count("encoded") == 3


def test_a_video_is_broken_with_its_reason(vlm: Any, photos: Path, tmp_path: Path) -> None:
    film = photos / "film.mp4"
    film.write_bytes(b"....ftyp")
    (result,) = encode([film], vlm, files=tmp_path / "out")
    assert result.status == "broken" and "video" in result.error


def test_a_folder_that_cannot_be_written_is_named(vlm: Any, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be made"):
        list(encode([photos], vlm, files=tmp_path / "file"))


# -- resuming ----------------------------------------------------------------------------------


def test_a_second_run_computes_nothing(
    vlm: Any, photos: Path, tmp_path: Path, demo_parts: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    list(encode([photos / "p0.png"], vlm, files=out))
    again = ks.wrap(*demo_parts["demo"])
    results = list(encode([photos], again, files=out))
    assert statuses(results) == {"p0.png": "kept", "p1.png": "encoded", "p2.png": "encoded"}
    assert towers(again) == (2, 2)
    assert all(result.nbytes == 0 for result in results if result.status == "kept")


def test_names_do_not_matter(
    vlm: Any, photos: Path, tmp_path: Path, demo_parts: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    (first, second, _) = encode([photos], vlm, files=out)
    key = ks.Package.load(second.package).key
    first.package.rename(out / "renamed.sight")
    second.package.write_bytes((out / "renamed.sight").read_bytes())  # another image's package
    again = ks.wrap(*demo_parts["demo"])
    results = list(encode([photos], again, files=out))
    assert statuses(results) == {"p0.png": "kept", "p1.png": "encoded", "p2.png": "kept"}
    assert towers(again) == (1, 1)
    assert ks.Package.load(results[1].package).key == key != ks.Package.load(second.package).key


def test_other_content_under_the_same_name_is_encoded(
    vlm: Any, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (before, *_) = encode([photos], vlm, files=out)
    image = Image.open(photos / "p0.png")
    image.putpixel((3, 3), (1, 2, 3))
    image.save(photos / "p0.png")
    results = list(encode([photos], vlm, files=out))
    assert statuses(results)["p0.png"] == "encoded"
    assert results[0].package != before.package and before.package.exists()


@pytest.mark.parametrize("spot", [-1, 40, 2000])
def test_a_damaged_package_is_made_again(vlm: Any, photos: Path, tmp_path: Path, spot: int) -> None:
    out = tmp_path / "out"
    (result, *_) = encode([photos], vlm, files=out)
    sound = result.package.read_bytes()
    damaged = bytearray(sound)
    damaged[spot] ^= 1
    result.package.write_bytes(damaged)
    assert statuses(encode([photos], vlm, files=out))["p0.png"] == "encoded"
    assert result.package.read_bytes() == sound


def test_half_files_and_foreign_files_are_left_alone(
    vlm: Any, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (result, *_) = encode([photos], vlm, files=out)
    result.package.rename(out / ".part-x.sight")
    (out / "foreign.sight").write_bytes(b"something else")
    assert statuses(encode([photos], vlm, files=out))["p0.png"] == "encoded"
    assert (out / "foreign.sight").read_bytes() == b"something else"


def test_other_weights_are_encoded_beside(
    vlm: Any, photos: Path, tmp_path: Path, demo_parts: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    list(encode([photos], vlm, files=out))
    other = ks.wrap(*demo_parts["demo-hybrid"])
    assert set(statuses(encode([photos], other, files=out)).values()) == {"encoded"}
    assert len(list(out.glob("*.sight"))) == 6
    assert set(statuses(encode([photos], vlm, files=out)).values()) == {"kept"}


def test_other_processor_settings_are_encoded_beside(
    vlm: Any, photos: Path, tmp_path: Path, demo_parts: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    list(encode([photos], vlm, files=out))
    size = {"shortest_edge": 128 * 128, "longest_edge": 128 * 128}
    other = ks.wrap(*demo_parts["demo"], image_options={"size": size})
    results = list(encode([photos], other, files=out))
    assert {result.status for result in results} == {"encoded"}
    assert {result.tokens for result in results} == {16}


def test_another_making_is_encoded_beside_unless_any_is_accepted(
    vlm: Any, photos: Path, tmp_path: Path, demo_parts: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    list(encode([photos], vlm, files=out))
    torch.set_num_threads(2)  # part of how features are made on a CPU
    lenient = ks.wrap(*demo_parts["demo"], accept_features="any")
    assert set(statuses(encode([photos], lenient, files=out)).values()) == {"kept"}
    strict = ks.wrap(*demo_parts["demo"])
    assert set(statuses(encode([photos], strict, files=out)).values()) == {"encoded"}
    assert len(list(out.glob("*.sight"))) == 6
