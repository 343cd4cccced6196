"""Exported folders that are half copied, changed, forged, or made for other versions.

Each is a named error before a runtime computes anything. A forger who writes the record anew, seal
and all, is what `sealed` stands for.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from support.exported_models import exported_demo
from support.model_parts import picture

import keepsight as ks
from keepsight.errors import (
    DamagedFile,
    FileError,
    ImageError,
    MissingExtra,
    ModelError,
    NotKeepsightFile,
    UnsupportedInput,
    WrongFormatVersion,
    WrongIdentity,
)
from keepsight.runtimes import manifest
from keepsight.runtimes.load import is_export, other_versions, read
from keepsight.runtimes.onnx import OnnxSession

QUESTION = "What do you see?"
FILES = [
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "chat_template.jinja",
    *(f"graphs/{part}.onnx{end}" for part in manifest.PARTS for end in ("", ".data")),
]
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole() -> Path:
    """An export that nobody may change."""
    return exported_demo("demo")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(whole, tmp_path / "export"))


def sealed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the record as a forger would, or as another version: its seal holds."""
    path = folder / manifest.NAME
    told = json.loads(path.read_text())
    change(told)
    told["seal"] = manifest.seal_of(told)
    path.write_text(json.dumps(told))


def resealed_files(folder: Path) -> None:
    """Name all files anew, as if they had been exported like this."""
    found = {name: vars(file) for name, file in manifest.files_in(folder).items()}
    sealed(folder, lambda told: told.update(files=found))


def answers(folder: Path, **options: Any) -> list[int]:
    with ks.load(folder, **options) as vlm:
        return vlm.ask(picture(1), QUESTION, max_new_tokens=4, do_sample=False).tokens


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_cut_off_or_changed_is_named(folder: Path, name: str) -> None:
    path = folder / name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(DamagedFile, match=rf"{name} has {len(data) - 1} bytes"):
        ks.load(folder)
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    with pytest.raises(DamagedFile, match=f"{name} is not the file that was exported"):
        ks.load(folder)
    path.unlink()
    with pytest.raises(DamagedFile, match=f"lacks {name}"):
        ks.load(folder)
    path.write_bytes(data)
    assert read(folder)


def edited(part: str, change: Callable[[Any], object]) -> Change:
    """A graph changed, and the record with it."""

    def edit(folder: Path) -> None:
        path = folder / f"graphs/{part}.onnx"
        model = onnx.load(path, load_external_data=False)
        change(model)
        path.write_bytes(model.SerializeToString())
        resealed_files(folder)

    return edit


def record(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda folder: sealed(folder, change)


def by_hand(name: str, value: Any) -> Change:
    """A line of the record changed, and not its seal."""

    def edit(folder: Path) -> None:
        path = folder / manifest.NAME
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))

    return edit


def led_out(name: str) -> Change:
    """A file or a folder behind a link that leads out."""

    def move(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / "outside")
        (folder / name).symlink_to(folder.parent / "outside")

    return move


def is_a_folder(folder: Path) -> None:
    (folder / manifest.NAME).unlink()
    (folder / manifest.NAME).mkdir()


def of_another_model(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "qwen2_vl"}))
    resealed_files(folder)


def unknown_operator(model: Any) -> None:
    model.graph.node[0].domain = "org.nobody"
    model.opset_import.append(onnx.helper.make_opsetid("org.nobody", 1))


def of_tomorrow(model: Any) -> None:
    for one in model.opset_import:
        one.version = one.version if one.domain else 9999


def elsewhere(folder: Path) -> None:
    """The weights lie outside, where a graph says they are."""
    shutil.move(folder / "graphs/head.onnx.data", folder.parent / "outside.data")

    def look_outside(model: Any) -> None:
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = "../../outside.data"

    edited("head", look_outside)(folder)


def swapped(part: str, other: str) -> Change:
    """Whoever reseals a folder gets past the digests, and still no KeyError in the first call."""

    def swap(folder: Path) -> None:
        graphs = folder / manifest.GRAPHS
        shutil.copyfile(graphs / f"{other}.onnx", graphs / f"{part}.onnx")
        resealed_files(folder)
        sealed(folder, lambda told: told.update(appends=part == "head" and told["appends"]))

    return swap


