"""`keepsight demo`: it runs to its end, what it prints is true, and none of it is canned.

The tour runs once for all tests here; whether the models are right is not this file's business, but
that Keepsight and stock Transformers say the same is.
"""

from __future__ import annotations

import re
import warnings
from html import unescape
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import keepsight as ks
from keepsight.cli.app import app
from keepsight.cli.terminal import age_text, plain, share_bar, thumbnail
from keepsight.cli.tour import Stage, scenes_of, script, speaking
from keepsight.cli.tour_stock import StockReply, StockSession, answer, judge, question
from keepsight.demo.scene import Scene, difference
from keepsight.errors import MissingExtra
from keepsight.models import demo_smol
from keepsight.models.renamed import RETURNED
from keepsight.report import Report
from keepsight.store import DiskStore
from keepsight.system.units import bytes_text

SEED = 4


def _not_installed() -> Path:
    raise MissingExtra("demo-smol needs another package")


@pytest.fixture(scope="module")
def toured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Everything that the tour printed, and its folder. Run as the command is."""
    out = tmp_path_factory.mktemp("tour") / "made"
    theirs = DiskStore(out / "store")  # beside which the tour makes a folder of its own
    theirs.put_note("alias", "0" * 64, {})
    theirs.close()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        patch.delenv("KEEPSIGHT_STORE", raising=False)
        patch.setenv("COLUMNS", "160")
        patch.setattr(demo_smol, "folder", _not_installed)  # its act has a test of its own
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        words = ["demo", "--out", str(out), "--seed", str(SEED)]
        result = CliRunner().invoke(app, [*words, "--save", str(out.parent / "tour.html")])
        assert torch.get_num_threads() == 2
        torch.set_num_threads(threads)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "FutureWarning" not in result.output
    assert DiskStore(out / "store").has("alias", "0" * 64)
    assert sorted(path.name for path in out.iterdir()) == ["demo-out", "store"]
    return result.stdout, out / "demo-out"


@pytest.fixture
def stock(demo_parts: dict[str, Any]) -> StockSession:
    return StockSession(*demo_parts["demo"])


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    paths = []
    for number, scene in enumerate(scenes_of(SEED)):
        paths.append(tmp_path / f"{number}.png")
        scene.draw().save(paths[-1])
    return paths


# -- the whole show ----------------------------------------------------------------------------


def test_every_act_is_played_and_answers_are_those_of_stock(toured: tuple[str, Path]) -> None:
    said, _ = toured
    for number in (1, 2, 3, 4, 5):
        assert re.search(rf"^{number}  \w.*─", said, re.M)
    assert "Left out here: demo-smol needs another package" in said
    assert "OTHER" not in said
    assert re.search(r"That was it, in \d+ seconds", said)


@pytest.mark.slow
def test_a_trained_model_speaks_and_starts_sooner(tmp_path: Path) -> None:
    out = StringIO()
    stage = Stage(Console(file=out, width=160), tmp_path, scenes_of(1))
    stage.draw()
    speaking(stage)
    said = out.getvalue()
    assert re.findall(r"(\d) of (\d) pictures looked at", said) == [
        ("1", "1"), ("0", "1"), ("1", "2"), ("0", "2"),
    ]  # fmt: skip
    assert len(re.findall(r"stock \d+ ms, the same words", said)) == 4
    sooner = re.search(r"start (\d+) times sooner", said)
    assert sooner and int(sooner[1]) > 1
    assert len(re.findall(r"^ +[\d.]+%  a \w+ \w+$", said, re.MULTILINE)) == 4
    assert "4 questions, 0 pictures looked at" in said
    assert re.search(r'\{"color": "\w+", "shape": "\w+"\}', said)


def test_each_turn_says_what_was_reused(toured: tuple[str, Path]) -> None:
    act = toured[0].split("2  A conversation")[1].split("3  Picture 1")[0]
    turns = re.findall(r"(\d+) of (\d+) tokens reused, (\d) of (\d) pictures looked at", act)
    looked = [(int(new), int(all_)) for _, _, new, all_ in turns]
    assert looked == [(2, 2), (0, 2), (2, 4), (0, 4), (0, 4)]
    reused = [int(tokens) for tokens, *_ in turns]
    assert reused[0] == 0 and reused == sorted(set(reused))
    assert len(re.findall(r"first token after \d+ ms; stock \d+ ms, the same words", act)) == 5
    for asked in script(scenes_of(SEED)):
        assert f"you    {asked.text}" in act


def test_keepsight_is_exact_where_stock_with_a_cache_is_not(toured: tuple[str, Path]) -> None:
    act = toured[0].split("3  Picture 1")[1].split("4  A package")[0]
    assert len(re.findall(r"✓ Keepsight: right \(logits within .*\), [1-9]\d* of", act)) == 2
    assert "ValueError: Image features and image tokens do not match" in act
    assert len(re.findall(r"✗ stock with past_key_values and .*: (crashes|wrong)", act)) == 5


def test_the_new_process_answers_from_disk(toured: tuple[str, Path]) -> None:
    act = toured[0].split("5  A restart")[1]
    assert "$ OMP_NUM_THREADS=1 keepsight ask" in act and "demo-hybrid" in act
    assert len(re.findall(r"image [12] +reused +disk", act)) == 2
    assert "the same words as stock Transformers" in act


def test_the_saved_page_says_the_same_and_needs_no_network(toured: tuple[str, Path]) -> None:
    said, out = toured
    page = (out.parents[1] / "tour.html").read_text(encoding="utf-8")
    assert "<script" not in page and not re.search(r"(src|href|url\()=?\W*[a-z]+:", page)
    assert "▀" in page  # pictures
    text = " ".join(unescape(re.sub("<[^>]+>", "", page)).split())
    for asked in script(scenes_of(SEED)):
        assert f"you {asked.text}" in text
    for line in re.findall(r"^(?:model  [✓✗] |     )(\S.*)$", said, re.MULTILINE):
        assert " ".join(line.split()) in text
    assert "stock with past_key_values" in text and "the same words as stock Transformers" in text


def test_what_it_made_is_listed_and_loads(toured: tuple[str, Path]) -> None:
    said, out = toured
    closing = said.split("That was it")[1]
    files = [path for path in out.rglob("*") if path.is_file() and "store" not in path.parts]
    assert len(files) == 6
    assert all(str(path) in closing for path in [*files, out / "store"])
    package = ks.Package.load(out / "picture-1.sight")
    assert package.key in said.split("4  A package")[1] and "sound: " in said
    with ks.load("demo", dtype="float32") as vlm:
        assert len(vlm.resume(out / "conversation.keep").messages) == 10
    assert f"keepsight chat --image {out / 'pictures' / 'picture-1.png'}" in closing


# -- nothing is canned -------------------------------------------------------------------------


def test_the_truth_is_that_of_the_scenes() -> None:
    scenes = [
        Scene.of(color="red", shape="circle", row="top", col="left"),
        Scene.of(color="red", shape="star", row="middle", col="center"),
        Scene.of(color="blue", shape="ring"),
        Scene.of(color="pink", shape="cross"),
    ]
    assert difference(scenes[0], scenes[1]) == "Only the shape differs."
    assert [ask.truth for ask in script(scenes)] == [
        "Picture 1 shows a red circle, picture 2 shows a red star. Only the shape differs.",
        "Red.",
        "1: red circle. 2: red star. 3: blue ring. 4: pink cross.",
        "Picture 3.",
        "In the center.",
    ]


def test_attempts_show_what_really_comes(
    stock: StockSession, pictures: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [question("Describe the picture.", pictures[:1])]
    said = answer(stock.answer(stock.inputs(first)).text)
    second = [*first, said, question("Compare the pictures.", pictures[1:2])]
    real = stock.model.generate

    def generate(**options: Any) -> Any:
        if RETURNED in options:
            raise RuntimeError("said by the test\nand more")
        return real(**options)

    monkeypatch.setattr(stock.model, "generate", generate)
    outcomes = list(stock.attempts(first, second))
    assert len(outcomes) == 4
    assert {outcome.text for outcome in outcomes} == {"RuntimeError: said by the test"}
    assert not any(outcome.right for outcome in outcomes)


def test_a_cache_that_upstream_handles_is_called_right(
    stock: StockSession, pictures: list[Path]
) -> None:
    """The control: without another conversation in between, stock's text follow-up is exact."""
    first = [question("Describe the picture.", pictures[:1])]
    said = answer(stock.answer(stock.inputs(first)).text)
    third = [*first, said, question("Where is it?")]
    assert stock.interrupted(first, third, first).right
    between = [question("List the pictures.", pictures[1:])]
    assert "logits off by" in stock.interrupted(first, third, between).verdict


