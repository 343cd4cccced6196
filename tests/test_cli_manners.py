"""One manner for all commands: how models and devices are named, what is JSON, what is refused."""

from __future__ import annotations

import json
import os
import pty
import select
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import keepsight as ks
from keepsight.bench import options as bench_options
from keepsight.cli import progress
from keepsight.cli.app import app
from keepsight.cli.options import model_first
from keepsight.errors import InputError, ModelError, UnsupportedModel
from keepsight.models import loadable, reachable
from keepsight.stock import verify


def said(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def test_the_benchmark_takes_a_model_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_options.parse(["demo"]).model == "demo"
    assert bench_options.parse(["--model", "demo"]).model == "demo"
    with pytest.raises(SystemExit):
        bench_options.parse(["demo", "--model", "demo"])
    assert "name one model" in capsys.readouterr().err


def test_a_device_is_refused_by_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for good in (None, "cpu", "auto", "cuda", "cuda:1", {"": "cpu"}, torch.device("cpu")):
        loadable.check_device(good)
    with pytest.raises(InputError, match="there are 2 of them"):
        loadable.check_device("cuda:2")


def test_the_first_word_of_ask_may_be_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    for name in ("picture.png", "demo/picture.png"):
        Image.new("RGB", (64, 64), "red").save(name)
    Path("demo-hybrid").mkdir()
    Path("demo-hybrid/train.py").write_text("")  # the clone has such a folder
    named = model_first(["demo-hybrid", "picture.png", "What?"], alone=False)
    assert named == ("demo-hybrid", ["picture.png", "What?"])
    # A folder of pictures that happens to be called so.
    assert model_first(["demo", "What?"], alone=False) == (None, ["demo", "What?"])
    wanted = said("ask", "picture.png", "What shape is it?", "--model", "demo-hybrid")
    assert wanted[0] == 0
    assert said("ask", "demo-hybrid", "picture.png", "What shape is it?") == wanted
    assert said("ask", "demo-hybrid", "picture.png", "--prompt", "What shape is it?") == wanted
    code, text = said("ask", "demo-hybrid", "picture.png", "What?", "--model", "demo")
    assert (code, "name one model" in text) == (2, True)


def test_a_model_that_only_reads_text_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="has no vision tower: models of type 'llama'"):
        ks.load(tmp_path)
    code, text = said("ask", "what?", "--model", str(tmp_path))
    assert (code, "has no vision tower" in text) == (2, True)


@pytest.mark.parametrize("silent", [True, False])
def test_a_hub_that_cannot_be_reached_is_said_within_two_seconds(
    silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*arguments: Any, **options: Any) -> None:
        if silent:
            time.sleep(30)
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", asked)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(reachable, "PATIENCE", 0.2)
    with pytest.raises(ModelError, match="is not on this machine and the Hub cannot be reached"):
        ks.load("somebody/some-model")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        ks.load("somebody/some-model")


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (503, {}, "the Hub cannot be reached .http://127.0.0.1:.* answers with status 503."),
        (404, {}, "the Hub cannot be reached .http://127.0.0.1:.* answers with status 404."),
        (404, {"X-Error-Code": "RevisionNotFound"}, "no revision 'other' of it"),
        (404, {"X-Error-Code": "RepoNotFound"}, "the Hub has no model 'somebody/some-model'"),
    ],
)
def test_a_hub_that_answers_with_an_error_is_not_asked_again(
    status: int, headers: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that speaks for a Hub out of reach gives any status; upstream asks for minutes."""
    asked = []

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *said: Any) -> None:
            pass

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with HTTPServer(("127.0.0.1", 0), Answers) as there:
        threading.Thread(target=there.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{there.server_port}"
        at = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", at)
        monkeypatch.setattr(reachable, "PATIENCE", 20.0)
        with pytest.raises(ModelError, match=words):
            reachable.check_hub("somebody/some-model", "other")
        there.shutdown()
    assert len(asked) == 1


def test_json_is_printed_on_a_terminal_only_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = verify.Certificate([verify.Check("one", True, 0.0, "")], "float32: none")
    monkeypatch.setattr(verify, "certify", lambda *_: found)

    def shown(*words: str) -> str:
        reading, writing = pty.openpty()
        with os.fdopen(writing, "w") as terminal, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            app(["verify", "demo", *words], standalone_mode=False)
            terminal.flush()
            text = b""
            while select.select([reading], [], [], 0.2)[0]:
                text += os.read(reading, 4096)
        os.close(reading)
        return text.decode()

    plain, asked = shown(), shown("--json")
    assert "holds" in plain
    assert '"ok"' not in plain
    assert "holds" not in asked
    assert json.loads(asked)["ok"]


def test_a_shell_completes_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    # Typer asks which shell it was started from; not all test runs have one above them.
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "/bin/bash"))
    result = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="keepsight")
    assert result.exit_code == 0
    assert "_KEEPSIGHT_COMPLETE=complete_bash" in result.output


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        Image.new("RGB", (64, 64 + 32 * number)).save(tmp_path / f"{number}.png")
    shown, seen = progress.shown, []

    def interrupted(*arguments: Any) -> Iterator[Any]:
        for result in shown(*arguments):
            yield result
            seen.append(result)
            if len(seen) == 2:
                raise KeyboardInterrupt

    words = ["encode", str(tmp_path), "--to", str(tmp_path / "store")]
    monkeypatch.setattr(progress, "shown", interrupted)
    code, text = said(*words)
    assert code != 0
    assert "the same command goes on from here" in text
    monkeypatch.setattr(progress, "shown", shown)
    code, text = said(*words, "--json")
    assert code == 0
    last = json.loads(text.splitlines()[-1])
    assert last["images"] == 3
    assert last["encoded"] <= 1


@pytest.mark.parametrize("slow", [True, False])
def test_a_slow_dtype_is_told_on_a_terminal(
    slow: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from keepsight.cli import options
    from keepsight.core.kernels import linear

    monkeypatch.setattr(linear, "has_bfloat16", lambda: not slow)
    monkeypatch.setattr(options, "_LARGE", 1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for dtype, told in (("auto", slow), ("float32", False)):
        options.load("demo", dtype=dtype).close()
        assert ("--dtype float32" in capsys.readouterr().err) == told
