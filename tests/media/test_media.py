"""Images in every form: named by what they hold, seen as Transformers sees them, refused by name.

What the tower would get is compared with what the checkpoint's own image processor makes of the
image that Transformers' own `load_image` gives.
"""

from __future__ import annotations

import base64
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.hostile import encoded, png_that_claims
from support.models import picture
from transformers.image_utils import load_image

import keepsight as ks
from keepsight.errors import ImageError, MediaChanged, UnsupportedInput
from keepsight.media import sources
from keepsight.media.sources import file_label, open_source

EXIF_ORIENTATION = 274
MODES = ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"]
MODES += ["LAB", "I", "F", "I;16", "I;16B"]


def name(image: Any) -> str:
    """The name that an image has before anything is decoded or preprocessed."""
    return open_source(image).name


def pixels(vlm: Any, image: Any) -> dict[str, torch.Tensor]:
    """What the tower would get."""
    medium = vlm.runtime.vision.name(image)
    return dict(medium.recall().tensors)


def stock(vlm: Any, image: Any) -> dict[str, torch.Tensor]:
    """What it gets in Transformers from an image as it is."""
    return dict(vlm.processor.image_processor([image], return_tensors="pt"))


def assert_seen_as(vlm: Any, image: Any, expected: Any) -> None:
    mine, theirs = pixels(vlm, image), stock(vlm, expected)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], torch.as_tensor(theirs[key])) for key in mine)


def of_mode(mode: str) -> Image.Image:
    """A picture in any mode; alpha, where there is any, is no plain border."""
    image = picture(1)
    if mode in ("LA", "PA", "La"):
        image = image.convert("LA")
        image.putalpha(picture(2).convert("L"))
        return image.convert(mode)
    if mode in ("RGBA", "RGBa"):
        image.putalpha(picture(2).convert("L"))
        return image.convert(mode)
    if mode == "LAB":
        return Image.merge("LAB", image.split())
    if mode.startswith("I;16"):
        values = np.asarray(image.convert("L")).astype(np.uint16)
        wide = Image.fromarray(values)
        return wide if mode == "I;16" else Image.frombytes(mode, wide.size, values.byteswap())
    return image.convert(mode)


# -- every form, as Transformers sees it -------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_seen_as_the_processor_sees_it_or_refused(vlm: Any, mode: str) -> None:
    image = of_mode(mode)
    assert image.mode == mode
    try:
        expected = stock(vlm, image)
    except Exception:
        with pytest.raises(ImageError, match="refused it"):
            vlm.ask(image, "What is it?", max_new_tokens=1)
        return
    assert expected["pixel_values"].std() > 0 or mode == "LAB"
    assert_seen_as(vlm, image, image)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_a_file_of_every_mode_is_seen_as_load_image_sees_it(
    vlm: Any, mode: str, tmp_path: Path
) -> None:
    path = tmp_path / "image.png"
    of_mode(mode).save(path)
    assert_seen_as(vlm, path, load_image(str(path)))


def test_a_palette_with_transparency_counts_in_the_name(vlm: Any, tmp_path: Path) -> None:
    image = of_mode("P")
    see_through = image.copy()
    see_through.info["transparency"] = 0
    other_palette = image.copy()
    other_palette.putpalette(bytes(reversed(image.getpalette() or [])))
    assert len({name(image), name(see_through), name(other_palette)}) == 3
    for one in (image, see_through, other_palette):
        assert_seen_as(vlm, one, one)
    see_through.save(tmp_path / "p.png", transparency=0)
    assert_seen_as(vlm, tmp_path / "p.png", load_image(str(tmp_path / "p.png")))


@pytest.mark.parametrize("orientation", [1, 3, 6])  # all of them: test_pictures.py
def test_files_are_turned_upright_and_objects_are_left_alone(
    vlm: Any, tmp_path: Path, orientation: int
) -> None:
    """As Transformers does it: `load_image` turns a file, the processor no PIL object."""
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    path = tmp_path / "turned.jpg"
    picture(3, 96, 160).save(path, exif=exif, quality=95)
    assert_seen_as(vlm, path, load_image(str(path)))
    with Image.open(path) as opened:
        assert_seen_as(vlm, opened, opened)
    grids = [pixels(vlm, form)["image_grid_thw"].tolist() for form in (path, Image.open(path))]
    assert (grids[0] == grids[1]) == (orientation < 5)


