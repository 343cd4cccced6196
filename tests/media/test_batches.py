"""`batch=n` packs pictures in one pass of the tower: features of stock to rounding, with their own
name. Without it each picture goes alone, and has the bits of stock."""

from __future__ import annotations

from typing import Any

import pytest
from support import models

import keepsight as ks
from keepsight.encode import encode
from keepsight.errors import InputError

SIDES = ((96, 96), (200, 160), (64, 200), (96, 96), (128, 64))
NO_SLIVERS = {"lfm2_vl"}  # its processor refuses pictures of such shapes


class Passes:
    """Counts the pictures in each call of a tower."""

    def __init__(self, vlm: ks.VLM) -> None:
        self.sizes: list[int] = []
        family = vlm.runtime.family
        together = family.encode_together

        def counted(media: Any) -> Any:
            self.sizes.append(len(media))
            return together(media)

        family.encode_together = counted  # type: ignore[method-assign]


def pictures(kind: str = "") -> list[Any]:
    sides = [(96, 96)] * 5 if kind in NO_SLIVERS else SIDES
    return [models.picture(number, *size) for number, size in enumerate(sides)]


def names(packages: list[ks.Package]) -> list[str]:
    return [package.feature_id for package in packages]


def folder(tmp_path: Any) -> Any:
    (tmp_path / "photos").mkdir()
    for number, shown in enumerate(pictures()):
        shown.save(tmp_path / "photos" / f"{number}.png")
    return tmp_path / "photos"


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("kind", models.ALL)
def test_any_family_takes_several_pictures_in_one_pass(kind: str) -> None:
    model, processor = models.build(kind)
    with ks.wrap(model, processor) as vlm:
        passes, shown = Passes(vlm), pictures(kind)[:3]
        alone = vlm.encode(shown)
        assert passes.sizes == [1] * 3
        made = vlm.encode(shown, batch=2)
        assert passes.sizes[3:] == [2, 1]
        assert vlm.stats()["features"]["encoded"] == 6
        again = vlm.encode(shown, batch=2)
        assert names(again) == names(made) and len(passes.sizes) == 5
    for one, other in zip(alone, made, strict=True):
        assert other.provenance == {**one.provenance, "batch": 2}
        assert (one.key, one.identity, one.grid) == (other.key, other.identity, other.grid)
        assert one.feature_id != other.feature_id
        for name, tensor in one.tensors.items():
            off = (tensor - other.tensors[name]).abs().max() / tensor.abs().max()
            assert tensor.shape == other.tensors[name].shape and off < 1e-5


def test_a_chat_takes_them_where_it_is_told_to(tmp_path: Any) -> None:
    model, processor = models.build("qwen3_vl")
    with ks.wrap(model, processor, store=tmp_path) as vlm:
        made = vlm.encode(pictures(), batch=5)
        wanted = vlm.ask(pictures(), "What is it?", max_new_tokens=3)
        assert wanted.usage.images_encoded == 5
        given = vlm.ask(made, "What is it?", max_new_tokens=3)
        assert given.usage.images_encoded == 0 and given.text == wanted.text
        vlm.encode(pictures(), batch=5)
        vlm.flush()
    with ks.wrap(model, processor, store=tmp_path, accept_features="any") as vlm:
        assert vlm.ask(pictures(), "What?", max_new_tokens=1).usage.images_encoded == 0


@pytest.mark.parametrize("codec", ["exact", "int8"])
@pytest.mark.parametrize("way", ["store", "files"])
def test_a_folder_in_batches(tmp_path: Any, way: str, codec: str) -> None:
    model, processor = models.build("qwen3_vl")
    photos = folder(tmp_path)
    with ks.wrap(model, processor, store=tmp_path / "store") as vlm:
        passes = Passes(vlm)

        def run(batch: int) -> set[str]:
            files = tmp_path / "out" if way == "files" else None
            found = encode([photos], vlm, files=files, codec=codec, batch=batch)
            return {result.status for result in found}

        assert run(2) == {"encoded"} and passes.sizes == [2, 2, 1]
        assert run(2) == {"kept"} and len(passes.sizes) == 3
        assert run(1) == {"encoded"} and passes.sizes[3:] == [1] * 5  # other features
        assert run(1) == {"kept"} and run(2) == {"kept"}


def test_one_that_cannot_be_used_costs_the_others_nothing(tmp_path: Any) -> None:
    model, processor = models.build("qwen3_vl")
    photos = folder(tmp_path)
    (photos / "1.png").write_bytes(b"no picture")
    with ks.wrap(model, processor, store=tmp_path / "store") as vlm:
        family, together = vlm.runtime.family, vlm.runtime.family.encode_together

        def refuse_one(media: Any) -> Any:
            if any(one.key == refused for one in media):
                raise ValueError("too wide")
            return together(media)

        refused = vlm.runtime.vision.name(pictures()[2]).key
        family.encode_together = refuse_one  # type: ignore[method-assign]
        found = [result.status for result in encode([photos], vlm, batch=5)]
        assert found == ["encoded", "broken", "broken", "encoded", "encoded"]


def test_equal_pictures_and_packages_in_a_batch() -> None:
    model, processor = models.build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        passes = Passes(vlm)
        a, b = pictures()[:2]
        made = vlm.encode([a, a, vlm.encode(b), b], batch=4)
        assert passes.sizes == [1, 2]
        assert names(made[:1]) == names(made[1:2]) and "batch" not in made[2].provenance
        for wrong in (0, "2", 1.5, None):
            with pytest.raises(InputError, match=f"batch={wrong!r}; expected pictures in a pass"):
                vlm.encode([a], batch=wrong)  # type: ignore[call-overload]


def test_numbers_of_threads_are_refused_by_name(tmp_path: Any) -> None:
    for name in ("threads", "torch_threads"):
        for wrong in (0, -1, "2"):
            with pytest.raises(
                InputError, match=f"^{name}={wrong!r}; expected a number of threads"
            ):
                ks.Encoder("demo", store=tmp_path, **{name: wrong})


def test_an_encoder_in_batches(tmp_path: Any) -> None:
    encoder = ks.Encoder("demo", store=tmp_path, batch=2)
    columns = encoder({"image": pictures()})
    assert columns["status"] == ["encoded"] * 5
    encoder.close()
