"""The command line as people use it: output, exit codes, and errors that are one named line.

Commands run in this process; two things are tested in real ones: that `--help` imports nothing
heavy, and that a store outlives the process that filled it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from models import build
from typer.testing import CliRunner

import keepsight as ks
from keepsight.cli import options
from keepsight.cli.app import app
from keepsight.cli.options import DEMO_NAMES
from keepsight.demo.scene import Scene
from keepsight.errors import UnsupportedInput
from keepsight.models import loading
from keepsight.models.families import SUPPORTED
from keepsight.stock import verify
from keepsight.stock.verify import Certificate, Verification


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two pictures and something that is none, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Scene.of(color="red", shape="circle", seed=1, size=(96, 96)).draw().save("a.png")
    Scene.of(color="blue", shape="star", seed=2, size=(128, 96)).draw().save("b.png")
    Path("bad.png").write_bytes(b"not an image")
    return tmp_path


def run(*words: str, given: str | None = None, code: int = 0, columns: int = 200) -> Any:
    # A terminal of its own width: the runner of several test processes sets 80 columns.
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(words), input=given)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def refused(*words: str) -> str:
    """The one line on stderr of a command that is refused."""
    result = run(*words, code=2)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def listed(*words: str) -> list[dict[str, Any]]:
    shown = run("cache", "list", "--json", *words).stdout
    return [json.loads(line) for line in shown.splitlines()]


def last_json(text: str) -> Any:
    return json.loads(text.strip().splitlines()[-1])


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

    greedy = text("--temperature", "0")
    short = text("--max-tokens", "2")
    assert short["usage"]["completion_tokens"] == 2 and short["finish_reason"] == "length"
    wild = ("--temperature", "30", "--max-tokens", "8", "--seed")
    assert text(*wild, "5")["text"] == text(*wild, "5")["text"]
    assert len({greedy["text"], text(*wild, "5")["text"], text(*wild, "6")["text"]}) == 3
    likeliest = text(*wild, "5", "--top-p", "0.0001")["text"]  # what greedy decoding takes
    assert likeliest == text("--max-tokens", "8")["text"]


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


def test_chat_goes_on_after_bad_pictures_and_commands(folder: Path) -> None:
    lines = ["/image bad.png", "/image nope.png", "/imge a.png", "/image", "/report", "/report x"]
    lines += ["/load nope.keep", "/image a.png", "Describe the picture.", "/exit", "never said"]
    said = run("chat", given="\n".join(lines)).stdout
    for told in (
        "error: bad.png is not an image",
        "error: nope.png: no image can be read there",
        "error: no command /imge; did you mean /image?",
        "error: /image wants a path",
        "error: there is no answer to report on yet",
        "error: /report takes no argument",
        "nope.keep",
        "a.png: 9 tokens",
    ):
        assert told in said
    with ks.load("demo") as vlm:
        assert vlm.ask("a.png", "Describe the picture.").text in said
    assert "never said" not in said


def measured(said: str) -> list[tuple[int, int]]:
    """(reused, computed) of each answer, from the dim lines."""
    lines = [line for line in said.splitlines() if line.startswith("[")]
    assert all("first token after " in line for line in lines)
    return [(int(line[1:].split()[0]), int(line.split()[3])) for line in lines]


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
    tokens = measured(said)
    # What is said in front of every conversation, nine tokens, any of them may use.
    assert [reused > 9 for reused, _ in tokens] == [False, True, True, False, True]
    last = answers[1].usage
    assert sum(tokens[-1]) == last.prompt_tokens and sum(tokens[2]) < sum(tokens[1])
    assert compared.text in said and said.count(answers[1].text) >= 1
    assert answers[0].text in said.split("/branch 1")[1].split("/branch 3")[0]
    assert "branch 2 of 2" in said and "error: /branch 3: expected a branch from 1 to 2" in said
    assert "talk.keep: 4 messages" in said and "1 of 2 images encoded" in said
    assert f"{last.prompt_tokens} prompt tokens" in said.split("/report")[1]


def test_chat_help_names_every_command(folder: Path) -> None:
    said = run("chat", given="/help\n").stdout
    assert max(map(len, said.splitlines())) <= 80
    for name in (
        "image",
        "images",
        "edit",
        "retry",
        "clear",
        "branch",
        "save",
        "load",
        "report",
        "help",
        "exit",
    ):
        assert f"\n/{name}" in said


def test_chat_shows_no_control_characters_of_a_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hostile(self: Any, token: int) -> str:
        return "\x1b[2Jgone"

    monkeypatch.setattr("keepsight.core.decoding.sampling.Detokenizer.push", hostile)
    said = run("chat", "demo", "--max-tokens", "2", given="Hello!\n").stdout
    assert "[2Jgone" in said and "\x1b" not in said


# -- files -------------------------------------------------------------------------------------


def test_encode_tells_what_became_of_each_image(folder: Path) -> None:
    result = run("encode", ".", "--files", "--to", "packs", code=1)
    assert "2 encoded, 1 broken" in result.stdout and "images/s" in result.stdout
    assert "broken: bad.png is not an image" in result.stderr
    Path("bad.png").unlink()
    told = last_json(run("encode", "*.png", "--files", "--to", "packs", "--json").stdout)
    assert (told["encoded"], told["kept"], told["broken"]) == (0, 2, 0)
    assert "there is no such file" in refused("encode", "nope", "--files", "--to", "packs")
    assert "cannot be made" in refused("encode", "a.png", "--files", "--to", "a.png")


def test_show_tells_what_a_package_is_bound_to(folder: Path) -> None:
    with ks.load("demo") as vlm:
        package = vlm.encode("a.png")
        package.save("a.sight")
    said = run("show", "a.sight").stdout
    for told in (package.key, package.weights, "9 ", "sound: ", "bfloat16", "9x160", "qwen3_vl"):
        assert told in said
    told = last_json(run("show", "a.sight", "--json").stdout)
    assert told["bytes"] == Path("a.sight").stat().st_size
    assert told["feature_id"] == package.feature_id and told["tokens"] == package.tokens
    shapes = {t["name"]: t["shape"] for t in told["tensors"]}
    assert shapes == {name: list(t.shape) for name, t in package.tensors.items()}


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


@pytest.mark.parametrize("spot", [0, 60, 3000, -1])
def test_show_names_what_is_damaged(folder: Path, spot: int) -> None:
    with ks.load("demo") as vlm:
        vlm.encode("a.png").save("a.sight")
    content = bytearray(Path("a.sight").read_bytes())
    content[spot] ^= 1
    Path("a.sight").write_bytes(content)
    assert "a.sight" in refused("show", "a.sight")
    Path("a.sight").write_bytes(content[:500])
    assert "a.sight" in refused("show", "a.sight")
    assert "missing.sight: cannot be read" in refused("show", "missing.sight")
    assert "not a Keepsight file" in refused("show", "a.png")


def test_show_prints_no_control_characters_of_a_file(folder: Path) -> None:
    with ks.load("demo") as vlm:
        package = vlm.encode("a.png")
    package.about["name"] = "evil \x1b[2J [bold]name[/bold]"
    package.save("a.sight")
    said = run("show", "a.sight").stdout
    assert "\x1b" not in said and "[2J [bold]name[/bold]" in said


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
    for dtype, share in (("float32", 1e-4), ("bfloat16", 5e-2)):
        said = run("verify", "demo-hybrid", "--dtype", dtype, "--image", "a.png").stdout
        found = _VERDICT.fullmatch(said.splitlines()[-1])
        assert found and "{" not in said, said
        held, checks, name = found.groups()[:3]
        off, scale, most = map(float, found.groups()[3:])
        assert held == checks and name == dtype
        assert 0 < off <= most == pytest.approx(share * scale, rel=0.05)
    told = json.loads(run("verify", "--json", "--image", "a.png").stdout)
    assert told["ok"] and all(check["ok"] for check in told["checks"])
    assert _VERDICT.fullmatch(told["verdict"])
    assert any("control" in check["what"] for check in told["checks"])


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


def test_one_family_is_told_in_detail_and_an_unknown_one_by_what_is_near() -> None:
    said = run("families", "Qwen3-VL", columns=80).stdout
    assert "qwen_vl.QwenVL" in said and "prefix: whatever two prompts begin with" in said
    assert "llava" not in said and max(map(len, said.splitlines())) <= 80
    assert "only an identical prompt" in run("families", "paligemma").stdout
    told = last_json(run("families", "mllama", "--json").stdout)
    assert (told["model_type"], told["reuses"]) == ("mllama", "same media")
    for wrong, near in (("qwen9_vl", "did you mean qwen3_vl or "), ("zzz", "families lists them")):
        words = refused("families", wrong)
        assert f"model type {wrong!r} is not listed" in words and near in words


def test_bench_gets_every_argument_and_gives_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def main(argv: list[str], check_model: Callable[[str], None]) -> int:
        seen.append(argv)
        return 7

    monkeypatch.setitem(
        sys.modules,
        "keepsight.bench",
        types.SimpleNamespace(main=main),  # type: ignore[arg-type]
    )
    run("bench", "W1", "--size", "big", "--help", code=7)
    assert seen == [["W1", "--size", "big", "--help"]]


# -- the store ---------------------------------------------------------------------------------


def test_a_new_process_answers_from_the_store(folder: Path) -> None:
    words = ["ask", "a.png", "--store", "memory", "--json", "--report"]
    run(*words, "--prompt", "Describe the picture.")
    code = "import sys, torch; torch.set_num_threads(1); from keepsight.cli.app import app; app()"
    command = [sys.executable, "-c", code, *words, "--prompt", "Where is the shape in the picture?"]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(child.stdout)
    assert told["usage"]["images_encoded"] == 0 and told["usage"]["cached_tokens"] > 9
    assert told["report"]["segments"][1]["reason"] == "disk"


def test_nothing_is_written_without_a_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(folder.rglob("*"))
    run("ask", "a.png", "Hello!")
    run("chat", given="Hello!\n")
    assert sorted(folder.rglob("*")) == before
    monkeypatch.setenv("KEEPSIGHT_STORE", str(folder / "memory"))
    run("ask", "a.png", "Hello!")
    assert (folder / "memory" / "package").is_dir()


def test_cache_commands_look_after_a_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("ask", "a.png", "b.png", "Hello!", "--store", "memory")
    Path("memory/mine.txt").write_text("not the store's")
    told = last_json(run("cache", "stats", "--store", "memory", "--json").stdout)
    assert told["kinds"]["package"]["entries"] == 2
    assert "package" in run("cache", "stats", "--store", "memory").stdout
    rows = run("cache", "list", "--store", "memory", "--kind", "package", "--json").stdout
    listed = [json.loads(line) for line in rows.splitlines()]
    assert sorted(row["tokens"] for row in listed) == [9, 12]
    assert {row["model"] for row in listed} == {"qwen3_vl"}
    assert sum(row["bytes"] for row in listed) == told["kinds"]["package"]["bytes"]
    assert "0 damaged" in run("cache", "check", "--store", "memory").stdout
    assert "12 tokens" in run("cache", "list", "--all", "--store", "memory").stdout
    monkeypatch.setenv("KEEPSIGHT_STORE", "memory")
    run("cache", "gc", "--budget", str(told["bytes"] // 2))
    rest = last_json(run("cache", "stats", "--json").stdout)["bytes"]
    assert 0 < rest <= told["bytes"] // 2
    run("cache", "clear", given="n\n", code=1)
    assert last_json(run("cache", "stats", "--json").stdout)["bytes"] == rest
    run("cache", "clear", given="y\n")
    assert last_json(run("cache", "stats", "--json").stdout)["bytes"] == 0
    assert Path("memory/mine.txt").exists()


def test_cache_list_names_the_files_that_pictures_came_from(folder: Path) -> None:
    Path("secret").mkdir()
    Path("a.png").rename("secret/cat.png")
    run("ask", "secret/cat.png", "b.png", "Hello!", "--store", "memory")
    written = b"".join(p.read_bytes() for p in Path("memory").rglob("*") if p.is_file())
    assert b"cat.png" in written and b"secret" not in written
    listed = run("cache", "list", "--all", "--store", "memory", "--json").stdout
    rows = [json.loads(line) for line in listed.splitlines()]
    packages = [row for row in rows if row["kind"] == "package"]
    where = ("--store", "memory")
    assert sorted(row["files"] for row in packages) == [["b.png"], ["cat.png"]]
    assert any(row.get("files") for row in rows if row["kind"] == "snapshot")
    assert "cat.png, qwen3_vl, 9 tokens" in run("cache", "list", "--all", *where).stdout
    key = next(row["key"] for row in packages if row["files"] == ["cat.png"])
    assert "cat.png" in run("cache", "explain", f"package/{key}", *where).stdout
    with ks.load("demo", store="memory") as vlm:
        assert vlm.ask("b.png", "Hello!").usage.images_encoded == 0


def test_cache_check_names_damage(folder: Path) -> None:
    run("ask", "a.png", "Hello!", "--store", "memory")
    path = next(Path("memory/package").rglob("*.sight"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    said = run("cache", "check", "--store", "memory", code=1).stdout
    assert "1 damaged" in said and path.name[:30] in said


def test_cache_check_repairs(folder: Path) -> None:
    run("ask", "a.png", "b.png", "Hello!", "--store", "memory")
    path = next(Path("memory/package").rglob("*.sight"))
    path.write_bytes(path.read_bytes()[:-1])
    said = run("cache", "check", "--store", "memory", "--repair").stdout
    assert "1 put right" in said
    assert "0 damaged" in run("cache", "check", "--store", "memory").stdout
    told = last_json(run("cache", "check", "--store", "memory", "--json").stdout)
    assert told["wrong"] == [] and told["entries"] > 0


def test_cache_explains_pins_and_deletes_an_entry(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("ask", "a.png", "Hello!", "--store", "memory")
    monkeypatch.setenv("KEEPSIGHT_STORE", "memory")
    rows = listed("--all")
    key = next(row["key"] for row in rows if row["kind"] == "package")
    told = last_json(run("cache", "explain", f"package/{key[:20]}", "--json").stdout)
    assert told["key"] == key and told["tokens"] in (9, 12) and told["tier"] == "disk"
    shown = run("cache", "explain", f"package/{key}").stdout
    assert "the features of one medium" in shown and "when a budget is exceeded" in shown
    run("cache", "pin", f"package/{key}")
    run("cache", "gc", "--budget", "0")
    left = listed("--all")
    assert [(row["key"], row["pinned"]) for row in left] == [(key, True)]
    assert "never by itself" in run("cache", "explain", key).stdout
    run("cache", "unpin", key)
    assert "B freed" in run("cache", "delete", key).stdout
    assert last_json(run("cache", "stats", "--json").stdout)["bytes"] == 0
    assert "no such entry" in refused("cache", "explain", key)


def test_cache_lists_pictures_and_takes_their_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSIGHT_STORE", "memory")
    run("encode", "a.png", "b.png", "--to", "memory")
    said = run("ask", "a.png", "b.png", "Hello!")
    assert "not encoded again: image 1, image 2" in said.stderr
    assert "store" not in run("ask", "Hello!").stderr
    run("ask", "b.png", "Hello!", "--tenant", "ada")
    rows = listed()
    of_all = [row for row in rows if not row["tenant"]]
    assert sorted((row["files"], row["tokens"]) for row in of_all) == [
        (["a.png"], [9]),
        (["b.png"], [12]),
    ]
    assert all(row["where"] == ["disk"] and row["bytes"] > 0 for row in rows) and len(rows) == 3
    shown = run("cache", "list").stdout.splitlines()
    assert " ".join(shown[0].split()) == "picture key tenant size tokens last use where"
    assert len(shown) == 4 and all(row["key"][:16] in "".join(shown) for row in rows)
    key = next(row["key"] for row in rows if row["files"] == ["a.png"])
    assert "a.png" in run("cache", "explain", key[:16]).stdout
    run("cache", "pin", "a.png")
    run("cache", "delete", "a.png", given="n\n", code=1)
    run("cache", "delete", "a.png", "--yes")
    assert key not in run("cache", "list", "--all", "--json").stdout
    Path("more").mkdir()
    PIL.Image.new("RGB", (64, 64)).save("more/b.png")
    run("encode", "more/b.png", "--to", "memory")
    told = refused("cache", "delete", "b.png")
    assert "may be any of 2" in told and all(row["key"][:16] in told for row in listed())
    for key in {row["key"] for row in listed()}:
        run("cache", "delete", key[:16])  # every tenant's
    assert listed() == [] and "no such entry" in refused("cache", "delete", "b.png")


def test_cache_looks_after_one_tenant(folder: Path) -> None:
    from keepsight.store import DiskStore

    store = DiskStore("memory")
    for tenant, count in ((None, 1), ("one", 2)):
        for number in range(count):
            store.tenant(tenant).put_note("alias", f"{number:064x}", {})
    store.close()
    arguments = ("cache", "stats", "--store", "memory", "--json")
    assert last_json(run(*arguments, "--tenant", "one").stdout)["entries"] == 2
    run("cache", "clear", "--store", "memory", "--tenant", "one", "--yes")
    assert last_json(run(*arguments, "--tenant", "one").stdout)["entries"] == 0
    assert last_json(run(*arguments).stdout)["entries"] == 1


@pytest.mark.parametrize("address", ["memory", "a file system"])
def test_cache_commands_see_all_tenants(
    folder: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    from keepsight.store import layout, open_store

    where = "memory" if address == "memory" else f"file://{folder}/memory"
    store = open_store(where)
    for tenant, count in ((None, 1), ("one", 2), ("two", 3)):
        for number in range(count):
            key = f"1{number}{count}{'0' * 61}"
            store.tenant(tenant).put_note("alias", key, {"n": number})
    store.close()
    one, two = layout.tenant_digest("one"), layout.tenant_digest("two")
    monkeypatch.setenv("KEEPSIGHT_STORE", where)
    told = last_json(run("cache", "stats", "--json").stdout)
    assert told["entries"] == told["kinds"]["alias"]["entries"] == 6
    assert {name: of["entries"] for name, of in told["tenants"].items()} == {"": 1, one: 2, two: 3}
    assert told["bytes"] == sum(of["bytes"] for of in told["tenants"].values()) > 0
    shown = run("cache", "stats").stdout
    assert one[:16] in shown and "(default)" in shown
    rows = listed("--all")
    assert sorted(row["tenant"] for row in rows) == sorted(["", one, one, two, two, two])
    assert one[:16] in run("cache", "list", "--all").stdout
    part = last_json(run("cache", "stats", "--json", "--tenant", one[:8]).stdout)
    assert part["entries"] == 2 and list(part["tenants"]) == [one]
    assert "0 damaged" in run("cache", "check").stdout
    assert "tenant" in refused("cache", "explain", "1")
    key = next(row["key"] for row in rows if row["tenant"] == one)
    explained = last_json(run("cache", "explain", key, "--json").stdout)
    assert explained["tenant"] == one and explained["tier"]
    if address != "memory":
        assert "lifecycle rules" in refused("cache", "gc", "--budget", "0")
        run("cache", "clear", "--yes")
        assert last_json(run("cache", "stats", "--json").stdout)["entries"] == 0
        return
    run("cache", "pin", key)
    run("cache", "gc", "--budget", "0", "--tenant", "two")
    told = last_json(run("cache", "stats", "--json").stdout)
    assert {name: of["entries"] for name, of in told["tenants"].items()} == {"": 1, one: 2}
    run("cache", "gc", "--budget", "0")
    rows = listed("--all")
    assert [(row["key"], row["pinned"]) for row in rows] == [(key, True)]
    run("cache", "delete", key, "--yes")
    assert last_json(run("cache", "stats", "--json").stdout)["entries"] == 0
