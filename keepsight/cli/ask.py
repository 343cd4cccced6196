"""`keepsight ask`: one question about pictures, or, with `--batch`, the many questions of a file.

Answers of a batch are written as they come, each on a line. What is there already is not asked
again, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track

from keepsight.cli.options import (
    IMAGES,
    JSON,
    REPORT,
    Decoding,
    Form,
    Remembering,
    beside,
    check_images,
    option,
    read_text,
)
from keepsight.cli.pictures import pictures_at
from keepsight.cli.terminal import console, json_line, plain, report_table, say, tell
from keepsight.core.structured.formats import Format, wanted
from keepsight.errors import InputError, KeepsightError, UnfinishedAnswer
from keepsight.kinds import Options, Record
from keepsight.system.optional import optional
from keepsight.system.places import expanded

if TYPE_CHECKING:
    from keepsight.report import Report
    from keepsight.vlm import VLM


def ask(
    model: Remembering,
    decoding: Decoding,
    form: Form,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar='[MODEL] [IMAGE]... "QUESTION"', show_default=False),
    ] = None,
    image: list[str] | None = IMAGES,
    prompt: str | None = option("The question; - is standard input.", "--prompt", "-p"),
    batch: Path | None = option('Many questions: lines of {"question": ..., "images": [...]}.'),
    out: Path | None = option("Where the answers of --batch go; resumable."),
    as_json: bool = JSON,
    report: bool = REPORT,
) -> None:
    """Ask one question about any number of images; the answer is printed as it is generated."""
    many = batch is not None or out is not None
    words = model.first_of(words or [], many or prompt is not None)
    options = decoding.options()
    if (asked := form.asked()) is not None:
        options["response_format"] = asked
    if many:
        if batch is None or out is None:
            raise InputError("--batch and --out go together: the questions, and their answers")
        if words or image or prompt is not None or report:
            raise InputError("--batch has its own questions and images; leave out all others")
        _answer_batch(model, batch, expanded(out), options, as_json)
        return
    if prompt is not None:
        question = read_text("-", "--prompt") if prompt == "-" else prompt
    else:
        *words, question = words or [""]
        if not question:
            raise InputError('there is no question; write: keepsight ask IMAGE "What is it?"')
        if os.path.isfile(question) or question.startswith(("http://", "https://")):
            hint = f'{question} is an image; write: keepsight ask {question} "What is it?"'
            raise InputError(hint)
    images = [*(image or []), *words]
    check_images(images)
    with model.load() as vlm:
        from keepsight.prompt.messages import user_message  # start-up time
        from keepsight.report import Reply

        opened = [picture for name in images for _, picture in pictures_at(name)]
        shown, pieces = console(), []
        for piece in vlm.stream([user_message(question, opened)], **options):
            pieces.append(piece)
            if not as_json:
                shown.out(plain(piece.text), end="", highlight=False)
        reply = Reply.of(pieces)
        cut = asked is not None and reply.finish_reason != "stop"
        if as_json:
            told: Record = {"text": reply.text, "finish_reason": reply.finish_reason}
            told |= {} if asked is None or cut else {"parsed": reply.parsed}
            told |= {"usage": vars(reply.usage)}
            json_line(told | ({"report": reply.report.to_dict()} if report else {}))
        else:
            shown.print()
            _tell_of_store(reply.report)
            if report:
                shown.print(report_table(reply.report))
        if cut:
            raise UnfinishedAnswer(
                "the answer ended before its form was complete; allow more tokens with --max-tokens"
            )


def _tell_of_store(report: Report) -> None:
    """Say which pictures were not encoded, because the store has them."""
    stored = ("disk", "remote")
    media = [s for s in report.segments if s.medium is not None]
    names = dict.fromkeys(s.name for s in media if s.features in stored or s.tier in stored)
    if names:
        tell(f"from the store, not encoded again: {', '.join(names)}")


# -- many questions ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Question:
    """One line of the file."""

    id: str | int
    question: str
    images: list[str]
    form: Format | None


def _answer_batch(
    model: Remembering, batch: Path, out: Path, options: Options, as_json: bool
) -> None:
    """Answer what has no answer yet."""
    questions = _read_questions(batch)
    done = _answered(out, questions)  # before anything slow
    left = [one for one in questions if one.id not in done]
    if done:
        tell(f"{len(done)} of {len(questions)} are answered already")
    count = failed = 0
    err = console(stderr=True)
    # Half of a surrogate pair in a question is written as JSON spells it.
    opened = out.open("a", encoding="utf-8", errors="backslashreplace")
    with opened as file, model.load() as vlm:
        answers = _answers(vlm, left, options)
        quiet = not err.is_terminal
        for one, made in track(answers, "answering", len(left), console=err, disable=quiet):
            line = {"id": one.id, "question": one.question, **made}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            count, failed = count + 1, failed + ("error" in made)
    told = {"answered": count - failed, "failed": failed, "out": str(out)}
    say(as_json, told, f"{count - failed} answered, {failed} failed: {out}")
    raise typer.Exit(1 if failed else 0)


def _read_questions(path: Path) -> list[_Question]:
    """The questions of a file; an error that names the line if one cannot be used."""
    found = dict[str | int, _Question]()
    for number, line in enumerate(read_text(path, "--batch").split("\n"), 1):
        if not line.strip():
            continue
        where = f"--batch {path}, line {number}"
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON: {error}") from error
        if not isinstance(data, dict) or not isinstance(data.get("question"), str):
            raise InputError(f'{where}: expected {{"question": "...", "images": ["..."]}}')
        images = data.get("images", data.get("image")) or []
        images = [images] if isinstance(images, str) else images
        if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
            raise InputError(f"{where}: images are paths or addresses, in a list")
        name = data.get("id", number)
        if not isinstance(name, str | int) or isinstance(name, bool):
            kind = type(name).__name__
            raise InputError(f"{where}: the id is a {kind}; expected a text or a number")
        if name in found:
            raise InputError(f"{where}: the id {name!r} was there before")
        if (form := wanted(data.get("response_format"), f"{where}: response_format")) is not None:
            optional("llguidance", "structured")
        images = [beside(one, expanded(path).parent) for one in images]
        found[name] = _Question(name, data["question"], images, form)
    if not found:
        raise InputError(f"--batch {path}: there are no questions in it")
    return list(found.values())


def _answered(path: Path, questions: list[_Question]) -> set[str | int]:
    """The ids that a file has answers to. Half a line at its end, of a run that was stopped, is
    removed."""
    asked = {one.id: one.question for one in questions}
    done = set[str | int]()
    if not path.exists():
        return done
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        where = f"--out {path}, line {number}"
        try:
            one = json.loads(line)
            name, question = one["id"], one["question"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{where}: not an answer of this command") from error
        if asked.get(name) != question:
            raise InputError(f"{where}: answers another question ({name!r}); name another file")
        if "error" not in one:
            done.add(name)
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return done


def _answers(
    vlm: VLM, questions: list[_Question], options: Options
) -> Iterator[tuple[_Question, Record]]:
    from keepsight.core.call import Call  # start-up time
    from keepsight.prefix.prompt import Prompt
    from keepsight.questions.many import as_they_come

    pairs = [(one.images, one.question) for one in questions]
    forms = [{"response_format": one.form} if one.form else {} for one in questions]
    calls = [Call.of(options | form, vlm.tenant, "ask_many") for form in forms]
    for call in calls:  # what cannot be enforced is refused before anything is asked
        vlm.runtime.grammar(call.decoding, Prompt.nothing())
    for number, found in as_they_come(vlm.runtime, pairs, calls):
        try:
            if isinstance(found, KeepsightError):
                raise found
            made: Record = {"text": found.text, "finish_reason": found.finish_reason}
            made |= {} if found.reads is None else {"parsed": found.parsed}
            yield questions[number], made | {"usage": vars(found.usage)}
        except KeepsightError as error:
            yield questions[number], {"error": f"{type(error).__name__}: {error}"}
