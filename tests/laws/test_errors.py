"""Errors say what was wrong and what to do; options that a call does not know are named."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

import keepsight as ks
from keepsight import errors, kinds
from keepsight.core.call import CHAT_OPTIONS
from keepsight.core.decoding.sampling import known_options
from keepsight.core.settings import RuntimeSettings


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        *(("InputError", ValueError), ("UnfinishedAnswer", ValueError), ("FileError", ValueError)),
        *(("UnknownOption", TypeError), ("StoreError", OSError), ("ModelError", RuntimeError)),
        *(("Busy", RuntimeError), ("Closed", RuntimeError), ("MissingExtra", ImportError)),
    ],
)
def test_an_error_is_one_of_ours_and_a_builtin(name: str, builtin: type[Exception]) -> None:
    error = getattr(ks.errors, name)
    assert issubclass(error, errors.KeepsightError) and issubclass(error, builtin)


def test_an_unknown_option_names_the_nearest_known_one() -> None:
    known = ["max_new_tokens", "seed", "stop"]
    error = errors.UnknownOption.among(["max_new_token", "seed"], known, "chat")
    assert str(error) == "chat has no option 'max_new_token'; did you mean 'max_new_tokens'?"
    error = errors.UnknownOption.among({"zzz": 1}, known, "chat")
    assert str(error) == "chat has no option 'zzz'; known options: max_new_tokens, seed, stop"


def test_a_wrong_identity_names_the_field_and_both_values() -> None:
    error = errors.WrongIdentity("vision weights", "aaa", "bbb")
    assert (error.field, error.expected, error.found) == ("vision weights", "aaa", "bbb")
    assert all(word in str(error) for word in ("vision weights", "'aaa'", "'bbb'", "package"))


def test_a_missing_library_says_what_to_install() -> None:
    assert str(errors.MissingExtra.named("ray")).endswith("pip install ray")
    said = str(errors.MissingExtra.named("fastapi", "server"))
    assert said.startswith("fastapi is not installed (keepsight's extra 'server'); run: pip inst")
    assert '"fastapi>=' in said and '"uvicorn>=' in said and "openvino" not in said
    assert str(errors.MissingExtra.named("av", "none such")).endswith("pip install av")


BOTH_WAYS = """
import runpy, sys
sys.argv = ["keepsight", "ask", "-p", "Hello"]
try:
    runpy.run_module("keepsight", run_name="__main__")
except SystemExit as end:
    assert end.code
sys.stderr.write("--\\n")
import keepsight as ks
ks.load
"""


def test_a_torchvision_of_another_build_is_one_sentence(tmp_path: Path) -> None:
    """As PyPI's beside a CPU build of PyTorch, with which Transformers cannot be imported."""
    named = tmp_path / "torchvision-0.28.0.dist-info"
    for folder in (tmp_path / "torchvision", named):
        folder.mkdir()
    fails = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
    (tmp_path / "torchvision/__init__.py").write_text(fails)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    run = [sys.executable, "-c", BOTH_WAYS]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, cwd=tmp_path)
    said = done.stderr.split("--\n")
    assert len(said) == 2
    for lines in map(str.splitlines, said):
        assert "pip uninstall torchvision" in lines[-1] and len(lines) <= 6, done.stderr


def test_an_unknown_option_lists_those_of_its_own_call() -> None:
    asked: dict[str, Any] = {"zzzzz": 1}
    with ks.load("demo") as vlm:
        calls: dict[str, Any] = {
            "ask": lambda **more: vlm.ask("a.png", "What?", **more),
            "chat": lambda **more: vlm.chat([], **more),
            "stream": lambda **more: list(vlm.stream([], **more)),
            "generate": vlm.generate,
            "load": partial(ks.load, "demo"),
            "wrap": partial(ks.wrap, vlm.model),
        }
        own = {"ask": "images", "generate": "pixel_values", "load": "device", "wrap": "store"}
        for name, call in calls.items():
            with pytest.raises(errors.UnknownOption, match=f"^{name} has no option 'z") as said:
                call(**asked)
            assert own.get(name, "max_new_tokens") in str(said.value), name
            assert "encoder_no_repeat" not in str(said.value)
        with pytest.raises(errors.UnknownOption, match="'max_new_token'; did you mean"):
            vlm.ask("a.png", "What?", max_new_token=1)
        for call in (vlm.ask, vlm.session().ask):
            with pytest.raises(errors.UnknownOption, match=r"vlm\.stream"):
                call("What is it?", stream=True)


def test_help_and_completion_show_the_options_of_a_call() -> None:
    with ks.load("demo") as vlm:
        chat = vlm.session()
        answers = (vlm.ask, vlm.chat, vlm.stream, vlm.astream, vlm.achat, vlm.aask, vlm.generate)
        for call in (*answers, chat.ask, chat.stream, chat.edit, chat.regenerate):
            assert inspect.signature(call).parameters["max_new_tokens"].annotation == "int | None"
        for call in (vlm.ask, chat.ask, chat.stream):
            assert "images" in inspect.signature(call).parameters
        loads = [inspect.signature(call).parameters for call in (ks.load, ks.wrap, ks.install)]
        assert all(named["cache_budget"].default is None for named in loads)
        assert "device" in loads[0]
    assert {one.name for one in fields(RuntimeSettings)} <= set(kinds.Wrapping.__annotations__)
    decoding = set(kinds.Generating.__annotations__)
    assert {"min_p", "repetition_penalty"} <= decoding <= {*known_options(), *CHAT_OPTIONS}


def test_a_tilde_is_the_home_folder_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with ks.load("demo") as vlm:
        session, package = vlm.session(), vlm.encode(PIL.Image.new("RGB", (64, 64)))
        session.ask("Hello!", max_tokens=2)
        assert session.save("~/talk.keep") == tmp_path / "talk.keep"
        assert vlm.resume("~/talk.keep").messages == session.messages
        assert package.save("~/cat.sight") == tmp_path / "cat.sight"
        assert ks.Package.load("~/cat.sight").key == package.key
        for call in (
            lambda: session.save("~nobody-here/talk.keep"),
            lambda: vlm.resume("~nobody-here/talk.keep"),
            lambda: package.save("~nobody-here/cat.sight"),
            lambda: ks.load("demo", store="~nobody-here/store"),
        ):
            with pytest.raises(errors.InputError, match="no home folder that ~ stands for"):
                call()
    assert not list(Path().iterdir())
