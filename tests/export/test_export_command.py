"""`keepsight export` and every other command on what it wrote, most of them in real processes.

One export is made, by a real process, and all tests look at a copy. Two processes are killed: one
by Ctrl-C, and one with -9 at the worst moment, when all files are in their places and the
comparison with the model is still to come.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.exported_models import copied, exported_by_command, exported_folder
from support.exported_models import folder as checkpoint
from support.hostile import ROOT, finished, hear_interrupts, start
from support.server_harness import Process
from typer.testing import CliRunner

import keepsight as ks
from keepsight.cli import export
from keepsight.cli.app import app
from keepsight.demo.scene import Scene
from keepsight.errors import InputError, ModelError, NotKeepsightFile, UnsupportedModel
from keepsight.export.graphs import check, exporter, target
from keepsight.runtimes.load import read

QUESTION = "Describe the picture."


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a picture in it."""
    folder = tmp_path_factory.mktemp("home")
    Scene.of(color="red", shape="circle", seed=1, size=(128, 96)).draw().save(folder / "a.png")
    return folder


@pytest.fixture(scope="module")
def made(home: Path) -> tuple[Path, Any]:
    """A copy of an export, and what the command said of it."""
    folder, printed, said = exported_by_command()
    assert not list(folder.parent.glob(".made*"))
    return Path(shutil.copytree(folder, home / "made")), (printed, said)


