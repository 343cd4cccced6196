"""What somebody types into `keepsight chat`: pictures in any writing, and commands about turns."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import keepsight as ks
from keepsight.cli.app import app
from keepsight.cli.pictures import open_pictures, split_pictures
from keepsight.cli.terminal import show_thumbnail
from keepsight.demo.scene import Scene
from keepsight.errors import ImageError, InputError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("two words").mkdir()
    for name, color in (("a.png", "red"), ("two words/b.png", "blue")):
        Scene.of(color=color, shape="circle", seed=1, size=(96, 96)).draw().save(name)
    return tmp_path


def test_pictures_are_found_however_they_are_written(folder: Path) -> None:
    a, b = f"{folder}/a.png", f"{folder}/two words/b.png"
    escaped = b.replace(" ", "\\ ")
    Path("my notes.txt").write_text("a note")
    for line, pictures, question in (
        (a, [a], ""),
        (b, [b], ""),
        (escaped, [b], ""),
        (f"'{b}' What is it?", [b], "What is it?"),
        (f'"{b}" {a} Compare them.', [b, a], "Compare them."),
        (f"file://{b.replace(' ', '%20')} What is it?", [b], "What is it?"),
        ("~/a.png What's this?", [a], "What's this?"),
        ("a.png What is it?", ["a.png"], "What is it?"),
        ("What is it? a.png", ["a.png"], "What is it?"),
        (f"What is in {a}?", [a], "What is in a.png?"),
        (f"Is {a} like {escaped}?", [a, b], "Is a.png like b.png?"),
        ("https://host/x.png What is it?", ["https://host/x.png"], "What is it?"),
        ("What is a .png, and and/or?", [], "What is a .png, and and/or?"),
        ("It's 'quoted', see https://host/page", [], "It's 'quoted', see https://host/page"),
        (f"{folder}/ Compare them.", [f"{folder}/"], "Compare them."),
        (f"What is {folder}?", [], f"What is {folder}?"),
        ("What says my notes.txt?", [], "What says my notes.txt?"),
    ):
        assert split_pictures(line) == (pictures, question), line
    missing, no_picture = "there is no such picture; nothing was sent", "notes.txt is not a picture"
    for line, why in (
        (f"{folder}/nope.png What is it?", f"nope.png: {missing}"),
        ("nope.png", missing),
        ("nope.png What is it?", missing),
        ("a.png nope.jpg Compare the pictures.", missing),
        ("my notes.txt", no_picture),
        (f"'{folder}/my notes.txt'", no_picture),
        (f"file://{folder}/my%20notes.txt", no_picture),
    ):
        with pytest.raises(InputError, match=why):
            split_pictures(line)


def test_folders_and_documents_are_several_pictures(folder: Path) -> None:
    assert [name for name, _ in open_pictures(str(folder))] == [f"{folder}/a.png"]
    Path("empty").mkdir()
    with pytest.raises(InputError, match="holds no picture"):
        open_pictures("empty")
    pytest.importorskip("pypdfium2")
    pages = [Scene.of(color=c, shape="star").draw().convert("RGB") for c in ("red", "blue")]
    pages[0].save("paper.pdf", save_all=True, append_images=pages[1:])
    names = [name for name, _ in open_pictures("paper.pdf")]
    assert names == ["paper.pdf#page=1", "paper.pdf#page=2"]
    Path("broken.pdf").write_bytes(b"no document")
    with pytest.raises(ImageError, match="cannot be opened as a PDF"):
        open_pictures("broken.pdf")


def test_a_chat_takes_paths_edits_retries_and_removes(folder: Path) -> None:
    """And goes on after whatever cannot be done."""
    typed = {  # what is typed, and what is said then
        "/retry": "error: /retry: there is no question yet",
        "/edit 1 x": "error: /edit: there is no question yet",
        "/image bad.png": "error: bad.png is not an image",
        "/image nope.png": "error: nope.png: no image can be read there",
        "/image": "error: /image wants a path",
        "/report": "error: there is no answer to report on yet",
        "/report x": "error: /report takes no argument",
        "/load nope.keep": "nope.keep",
        "/save": "error: /save needs a file name",
        f"{folder}/a.png": "a.png: 9 tokens, waits for your next question",
        "'two words/b.png'": "b.png: 9 tokens, waits",
        "/images": "2  two words/b.png: 9 tokens",
        "/images 2": "removed two words/b.png",
        "/images 7": "error: /images 7: expected a picture from 1 to 1",
        "/images remove": "error: /images remove: which? write /images N, or /images all",
        "Describe the picture.": "DESCRIBED",
        "/retry ": "DESCRIBED",
        "Where is the shape in the picture?": "tokens reused",
        "/edit 1 What color is the shape in the picture?": "COLOR",
        "/edit": "error: /edit wants the new question",
        "/images ": "no picture waits",
        "/imags": "error: no command /imags; did you mean /images?",
        "How many pictures are in 'two words/b.png'?": "b.png: 9 tokens, goes with this question",
        "/help": "/exit           the end",
    }
    Path("bad.png").write_bytes(b"not an image")
    with ks.load("demo") as vlm:
        answers = {
            "DESCRIBED": vlm.ask("a.png", "Describe the picture.").text,
            "COLOR": vlm.ask("a.png", "What color is the shape in the picture?").text,
        }
    result = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["chat"], input="\n".join([*typed, "/exit", "never said"])
    )
    assert result.exit_code == 0 and "never said" not in result.stdout, result.output
    rest = "\n" + result.stdout
    for line, told in typed.items():
        _, found, rest = rest.partition(f"\n> {line.strip()}\n")
        assert found and answers.get(told, told) in rest.partition("\n> ")[0], line
    listed = [line for line in rest.splitlines() if line.startswith("/")]
    assert len(listed) == 11 and max(map(len, listed)) <= 80


def test_thumbnails_are_drawn_as_the_terminal_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half blocks, by textual-image where it draws better, and not at all without colours."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    picture = Scene.of(color="red", shape="circle").draw()

    def shown(**options: bool) -> str:
        file = io.StringIO()
        show_thumbnail(picture, Console(file=file, width=80, **options))
        return file.getvalue()

    for better in (True, False):
        drawn = lambda picture, width: "drawn" * (width == 16)  # noqa: E731
        can = SimpleNamespace(Image=drawn if better else None, SixelImage=drawn, TGPImage=object)
        monkeypatch.setitem(sys.modules, "textual_image", SimpleNamespace(renderable=can))
        assert ("drawn" in shown(force_terminal=True)) is better
        assert ("▀" in shown(force_terminal=True)) is not better
        assert shown(force_terminal=False) == ""
        assert shown(force_terminal=True, no_color=True) == ""
    monkeypatch.setitem(sys.modules, "textual_image", None)
    assert "▀" in shown(force_terminal=True)


def test_one_question_takes_a_pdf_and_a_folder(folder: Path) -> None:
    Image.open("a.png").save("paper.pdf")
    words = ["ask", "paper.pdf", "two words", "Compare the pictures.", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["usage"]["images"] == 2
