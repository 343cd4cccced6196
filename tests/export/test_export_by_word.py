"""`ks.load(..., runtime=...)`: exports are made once, in the store, and used by whoever comes next.

Making one takes half a minute, so a copy stands for it; that exports are right is shown
elsewhere.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.exported_models import exported_demo
from support.model_parts import picture

import keepsight as ks
from keepsight.errors import InputError, ModelError, UnknownOption, UnsupportedInput
from keepsight.export import runtime_choice
from keepsight.models import loading
from keepsight.runtimes.manifest import is_export

QUESTION = "Describe the picture."


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the exporter, which copies an export of the demo."""
    asked: list[str] = []

    def copy(name: str, to: Path, runtime: str, *options: Any) -> None:
        asked.append(runtime)
        shutil.copytree(exported_demo("demo"), to)

    monkeypatch.setattr(runtime_choice, "make_apart", copy)
    return asked


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of our own, to be changed."""
    return Path(shutil.copytree(loading.model_path("demo"), tmp_path / "checkpoint"))


def answer(name: str | Path, store: Path, **options: Any) -> tuple[str, dict[str, Any]]:
    with ks.load(name, store=store, **options) as vlm:
        reply = vlm.ask(picture(1), QUESTION, max_new_tokens=4)
        return reply.text, vlm.stats()["runtime"]


def exports_in(store: Path) -> list[Path]:
    return [path for path in (store / "exports").iterdir() if is_export(path)]


def test_an_export_is_made_once_and_used_from_then_on(made: list[str], tmp_path: Path) -> None:
    lines: list[str] = []
    first, said = answer("demo", tmp_path, runtime="onnx", tell=lines.append)
    assert said == {"name": "onnx", "weights": "float32", "because": "it was asked for"}
    assert any("exported for onnx in" in line and "MiB" in line for line in lines)
    with ks.load("demo", store=tmp_path, runtime="onnx") as vlm:
        assert hasattr(vlm.model, "exported")
        reply = vlm.ask(picture(1), QUESTION, max_new_tokens=4)
    assert made == ["onnx"]
    assert reply.text == first
    assert reply.usage.images_encoded == 0  # the store remembers for the export, too


def test_a_changed_checkpoint_has_another_export(
    made: list[str], checkpoint: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    answer(checkpoint, store, runtime="onnx")
    before = exports_in(store)
    (checkpoint / "generation_config.json").touch()
    answer(checkpoint, store, runtime="onnx")
    assert made == ["onnx", "onnx"]
    assert len(exports_in(store)) == 1, "the one that nobody can use any more is removed"
    assert exports_in(store) != before


def test_a_damaged_export_is_made_again(made: list[str], tmp_path: Path) -> None:
    first, _ = answer("demo", tmp_path, runtime="onnx")
    graph = exports_in(tmp_path)[0] / "graphs" / "head.onnx"
    graph.write_bytes(graph.read_bytes()[:-100])
    lines: list[str] = []
    again, _ = answer("demo", tmp_path, runtime="onnx", tell=lines.append)
    assert again == first
    assert made == ["onnx", "onnx"]
    assert any(line.startswith("making the export again") for line in lines)


def test_what_breaks_off_leaves_nothing_and_the_next_begins_anew(
    made: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = runtime_choice.make_apart

    def stopped(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime_choice, "make_apart", stopped)
    with pytest.raises(KeyboardInterrupt):
        ks.load("demo", runtime="onnx", store=tmp_path)
    assert exports_in(tmp_path) == []
    monkeypatch.setattr(runtime_choice, "make_apart", whole)
    answer("demo", tmp_path, runtime="onnx")
    assert made == ["onnx"]


def test_several_at_once_make_one(
    made: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check, both = runtime_choice.check_export_place, threading.Barrier(2, timeout=60)

    def meet(*given: Any) -> None:
        check(*given)
        both.wait()

    monkeypatch.setattr(runtime_choice, "check_export_place", meet)
    load = functools.partial(ks.load, "demo", runtime="onnx", store=tmp_path)
    with ThreadPoolExecutor(2) as pool:
        for vlm in pool.map(lambda _: load(), range(2)):
            vlm.close()
    assert made == ["onnx"]


def test_auto_is_openvino_where_it_can_be(made: list[str], tmp_path: Path) -> None:
    _, said = answer("demo", tmp_path, runtime="auto")
    assert said == {
        "name": "openvino",
        "weights": "float32",
        "because": "this model runs in it here",
    }
    assert made == ["openvino"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"store": ""}, "needs a store"),
        ({"vision": False}, "has its vision encoder"),
        ({"dtype": "bfloat16"}, "computes as it was exported"),
        ({"openvino": None}, "openvino is not installed"),
    ],
)
def test_auto_is_torch_elsewhere_and_says_why(
    options: dict[str, Any],
    why: str,
    made: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KEEPSIGHT_STORE", raising=False)
    if "openvino" in options:
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda n, *a: None if n == "openvino" else found(n, *a)
        )
        options = {}
    with ks.load("demo", runtime="auto", **{"store": tmp_path, **options}) as vlm:
        said = vlm.stats()["runtime"]
    assert said["name"] == "torch"
    assert why in said["because"]
    assert made == []


@pytest.mark.slow
def test_exports_are_made_together_while_others_answer(tmp_path: Path) -> None:
    """Tracers exchange functions of the process that exports, so that is another one."""
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    found: dict[str, str] = {}

    def export(name: str) -> None:
        with ks.load(name, runtime="onnx", store=tmp_path / "store") as vlm:
            found[name] = vlm.ask(picture(1), QUESTION, **options).text

    names = ("demo", "demo-hybrid")
    threads = [threading.Thread(target=export, args=[name]) for name in names]
    with ks.load("demo-hybrid", dtype="float32") as vlm:
        before = vlm.ask(picture(1), QUESTION, **options).text
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            vlm.clear()
            assert vlm.ask(picture(1), QUESTION, **options).text == before
    assert found["demo-hybrid"] == before
    assert set(found) == set(names)


def test_an_export_that_fails_is_one_named_error(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ModelError, match="demo could not be exported for onnx: / is there already"):
        runtime_choice.make_apart("demo", Path("/"), "onnx", None, None, lines.append)


def test_what_is_told_may_stop_it(tmp_path: Path) -> None:
    def tell(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runtime_choice.make_apart("demo", tmp_path / "out", "onnx", None, None, tell)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = exported_demo("demo")
    monkeypatch.delenv("KEEPSIGHT_STORE", raising=False)
    for name, options, error, words in (
        ("demo", {"runtime": "onx"}, UnknownOption, "did you mean 'onnx'"),
        ("demo", {"weights": "int3"}, InputError, "known: 'int8', 'int4'"),
        ("demo", {"weights": "int4", "runtime": "torch"}, UnsupportedInput, "runtime='onnx'"),
        ("demo", {"weights": "int4"}, UnsupportedInput, "runtime='onnx'"),
        ("demo", {"weights": "int4", "runtime": "auto"}, InputError, "store="),
        ("demo", {"runtime": "onnx"}, InputError, "store="),
        (export, {"runtime": "openvino"}, InputError, "an export for onnx"),
        (export, {"weights": "int8"}, InputError, "with weights in float32"),
        ("demo", {"runtime": "onnx", "stor": "x"}, UnknownOption, "did you mean"),
    ):
        with pytest.raises(error, match=words):
            ks.load(name, **options)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "openvino" else found(n, *a)
    )
    with pytest.raises(UnsupportedInput, match="openvino is not installed"):
        ks.load("demo", weights="int4", runtime="auto", store=tmp_path)


def test_an_export_may_be_named_with_its_own_words() -> None:
    with ks.load(exported_demo("demo"), runtime="onnx") as vlm:
        assert hasattr(vlm.model, "exported")
