"""Packages: golden bytes, and refusal of everything that is not a sound package of this model.

`golden/tiny.sight` was written once, by `tiny_package().save(...)` of support/hostile.py. It must
read as exactly these values and be written again as exactly these bytes while FORMAT is 1.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support.common import bits
from support.hostile import GOLDEN, bounded, tiny_package
from support.models import picture, turn

import keepsight as ks
from keepsight import Together
from keepsight.errors import (
    DamagedFile,
    InputError,
    WrongIdentity,
)
from keepsight.formats import package, tensorfile
from keepsight.formats.package import FORMAT, KIND, Package
from keepsight.store import DiskStore

TINY = GOLDEN / "tiny.sight"


def equal(one: Package, two: Package) -> bool:
    """Equal in everything that is saved, bit for bit."""
    return one.record() == two.record() and bits(one.tensors) == bits(two.tensors)


# -- golden bytes ------------------------------------------------------------------------------


def test_the_golden_file_reads_as_it_was_written() -> None:
    assert equal(Package.load(TINY), tiny_package())
    features = Package.load(TINY).tensors["features"]
    assert features.tolist()[0] == [0.5, -1.25, 3.0]
    assert str(features[1, 1].item()) == "-0.0"


def test_writing_it_again_gives_the_same_bytes(tmp_path: Path) -> None:
    tiny_package().save(tmp_path / "fresh.sight")
    Package.load(TINY).save(tmp_path / "again.sight")
    for path in tmp_path.iterdir():
        assert path.read_bytes() == TINY.read_bytes()


def test_the_golden_file_is_plain_safetensors() -> None:
    with safe_open(TINY, "pt") as file:
        assert torch.equal(file.get_tensor("features"), tiny_package().tensors["features"])
        assert file.get_tensor("deepstack.0").dtype == torch.bfloat16
        record = json.loads(file.metadata()["keepsight"])
    assert (record["kind"], record["format"]) == (KIND, FORMAT) == ("package", 1)
    assert record["about"]["name"] == "Zürich 👁"


def test_its_names_have_not_changed() -> None:
    """Names go into file names and paths of stores that exist."""
    tiny = tiny_package()
    assert tiny.identity == IDENTITY
    assert tiny.feature_id == FEATURE_ID


IDENTITY = "72bc253647e6cf81f4b272c9d2574de5a92738bc0a48de353fc1aadb1a8ff82a"
FEATURE_ID = "de399fc38d23307864d7bf95a2db9d4a9084e762a77d26edd1c4aa5c33fbf663"


def test_every_field_of_the_identity_counts() -> None:
    names = {tiny_package().identity}
    for field in ("key", "weights", "settings"):
        names.add(tiny_package(**{field: "x" * 64}).identity)
    assert len(names) == 4
    other = tiny_package(provenance={"dtype": "torch.float32", "codec": "int8", "threads": 2})
    assert other.identity == tiny_package().identity
    assert other.feature_id != tiny_package().feature_id


# -- files -------------------------------------------------------------------------------------


@bounded(40)
@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]),
    st.integers(0, 3),
    st.dictionaries(st.text(), st.none() | st.text() | st.integers()),
)
def test_what_is_saved_is_loaded(
    tmp_path: Path, tokens: int, width: int, dtype: torch.dtype, levels: int, about: dict[str, Any]
) -> None:
    names = ["features", *(f"deepstack.{level}" for level in range(levels))]
    tensors = {name: torch.randn(tokens, width).to(dtype) for name in names}
    pack = tiny_package(tensors=tensors, layout=("<", tokens, ">"), about=about)
    assert equal(Package.load(pack.save(tmp_path / "x.sight")), pack)


def lying(path: Path, change: Callable[[dict[str, Any]], Any], **tensors: torch.Tensor) -> Path:
    """A file with all seals whole, whose record says something else than the truth."""
    record = tiny_package().record()
    change(record)
    tensorfile.save(path, KIND, FORMAT, tensors or tiny_package().tensors, record)
    return path


@pytest.mark.parametrize("field", list(package._FIELDS))
def test_fields_that_are_missing_or_of_the_wrong_type(tmp_path: Path, field: str) -> None:
    with pytest.raises(DamagedFile, match=field):
        Package.load(lying(tmp_path / "x", lambda record: record.pop(field)))
    for wrong in (1.5, True, ["x"], {"x": None}, None, "?"):
        if isinstance(wrong, package._FIELDS[field]) and wrong is not True:
            continue
        with pytest.raises(DamagedFile):
            Package.load(lying(tmp_path / "x", lambda record, it=wrong: record.update({field: it})))


RECORDS: dict[str, dict[str, Any]] = {
    "more tokens than the layout": {"tokens": 3},
    "fewer tokens than the layout": {"layout": ["<look>", 1, "</look>"]},
    "a negative run": {"layout": [3, -1]},
    "a run of nothing": {"layout": [2, 0]},
    "a run of truth": {"layout": [True, True]},
    "a run of half a token": {"layout": [1.5, 0.5]},
    "a layout in a layout": {"layout": [[2]]},
    "no tokens at all": {"layout": ["<look>"], "tokens": 0},
    "an unknown container": {"container": "pickle"},
    "a grid of text": {"grid": {"image_grid_thw": "124"}},
}


@pytest.mark.parametrize("what", RECORDS)
def test_records_that_contradict_themselves(tmp_path: Path, what: str) -> None:
    with pytest.raises(DamagedFile):
        Package.load(lying(tmp_path / "x", lambda record: record.update(RECORDS[what])))


TENSORS: dict[str, dict[str, torch.Tensor]] = {
    "no features": {"deepstack.0": torch.zeros(2, 3)},
    "a level is missing": {"features": torch.zeros(2, 3), "deepstack.1": torch.zeros(2, 3)},
    "a row too few": {"features": torch.zeros(1, 3)},
    "a row too many": {"features": torch.zeros(3, 3)},
    "no rows": {"features": torch.zeros(0, 3)},
    "no width": {"features": torch.zeros(2, 0)},
    "one dimension": {"features": torch.zeros(2)},
    "no dimension": {"features": torch.zeros(())},
    "levels of another width": {"features": torch.zeros(2, 3), "deepstack.0": torch.zeros(2, 4)},
    "levels of another length": {"features": torch.zeros(2, 3), "deepstack.0": torch.zeros(3, 3)},
    "whole numbers": {"features": torch.zeros(2, 3, dtype=torch.int64)},
    "truth": {"features": torch.zeros(2, 3, dtype=torch.bool)},
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_do_not_fit_the_record(tmp_path: Path, what: str) -> None:
    with pytest.raises(DamagedFile):
        Package.load(lying(tmp_path / "x", lambda record: None, **TENSORS[what]))


def test_tiles_are_rows_too(tmp_path: Path) -> None:
    tiles = torch.zeros(2, 3, 5)
    path = lying(tmp_path / "x", lambda record: record.update(layout=[6], tokens=6), features=tiles)
    assert Package.load(path).tensors["features"].shape == (2, 3, 5)


def test_bytes_are_those_of_storages() -> None:
    """A view pins all of the tensor it looks into, and two views of one storage count once."""
    base = torch.zeros(100, 3)
    tensors = {"features": base[:2], "deepstack.0": base[2:4]}
    assert tiny_package(tensors=tensors).nbytes == base.nbytes
    assert tiny_package().nbytes == 2 * 3 * 4 + 2 * 3 * 2


# -- what a model refuses ----------------------------------------------------------------------


@pytest.fixture
def vlm(demo_parts: dict[str, Any]) -> Any:
    model, processor = demo_parts["demo"]
    return ks.wrap(model, processor)


REFUSED: dict[str, tuple[Callable[[Package], dict[str, Any]], type[Exception], str]] = {
    "other settings": (lambda p: {"settings": "0" * 64}, WrongIdentity, "vision settings"),
    "another width": (
        lambda p: {"tensors": {name: t[:, :-1] for name, t in p.tensors.items()}},
        WrongIdentity,
        "width",
    ),
    "no deepstack": (
        lambda p: {"tensors": {"features": p.tensors["features"]}},
        WrongIdentity,
        "deepstack",
    ),
    "a row too few": (
        lambda p: {"tensors": {name: t[1:] for name, t in p.tensors.items()}},
        DamagedFile,
        "expected one row",
    ),
    "whole numbers": (
        lambda p: {"tensors": {name: t.to(torch.int8) for name, t in p.tensors.items()}},
        DamagedFile,
        "floating",
    ),
    "a grid of another size": (
        lambda p: {"grid": {"image_grid_thw": [[1, 1000, 1000]]}},
        DamagedFile,
        "grid",
    ),
    "a grid of two images": (
        lambda p: {"grid": {"image_grid_thw": p.grid["image_grid_thw"] * 2}},
        DamagedFile,
        "grid",
    ),
    "a grid of nonsense": (lambda p: {"grid": {"image_grid_thw": ["x"]}}, DamagedFile, "grid"),
    "no grid": (lambda p: {"grid": {}}, DamagedFile, "grid"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_package_that_does_not_fit_is_refused_by_name(vlm: Any, what: str) -> None:
    change, error, named = REFUSED[what]
    pack = vlm.encode(picture(1))
    wrong = dataclasses.replace(pack, **change(pack))
    with pytest.raises(error, match=named):
        vlm.ask(wrong, "What is it?", max_new_tokens=1)
    assert vlm.ask(pack, "What is it?", max_new_tokens=1).usage.images_encoded == 0


def test_a_package_that_lies_in_a_store_is_encoded_again(
    demo_parts: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, processor = demo_parts["demo"]
    with ks.wrap(model, processor, store=tmp_path) as first:
        true = first.encode(picture(1))
        first.flush()
    (path,) = tmp_path.glob("package/*/*.sight")
    for change in ({"tokens": 1}, {"key": "0" * 64}, {"container": "?"}):
        record = dict(true.record(), entry=true.feature_id, **change)
        tensorfile.save(path, KIND, FORMAT, true.tensors, record)
        caplog.clear()
        with ks.wrap(model, processor, store=tmp_path) as second:
            again = second.encode(picture(1))
            second.flush()
            assert second.runtime.vision.counts["encoded"] == 1
        assert "set aside" in caplog.text
        assert equal(again, true) and equal(Package.load(path), true)


NOTES: list[dict[str, Any]] = [
    {},
    {"key": 7},
    {"key": "0", "grid": [], "layout": [4]},
    {"key": "0", "grid": {"image_grid_thw": 7}, "layout": [4]},
    {"key": "0", "grid": {}, "layout": 4},
    {"key": "0", "grid": {}, "layout": ["<", ">"]},
    {"key": "0", "grid": {}, "layout": [-4]},
    {"key": "0", "grid": {}, "layout": [True]},
    {"key": "0", "grid": {}, "layout": [1.5]},
]


def test_notes_that_lie_are_set_aside(demo_parts: dict[str, Any], tmp_path: Path) -> None:
    """Notes whose seals hold, and that say nothing of use: the image is looked at again."""
    model, processor = demo_parts["demo"]
    with ks.wrap(model, processor, store=tmp_path) as first:
        true = [first.encode(picture(number)) for number in range(len(NOTES))]
    liar = DiskStore(tmp_path)
    aliases = {
        pack.key: [e.key for e in liar.entries() if e.kind == "alias" and pack.key in e.media]
        for pack in true
    }
    for pack, note in zip(true, NOTES, strict=True):
        assert len(aliases[pack.key]) == 2
        for kind, key in [("made", pack.identity), *(("alias", k) for k in aliases[pack.key])]:
            liar.delete(kind, key)
            liar.put_note(kind, key, note)
    liar.close()
    with ks.wrap(model, processor, store=tmp_path, accept_features="any") as second:
        for number, pack in enumerate(true):
            assert equal(second.encode(picture(number)), pack), NOTES[number]
    for pack, note in zip(true, NOTES, strict=True):
        assert all(DiskStore(tmp_path).note("alias", key) != note for key in aliases[pack.key])


def test_a_path_is_as_good_as_the_package(tmp_path: Path) -> None:
    file, more = tmp_path / "cat.sight", {"max_new_tokens": 2}
    with ks.load("demo", device="cpu") as vlm:
        vlm.encode(picture(1)).save(file)
    with ks.load("demo") as vlm, vlm.blindfold():
        assert vlm.encode(file).key == vlm.encode([str(file)])[0].key
        assert vlm.ask(str(file), "What is it?", **more).usage.images == 1
        assert vlm.session().ask("What is it?", file, **more).usage.images == 1
        messages = [turn("What is it?", str(file))]
        assert vlm.explain(messages).segments
        vlm.pin(file)
        with Together(vlm) as together:
            assert together.submit(messages, **more).result().text
        with pytest.raises(InputError, match="nothing.sight: no package can be read"):
            vlm.ask("nothing.sight", "What is it?")
    with pytest.raises(InputError, match="two names of one option"):
        ks.load("demo", device="cpu", device_map="cpu")


def test_what_is_no_path_is_refused_by_name(tmp_path: Path) -> None:
    package = Package.load(TINY)
    assert package.on("cpu") is package and package.on("meta").tensors["features"].is_meta
    assert equal(Package.load(os.fsencode(TINY)), package)  # type: ignore[arg-type]
    wrong: Any = None
    for call in (
        lambda: package.save(wrong),
        lambda: Package.load(wrong),
        lambda: ks.load(wrong),
        lambda: ks.load("demo", store=wrong or 3),
        lambda: ks.Encoder("demo", store=wrong),
        lambda: ks.Encoder(wrong, store=tmp_path),
    ):
        with pytest.raises(InputError, match="expected a path or an address"):
            call()
