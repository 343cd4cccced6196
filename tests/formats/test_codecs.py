"""Codecs of packages: how much is lost is measured, bounded and written down, and cannot hide.

Bounds are checked against the rows themselves, errors are computed again here from both sides, and
files that lie about their codec with all seals whole are refused by name.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.common import bits
from support.hostile import bounded, tiny_package
from support.models import picture

import keepsight as ks
from keepsight.cli import show
from keepsight.errors import DamagedFile, FileError, InputError, WrongFormatVersion
from keepsight.formats import codecs, tensorfile
from keepsight.formats.package import FORMAT, KIND, Package

LOSSY = ("bf16", "int8")


def rows(seed: int, shape: tuple[int, ...] = (9, 64), dtype: Any = torch.float32) -> torch.Tensor:
    """Features as towers make them: small numbers, and a few columns that tower over the rest."""
    made = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=made)
    tensor[..., 3] += 40
    return tensor.to(dtype)


def wide_package(dtype: Any = torch.float32) -> Package:
    tensors = {"features": rows(1, dtype=dtype), "deepstack.0": rows(2, dtype=dtype) / 100}
    return tiny_package(tensors=tensors, layout=("<", 9, ">"))


# -- the bound ---------------------------------------------------------------------------------

NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-8, 8, width=32)


@bounded(150)
@given(st.data(), st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
def test_no_number_is_further_off_than_half_a_step(data: Any, dtype: torch.dtype) -> None:
    """Half a step before the unpacked number is rounded to its dtype; rounding at most doubles."""
    width = data.draw(st.integers(1, 5))
    lists = st.lists(NUMBERS, min_size=width, max_size=width)
    tensor = torch.tensor(data.draw(st.lists(lists, min_size=1, max_size=4)), dtype=torch.float64)
    tensor = tensor.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else tensor.to(dtype)
    kept, said = codecs.pack({"features": tensor}, "int8")
    assert (
        kept["features"].dtype == torch.uint8 and kept["features.scale"].shape == tensor.shape[:-1]
    )
    found = codecs.unpack(kept, said, "here")["features"]
    assert found.dtype == dtype
    step, reach = kept["features.scale"].double(), tensor.double().abs().amax(-1)
    most = step / 2 if dtype in (torch.float64, torch.float32) else step
    slack = (reach + 255 * step) * 2.0**-22
    off = (found.double() - tensor.double()).abs().amax(-1)
    assert (off <= most + slack).all(), (off, most)
    low, high = tensor.double().amin(-1), tensor.double().amax(-1)
    assert (step <= ((high - low) / 255) * (1 + 1e-6) + 2e-38 + reach * 2.0**-24).all()


@bounded(60)
@given(st.lists(NUMBERS, min_size=1, max_size=8))
def test_bf16_is_off_by_half_a_place(row: list[float]) -> None:
    tensor = torch.tensor([row])
    kept, said = codecs.pack({"features": tensor}, "bf16")
    found = codecs.unpack(kept, said, "here")["features"]
    assert torch.equal(found, tensor.to(torch.bfloat16).float())
    assert said["tensors"]["features"]["max_abs"] <= 1.001 * 2.0**-8 * tensor.abs().max() + 1e-37


@pytest.mark.parametrize("row", [[0.0] * 4, [5.25] * 4, [-3.0] * 4, [1e-45, 0.0, 0.0, 0.0]])
def test_rows_of_one_value_are_kept_exactly(row: list[float]) -> None:
    kept, said = codecs.pack({"features": torch.tensor([row])}, "int8")
    found = codecs.unpack(kept, said, "here")["features"]
    assert (found - torch.tensor([row])).abs().max() < 1e-37
    assert (kept["features.scale"] > 0).all()


# -- what is said of it ------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("shape", [(9, 64), (3, 3, 64)])
def test_the_error_in_the_record_is_the_true_one(name: str, shape: tuple[int, ...]) -> None:
    pack = tiny_package(tensors={"features": rows(1, shape)}, layout=(9,))
    lossy = pack.pack(name)
    said = lossy.provenance["codec"]["tensors"]["features"]
    off = (lossy.tensors["features"].double() - pack.tensors["features"].double()).reshape(9, 64)
    true = pack.tensors["features"].double().reshape(9, 64)
    assert (
        said["max_abs"] == pytest.approx(off.abs().max().item(), rel=1e-3) and said["max_abs"] > 0
    )
    assert said["relative_rms"] == pytest.approx((off.norm() / true.norm()).item(), rel=1e-3)
    worst = (off.norm(dim=-1) / true.norm(dim=-1)).max().item()
    assert said["worst_row"] == pytest.approx(worst, rel=1e-3)
    assert name in lossy.codec and f"{said['relative_rms']:.2%}" in lossy.codec


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_package_has_a_name_of_its_own(name: str) -> None:
    pack = wide_package()
    lossy = pack.pack(name)
    assert lossy.identity == pack.identity
    assert lossy.feature_id != pack.feature_id == wide_package().feature_id
    assert lossy.feature_id == wide_package().pack(name).feature_id
    assert pack.codec == "exact" and lossy.pack(name) is lossy


def test_sizes_are_a_half_and_a_quarter() -> None:
    exact = tiny_package(tensors={"features": rows(1, (64, 1024))}, layout=(64,))
    sizes = {
        name: sum(t.nbytes for t in exact.pack(name).stored.values()) for name in codecs.CODECS
    }
    assert sizes["bf16"] * 2 == sizes["exact"]
    assert sizes["exact"] / 4 < sizes["int8"] < sizes["exact"] / 3.9


def test_what_is_not_made_smaller_stays_exact() -> None:
    half = wide_package(torch.bfloat16)
    assert half.pack("bf16") is half and half.codec == "exact"
    assert wide_package(torch.float16).pack("bf16").codec == "exact"
    mixed = tiny_package().pack("bf16")  # its deepstack level is bf16 already
    assert mixed.provenance["codec"]["tensors"].keys() == {"features"}
    assert mixed.stored["deepstack.0"] is tiny_package().tensors["deepstack.0"] or torch.equal(
        mixed.stored["deepstack.0"], tiny_package().tensors["deepstack.0"]
    )
    exact = wide_package()
    assert exact.pack("exact") is exact


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", LOSSY)
def test_features_that_are_no_numbers_are_refused(name: str, wrong: float) -> None:
    pack = wide_package()
    pack.tensors["deepstack.0"][4, 5] = wrong
    with pytest.raises(InputError, match="'deepstack.0' holds NaN or infinity"):
        pack.pack(name)


@pytest.mark.parametrize("name", LOSSY)
def test_features_too_large_are_refused(name: str) -> None:
    most = torch.finfo(torch.float32).max
    tensors = {"features": torch.tensor([[most, -most]])}
    with pytest.raises(InputError, match="too large"):
        tiny_package(tensors=tensors, layout=(1,)).pack(name)


def test_what_is_lost_is_lost() -> None:
    lossy = wide_package().pack("int8")
    for name in ("exact", "bf16"):
        with pytest.raises(InputError, match="packed already"):
            lossy.pack(name)
    with pytest.raises(InputError, match=r"no codec 'int4'.*bf16"):
        lossy.pack("int4")
    claimed = tiny_package(provenance={"codec": "int8"})  # somebody else's word, and nothing more
    with pytest.raises(InputError, match="packed already"):
        claimed.pack("bf16")


# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", codecs.CODECS)
def test_what_is_saved_is_loaded(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    pack = wide_package(dtype).pack(name)
    found = Package.load(pack.save(tmp_path / "x.sight"))
    assert bits(found.tensors) == bits(pack.tensors)
    assert found.feature_id == pack.feature_id and found.record() == pack.record()
    again = found.save(tmp_path / "y.sight")
    assert again.read_bytes() == (tmp_path / "x.sight").read_bytes()
    sizes = {t.dtype for t in tensorfile.read(again, KIND, FORMAT)[0].values()}
    assert (torch.uint8 in sizes) == (name == "int8")


def test_changed_features_do_not_keep_the_name(tmp_path: Path) -> None:
    lossy = wide_package().pack("int8")
    changed = {name: t + 1 for name, t in lossy.tensors.items()}
    for tensors, packed in ((changed, lossy.packed), (lossy.tensors, None)):
        liar = dataclasses.replace(lossy, tensors=tensors, packed=packed)
        with pytest.raises((InputError, DamagedFile)):
            liar.save(tmp_path / "x.sight")
    lossy.tensors["features"].add_(1)
    with pytest.raises(InputError, match="changed after they were packed"):
        lossy.save(tmp_path / "x.sight")
    assert not (tmp_path / "x.sight").exists()


def test_show_says_codec_and_error(tmp_path: Path) -> None:
    lossy = wide_package().pack("int8")
    described = show.describe(lossy.save(tmp_path / "x.sight"))
    assert described["codec"] == lossy.codec
    assert described["feature_id"] == lossy.feature_id
    assert show.describe(wide_package().save(tmp_path / "y.sight"))["codec"] == "exact"


# -- files that lie ----------------------------------------------------------------------------

Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]
NAN, INF = torch.tensor(math.nan), torch.tensor(math.inf)


def _spoil(name: str, value: Any) -> Change:
    return lambda tensors, codec: tensors[name].view(-1).__setitem__(0, value)


def _claim(field: str, value: Any) -> Change:
    return lambda tensors, codec: codec["tensors"]["features"].update({field: value})


LIES: dict[str, Change] = {
    "no scales": lambda tensors, codec: tensors.pop("features.scale"),
    "no offsets": lambda tensors, codec: tensors.pop("deepstack.0.offset"),
    "no codes": lambda tensors, codec: tensors.pop("features"),
    "scales too few": lambda t, codec: t.update({"features.scale": t["features.scale"][1:]}),
    "scales too many": lambda t, codec: t.update({"features.scale": torch.ones(10)}),
    "scales of another shape": lambda t, codec: t.update({"features.scale": torch.ones(9, 1)}),
    "scales of another dtype": lambda t, codec: t.update({"features.scale": torch.ones(9).half()}),
    "scales that are NaN": _spoil("features.scale", NAN),
    "scales without end": _spoil("features.scale", INF),
    "scales of nothing": _spoil("features.scale", 0.0),
    "scales below nothing": _spoil("features.scale", -1.0),
    "scales that overflow": _spoil("features.scale", 3e38),
    "offsets that are NaN": _spoil("deepstack.0.offset", NAN),
    "offsets without end": _spoil("deepstack.0.offset", -INF),
    "signed codes": lambda t, codec: t.update({"features": t["features"].to(torch.int8)}),
    "floats said to be codes": lambda t, codec: t.update({"features": t["features"].float()}),
    "codes of no dimension": lambda t, codec: t.update({"features": t["features"][0, 0]}),
    "codes too few": lambda t, c: t.update({k: t[k][1:] for k in t if k.startswith("features")}),
    "a tensor that the record does not name": lambda t, codec: codec["tensors"].pop("deepstack.0"),
    "a tensor that is not there": lambda t, c: c["tensors"].update(x=c["tensors"]["features"]),
    "scales of nobody": lambda tensors, codec: tensors.update({"x.scale": torch.ones(9)}),
    "less error than none": _claim("relative_rms", -0.5),
    "an error that is NaN": _claim("worst_row", "NaN"),
    "an error that is true": _claim("max_abs", True),
    "an error without end": _claim("max_abs", 10**400),
    "no error": lambda t, codec: codec["tensors"]["features"].pop("relative_rms"),
    "a dtype of integers": _claim("dtype", "int64"),
    "a dtype of nonsense": _claim("dtype", ["float32"]),
    "no tensors": lambda tensors, codec: codec.update(tensors={}),
    "tensors in a list": lambda tensors, codec: codec.update(tensors=["features"]),
    "a name that is none": lambda tensors, codec: codec.update(name=7),
    "an exact loss": lambda tensors, codec: codec.update(name="exact"),
    "more than was asked": lambda tensors, codec: codec.update(more=1),
}


def lying(path: Path, change: Change, name: str = "int8") -> Path:
    """A packed file with all seals whole and one lie in it."""
    pack = wide_package().pack(name)
    tensors = {title: t.clone() for title, t in pack.stored.items()}
    record = copy.deepcopy(pack.record())
    change(tensors, record["provenance"]["codec"])
    tensorfile.save(path, KIND, FORMAT, tensors, record)
    return path


@pytest.mark.parametrize("what", LIES)
def test_files_that_lie_about_their_codec(tmp_path: Path, what: str) -> None:
    with pytest.raises(DamagedFile):
        Package.load(lying(tmp_path / "x.sight", LIES[what]))


def test_the_file_that_does_not_lie(tmp_path: Path) -> None:
    """Or the refusals above would prove nothing."""
    for name in LOSSY:
        assert Package.load(lying(tmp_path / "x.sight", lambda t, c: None, name)).tokens == 9


def test_lies_about_bf16(tmp_path: Path) -> None:
    for change in (
        lambda t, c: t.update({"features": t["features"].float()}),
        lambda t, c: t["features"].view(-1).__setitem__(0, NAN),
        lambda t, c: t.update({"features.scale": torch.ones(9)}),
        _claim("max_abs", -1.0),
        lambda t, c: t.pop("deepstack.0"),
    ):
        with pytest.raises(DamagedFile):
            Package.load(lying(tmp_path / "x.sight", change, "bf16"))


def test_codes_without_a_codec(tmp_path: Path) -> None:
    """Integers are never taken for features, whatever the provenance calls itself."""
    pack = wide_package().pack("int8")
    for codec in ("exact", "int8", None):
        record = copy.deepcopy(pack.record())
        record["provenance"]["codec"] = codec
        tensorfile.save(tmp_path / "x.sight", KIND, FORMAT, pack.stored, record)
        with pytest.raises(DamagedFile):
            Package.load(tmp_path / "x.sight")
        only = {"features": pack.stored["features"], "deepstack.0": pack.stored["deepstack.0"]}
        tensorfile.save(tmp_path / "x.sight", KIND, FORMAT, only, record)
        with pytest.raises(DamagedFile, match="floating"):
            Package.load(tmp_path / "x.sight")


def test_a_codec_of_tomorrow(tmp_path: Path) -> None:
    path = lying(tmp_path / "x.sight", lambda tensors, codec: codec.update(name="int4"))
    with pytest.raises(WrongFormatVersion, match=r"'int4'.*bf16, int8"):
        Package.load(path)


def test_another_error_is_another_package(tmp_path: Path) -> None:
    """The error is a part of the name."""
    liar = Package.load(lying(tmp_path / "x.sight", _claim("max_abs", 1e-6)))
    assert liar.feature_id != wide_package().pack("int8").feature_id


PACKED = wide_package().pack("int8")


@bounded(60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_codec_record_at_all(nonsense: Any) -> None:
    record = copy.deepcopy(PACKED.record())
    record["provenance"]["codec"] = nonsense
    with pytest.raises(FileError):
        Package.from_record(dict(PACKED.stored), record, "here")


# -- in use ------------------------------------------------------------------------------------


def test_a_packed_package_answers_and_leaves_exact_answers_alone(
    demo_parts: dict[str, Any], tmp_path: Path
) -> None:
    model, processor = demo_parts["demo"]
    vlm = ks.wrap(model, processor)
    pack = vlm.encode(picture(1))
    assert isinstance(pack, Package)
    lossy = Package.load(pack.pack("int8").save(tmp_path / "x.sight"))
    said = vlm.ask(lossy, "What is it?", max_new_tokens=6)
    assert said.text == vlm.ask(pack, "What is it?", max_new_tokens=6).text
    exact = vlm.ask(picture(1), "What is it?", max_new_tokens=6)
    assert exact.usage.images_encoded == 0 or exact.usage.cached_tokens == 0
    assert vlm.runtime.vision.name(lossy).feature_id != vlm.runtime.vision.name(pack).feature_id
