"""The first part of the demo: how much time memory saves with a model that is not tiny.

The model is built on the spot, with the demo's processor and random weights: its words mean
nothing, but its times do. Both sides answer the same questions about one picture with the same
model object.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

import keepsight as ks
from keepsight.cli.terminal import table
from keepsight.cli.tour_stage import Stage, timed
from keepsight.cli.tour_stock import StockSession, answer, question
from keepsight.demo.scene import Scene
from keepsight.kinds import Message
from keepsight.models import loading
from keepsight.session import Session

_TEXT = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
_TOWER = {"hidden_size": 384, "intermediate_size": 1536, "num_heads": 6, "depth": 8}
_SIDE = 448  # pixels
_RUNS, _TOKENS = 2, 4
_QUESTIONS = ("Describe the picture.", "What color is the shape?", "Where is it?")


def made_on_the_spot(seed: int = 0) -> PreTrainedModel:
    """A wider model of the demo's architecture, with random weights."""
    config = AutoConfig.from_pretrained(loading.model_path("demo"))
    for name, value in _TEXT.items():
        setattr(config.text_config, name, value)
    for name, value in _TOWER.items():
        setattr(config.vision_config, name, value)
    config.vision_config.out_hidden_size = _TEXT["hidden_size"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    return model.float().eval()


def opening(stage: Stage) -> None:
    """A chat about one picture, timed beside stock."""
    model, processor = made_on_the_spot(), loading.load_processor(loading.model_path("demo"), None)
    pixels = {"shortest_edge": 32 * 32, "longest_edge": _SIDE * _SIDE}
    vars(processor.image_processor)["size"] = pixels  # the demo's own limits are smaller
    millions = model.num_parameters() / 1e6
    stage.act(
        "What memory saves",
        f"A model with {millions:.0f} million random weights, made here, and a picture of "
        f"{_SIDE}x{_SIDE}: its words mean nothing, so only times are shown. Stock Transformers "
        "answers the same questions with the same model.",
    )
    picture = stage.out / "pictures" / "large.png"
    Scene(random.Random(1), (_SIDE, _SIDE)).draw().save(picture)
    stage.made.append(picture)
    with ks.wrap(model, processor, store="") as vlm:
        stock = StockSession(model, processor)
        # The first calls of a process have other costs.
        _conversation(vlm.session(), stock, picture, _QUESTIONS[:2])
        runs = []
        for _ in range(_RUNS):
            vlm.clear()
            runs.append(_conversation(vlm.session(), stock, picture, _QUESTIONS))
    _show(stage, runs)


Times = tuple[int, int, float, float]  # tokens, reused tokens, milliseconds, milliseconds of stock


def _conversation(
    session: Session, stock: StockSession, picture: Path, questions: Sequence[str]
) -> list[Times]:
    turns: list[Times] = []
    messages: list[Message] = []
    for number, text in enumerate(questions):
        new = [picture] if number == 0 else []
        reply, first = timed(session, text, new, max_new_tokens=_TOKENS)
        messages.append(question(text, new))
        stock_ms = stock.first_token_ms(messages)
        messages.append(answer(reply.text))
        usage = reply.usage
        turns.append((usage.prompt_tokens, usage.cached_tokens, first, stock_ms))
    return turns


def _show(stage: Stage, runs: list[list[Times]]) -> None:
    names = ("prompt", "reused", "first token", "stock", "times sooner")
    title = f"means of {_RUNS} runs; time is until the first token"
    shown = table("turn", *names, right=names, title=title)
    ratios = []
    for number, turns in enumerate(zip(*runs, strict=True), 1):
        prompt, reused = turns[0][:2]
        mine, stocks = (statistics.fmean(turn[i] for turn in turns) for i in (2, 3))
        ratios.append(stocks / mine)
        times = (f"{mine:.0f} ms", f"{stocks:.0f} ms", f"{stocks / mine:.1f}x")
        shown.add_row(*map(str, (number, prompt, reused)), *times)
    stage.show(shown)
    later = statistics.median(ratios[1:])
    stage.say(f"The first turn has nothing to remember; later ones start {later:.1f} times sooner.")
    about = (
        "From here on two tiny trained models answer, which know what they say: look at their "
        "words and tokens. With models so small and pictures of 128 pixels, times say little."
    )
    stage.explain(about)