def test_a_cache_of_something_else_is_not_held_against_stock(
    stock: StockSession, pictures: list[Path]
) -> None:
    first = [question("Describe the picture.", pictures[:1])]
    third = [*first, answer("Something it never said."), question("Where is it?")]
    assert "does not begin with" in stock.interrupted(first, third, first).verdict


def test_judging_looks_at_words_and_at_logits() -> None:
    logits = torch.zeros(1, 8)
    fresh = StockReply("Red.", logits, None, torch.zeros(1))
    assert judge("Red.", logits + 1e-5, fresh)[1]
    assert judge("Red.", logits + 0.1, fresh) == ("wrong: same words, but logits off by 0.1", False)
    assert not judge("Blue.", logits, fresh)[1]


def test_a_wrong_answer_is_marked_with_the_truth() -> None:
    out = StringIO()
    stage = Stage(Console(file=out, width=100), Path("."), scenes_of(1))
    report = Report(cached_tokens=3, prompt_tokens=4)
    reply: Any = SimpleNamespace(text="Red.", report=report, usage=SimpleNamespace(images=0))
    stage.exchange("What color?", reply, "Blue.")
    stage.exchange("What color?", reply, "Red.")
    lines = out.getvalue().splitlines()
    assert lines[1] == "model  ✗ Red.  (it is: Blue.)" and lines[4] == "model  ✓ Red."
    assert lines[2].count("█") == 14 and lines[2].count("░") == 4


# -- what it prints with -----------------------------------------------------------------------


def test_thumbnails_have_two_pixels_in_each_character() -> None:
    image = Image.new("RGB", (8, 8), (255, 0, 0))
    image.paste((0, 0, 255), (0, 4, 8, 8))
    out = StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=40)
    console.print(thumbnail(image, 2))
    assert out.getvalue().count("\x1b[38;2;255;0;0;48;2;0;0;255m▀") == 2


def test_small_helpers() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
    ]
    assert [age_text(n) for n in (-1, 59, 7300, 200000)] == ["0 s", "59 s", "2 h", "2 d"]
    assert plain("a\x1b[2J\nb\x07\u200b") == "a\ufffd[2J\nb\ufffd\ufffd"
    assert share_bar(0, 0).plain == "░" * 24