_OUTSIDE = ["/etc/passwd", "../secret", "graphs/../../x", "a\\..\\b", "a\0b"]
_NONE = {"bytes": 1, "digest": "0" * 64}
_NONSENSE: list[tuple[str, Any]] = [
    *(("runtime", one) for one in ("torch", None, ["onnx"], {})),
    *(("files", one) for one in (None, [], {}, {"config.json": 3}, {"config.json": {"bytes": 1}})),
    ("surprise", 1),
]
DAMAGES: list[tuple[Change, type[Exception], str]] = [
    (lambda f: (f / manifest.NAME).unlink(), NotKeepsightFile, r"has no keepsight\.json"),
    (is_a_folder, NotKeepsightFile, r"has no keepsight\.json"),
    *(
        (lambda f, n=name: (f / n).write_text("{}"), DamagedFile, f"holds {name}")
        for name in ("graphs/other.onnx", "processor_config.json", "x.jinja")
    ),
    *(
        (led_out(name), DamagedFile, "leads out of the folder")
        for name in ("graphs/decoder.onnx.data", "graphs")
    ),
    *(
        (record(lambda told, form=form: told.update(format=form)), WrongFormatVersion, "reads 2")
        for form in (0, 1, "2", True, 2.0, None, [2])
    ),
    *(
        (by_hand(name, value), DamagedFile, "was changed after the export")
        for name, value in (("weights", {"all": "0" * 64}), ("most_patches", 9), ("seal", None))
    ),
    *(
        (record(lambda told, n=n, v=v: told.update({n: v})), DamagedFile, r"keepsight\.json")
        for n, v in _NONSENSE
    ),
    *(
        (record(lambda told, n=n: told["files"].update({n: _NONE})), DamagedFile, "outside its")
        for n in _OUTSIDE
    ),
    (
        record(lambda told: told["files"].pop("graphs/head.onnx")),
        DamagedFile,
        r"names no graphs/head\.onnx",
    ),
    (
        record(lambda told: told.update(runtime="openvino")),
        DamagedFile,
        r"names no graphs/\w+\.bin",
    ),
    (of_another_model, DamagedFile, "is for qwen2_vl, the record for qwen3_vl"),
    (edited("head", unknown_operator), ModelError, r"cannot run head\.onnx"),
    (edited("head", of_tomorrow), ModelError, r"cannot run head\.onnx"),
    (elsewhere, ModelError, r"head\.onnx"),
    (swapped("head", "embedding"), ModelError, "the head's graph takes .* which this model lacks"),
    (swapped("decoder", "head"), ModelError, "the decoder's graph takes .* which this model lacks"),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_damage_is_named(folder: Path, number: int) -> None:
    change, error, told = DAMAGES[number]
    change(folder)
    assert is_export(folder)
    with pytest.raises(error, match=told):
        ks.load(folder)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b'{"format": 2',
        b'{"format": NaN}',
        b'{"format": 2, "deviation": {"logits": -Infinity}}',
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"format": 2, "deviation": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
        b'{"format": 2' + b" " * (5 << 20) + b"}",
        b'{"format": ' + b"9" * 10_000 + b"}",
    ],
    ids=range(13),
)
def test_a_record_that_is_none_is_named(folder: Path, text: bytes) -> None:
    (folder / manifest.NAME).write_bytes(text)
    with pytest.raises(FileError, match=r"keepsight\.json"):
        ks.load(folder)


# -- what is refused in use ----------------------------------------------------------------------


