"""`keepsight decide` and `keepsight ask --batch`, as people use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import last_json, run

import keepsight as ks
from keepsight.cli import options
from keepsight.errors import InputError

QUESTIONS = {
    "red": {"type": "noul", "instructions": "Is it red?"},
    "shape": {"type": "choice", "criteria": {"circle": None, "star": None}},
    "size": {"type": "score", "criteria": ["small", "large"]},
}


def write(name: str, data: Any) -> None:
    text = data if isinstance(data, str) else json.dumps(data)
    Path(name).write_text(text, encoding="utf-8")


def test_decide(folder: Path) -> None:
    write("q.json", QUESTIONS)
    shown = run("decide", "a.png", "--questions", "q.json", "--report").stdout
    assert "shape" in shown and "circle" in shown and "1 of 1 images encoded" in shown
    found = last_json(run("decide", "demo", "a.png", "-q", "q.json", "--json").stdout)
    with ks.load("demo") as vlm:
        own = vlm.decide("<p>", QUESTIONS, assets={"<p>": "a.png"})
        assert found["answers"] == own
    assert found["usage"]["images_encoded"] == 1


def test_decide_with_placeholders_and_a_whole_request(folder: Path) -> None:
    asked = {"same": {"type": "noul", "instructions": "Is <picture-2> as <picture-1>?"}}
    write("q.json", asked)
    words = ("a.png", "-i", "b.png", "-q", "q.json", "--state", '{"of": 2}', "--json")
    found = last_json(run("decide", *words).stdout)
    write("whole.json", {"state": "see <x>", "questions": QUESTIONS, "assets": {"<x>": "b.png"}})
    whole = last_json(run("decide", "-q", "whole.json", "--json").stdout)
    with ks.load("demo") as vlm:
        images = {"<picture-1>": "b.png", "<picture-2>": "a.png"}  # pictures named first come later
        assert found["answers"] == vlm.decide({"of": 2}, asked, assets=images)
        own = vlm.decide("see <x>", QUESTIONS, assets={"<x>": "b.png"})
        assert whole["answers"] == own
    write("own.json", {"labels": {"noul": ["N", "Y"]}})
    words = ("-q", "whole.json", "--dtype", "float32", "--json")
    as_is = last_json(run("decide", *words).stdout)["answers"]["red"]["noul"]
    turned = last_json(run("decide", *words, "--decision-config", "own.json").stdout)
    assert turned["answers"]["red"]["noul"] != as_is


# -- many questions ------------------------------------------------------------------------------


def lines(name: str) -> list[dict[str, Any]]:
    text = Path(name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def batch(folder: Path) -> list[dict[str, Any]]:
    asked = [
        {"id": "one", "question": "What color is the shape?", "images": ["a.png"]},
        {"question": "What is in the picture?", "image": str(folder / "b.png")},
        {"question": "Where is the shape?", "images": ["a.png"]},
        {"question": "Which picture shows a star?", "images": ["a.png", "b.png"]},
        {"question": "Hello!"},
    ]
    write("in.jsonl", "\n\n".join(json.dumps(one) for one in asked) + "\n")
    return asked


def test_a_decision_config_may_be_on_a_hub() -> None:
    options.check_decision_config("owner/decisions")
    with pytest.raises(InputError, match="there is no such file"):
        options.check_decision_config("owner/decisions/decision.json")


def test_a_batch_is_answered_and_goes_on_where_it_was(folder: Path) -> None:
    asked = batch(folder)
    words = ("ask", "--batch", "in.jsonl", "--out", "out.jsonl", "--max-tokens", "8")
    assert "5 answered, 0 failed" in run(*words).stdout
    found = {one["id"]: one for one in lines("out.jsonl")}
    assert list(map(str, sorted(found, key=str))) == ["3", "5", "7", "9", "one"]
    with ks.load("demo") as vlm:
        for one, name in zip(asked, ("one", 3, 5, 7, 9), strict=True):
            images = one.get("images") or [one["image"]] if len(one) > 1 else []
            reply = vlm.ask(images or None, one["question"], max_new_tokens=8)  # type: ignore[arg-type]
            assert found[name]["text"] == reply.text
    # Stopped in the middle of a line: the rest is asked, what is there is not.
    whole = Path("out.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    Path("out.jsonl").write_text("".join(whole[:2]) + whole[2][:20], encoding="utf-8")
    again = run(*words, "--json")
    assert last_json(again.stdout)["answered"] == 3
    assert "2 of 5 are answered already" in again.stderr
    assert {one["id"]: one["text"] for one in lines("out.jsonl")} == {
        name: one["text"] for name, one in found.items()
    }
    assert last_json(run(*words, "--json").stdout)["answered"] == 0


def test_lines_that_fail_are_written_and_asked_again(folder: Path) -> None:
    """A line ends at a line feed alone, and what is no Unicode fails alone."""
    asked = ['{"question": "One\u2028question?"}', '{"question": "\\ud800?"}']
    write("in.jsonl", "\n".join([*asked, '{"question": "A?", "image": "bad.png"}']))
    words = ("ask", "demo", "--batch", "in.jsonl", "--out", "out.jsonl", "--max-tokens", "2")
    assert "1 answered, 2 failed" in run(*words, code=1).stdout
    found = {one["id"]: one for one in lines("out.jsonl")}
    assert "text" in found[1] and found[3]["error"].startswith("ImageError: ")
    assert found[2]["question"] == "\ud800?" and "no Unicode" in found[2]["error"]
    Path("b.png").replace("bad.png")
    # Read again, the others are the same questions.
    assert "1 answered, 1 failed" in run(*words, code=1).stdout