def test_one_image_in_every_form_is_one_image(vlm: Any, tmp_path: Path) -> None:
    image, path = picture(4), tmp_path / "ein bild.png"
    path.write_bytes(encoded(image))
    data, array = path.read_bytes(), np.asarray(image)
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    by_bytes = [path, str(path), data, bytearray(data), memoryview(data), uri, path.as_uri()]
    by_bytes += ["data:image/png," + "".join(f"%{byte:02x}" for byte in data), os.fspath(path)]
    assert {name(form) for form in by_bytes} == {name(data)}
    arrays = [array, np.asfortranarray(array), torch.from_numpy(array.copy())]
    turned = [array.transpose(2, 0, 1), torch.from_numpy(array.copy()).permute(2, 0, 1)]
    forms = [*by_bytes, image, *arrays, *turned]
    assert len({vlm.runtime.vision.name(form).feature_id for form in forms}) == 1
    assert len({vlm.encode(form).key for form in forms}) == 1
    counts = vlm.runtime.vision.counts
    assert counts["encoded"] == 1
    assert counts["preprocessed"] == 3  # the PIL image, the array, and the array turned


@pytest.mark.parametrize(
    ("where", "label"),
    [
        ("/home/ada/secret/cat.jpg", "cat.jpg"),
        ("scans/a.pdf#page=3", "a.pdf#page=3"),
        ("https://ada:pw@host.org/secret/my%20cat.jpg?token=12#top", "my cat.jpg"),
        ("https://host.org/signed/eyJhbGciOi", ""),
        ("https://host.org/", ""),
        ("data:image/png;base64,iVBORw0KGgo/AAA", ""),
        ("https://[no-address/cat.jpg", ""),
        ("evil\x1b[2J.png", "evil[2J.png"),
        ("a" * 300, "a" * 120),
    ],
)
def test_a_store_remembers_of_a_place_its_last_part_alone(where: str, label: str) -> None:
    assert file_label(where) == label


def test_a_known_image_is_neither_decoded_nor_preprocessed(
    vlm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(encoded(picture(5)))
    first = vlm.runtime.vision.name(path)
    monkeypatch.setattr(sources, "decode_bytes", None)
    monkeypatch.setattr(vlm.runtime.vision.namer, "run_processor", None)
    path.rename(tmp_path / "moved.png")
    again = vlm.runtime.vision.name(tmp_path / "moved.png")
    assert (again.key, again.feature_id, again.layout) == (
        first.key,
        first.feature_id,
        first.layout,
    )


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [lambda i: i, np.asarray, encoded], ids=["PIL", "array", "bytes"])
def test_one_changed_pixel_is_another_image(vlm: Any, form: Callable[[Any], Any]) -> None:
    image = picture(7)
    changed = image.copy()
    red, green, blue = image.getpixel((95, 95))  # type: ignore[misc]
    changed.putpixel((95, 95), (red ^ 1, green, blue))
    one, two = (vlm.runtime.vision.name(form(i)) for i in (image, changed))
    assert name(form(image)) != name(form(changed))
    assert one.source != two.source and one.key != two.key
    assert one.feature_id != two.feature_id and one.identity != two.identity
    assert one.layout == two.layout


def test_shape_and_mode_are_part_of_the_name() -> None:
    array = np.zeros((4, 6, 3), dtype=np.uint8)
    forms = [array, array.reshape(6, 4, 3), array.reshape(4, 6, 3)[..., :1].repeat(4, 2)]
    forms += [Image.fromarray(array), Image.fromarray(array.reshape(6, 4, 3))]
    forms += [Image.new("RGB", (4, 3)), Image.new("HSV", (4, 3)), Image.new("L", (12, 3))]
    assert len({name(form) for form in forms}) == len(forms)


def test_settings_of_the_processor_are_part_of_the_name(demo_parts: dict[str, Any]) -> None:
    model, processor = demo_parts["demo"]
    media_of = []
    for options in ({}, {"do_resize": False}, {"image_mean": [0.4, 0.5, 0.5]}):
        with ks.wrap(model, processor, image_options=options) as vlm:
            media_of.append(vlm.runtime.vision.name(picture(7)))
    assert len({medium.source for medium in media_of}) == 3
    assert len({medium.key for medium in media_of[1:]}) == 2