@pytest.fixture
def here(home: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    return home


@pytest.fixture(scope="module")
def expected(home: Path) -> str:
    """What the model says that was exported."""
    with ks.load("demo", dtype="float32") as vlm:
        return vlm.ask(home / "a.png", QUESTION, do_sample=False).text


def keepsight(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The real command, in a folder."""
    command = [sys.executable, "-m", "keepsight", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, stdout=pipe, stderr=pipe, text=True, preexec_fn=hear_interrupts
    )


def run(*words: str, given: str | None = None, code: int = 0) -> Any:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(words), input=given)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def refused(*words: str) -> str:
    """The one line on stderr of a command that is refused."""
    result = run(*words, code=2)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return str(result.stderr)


def until(process: subprocess.Popen[str], line: str) -> None:
    """Read progress until a line comes."""
    assert process.stderr is not None
    for said in process.stderr:
        if said.strip() == line:
            return
    raise AssertionError(f"the process ended before it said {line!r}")


# -- making --------------------------------------------------------------------------------------


def test_it_says_what_it_does_and_nothing_else(made: Any) -> None:
    folder, (output, errors) = made
    assert output.count("\n") == 1
    first, *lines = errors.strip().split("\n")
    assert re.fullmatch(r"this takes about [\d.]+ \w+ of memory and [\d.]+ \w+ of disk", first)
    parts = [f"tracing the {part}" for part in ("tower", "embedding", "decoder", "head")]
    last = ["comparing with the model", "giving it its name"]
    assert lines == ["loading the model", *parts, *last]
    told, manifest = json.loads(output), read(folder)
    assert told["folder"] == "made" and told["bytes"] == manifest.bytes > sum(
        told["graphs"].values()
    )
    assert told["deviation"] == manifest.deviation and manifest.deviation["logits"] < 1e-4
    assert told["deviation"]["same_tokens"] == told["deviation"]["tokens"] > 0
    assert told["most_patches"] == manifest.most_patches == 256


def test_only_the_command_looks_for_the_exporters() -> None:
    code = (
        "import sys, keepsight.cli.app; print([m for m in ('torch', 'onnx') if m in sys.modules])"
    )
    assert finished(start(code)) == "[]\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("demo", "--to", "made"), "made is there already"),
        (("demo", "--to", "a.png"), "a.png is there already"),
        (("demo", "--to", "a.png/below"), "a.png/below cannot be written"),
        (("demo", "--to", "/proc/nothing"), "/proc/nothing"),
        (("demo", "--to", "ring"), "ring cannot be written"),
        (("demo", "--to", "/"), "is there already"),
        (("made", "--to", "new"), "made is an export; name the checkpoint"),
        (("demo", "--to", "new", "--format", "onx"), "did you mean 'onnx'?"),
        (("demo", "--to", "new", "--quant", "int3"), "--quant int3 is not known"),
        (("/no/such/folder", "--to", "new"), "/no/such/folder"),
    ],
)
def test_what_cannot_be_exported_is_one_named_line(
    here: Path, words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **options: Any) -> Any:
        raise AssertionError("the long work began")

    monkeypatch.setattr(exporter, "load", load)
    ring = here / "ring"
    if not ring.is_symlink():
        ring.symlink_to(ring)
    assert told in refused("export", *words)
    assert not (here / "new").exists() and not list(here.glob(".new*"))


def test_models_that_are_not_shown_right_are_refused_by_name(tmp_path: Path) -> None:
    for name, told in (
        ("mllama", "'mllama' cannot be exported"),
        ("ernie4_5_vl_moe", "'ernie4_5_vl_moe' cannot be exported: its resampler"),
        ("qwen2_vl", "quantised already"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        config = {"model_type": name, "quantization_config": {"quant_method": "awq", "bits": 4}}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedModel, match=told):
            exporter.export(str(folder), tmp_path / "out")


def test_too_little_disk_or_memory_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patched:
        patched.setattr(target.shutil, "disk_usage", lambda path: usage(9, 8, 1 << 20))
        with pytest.raises(InputError, match=r"out needs about \d+ MiB, and 1 MiB are free"):
            exporter.export("demo", tmp_path / "out")
    monkeypatch.setattr(exporter, "free_memory", lambda: 1 << 20)
    with pytest.raises(ModelError, match=r"this takes about \d+ MiB of memory .* 1 MiB of memory"):
        exporter.export("demo", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "named", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), InputError, "No space left"),
        (MemoryError(), ModelError, "the memory is full; this takes about"),
        (RuntimeError("no such operator\nand more"), ModelError, "tower of qwen3_vl could not be"),
    ],
)
def test_what_goes_wrong_midway_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, named: Any, told: str
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(exporter, "write_graph", fail)
    with pytest.raises(named, match=told):
        exporter.export("demo", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_whatever_the_exporter_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever step: OpenVINO says `basic_ios::clear: iostream error`."""
    usage = namedtuple("usage", "total used free")

    def fail(patched: pytest.MonkeyPatch, *args: Any) -> None:
        patched.setattr(target.shutil, "disk_usage", lambda path: usage(9, 9, 4096))
        raise RuntimeError("basic_ios::clear: iostream error")

    for name in ("write_graph", "quantise"):
        with monkeypatch.context() as patched:
            patched.setattr(exporter, "write_graph", lambda *args: None)
            patched.setattr(exporter, "QUANTISED", ("tower",))
            patched.setattr(exporter, name, partial(fail, patched))
            with pytest.raises(InputError, match=r"out cannot be written: No space left on device"):
                exporter.export("demo", tmp_path / "out", runtime="openvino", quantised="int8")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["features", "logits"])
@pytest.mark.parametrize("off", [0.5, float("nan")])
def test_graphs_that_are_far_off_are_not_written(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: float, what: str
) -> None:
    monkeypatch.setattr(exporter, "write_graph", copied(made[0]))
    true = getattr(check, f"_{what}")

    def falsified(vlm: ks.VLM, *given: Any) -> Any:
        found = true(vlm, *given)
        factor = 1 + off if hasattr(vlm.model, "exported") else 1
        return [each * factor for each in found] if isinstance(found, list) else found * factor

    monkeypatch.setattr(check, f"_{what}", falsified)
    with pytest.raises(ModelError, match=f"of the scale of the {what}; nothing was written"):
        exporter.export("demo", tmp_path / "out")
    assert not list(tmp_path.iterdir())


# -- killed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_leave_nothing(tmp_path: Path, asked: signal.Signals) -> None:
    process = keepsight(tmp_path, "export", "demo", "--to", "out")
    until(process, "tracing the tower")
    process.send_signal(asked)
    _, errors = process.communicate(timeout=120)
    # The second: having cleaned up, Python ends itself by the signal where that came while text was
    # being executed (`exec`), as tracers and dataclasses do.
    assert process.returncode in (130, -signal.SIGINT) and "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_an_interrupt_that_a_tracer_swallows_ends_it_before_the_next_step() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background shells have none
    with export._ending_tidily() as go_on:
        go_on()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            go_on()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with export._ending_tidily() as go_on:
            signal.raise_signal(signal.SIGHUP)
            go_on()
    finally:
        signal.signal(signal.SIGHUP, before)


# The real command, but for its tracer.
_EXPORT = """
import shutil, sys
from pathlib import Path
from keepsight.cli.app import main
from keepsight.export.graphs import exporter

made = Path(sys.argv.pop(1))

def copied(runtime, path, *more):
    path.parent.mkdir(exist_ok=True)
    for file in (made / "graphs").glob(f"{path.name}.*"):
        shutil.copy(file, path.parent)

exporter.write_graph = copied
main()
"""


def test_kill_9_leaves_no_folder_that_loads_and_the_next_export_removes_it(tmp_path: Path) -> None:
    made, out = exported_folder("llava"), tmp_path / "out"
    process = start(_EXPORT, made, "export", checkpoint("llava"), "--to", out)
    until(process, "comparing with the model")
    process.kill()
    process.communicate(timeout=120)
    assert not (tmp_path / "out").exists()
    (left,) = tmp_path.iterdir()
    assert (left / "export" / "graphs").is_dir(), "killed too late or too early"
    with pytest.raises(NotKeepsightFile, match="has no keepsight.json"):
        ks.load(left / "export")
    with pytest.raises(KeyboardInterrupt), target.new_folder(out) as folder:
        assert not left.exists()
        with pytest.raises(KeyboardInterrupt), target.new_folder(out):
            raise KeyboardInterrupt
        assert folder.exists(), "somebody is at work there"
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


# -- the other commands ----------------------------------------------------------------------------


def test_ask_in_a_process_of_its_own(made: Any, home: Path, expected: str) -> None:
    process = keepsight(home, "ask", "a.png", QUESTION, "--model", "made", "--temperature", "0")
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output, errors) == (0, f"{expected}\n", "")


