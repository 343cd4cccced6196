"""The first act of the demo: a trained model that speaks, asked about two pictures.

It needs the weights of SmolLM2, which are a package of their own; without it the act is left out.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import cast

import keepsight as ks
from keepsight.cli.tour_stage import Ask, Stage, TurnTimes, timed
from keepsight.cli.tour_stock import StockSession, answer, question
from keepsight.demo.scene import COLORS, SHAPES, Scene
from keepsight.errors import MissingExtra
from keepsight.kinds import Message
from keepsight.models import demo_smol
from keepsight.questions.decide import Decisions
from keepsight.vlm import VLM

_SIDE = 448  # pixels
_FORM = {
    "type": "object",
    "properties": {"color": {"enum": list(COLORS)}, "shape": {"enum": list(SHAPES)}},
    "required": ["color", "shape"],
}


def speaking(stage: Stage) -> None:
    """Play the act, or say what it needs."""
    stage.act(
        "1  A model that speaks",
        "demo-smol is SmolLM2 (135 million parameters) with eyes of ours, and pictures of "
        f"{_SIDE}x{_SIDE}. Stock Transformers answers the same questions with the same model, and "
        "looks at everything again.",
    )
    try:
        demo_smol.folder()
    except MissingExtra as error:
        stage.explain(f"Left out here: {error}")
        return
    pictures = [_drawn(stage, number) for number in (1, 2)]
    with ks.load("demo-smol", dtype="float32", store="") as vlm:
        _conversation(stage, vlm, pictures)
        _decisions(stage, vlm, pictures[0])
        _as_json(stage, vlm, pictures[0])


def _drawn(stage: Stage, number: int) -> Path:
    """The scene of a picture of the tour, drawn larger."""
    scene = stage.scenes[number - 1]
    large = Scene.of(
        color=scene.color, shape=scene.shape, background=scene.background,
        row=scene.row, col=scene.col, scale="large", size=(_SIDE, _SIDE),
    )  # fmt: skip
    path = stage.out / "pictures" / f"large-{number}.png"
    large.draw().save(path)
    stage.made.append(path)
    return path


def _conversation(stage: Stage, vlm: VLM, pictures: list[Path]) -> None:
    stock = StockSession(vlm.model, vlm.runtime.needed_processor())
    a, b = stage.scenes[:2]
    asks = [
        Ask("What is in the picture?", (0,), a.name),
        Ask("What color is it?", (), a.color),
        Ask(f"Which picture shows a {b.name}?", (1,), "second picture"),
        Ask(f"Is there a {a.name} in the first picture?", (), "Yes"),
    ]
    vlm.ask(pictures[1], "Hello!", max_new_tokens=2)  # the first calls of a process cost more
    stock.answer(stock.inputs([question("Hello!", pictures[1:])]), max_new_tokens=2)
    vlm.clear()
    session, messages = vlm.session(), list[Message]()
    sooner = []
    for ask in asks:
        new = [pictures[i] for i in ask.new]
        reply, ms = timed(session, ask.text, new)
        messages.append(question(ask.text, new))
        stock_ms = stock.first_token_ms(messages)
        heard = stock.answer(stock.inputs(messages))
        messages.append(answer(reply.text))
        stage.turn(ask, new, TurnTimes(reply, ms, stock_ms, heard.text))
        if not new:
            sooner.append(stock_ms / ms)
    stage.say(
        "The first turn has nothing to remember. Those about remembered pictures alone start "
        f"{statistics.median(sooner):.0f} times sooner than stock."
    )


def _decisions(stage: Stage, vlm: VLM, picture: Path) -> None:
    stage.say("\nDecisions: typed questions about the picture, answered by probabilities.")
    named = [scene.name for scene in stage.scenes]
    questions = {
        name: {"type": "noul", "instructions": f"Is there a {name} in the picture?"}
        for name in named
    }
    found = cast(Decisions, vlm.decide("<picture>", questions, assets={"<picture>": picture}))
    for name in named:
        stage.say(f"       {found[name]['noul']:6.1%}  a {name}")
    report = found.report
    stage.say(
        f"       {len(named)} questions, {report.images_encoded} pictures looked at, "
        f"{report.cached_tokens} tokens reused",
        "dim",
    )


def _as_json(stage: Stage, vlm: VLM, picture: Path) -> None:
    stage.say("\nAn answer as JSON, which fits its schema whatever the model would like to say.")
    form = {"type": "json_schema", "json_schema": {"name": "seen", "schema": _FORM}}
    asked = question("Which color and which shape is in the picture?", [picture])
    reply = vlm.chat([asked], response_format=form, do_sample=False)
    stage.say(f"       {reply.text}")