def test_a_picture_beyond_the_bound_is_named_and_the_next_call_works(folder: Path) -> None:
    sealed(folder, lambda told: told.update(most_patches=40))
    small, large = picture(1, 96, 96), picture(2, 128, 96)
    with ks.load(folder) as vlm:
        wanted = vlm.ask(small, QUESTION, max_new_tokens=4, do_sample=False).tokens
        before = vlm.stats()["engine"]["prefill_tokens"]
        for images in ([large], [small, large]):
            with pytest.raises(ImageError, match="48 patches is beyond the 40"):
                vlm.ask(images, QUESTION, max_new_tokens=4)
        assert vlm.stats()["engine"]["prefill_tokens"] == before, "refused before anything is run"
        again = vlm.ask(small, QUESTION, max_new_tokens=4, do_sample=False)
        assert again.tokens == wanted and again.usage.images_encoded == 0


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"device_map": "cuda"}, {"vision": False}, {"revision": "x"}]
)
def test_options_that_an_export_cannot_honour(whole: Path, options: Any) -> None:
    ((name, value),) = options.items()
    with pytest.raises(UnsupportedInput, match=f"{name}={value!r}"):
        ks.load(whole, **options)


def test_a_graph_that_breaks_off_is_named_and_runs_again(whole: Path) -> None:
    session = OnnxSession(whole / "graphs/head.onnx", 1)
    with pytest.raises(ModelError, match=r"failed in head\.onnx"):
        session.run({"hidden": torch.zeros(1, 2, 3)})
    width = json.loads((whole / "config.json").read_text())["text_config"]["hidden_size"]
    assert session.run({"hidden": torch.zeros(1, 2, width)})["logits"].shape[:2] == (1, 2)


def test_a_change_does_not_make_two_exports_one(whole: Path, folder: Path, tmp_path: Path) -> None:
    """No package and no state of one serves the other, also where both were changed alike."""
    sealed(folder, lambda told: told["weights"].update(all="1" * 64, vision="2" * 64))
    for changed in (False, True):
        with ks.load(whole) as one, ks.load(folder) as other:
            for vlm in (one, other) if changed else ():
                vlm.model.get_decoder().mine = "a setting"
            package, chat = one.encode(picture(1)), one.session()
            chat.ask(QUESTION * 8, max_new_tokens=1)
            chat.save(tmp_path / "talk.keep")
            with pytest.raises(WrongIdentity, match="vision weights"):
                other.ask(package, QUESTION, max_new_tokens=1)
            same = [vlm.resume(tmp_path / "talk.keep").ask(QUESTION) for vlm in (one, other)]
            assert same[0].usage.cached_tokens and not same[1].usage.cached_tokens


def test_training_and_saving_take_the_checkpoint(whole: Path, tmp_path: Path) -> None:
    with ks.load(whole) as vlm:
        with pytest.raises(UnsupportedInput, match="cannot be trained"):
            vlm.model.train()
        with pytest.raises(UnsupportedInput, match=r"copy .* instead"):
            vlm.model.save_pretrained(tmp_path / "saved")
        assert not vlm.model.eval().training and not (tmp_path / "saved").exists()


def test_a_runtime_that_is_not_installed(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtra, match="extra 'onnx'"):
        ks.load(whole)


def test_other_versions_are_told_and_do_not_stop_what_works(folder: Path, whole: Path) -> None:
    versions = {"torch": "1.0", "transformers": "99.0", "onnxruntime": "0.1"}
    sealed(folder, lambda told: told.update(versions=versions))
    found = {name: was for name, (was, _) in other_versions(read(folder)).items()}
    assert found == {"transformers": "99.0", "onnxruntime": "0.1"}
    assert not other_versions(read(whole))
    assert answers(folder) == answers(whole)
    edited("head", unknown_operator)(folder)
    with pytest.raises(ModelError, match=r"made with transformers 99\.0 .*, onnxruntime 0\.1"):
        ks.load(folder)


def test_with_a_store_the_same_files_are_read_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_files: list[str] = []
    true = manifest.file_digest
    monkeypatch.setattr(manifest, "file_digest", lambda p: read_files.append(p.name) or true(p))
    store = tmp_path / "store"
    assert answers(folder) == answers(folder, store=store)
    assert len(read_files) == 2 * len(read(folder, contents=False).files)
    read_files.clear()
    assert answers(folder, store=store) and not read_files
    path = folder / "graphs/head.onnx.data"
    status, data = path.stat(), bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DamagedFile, match="is not the file"):
        ks.load(folder, store=store)