def test_serve_in_a_process_of_its_own(made: Any, home: Path, expected: str) -> None:
    words = ("serve", "made", "--port", "0", "--no-log")
    process = keepsight(home, *words)
    try:
        assert process.stdout is not None
        found = re.search(r"http://[^:]+:(\d+)", process.stdout.readline())
        assert found, "the server did not start"
        client = Process(process, int(found[1]))
        data = base64.b64encode((home / "a.png").read_bytes()).decode()
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        content = [image, {"type": "text", "text": QUESTION}]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
        for reused in (0, 1):
            status, told, _ = client.call("/v1/chat/completions", {"model": "made", **body})
            assert status == 200 and told["choices"][0]["message"]["content"] == expected
            assert (told["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == bool(reused)
        assert client.stop() == 0
    finally:
        process.kill()
        process.communicate()


def test_show_tells_what_an_export_is(here: Path, made: Any) -> None:
    folder, _ = made
    manifest = read(folder)
    said = run("show", "made").stdout
    for told in ("qwen3_vl", "ONNX Runtime", "float32", "256", "sound: ", "same_tokens"):
        assert told in said
    for told in (manifest.weights["all"], manifest.weights["vision"], *manifest.versions.values()):
        assert told in said
    assert f"{manifest.deviation['logits']:.3g}" in said
    data = json.loads(run("show", "made", "--json").stdout)
    assert data["kind"] == "export" and data["weights"] == manifest.weights
    assert data["bytes"] == manifest.bytes and data["other_versions"] == {}


# -- the page ------------------------------------------------------------------------------------


def test_the_page_s_commands_and_blocks_run(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is not made a second time; everything else is done as written."""

    def copied(name: str, to: Path, *, runtime: str, quantised: Any, **options: Any) -> Any:
        assert (name, runtime, quantised) == ("demo", "onnx", None)
        return read(Path(shutil.copytree(made[0], to)))

    monkeypatch.setattr(exporter, "export", copied)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples/picture.png", tmp_path / "examples")
    page = (ROOT / "docs/exporting.md").read_text()
    (commands,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    done = []
    for line in commands.strip().split("\n"):
        program, command, *words = shlex.split(line)
        done.append(command)
        if program == "keepsight" and command != "serve":  # it would not end
            run(command, *words, given="Hello!\n/exit\n" if command == "chat" else None)
    assert done == ["install", "export", "ask", "verify", "show", "encode", "chat", "serve"]
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for block in (block for block in blocks if "Qwen/" not in block):  # not on this machine
        claims = re.findall(r"^print\(.*# -> (.*)$", block, re.MULTILINE)
        exec(compile(block, "docs/exporting.md", "exec"), {})
        printed = capsys.readouterr().out.splitlines()
        assert claims and set(claims) <= set(printed), printed


# -- elsewhere -------------------------------------------------------------------------------------

ALONE = """
import json, runpy, sys
from pathlib import Path
for name in ("torch", "transformers", "keepsight"):
    sys.modules[name] = None  # so that importing it fails
example = runpy.run_path("examples/onnx_runtime.py")
for question in sys.argv[3:]:
    print(json.dumps(example["answer"](Path(sys.argv[1]), Path(sys.argv[2]), question)))
"""


def test_the_example_drives_the_graphs_without_torch(made: Any, home: Path) -> None:
    assert (ROOT / "examples/onnx_runtime.py").exists()
    questions = [QUESTION, "What shape is in the picture?", "Where is the shape in the picture?"]
    with ks.load(made[0]) as vlm:
        vlm.encode(home / "a.png").save(home / "a.sight")
        wanted = [vlm.ask(home / "a.png", q, do_sample=False).tokens for q in questions]
    said = finished(start(ALONE, made[0], home / "a.sight", *questions))
    assert [json.loads(line) for line in said.strip().split("\n")] == wanted
