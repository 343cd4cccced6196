"""`keepsight decide`: typed questions about pictures, answered by probabilities.

The questions come from a file: some by their names, or a whole request as `vlm.decide` takes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from keepsight.cli.options import (
    IMAGES,
    JSON,
    REPORT,
    Remembering,
    beside,
    check_decision_config,
    check_images,
    option,
    read_text,
)
from keepsight.cli.pictures import pictures_at
from keepsight.cli.terminal import say, table
from keepsight.errors import InputError
from keepsight.kinds import Record
from keepsight.system.places import expanded

if TYPE_CHECKING:
    from keepsight.questions.decide import Decisions


def decide(
    model: Remembering,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL] [IMAGE]...", show_default=False)
    ] = None,
    questions: Path | None = option(
        "JSON: questions by name, or a whole request.", "--questions", "-q"
    ),
    state: str | None = option("What is shown besides the pictures; text or JSON."),
    decision_config: str | None = option("decision.json, or a folder with one."),
    image: list[str] | None = IMAGES,
    as_json: bool = JSON,
    report: bool = REPORT,
) -> None:
    """Decide typed questions (noul, choice, score) about pictures; the questions come from a file.

    A picture stands where a text has its placeholder <picture-1>, <picture-2>, ...; without any,
    the pictures stand before the state.
    """
    if questions is None:
        raise InputError("there are no questions; write: keepsight decide IMAGE --questions FILE")
    words = model.first_of(words or [], True)
    images = [*(image or []), *words]
    check_images(images)
    check_decision_config(decision_config)
    request = _request(questions, state, images)
    with model.load() as vlm:
        found = cast("Decisions", vlm.decide(request, decision_config=decision_config))
    made: Record = {"answers": found, "usage": vars(found.usage)}
    made |= {"report": found.report.to_dict()} if report else {}
    names = ("question", "answer", "confidence", "probabilities")
    rows = [(name, *_row(answer)) for name, answer in found.items()]
    shown = table(*names, right=names[2:3], rows=rows)
    say(as_json, made, shown, *([str(found.report)] if report else []))


def _row(answer: Record) -> tuple[str, str, str]:
    if answer["type"] == "noul":
        return ("yes" if answer["noul"] >= 0.5 else "no", "", f"{answer['noul']:.3f}")
    value = answer["choice"] if answer["type"] == "choice" else f"{answer['score']:.2f}"
    each = ", ".join(f"{name} {chance:.3f}" for name, chance in answer["probabilities"].items())
    return str(value), f"{answer['confidence']:.2f}", each


def _request(path: Path, state: str | None, images: list[str]) -> Record:
    """The request of a file and the command line."""
    text = read_text(path, "--questions")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--questions {path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"--questions {path}: expected questions by name, as in {{...}}")
    whole = isinstance(data.get("questions"), dict) and "type" not in data["questions"]
    request: Record = data if whole else {"questions": data}
    named, folder = request.get("assets") or {}, expanded(path).parent
    names = [f"<picture-{number + 1}>" for number in range(len(images))]
    pictures = [pictures_at(one)[0][1] if one == "-" else one for one in images]
    request["assets"] = {name: beside(asset, folder) for name, asset in named.items()}
    request["assets"] |= dict(zip(names, pictures, strict=True))
    if state is not None:
        request["state"] = _state(state)
    texts = json.dumps([request.get("state"), request["questions"]], ensure_ascii=False)
    if names and not any(name in texts for name in names):
        before, said = "\n".join(names), request.get("state")
        if said is None or isinstance(said, str):
            request["state"] = "\n".join(filter(None, (before, said)))
        else:
            request["state"] = {"pictures": before, "state": said}
    return {"state": "", **request}


def _state(text: str) -> Any:
    """JSON, or the text itself."""
    try:
        return json.loads(text) if text.lstrip()[:1] in ("{", "[") else text
    except ValueError:
        return text
