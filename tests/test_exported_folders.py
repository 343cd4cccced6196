"""Exported folders that are half copied, changed, forged, or made for other versions.

Each is a named error before a runtime computes anything, and the good folder beside it still works.
A forger who writes the record anew, seal and all, is what `sealed` stands for.
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
from exported_models import exported_demo
from model_parts import picture

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


@pytest.fixture(scope="module")
def whole() -> Path:
    """An export that nobody may change."""
    return exported_demo("demo")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(whole, tmp_path / "export"))


def sealed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
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


# -- half copied, changed ------------------------------------------------------------------------


def test_the_list_of_files_is_that_of_an_export(whole: Path) -> None:
    assert set(FILES) <= set(read(whole).files)


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


def test_a_folder_that_lost_its_record_says_so(folder: Path) -> None:
    (folder / manifest.NAME).unlink()
    with pytest.raises(NotKeepsightFile, match=r"has no keepsight\.json"):
        ks.load(folder)
    (folder / manifest.NAME).mkdir()
    with pytest.raises(NotKeepsightFile, match=r"has no keepsight\.json"):
        ks.load(folder)
    shutil.rmtree(folder / "graphs")
    assert not is_export(folder)


@pytest.mark.parametrize("name", ["graphs/other.onnx", "processor_config.json", "x.jinja"])
def test_a_file_that_is_not_of_this_export_is_noticed(folder: Path, name: str) -> None:
    (folder / name).write_text("{}")
    with pytest.raises(DamagedFile, match=f"holds {name}"):
        ks.load(folder)


def test_other_files_may_lie_beside_an_export(folder: Path) -> None:
    (folder / "README.md").write_text("mine")
    assert answers(folder)


def test_links_that_lead_out_are_refused(folder: Path, tmp_path: Path) -> None:
    data = folder / "graphs/decoder.onnx.data"
    shutil.move(data, tmp_path / "outside")
    data.symlink_to(tmp_path / "outside")
    with pytest.raises(DamagedFile, match="leads out of the folder"):
        ks.load(folder)
    data.unlink()
    shutil.move(tmp_path / "outside", data)
    assert read(folder)
    shutil.move(folder / "graphs", tmp_path / "elsewhere")
    (folder / "graphs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedFile, match="leads out of the folder"):
        ks.load(folder)


# -- the record ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [0, 1, "2", True, 2.0, None, [2]])
def test_another_version_of_the_format_is_named(folder: Path, form: Any) -> None:
    sealed(folder, lambda told: told.update(format=form))
    with pytest.raises(WrongFormatVersion, match="this version reads 2"):
        ks.load(folder)


def test_a_record_changed_by_hand_is_noticed(folder: Path) -> None:
    path = folder / manifest.NAME
    told = json.loads(path.read_text())
    other = "0" * 64  # the fingerprint of another model
    for name, value in (("weights", {"all": other, "vision": other}), ("most_patches", 9)):
        path.write_text(json.dumps({**told, name: value}))
        with pytest.raises(DamagedFile, match="was changed after the export"):
            ks.load(folder)


NONSENSE: dict[str, Any] = {
    "runtime": ["torch", None, ["onnx"], {}],
    "files": [None, [], {}, {"config.json": 3}, {"config.json": {"bytes": 1}}],
    "seal": [None, 3, "0" * 64],
    "surprise": [1],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_in_a_record_is_named(folder: Path, name: str) -> None:
    path = folder / manifest.NAME
    for value in NONSENSE[name]:
        told = json.loads((folder / manifest.NAME).read_text())
        before = json.dumps(told)
        told[name] = value
        if name != "seal":
            told["seal"] = manifest.seal_of(told)
        path.write_text(json.dumps(told))
        with pytest.raises(DamagedFile, match=r"keepsight\.json"):
            read(folder)
        path.write_text(before)
    assert read(folder)


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


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret", "graphs/../../x", "a\\..\\b", "a\0b"])
def test_paths_outside_the_folder_are_refused(folder: Path, name: str) -> None:
    file = {"bytes": 1, "digest": "0" * 64}
    sealed(folder, lambda told: told["files"].update({name: file}))
    with pytest.raises(DamagedFile, match="outside its folder"):
        ks.load(folder)


def test_a_record_that_leaves_out_a_graph_is_refused(folder: Path) -> None:
    sealed(folder, lambda told: told["files"].pop("graphs/head.onnx"))
    with pytest.raises(DamagedFile, match=r"names no graphs/head\.onnx"):
        ks.load(folder)
    sealed(folder, lambda told: told.update(runtime="openvino"))
    with pytest.raises(DamagedFile, match=r"names no graphs/\w+\.bin"):
        ks.load(folder)


# -- graphs that no runtime here can run ---------------------------------------------------------


def edited(folder: Path, part: str, change: Callable[[Any], None]) -> None:
    """A graph changed, and the record with it."""
    path = folder / f"graphs/{part}.onnx"
    model = onnx.load(path, load_external_data=False)
    change(model)
    path.write_bytes(model.SerializeToString())
    resealed_files(folder)


def test_settings_of_another_model_are_noticed(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "qwen2_vl"}))
    resealed_files(folder)
    with pytest.raises(DamagedFile, match="is for qwen2_vl, the record for qwen3_vl"):
        ks.load(folder)


def test_an_operator_or_opset_that_the_runtime_lacks_is_named(folder: Path, whole: Path) -> None:
    def unknown(model: Any) -> None:
        model.graph.node[0].domain = "org.nobody"
        model.opset_import.append(onnx.helper.make_opsetid("org.nobody", 1))

    def tomorrow(model: Any) -> None:
        for one in model.opset_import:
            one.version = one.version if one.domain else 9999

    for change in (unknown, tomorrow):
        edited(folder, "head", change)
        with pytest.raises(ModelError, match=r"cannot run head\.onnx"):
            ks.load(folder)
        shutil.copy(whole / "graphs/head.onnx", folder / "graphs/head.onnx")
    edited(folder, "head", unknown)
    sealed(folder, lambda told: told["versions"].update(onnxruntime="99.0"))
    with pytest.raises(ModelError, match=r"it was made with onnxruntime 99\.0 \(here "):
        ks.load(folder)
    assert answers(whole)


def test_weights_that_a_graph_lacks_are_named(folder: Path) -> None:
    (folder / "graphs/head.onnx.data").unlink()
    resealed_files(folder)
    with pytest.raises(ModelError, match=r"head\.onnx"):
        ks.load(folder)


def test_weights_outside_the_folder_are_not_read(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "graphs/head.onnx.data", tmp_path / "outside.data")

    def look_outside(model: Any) -> None:
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = "../../outside.data"

    edited(folder, "head", look_outside)
    with pytest.raises(ModelError, match=r"head\.onnx"):
        ks.load(folder)


# -- what is refused in use ----------------------------------------------------------------------


def test_a_picture_beyond_the_bound_is_named_and_the_next_call_works(folder: Path) -> None:
    sealed(folder, lambda told: told.update(most_patches=40))
    small, large = picture(1, 96, 96), picture(2, 128, 96)
    with ks.load(folder) as vlm:
        wanted = vlm.ask(small, QUESTION, max_new_tokens=4, do_sample=False).tokens
        before = vlm.stats()["engine"]["prefill_tokens"]
        for images in ([large], [small, large]):
            pieces = vlm.stream([ks_message(images)], max_new_tokens=4)
            with pytest.raises(ImageError, match="48 patches is beyond the 40"):
                next(pieces)
            with pytest.raises(ImageError, match="48 patches is beyond the 40"):
                vlm.explain([ks_message(images)])
        assert vlm.stats()["engine"]["prefill_tokens"] == before, "refused before anything is run"
        again = vlm.ask(small, QUESTION, max_new_tokens=4, do_sample=False)
        assert again.tokens == wanted and again.usage.images_encoded == 0
        vlm.clear()
        assert vlm.ask(small, QUESTION, max_new_tokens=4, do_sample=False).tokens == wanted


def ks_message(images: list[Any]) -> dict[str, Any]:
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtype": "bfloat16"}, "dtype='bfloat16'"),
        ({"device_map": "cuda"}, "device_map='cuda'"),
        ({"vision": False}, "vision=False"),
        ({"revision": "main"}, "revision='main'"),
    ],
)
def test_options_that_an_export_cannot_honour(whole: Path, options: Any, told: str) -> None:
    with pytest.raises(UnsupportedInput, match=told):
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
        wanted = vlm.ask(picture(1), QUESTION, max_new_tokens=4, do_sample=False).tokens
    assert wanted == answers(whole)


def test_a_runtime_that_is_not_installed(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtra, match="extra 'onnx'"):
        ks.load(whole)


def test_other_versions_are_told_and_do_not_stop_what_works(folder: Path, whole: Path) -> None:
    versions = {"torch": "1.0", "transformers": "99.0", "onnxruntime": "0.1"}
    sealed(folder, lambda told: told.update(versions=versions))
    found = other_versions(read(folder))
    assert {name: was for name, (was, _) in found.items()} == {
        "transformers": "99.0",
        "onnxruntime": "0.1",
    }
    assert not other_versions(read(whole))
    assert answers(folder) == answers(whole)


# -- reading every byte, and remembering that ----------------------------------------------------


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


@pytest.mark.parametrize("part", ["head", "decoder"])
def test_a_graph_of_another_part_is_named_when_it_is_loaded(part: str, folder: Path) -> None:
    """Whoever reseals a folder gets past the digests, and still no KeyError in the first call."""
    graphs = folder / manifest.GRAPHS
    swapped = {"head": "embedding", "decoder": "head"}[part]
    shutil.copyfile(graphs / f"{swapped}.onnx", graphs / f"{part}.onnx")
    resealed_files(folder)
    sealed(folder, lambda told: told.update(appends=part == "head" and told["appends"]))
    with pytest.raises(ModelError, match=rf"the {part}'s graph takes .* which this model lacks"):
        ks.load(folder)
