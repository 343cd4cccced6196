"""`keepsight encode` as people use it: one store, a list of what was left out, exit codes.

What becomes of images is tested in test_encode_store.py; here it is words, files and refusals.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import commands
from support.encode_parts import png, table, tar

import keepsight as ks
from keepsight.cli import progress
from keepsight.encode import Encoded
from keepsight.encode.places import ToStore
from keepsight.errors import NotStored


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two pictures, a broken one, and an archive, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate("ab"):
        Path(f"{name}.png").write_bytes(png(number, (96, 96)))
    Path("bad.png").write_bytes(b"not an image")
    tar(Path("c.tar"), [("x.png", png(5)), ("a.png", png(0, (96, 96)))])
    return tmp_path


def run(*words: str, code: int = 0) -> Any:
    return commands.run("encode", *words, code=code)


def test_files_of_other_kinds_are_one_line_and_listed_when_asked_for(folder: Path) -> None:
    Path("more").mkdir()
    for name in ("a.txt", "b.txt", "c.TXT", "d.md", "README"):
        Path("more", name).write_text("words")
    words = ("more", "--to", "store")
    line = "5 files of other kinds left out: 3 .txt, 1 without a suffix, 1 .md"
    said = run(*words).stderr
    assert f"{line}; -v lists them\n" in said
    assert "d.md" not in said
    listed = run(*words, "-v").stderr
    assert f"{line}\n" in listed
    assert all(f"left out: {name}\n" in listed for name in ("a.txt", "d.md", "README"))


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.strip().splitlines()]


def test_a_store_is_filled_and_then_answers(folder: Path) -> None:
    result = run(".", "--to", "store", "--errors", "left.jsonl", code=1)
    assert "3 encoded, 1 duplicate, 1 broken" in result.stdout and "in store" in result.stdout
    assert "broken: bad.png is not an image" in result.stderr
    (left,) = lines(Path("left.jsonl").read_text())
    assert left["image"] == "bad.png" and left["status"] == "broken" and left["error"]
    Path("bad.png").unlink()
    told = lines(run(".", "--to", "store", "--json").stdout)
    assert [row["status"] for row in told[:-1]] == ["kept", "kept", "kept", "duplicate"]
    assert told[-1]["images"] == told[-1]["total"] == 4 and told[-1]["seconds_left"] == 0
    assert "3 kept, 1 duplicate; nothing new" in run(".", "--to", "store").stdout
    with ks.load("demo", store="store") as vlm:
        for image in (Path("a.png"), Path("b.png"), png(5)):
            assert vlm.ask(image, "Describe the picture.").usage.images_encoded == 0
        assert vlm.stats()["features"]["preprocessed"] == 0


def test_options_reach_the_run(folder: Path) -> None:
    table(Path("t.parquet"), {"photo": [png(1, (128, 96)), png(2, (64, 64))]})
    source = ("t.parquet", "--column", "photo", "--to", "store", "--json")
    told = lines(run(*source, "--max-tokens-per-image", "11").stdout)
    assert [row["status"] for row in told[:-1]] == ["skipped", "encoded"]
    packed = lines(run(*source, "--codec", "int8").stdout)
    assert {row["status"] for row in packed[:-1]} == {"encoded"}
    assert packed[1]["nbytes"] < told[1]["nbytes"]
    other = lines(run(*source, "--tenant", "ann", "--threads", "1").stdout)
    assert other[-1]["encoded"] == 2
    smaller = lines(run(*source, "--max-pixels", "9216").stdout)
    assert smaller[0]["tokens"] < told[0]["tokens"]
    halves = [lines(run(*source, "--shard", f"{n}/2").stdout) for n in (1, 2)]
    assert sum(half[-1]["images"] for half in halves) == 2


def test_the_model_may_be_the_first_word(folder: Path) -> None:
    to = ("--to", "store", "--json")
    option = lines(run("a.png", *to, "--model", "demo-hybrid").stdout)
    first = lines(run("demo-hybrid", "a.png", *to).stdout)
    other = lines(run("demo", "a.png", *to).stdout)
    assert [rows[0]["status"] for rows in (option, first, other)] == ["encoded", "kept", "encoded"]
    # The clone has a folder of that name, which holds nothing to look at.
    Path("demo").mkdir()
    Path("demo/make.py").write_text("")
    assert lines(run("demo", "a.png", *to).stdout)[0]["status"] == "kept"
    assert "no pictures are named" in commands.refused("encode", "demo", *to)
    # What is there is a source, whatever it is called and whatever else lies in it.
    Path("demo/config.json").write_text('{"title": "my pictures"}')
    Path("demo/p.png").write_bytes(png(9))
    assert lines(run("demo", "a.png", *to).stdout)[-1]["images"] == 2
    Path("demo/config.json").write_text('{"model_type": "qwen3_vl"}')
    beside = run("demo", "a.png", *to, "--model", "demo-hybrid").stdout
    assert lines(beside)[-1]["images"] == 2


def test_files_may_come_from_a_store(folder: Path) -> None:
    run("a.png", "--to", "store")
    told = lines(run("a.png", "--files", "--to", "packs", "--store", "store", "--json").stdout)
    assert told[0]["status"] == "encoded"
    assert ks.Package.load(told[0]["package"]).feature_id == told[0]["feature_id"]


# -- a store that does not take everything --------------------------------------------------------


def test_what_a_store_refuses_is_no_success(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, result: Encoded) -> Encoded:
        return Encoded(result.image, "refused", error="the budget is too small")

    monkeypatch.setattr(ToStore, "confirm", refuse)
    told = run("a.png", "b.png", "--to", "store", "--errors", "left.jsonl", code=1)
    assert told.stdout.startswith("2 refused; 0.0 images/s") and "0 B written" in told.stdout
    assert "refused: b.png: the budget is too small" in told.stderr
    assert [line["status"] for line in lines(Path("left.jsonl").read_text())] == ["refused"] * 2


def test_a_run_that_a_store_ends_tells_how_far_it_came(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: Any, most: int | None) -> None:
        raise NotStored("1 package is gone")

    monkeypatch.setattr(ToStore, "look_back", gone)
    told = run("a.png", "b.png", "--to", "store", code=2)
    assert told.stdout.startswith("2 encoded") and "error: 1 package is gone" in told.stderr


# -- progress ----------------------------------------------------------------------------------


def results(count: int) -> Iterator[Encoded]:
    for number in range(count):
        yield Encoded(f"{number}.png", "encoded", "ab" * 32, 10, 1 << 20)
    yield Encoded("bad.png", "broken", error="it is torn")


@pytest.mark.parametrize("as_json", [False, True])
def test_progress_tells_rates_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: float(next(clock)))
    out = io.StringIO()
    tally = progress.EncodeCounts(total=20)
    assert len(list(progress.shown(results(5), tally, Console(file=out), as_json))) == 6
    first = out.getvalue().splitlines()[0]
    if as_json:
        told = json.loads(first)["progress"]
        assert (told["images"], told["total"], told["tokens"]) == (3, 20, 30)
        assert told["images_per_second"] == 0.25 and told["seconds_left"] == 68
    else:
        assert first == (
            "3/20 images: 3 encoded; 0.2 images/s, 2 tokens/s, 3.0 MiB written, 1:08 left"
        )
    assert tally.failed == 1 and tally.problems == [("bad.png", "broken", "it is torn")]


def test_a_bar_is_shown_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    tally = progress.EncodeCounts()
    list(progress.shown(results(3), tally, console))
    assert "images/s" in out.getvalue() and "3.0 MiB" in out.getvalue()
    assert tally.left() is None and tally.to_dict()["total"] is None
    assert progress.duration(5025) == "1:23:45" and progress.duration(65) == "1:05"


def test_a_list_without_end_is_not_told_in_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_MOST_TOLD", 2)
    tally = progress.EncodeCounts()
    for number in range(5):
        tally.add(Encoded(f"{number}.png", "broken", error="torn"))
    tally.tell("store", None, as_json=False)
    told = capsys.readouterr().err
    assert told.count("torn") == 2 and "and 3 more" in told and "--errors FILE" in told