# -- what changes between naming and encoding --------------------------------------------------


def test_a_file_that_changed_after_it_was_named(vlm: Any, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(encoded(picture(1)))
    medium = vlm.runtime.vision.name(path)
    vlm.clear()
    path.write_bytes(encoded(picture(2)))
    with pytest.raises(MediaChanged, match=r"image\.png changed"):
        vlm.encode(medium)
    assert vlm.encode(path).key != medium.key
    path.unlink()
    with pytest.raises(ImageError, match="no image can be read"):
        vlm.encode(medium)
    path.write_bytes(encoded(picture(1)))
    vlm.clear()
    assert vlm.encode(medium).key == medium.key


@pytest.mark.parametrize("form", ["PIL", "array", "tensor"])
def test_pixels_that_were_changed_in_place_after_they_were_named(vlm: Any, form: str) -> None:
    array = np.asarray(picture(1)).copy()
    forms: dict[str, Any] = {"PIL": picture(1), "array": array, "tensor": torch.from_numpy(array)}
    image = forms[form]
    medium = vlm.runtime.vision.name(image)
    vlm.clear()
    if form == "PIL":
        image.putpixel((0, 0), (1, 2, 3))
    else:
        image[0, 0, 0] ^= 1
    with pytest.raises(MediaChanged, match="changed after it was named"):
        vlm.encode(medium)
    assert vlm.runtime.vision.name(image).key != medium.key
    assert vlm.encode(image).key != medium.key


def test_a_matrix_is_an_array(vlm: Any) -> None:
    grey = np.asarray(picture(1).convert("L"))
    assert vlm.encode(np.asmatrix(grey)).key == vlm.encode(grey).key
    for odd in (torch.empty(64, 64, 3, device="meta"), torch.eye(64).to_sparse()):
        with pytest.raises(ImageError, match="cannot be read"):
            vlm.encode(odd.to(torch.uint8))


# -- what is refused ---------------------------------------------------------------------------

JPEG, PNG = encoded(picture(1), "JPEG"), encoded(picture(1))
B64 = base64.b64encode(PNG).decode()
BAD: dict[str, tuple[Any, str]] = {
    "empty": (b"", "is empty"),
    "text": (b"this is no image" * 50, "not an image"),
    "a truncated PNG": (PNG[: len(PNG) // 2], "truncated"),
    "a PNG without pixels": (PNG[:60], "truncated|not an image"),
    "a truncated JPEG": (JPEG[: len(JPEG) // 2], "truncated"),
    "a JPEG of a header": (JPEG[:20], "truncated|not an image"),
    "a PNG with a wrong checksum": (PNG[:45] + b"????" + PNG[49:], "decoded|not an image"),
    "a decompression bomb": (png_that_claims(60_000, 60_000), "bomb"),
    "a smaller bomb": (png_that_claims(12_000, 11_000), "bomb"),
    "a PNG that claims too much": (png_that_claims(3000, 3000), "decoded"),
    "a PNG of no size": (png_that_claims(0, 5), "not an image|nothing to see|decoded"),
    "PIL 0x0": (Image.new("RGB", (0, 0)), "0x0"),
    "PIL 0x5": (Image.new("RGB", (0, 5)), "0x5"),
    "a PIL bomb": (Image.new("1", (20_000, 7_000)), "bomb"),
    "20000x1": (Image.new("RGB", (20_000, 1)), "the image processor refused it"),
    "1x20000": (Image.new("RGB", (1, 20_000)), "the image processor refused it"),
    "array 0x0": (np.zeros((0, 0, 3), np.uint8), "0x0"),
    "floats": (np.zeros((8, 8, 3), np.float32), "float32, expected uint8"),
    "doubles": (np.zeros((8, 8, 3)), "float64, expected uint8"),
    "half floats": (torch.zeros(8, 8, 3, dtype=torch.bfloat16), "bfloat16, expected uint8"),
    "signed": (np.zeros((8, 8, 3), np.int8), "int8, expected uint8"),
    "objects": (np.array([["x"]], dtype=object), "object, expected uint8"),
    "a vector": (np.zeros(8, np.uint8), r"\(8,\)"),
    "a scalar": (np.uint8(3) * np.ones((), np.uint8), "shape|not an image"),
    "a batch": (np.zeros((2, 8, 8, 3), np.uint8), r"\(2, 8, 8, 3\)"),
    "two channels": (np.zeros((8, 8, 2), np.uint8), "channels"),
    "a number": (7, "a int is not an image"),
    "nothing": (None, "without an image in it"),
    "a dictionary": ({"a": 1}, "without an image in it"),
    "a set": ({1}, "a set is not an image"),
    "a missing file": ("/nowhere/cat.jpg", "No such file"),
    "a missing file by URL": ("file:///nowhere/cat.jpg", "No such file"),
    "a device": ("/dev/zero", "a pipe or a device"),
    "a path with a null byte": ("cat\0.jpg", "no image can be read"),
    "a path that is very long": ("x" * 100_000, "too long"),
    "a data URI without a comma": ("data:image/png;base64", "data URI"),
    "a data URI of nonsense": ("data:image/png;base64,!!!!", "data URI"),
    "a data URI with a blot": (f"data:;base64,{B64[:40]}!{B64[40:]}", "cannot be decoded"),
    "a data URI with half a byte": ("data:image/png;base64,A", "data URI"),
    "a data URI beyond ASCII": ("data:image/png;base64,é", "data URI"),
    "an empty data URI": ("data:,", "is empty"),
    "a data URI of text": ("data:text/plain,hello", "not an image"),
    "a URL with a blank": ("http://127.0.0.1:9/a b.png", "could not be fetched"),
    "a URL of nobody": ("http://127.0.0.1:9/a.png", "could not be fetched"),
    "a URL without a host": ("http://", "could not be fetched"),
    "a URL with a bad port": ("http://127.0.0.1:x/", "could not be fetched"),
}


@pytest.fixture(scope="module")
def asked(demo_parts: dict[str, Any]) -> Any:
    """One model for all refusals: each must leave it as it was."""
    model, processor = demo_parts["demo"]
    with ks.wrap(model, processor) as vlm:
        vlm.ask(picture(1), "What is it?", max_new_tokens=1)
        yield vlm


@pytest.mark.parametrize("what", BAD)
def test_bad_images_are_refused_by_name_and_the_next_call_is_served(asked: Any, what: str) -> None:
    image, reason = BAD[what]
    with pytest.raises(ImageError, match=reason):
        asked.ask([image], "What is it?", max_new_tokens=1)
    asked.runtime.tree.check()
    reply = asked.ask(picture(1), "What is it?", max_new_tokens=1)
    assert reply.usage.cached_tokens == reply.usage.prompt_tokens


def test_folders_pipes_and_empty_files(asked: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (("", "directory"), ("empty.png", "empty"), ("pipe", "a pipe")):
        with pytest.raises(ImageError, match=reason):
            asked.encode(tmp_path / path)


def test_files_beyond_the_bound_are_not_read(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "large.png", "wb") as file:
        file.truncate(sources.MAX_BYTES + 1)
    monkeypatch.setattr(Path, "read_bytes", None)
    with pytest.raises(ImageError, match="larger than"):
        asked.encode(tmp_path / "large.png")


def test_a_lazily_opened_image_that_is_damaged(asked: Any, tmp_path: Path) -> None:
    path = tmp_path / "cut.png"
    path.write_bytes(PNG[: len(PNG) // 2])
    with pytest.raises(ImageError, match="cannot be decoded"):
        asked.encode(Image.open(path))
    path.write_bytes(PNG)
    closed = Image.open(path)
    closed.close()
    with pytest.raises(ImageError, match="cannot be decoded"):
        asked.encode(closed)


def test_video_is_refused_as_video(asked: Any, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"\0" * 100)
    with pytest.raises(UnsupportedInput, match="video"):
        asked.encode(path)


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (1, 3), (3, 1), (5, 199)])
def test_tiny_images_are_seen(asked: Any, size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (200, 30, 30))
    assert_seen_as(asked, image, image)
    assert asked.ask(image, "What is it?", max_new_tokens=1).usage.images == 1


def test_a_medium_is_data(asked: Any) -> None:
    """Naming twice gives equal facts, and a medium can stand for its image anywhere."""
    one, two = (asked.runtime.vision.name(picture(1)) for _ in range(2))
    facts = [f.name for f in dataclasses.fields(one) if f.name not in ("recall", "opened")]
    assert all(getattr(one, fact) == getattr(two, fact) for fact in facts)
    assert asked.encode(one).feature_id == asked.encode(picture(1)).feature_id
