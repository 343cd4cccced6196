"""The command line as people use it: output, exit codes, and errors that are one named line.

Commands run in this process, but for what is of a process: imports, streams, its folder.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from PIL import Image
from support.commands import last_json, refused, run
from support.models import build
from typer.testing import CliRunner

import keepsight as ks
from keepsight.bench import suite
from keepsight.bench.options import Asked
from keepsight.cli import options, progress
from keepsight.cli.app import app, main
from keepsight.cli.options import DEMO_NAMES, model_first
from keepsight.core.kernels import linear
from keepsight.errors import InputError, ModelError, UnsupportedInput, UnsupportedModel
from keepsight.models import loading, reachable
from keepsight.models.families import SUPPORTED
from keepsight.stock import verify
from keepsight.stock.verify import Certificate, Verification

# -- the door ----------------------------------------------------------------------------------


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from keepsight.cli.app import app; from typer.testing import CliRunner;"
        "print(CliRunner().invoke(app, ['--help']).output);"
        "print('heavy:', sorted({'torch', 'transformers', 'PIL', 'numpy'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "heavy: []" in said.stdout
    listed = {line.split()[1] for line in said.stdout.splitlines() if line.startswith("│ ")}
    commands = "demo ask chat encode show verify families cache bench"
    assert set(commands.split()) <= listed


@pytest.mark.parametrize("words", [("families", "--json"), ("plan", "demo"), ("verify", "demo")])
def test_a_line_moves_while_pytorch_is_imported(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    @contextmanager
    def line(name: str) -> Iterator[None]:
        shown.append(name)
        yield

    room = words[0] if words[0] in ("plan", "families") else "app"
    monkeypatch.setattr(f"keepsight.cli.{room}.loading_line", line)
    monkeypatch.setattr(verify, "certify", lambda *arguments: Certificate([], ""))
    run(*words)
    assert shown == ["PyTorch"]


def test_the_names_of_the_demo_models_are_those_that_load() -> None:
    assert set(DEMO_NAMES) == {*loading.DEMO, loading.DEMO_SMOL}


def test_version_is_the_package_s() -> None:
    assert run("--version").output.strip() == f"keepsight {ks.__version__}"


# -- ask ---------------------------------------------------------------------------------------


def test_ask_says_what_the_library_says(folder: Path) -> None:
    with ks.load("demo") as vlm:
        expected = vlm.ask(["a.png", "b.png"], "Compare the pictures.").text
    assert run("ask", "a.png", "b.png", "Compare the pictures.").stdout == f"{expected}\n"
    named = run("ask", "--image", "a.png", "-i", "b.png", "--prompt", "Compare the pictures.")
    assert named.stdout == f"{expected}\n"


def test_standard_input_stands_for_a_picture_a_question_or_a_file(folder: Path) -> None:
    said = run("ask", "a.png", "Describe the picture.").stdout
    assert run("ask", "-", "Describe the picture.", given=Path("a.png").read_bytes()).stdout == said
    assert run("ask", "a.png", "--prompt", "-", given="Describe the picture.").stdout == said
    Path("q.json").write_text('{"red": {"type": "noul", "instructions": "Is it red?"}}')
    decided = run("decide", "a.png", "-q", "q.json").stdout
    piped = run("decide", "a.png", "-q", "-", given=Path("q.json").read_text())
    seen = run("decide", "-", "-q", "q.json", given=Path("a.png").read_bytes())
    assert piped.stdout == seen.stdout == decided
    run("ask", "--batch", "-", "--out", "o.jsonl", given='{"question": "Hi", "images": "a.png"}')
    assert json.loads(Path("o.jsonl").read_text())["usage"]["images"] == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device here")
def test_a_full_disk_is_said_on_one_line_or_by_the_exit_code() -> None:
    for words in ("--help", "show nothing.sight", "nothing"):
        command = [sys.executable, "-m", "keepsight", *words.split()]
        with open("/dev/full", "w") as full:
            errors = subprocess.PIPE if words == "--help" else full
            done = subprocess.run(command, stdout=full, stderr=errors, text=True)
        assert done.returncode == 2
        assert done.stderr in (None, "error: No space left on device\n")


@pytest.mark.skipif(sys.platform == "win32", reason="there, such a folder cannot be removed")
def test_a_removed_folder_to_run_in_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        "import os, sys\n"
        "from keepsight.cli.app import main\n"
        f"os.rmdir({str(gone)!r})\n"
        "sys.argv = ['keepsight', 'families']\n"
        "main()"
    )
    command = [sys.executable, "-P", "-c", code]  # no folder to import from, as in a script
    done = subprocess.run(command, cwd=gone, capture_output=True, text=True)
    assert done.returncode == 2 and "started in is gone; change to another" in done.stderr


def test_streams_take_what_their_encoding_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.BytesIO()
    stdin = io.TextIOWrapper(io.BytesIO("/n\u00f6pe\n".encode("latin-1")), encoding="ascii")
    stdout = io.TextIOWrapper(said, encoding="ascii", errors="strict", write_through=True)
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "argv", ["keepsight", "chat", "demo"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    first, error = said.getvalue().decode("ascii").splitlines()
    assert first == "> /n\\ufffdpe" and error.startswith("error: no command /n\\ufffdpe;")


def test_a_closed_stream_is_like_an_empty_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(sys, "argv", ["keepsight", "ask", "--batch", "-", "--out", "o.jsonl"])
    with pytest.raises(SystemExit) as ended:
        main()
    sys.stdin.close()
    assert ended.value.code == 2 and "there are no questions" in capsys.readouterr().err


def test_ask_reports(folder: Path) -> None:
    said = run("ask", "a.png", "Describe the picture.", "--report").stdout
    assert "0 reused" in said and "tower" in said and "prefill" in said
    told = last_json(run("ask", "a.png", "Describe the picture.", "--report", "--json").stdout)
    assert told["text"] == said.splitlines()[0]
    assert told["usage"]["images_encoded"] == 1 and told["finish_reason"] == "stop"
    assert told["report"]["segments"][1]["features"] == "tower"
    assert "report" not in last_json(run("ask", "a.png", "Hello!", "--json").stdout)


def test_ask_takes_packages_as_images(folder: Path) -> None:
    run("encode", "a.png", "--files", "--to", "packs")
    package = str(next(Path("packs").glob("*.sight")))
    words = ("Describe the picture.", "--json", "--report")
    told = last_json(run("ask", package, *words).stdout)
    assert told["report"]["segments"][1]["features"] == "caller"
    assert told["text"] == last_json(run("ask", "a.png", *words).stdout)["text"]
    assert "does not fit" in refused("ask", package, "Hello!", "--model", "demo-hybrid")


def test_ask_decodes_as_told(folder: Path) -> None:
    def text(*words: str) -> Any:
        return last_json(run("ask", "a.png", "Describe the picture.", "--json", *words).stdout)

    greedy = text("--temperature", "0", "--max-tokens", "8")
    assert greedy["usage"]["completion_tokens"] == 8 and greedy["finish_reason"] == "length"
    wild = ("--temperature", "30", "--max-tokens", "8", "--seed")
    five, again, six = (text(*wild, seed)["text"] for seed in "556")
    assert five == again and len({greedy["text"], five, six}) == 3
    likeliest = text(*wild, "5", "--top-p", "0.0001")["text"]  # what greedy decoding takes
    assert likeliest == greedy["text"]


def test_ask_loads_as_told(folder: Path) -> None:
    def prompt(*words: str) -> Any:
        return last_json(run("ask", "b.png", "Hello!", "--json", "--report", *words).stdout)

    tokens = prompt()["usage"]["prompt_tokens"]
    assert prompt("--max-pixels", "9216")["usage"]["prompt_tokens"] == tokens - 6  # of 12
    grown = prompt("--min-pixels", "65536", "--max-pixels", "99999")["usage"]["prompt_tokens"]
    assert grown > tokens + 40
    run("encode", "a.png", "--files", "--to", "f32", "--dtype", "float32")
    shown = last_json(run("show", str(next(Path("f32").iterdir())), "--json").stdout)
    assert shown["provenance"]["dtype"] == "torch.float32"


def test_pixel_limits_are_refused_where_they_mean_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, processor = build("llava")
    monkeypatch.setattr(loading, "load_processor", lambda path, revision: processor)
    monkeypatch.setattr(options, "check_model", lambda model: None)
    with pytest.raises(UnsupportedInput, match="--max-pixels"):
        options.load("some/llava", max_pixels=1000)


# -- chat --------------------------------------------------------------------------------------


def test_chat_remembers_forks_clears_saves_and_loads(folder: Path) -> None:
    lines = ["Describe the picture.", "/branch", "/image b.png", "Compare the pictures."]
    lines += ["/save talk.keep", "/branch 1", "How many pictures are there?", "/branch 3"]
    lines += ["/clear", "Hello!", "/load talk.keep", "How many pictures are there?", "/report"]
    said = run("chat", "--image", "a.png", given="\n".join(lines)).stdout
    with ks.load("demo") as vlm:
        one = vlm.session()
        one.ask("Describe the picture.", images=["a.png"])
        two = one.fork()
        compared = two.ask("Compare the pictures.", images=["b.png"])
        answers = [one.ask("How many pictures are there?"), two.ask("How many pictures are there?")]
    lines = [line for line in said.splitlines() if line.startswith("[")]
    assert all("first token after " in line for line in lines)
    tokens = [(int(line[1:].split()[0]), int(line.split()[3])) for line in lines]
    # What is said in front of every conversation, nine tokens, any of them may use.
    assert [reused > 9 for reused, _ in tokens] == [False, True, True, False, True]
    last = answers[1].usage
    assert sum(tokens[-1]) == last.prompt_tokens and sum(tokens[2]) < sum(tokens[1])
    assert compared.text in said and said.count(answers[1].text) >= 1
    assert answers[0].text in said.split("/branch 1")[1].split("/branch 3")[0]
    assert "branch 2 of 2" in said and "error: /branch 3: expected a branch from 1 to 2" in said
    assert "talk.keep: 4 messages" in said and "1 of 2 images encoded" in said
    assert f"{last.prompt_tokens} prompt tokens" in said.split("/report")[1]


def test_chat_shows_no_control_characters_of_a_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hostile(self: Any, token: int) -> str:
        return "\x1b[2Jgone"

    monkeypatch.setattr("keepsight.core.decoding.sampling.Detokenizer.push", hostile)
    said = run("chat", "demo", "--max-tokens", "2", given="Hello!\n").stdout
    assert "[2Jgone" in said and "\x1b" not in said


# -- files -------------------------------------------------------------------------------------


def test_show_tells_what_a_package_is_bound_to_and_what_is_damaged(folder: Path) -> None:
    with ks.load("demo") as vlm:
        package = vlm.encode("a.png")
    package.about["name"] = "evil \x1b[2J [bold]name[/bold]"
    package.save("a.sight")
    said = run("show", "a.sight").stdout
    for told in (package.key, package.weights, "9 ", "sound: ", "bfloat16", "9x160", "qwen3_vl"):
        assert told in said
    assert "\x1b" not in said and "[2J [bold]name[/bold]" in said
    told = last_json(run("show", "a.sight", "--json").stdout)
    assert told["bytes"] == Path("a.sight").stat().st_size
    assert told["feature_id"] == package.feature_id and told["tokens"] == package.tokens
    shapes = {t["name"]: t["shape"] for t in told["tensors"]}
    assert shapes == {name: list(t.shape) for name, t in package.tensors.items()}
    whole = Path("a.sight").read_bytes()
    for damaged in (whole[:500], whole[:-1] + bytes([whole[-1] ^ 1])):
        Path("a.sight").write_bytes(damaged)
        assert "a.sight" in refused("show", "a.sight")


def test_show_tells_what_a_session_holds(folder: Path) -> None:
    with ks.load("demo") as vlm:
        session = vlm.session(system="Be brief.")
        text = session.ask("Describe the picture.", images=["a.png"]).text
        session.save("talk.keep")
    told = last_json(run("show", "talk.keep", "--json").stdout)
    assert [m["role"] for m in told["messages"]] == ["system", "user", "assistant"]
    assert told["images"] == 1 and told["image_tokens"] == 9 and told["prefilled_tokens"] > 9
    said = run("show", "talk.keep").stdout
    assert f"assistant: {text}" in said and "a session" in said


def test_a_chat_in_json_is_one_object_an_answer(folder: Path) -> None:
    given = "a.png What color is the shape in the picture?\n/nonsense\n/retry\n"
    done = run("chat", "--json", "--report", given=given)
    first, wrong, again = [json.loads(line) for line in done.stdout.splitlines()]
    assert first["question"] == "What color is the shape in the picture?"
    assert first["text"] == again["text"] == "Red." and first["finish_reason"] == "stop"
    assert (first["usage"]["images_encoded"], again["usage"]["images_encoded"]) == (1, 0)
    assert again["report"]["segments"] and "no command /nonsense" in wrong["error"]
    assert "a.png: 9 tokens" in done.stderr  # all else
    plain = run("chat", given=given).stdout
    assert "Red." in plain and '"text"' not in plain  # unasked there is none
    assert "report" not in json.loads(run("chat", "--json", given="Hi\n").stdout)


# -- verify, families, bench -------------------------------------------------------------------


_VERDICT = re.compile(
    r"(\d+) of (\d+) hold; (\w+): rounding against stock Transformers at most (\S+) on logits up to"
    r" (\S+), tolerance (\S+)"
)


def test_verify_ends_with_a_verdict_and_prints_json_only_if_asked(folder: Path) -> None:
    said = run("verify", "demo-hybrid", "--dtype", "bfloat16", "--image", "a.png").stdout
    assert "{" not in said
    told = json.loads(run("verify", "--dtype", "float32", "--json", "--image", "a.png").stdout)
    assert told["ok"] and all(check["ok"] for check in told["checks"])
    assert any("control" in check["what"] for check in told["checks"])
    lines = (("bfloat16", 5e-2, said.splitlines()[-1]), ("float32", 1e-4, told["verdict"]))
    for dtype, share, line in lines:
        found = _VERDICT.fullmatch(line)
        assert found, line
        held, checks, name = found.groups()[:3]
        off, scale, most = map(float, found.groups()[3:])
        assert held == checks and name == dtype
        assert 0 < off <= most == pytest.approx(share * scale, rel=0.05)


@pytest.mark.parametrize(("equal", "off"), [(False, 0.1), (True, 1.1)])
def test_verify_fails_where_warm_is_not_cold_or_stock_is_beyond_rounding(
    folder: Path, monkeypatch: pytest.MonkeyPatch, equal: bool, off: float
) -> None:
    found = Verification(equal, 0.5, 10, 5, off, 10.0, True, stock_tolerance=1.0, dtype="float32")
    monkeypatch.setattr(verify, "verify", lambda *arguments: found)
    said = run("verify", code=1).stdout
    assert "NO" in said and not said.splitlines()[-1].startswith("9 of 9")
    assert json.loads(run("verify", "--json", code=1).stdout)["ok"] is False


def test_families_are_those_of_the_library() -> None:
    told = last_json(run("families", "--json").stdout)
    assert {row["model_type"] for row in told} == set(SUPPORTED)
    said = run("families", columns=80).stdout.splitlines()
    assert [line.split(" ")[0] for line in said[1:-1]] == sorted(SUPPORTED)  # a line for each
    assert "qwen3_vl" in run("families", columns=0).stdout  # as shells in editors set it


def test_one_family_is_told_in_detail_and_an_unknown_one_by_what_is_near() -> None:
    said = run("families", "Qwen3-VL", columns=80).stdout
    assert "qwen_vl.QwenVL" in said and "prefix: whatever two prompts begin with" in said
    assert "llava" not in said and max(map(len, said.splitlines())) <= 80
    assert "only an identical prompt" in run("families", "paligemma").stdout
    told = last_json(run("families", "mllama", "--json").stdout)
    assert (told["model_type"], told["reuses"]) == ("mllama", "same media")


def test_bench_gets_every_argument_and_gives_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(suite, "run", lambda *given: seen.append(given) or 7)
    words = ["--model-shape", "qwen3_vl,qwen3_5", "--workload", "W4,W1", "--size", "tiny"]
    words += ["--dtype", "bfloat16,float32", "--device", "cpu", "--turns", "2"]
    words += ["--repetitions", "3", "--scale", "smoke", "--folder", "f", "--out", "o", "--json"]
    run("bench", *words, code=7)
    asked = Asked(
        shapes=["qwen3_vl", "qwen3_5"],
        workloads=["W4", "W1"],
        size="tiny",
        dtypes=["bfloat16", "float32"],
        device_map="cpu",
        turns=2,
        repetitions=3,
        scale="smoke",
        folder=Path("f"),
    )
    assert seen.pop() == (words, asked, Path("o"), True)
    for words in (["demo", "--quick"], ["--model", "demo", "--quick"]):
        run("bench", *words, code=7)
        asked = seen.pop()[1]
        assert (asked.model, asked.plan()) == ("demo", {"demo": ["W1", "W5"]})


# -- one manner for all commands -----------------------------------------------------------------


def test_a_device_is_refused_by_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for good in (None, "cpu", "auto", "cuda", "cuda:1", {"": "cpu"}, torch.device("cpu")):
        loading.check_device(good)
    with pytest.raises(InputError, match="there are 2 of them"):
        loading.check_device("cuda:2")


def test_the_first_word_of_ask_may_be_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])  # the clone has a folder `demo` without pictures
    named = model_first(["demo", "picture.png", "What?"], alone=False)
    assert named == ("demo", ["picture.png", "What?"])
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    for name in ("picture.png", "demo/picture.png"):
        Image.new("RGB", (64, 64), "red").save(name)
    # A folder of pictures that happens to be called so.
    assert model_first(["demo", "What?"], alone=False) == (None, ["demo", "What?"])
    wanted = run("ask", "picture.png", "What shape is it?", "--model", "demo-hybrid").output
    assert run("ask", "demo-hybrid", "picture.png", "What shape is it?").output == wanted
    assert run("ask", "demo-hybrid", "picture.png", "-p", "What shape is it?").output == wanted
    assert "name one model" in refused("ask", "demo-hybrid", "picture.png", "What?", "-m", "demo")


def test_a_model_that_only_reads_text_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(UnsupportedModel, match="has no vision encoder: models of type 'llama'"):
        ks.load(tmp_path)
    assert "has no vision encoder" in refused("ask", "what?", "--model", str(tmp_path))


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
    assert "the same command goes on from here" in run(*words, code=130).output
    monkeypatch.setattr(progress, "shown", shown)
    last = last_json(run(*words, "--json").stdout)
    assert last["images"] == 3 and last["encoded"] <= 1


@pytest.mark.parametrize("slow", [True, False])
def test_a_slow_dtype_is_told_on_a_terminal(
    slow: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(linear, "has_bfloat16", lambda: not slow)
    monkeypatch.setattr(options, "_LARGE", 1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for dtype, told in (("auto", slow), ("float32", False)):
        options.load("demo", dtype=dtype).close()
        assert ("--dtype float32" in capsys.readouterr().err) == told
