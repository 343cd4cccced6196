"""`keepsight ask --batch`: many questions of a file, answered into another one.

Answers are written as they come, each on a line. What is there already is not asked again, so a run
that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from keepsight.cli.options import read_text
from keepsight.cli.progress import duration
from keepsight.core.structured.formats import Format, wanted
from keepsight.errors import InputError, KeepsightError
from keepsight.kinds import Options, Record
from keepsight.system.optional import optional
from keepsight.system.places import expanded

if TYPE_CHECKING:
    from rich.console import Console

    from keepsight.vlm import VLM

_LINES = 10.0  # seconds between two lines without a terminal


@dataclass(frozen=True)
class Question:
    """One line of the file."""

    id: str | int
    question: str
    images: tuple[str, ...]
    form: Format | None = None


def read_questions(path: Path) -> list[Question]:
    """The questions of a file; an error that names the line if one cannot be used."""
    found, seen = list[Question](), set[str | int]()
    for number, line in enumerate(read_text(path, "--batch").splitlines(), 1):
        if not line.strip():
            continue
        one = _question(line, number, path)
        if one.id in seen:
            raise InputError(f"--batch {path}, line {number}: the id {one.id!r} was there before")
        seen.add(one.id)
        found.append(one)
    if not found:
        raise InputError(f"--batch {path}: there are no questions in it")
    return found


def _question(line: str, number: int, path: Path) -> Question:
    where = f"--batch {path}, line {number}"
    try:
        data = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("question"), str):
        raise InputError(f'{where}: expected {{"question": "...", "images": ["..."]}}')
    given = data.get("images", data.get("image"))
    images = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        raise InputError(f"{where}: images are paths or addresses, in a list")
    name = data.get("id", number)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise InputError(f"{where}: the id is a {type(name).__name__}; expected a text or a number")
    folder = expanded(path).parent
    if (form := wanted(data.get("response_format"), f"{where}: response_format")) is not None:
        optional("llguidance", "structured")
    return Question(name, data["question"], tuple(_at(one, folder) for one in images), form)


def _at(image: str, folder: Path) -> str:
    """An address as it is; a path begins where the file lies."""
    if "://" in image or image.startswith("data:"):
        return image
    return os.fspath(folder / os.path.expanduser(image))


def answered(path: Path, questions: list[Question]) -> set[str | int]:
    """The ids that a file has answers to. Half a line at its end, of a run that was stopped, is
    removed."""
    asked = {one.id: one.question for one in questions}
    done: set[str | int] = set()
    if not path.exists():
        return done
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            one = json.loads(line)
            name, question = one["id"], one["question"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"--out {path}, line {number}: not an answer of this command") from (
                error
            )
        if asked.get(name) != question:
            raise InputError(
                f"--out {path}, line {number}: answers another question ({name!r}); name another "
                "file"
            )
        if "error" not in one:
            done.add(name)
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return done


def run(
    vlm: VLM, questions: list[Question], out: Path, options: Options, err: Console
) -> tuple[int, int]:
    """Answer what has no answer yet; return how many were answered and how many failed."""
    done = answered(out, questions)
    left = [one for one in questions if one.id not in done]
    if done:
        typer.echo(f"{len(done)} of {len(questions)} are answered already", err=True)
    begun = last = time.perf_counter()
    count = failed = 0
    with out.open("a", encoding="utf-8") as file:
        for one, made in _answers(vlm, left, options):
            line = {"id": one.id, "question": one.question, **made}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            count, failed = count + 1, failed + ("error" in made)
            now = time.perf_counter()
            if err.is_terminal or now - last >= _LINES:
                last = now
                rest = duration((len(left) - count) * (now - begun) / count)
                text = f"{count}/{len(left)} answered, {count / (now - begun):.1f}/s, {rest} left"
                err.print(text, end="\r" if err.is_terminal else "\n")
    if err.is_terminal and count:
        err.print()
    return count - failed, failed


def _answers(
    vlm: VLM, questions: list[Question], options: Options
) -> Iterator[tuple[Question, Record]]:
    from keepsight.core.call import Call  # start-up time
    from keepsight.prefix.prompt import Prompt
    from keepsight.questions.many import as_they_come

    pairs = [(list(one.images), one.question) for one in questions]
    forms = [{"response_format": one.form} if one.form else {} for one in questions]
    calls = [Call.of(options | form, vlm.tenant, "ask_many") for form in forms]
    for call in calls:  # what cannot be enforced is refused before anything is asked
        vlm.runtime.grammar(call.decoding, Prompt.nothing())
    for number, found in as_they_come(vlm.runtime, pairs, calls):
        try:
            if isinstance(found, KeepsightError):
                raise found
            made: Record = {"text": found.text, "finish_reason": found.finish_reason}
            if found.reads is not None:
                made["parsed"] = found.parsed
            yield questions[number], made | {"usage": vars(found.usage)}
        except KeepsightError as error:
            yield questions[number], {"error": f"{type(error).__name__}: {error}"}
