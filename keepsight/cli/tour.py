"""`keepsight demo`: five short acts in which a model remembers pictures. Nothing printed is canned.

Every answer, time and exception comes from running the model, beside stock Transformers on the same
model object. One thread is used throughout: the models are tiny, and other load on the machine then
disturbs both sides least.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from rich.console import Console
from rich.text import Text
from transformers import logging

import keepsight as ks
from keepsight.cli import show
from keepsight.cli.terminal import table
from keepsight.cli.tour_speaking import speaking
from keepsight.cli.tour_stage import Stage, TurnTimes, scenes_of, script, timed
from keepsight.cli.tour_stock import (
    TOKENS,
    Outcome,
    StockReply,
    StockSession,
    answer,
    judge,
    question,
)
from keepsight.errors import KeepsightError
from keepsight.kinds import Message
from keepsight.store import DiskStore
from keepsight.system.places import expanded
from keepsight.system.units import bytes_text

if TYPE_CHECKING:
    from keepsight.vlm import VLM


def run(console: Console, out: Path, seed: int = 1, save: Path | None = None) -> None:
    """Run the tour; `save`: the page to write."""
    began = time.perf_counter()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with _one_thread():
        stage = Stage(console, _own_folder(expanded(out)), scenes_of(seed))
        stage.draw()
        _opening(stage)
        speaking(stage)
        with ks.load("demo", dtype="float32", store="") as vlm:
            stock = StockSession(vlm.model, vlm.runtime.needed_processor())
            _conversation(stage, vlm, stock)
            _one_more_picture(stage, vlm, stock)
            _package(stage, vlm)
        _restart(stage)
    _closing(stage, time.perf_counter() - began)
    if save is not None:
        stage.save(save)
        stage.say(f"The tour as a page: {save}")


def _own_folder(out: Path) -> Path:
    """The folder itself if it is new, empty, or an earlier demo's; otherwise one in it. The tour
    writes over its pictures and clears its store."""
    made = [out / "picture-1.sight", out / "pictures" / "picture-1.png", out / "store"]
    if not out.exists() or not any(out.iterdir()) or all(path.exists() for path in made):
        return out
    return out / "demo-out"


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _opening(stage: Stage) -> None:
    stage.say("Keepsight: look once, remember.", "bold")
    versions = f"torch {torch.__version__}, Transformers {transformers.__version__}"
    stage.say(f"{platform.machine()}, one thread, float32, {versions}", "dim")
    stage.explain(
        "Nothing here is canned: every answer and every time is of a model that runs now. ✓ is "
        "right, ✗ is wrong, with Keepsight and without it alike."
    )


# -- act 2 -------------------------------------------------------------------------------------


def _conversation(stage: Stage, vlm: VLM, stock: StockSession) -> None:
    stage.act(
        "2  A conversation over several pictures",
        "Two tiny models come with the package. They were trained on pictures of one coloured "
        "shape, and what they say is what they see. They are too small for times to say much: look "
        "at words and tokens.",
    )
    session, messages = vlm.session(), list[Message]()
    for ask in script(stage.scenes):
        pictures = [stage.pictures[i] for i in ask.new]
        reply, ms = timed(session, ask.text, pictures)
        messages.append(question(ask.text, pictures))
        stock_ms = stock.first_token_ms(messages)
        heard = stock.answer(stock.inputs(messages))
        messages.append(answer(reply.text))
        stage.turn(ask, pictures, TurnTimes(reply, ms, stock_ms, heard.text))
    stage.made.append(session.save(stage.out / "conversation.keep"))


# -- act 3 -------------------------------------------------------------------------------------


def _one_more_picture(stage: Stage, vlm: VLM, stock: StockSession) -> None:
    stage.act(
        "3  Picture 1 is remembered, picture 2 is new",
        "The same question to Keepsight with its memory, and to stock `generate` with the "
        "past_key_values of the first prompt, in every obvious way. Right means: the words and the "
        "logits of computing everything afresh.",
    )
    vlm.clear()
    first = [question("Describe the picture.", stage.pictures[:1])]
    printed = answer(vlm.chat(first).text)
    second = [*first, printed, question("Compare the pictures.", stage.pictures[1:2])]
    fresh = stock.answer(stock.inputs(second))
    stage.verdict("stock, no cache", fresh.text, "everything computed afresh", True)
    _keepsight(stage, vlm, stock, second, fresh)
    for outcome in stock.attempts(first, second):
        _attempt(stage, outcome)
    stage.say("\nTwo conversations in turn: another one about three pictures, then back to this.")
    between = [question("List the pictures.", stage.pictures[1:])]
    third = [*first, printed, question("Where is the shape in the picture?")]
    fresh = stock.answer(stock.inputs(third))
    vlm.chat(between)
    _keepsight(stage, vlm, stock, third, fresh)
    _attempt(stage, stock.interrupted(first, third, between))


def _keepsight(
    stage: Stage, vlm: VLM, stock: StockSession, messages: list[Message], fresh: StockReply
) -> None:
    """Keepsight's answer to the tensors that stock was given."""
    output = vlm.generate(
        **stock.inputs(messages),
        max_new_tokens=TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    length = output.usage.prompt_tokens
    text = stock.text(output.sequences[0, length:])
    verdict, right = judge(text, (output.logits or ())[0], fresh)
    reused = f"{output.usage.cached_tokens} of {length} tokens reused"
    stage.verdict("Keepsight", text, f"{verdict}, {reused}", right)


def _attempt(stage: Stage, outcome: Outcome) -> None:
    who = f"stock with past_key_values and {outcome.attempt}"
    stage.verdict(who, outcome.text, outcome.verdict, outcome.right)


# -- acts 4 and 5 ------------------------------------------------------------------------------


def _package(stage: Stage, vlm: VLM) -> None:
    package = vlm.encode(stage.pictures[0])
    path = package.save(stage.out / "picture-1.sight")
    stage.made.append(path)
    stage.act(
        "4  A package", f"What the model saw in one picture, as a file: keepsight show {path}"
    )
    stage.show(show.render(show.describe(path)))


def _restart(stage: Stage) -> None:
    stage.act(
        "5  A restart",
        "The other model (demo-hybrid: Qwen3.5, linear attention) answers here, remembers in a "
        "store, and is closed. Then a new process asks something else about the same pictures.",
    )
    folder = stage.out / "store"
    DiskStore(folder).clear()  # packages of an earlier demo would make the first answer warm
    pictures = stage.pictures[:2]
    later = f"Which picture shows a {stage.scenes[1].name}?"
    with ks.load("demo-hybrid", dtype="float32", store=folder) as vlm:
        asked = script(stage.scenes)[0]
        stage.show_pictures(pictures)
        stage.exchange(asked.text, vlm.ask(pictures, asked.text), asked.truth)
        vlm.flush()
        stock = StockSession(vlm.model, vlm.runtime.needed_processor())
        fresh = stock.answer(stock.inputs([question(later, pictures)]))
    kept = bytes_text(DiskStore(folder).stats()["bytes"])
    stage.say(f"{kept} in {folder}\n", "dim")
    words = ["ask", *map(str, pictures), later, "--model", "demo-hybrid"]
    words += ["--dtype", "float32", "--store", str(folder), "--report"]
    printed = _new_process(stage, words)
    same = printed.partition("\n")[0].strip() == fresh.text
    verdict = "the same words as" if same else f"OTHER words than ({fresh.text})"
    stage.say(f"{verdict} stock Transformers, computing everything afresh", "dim")


def _new_process(stage: Stage, words: list[str]) -> str:
    """The output of a second interpreter, which shares only the folder with this one."""
    quoted = " ".join(f'"{word}"' if " " in word else word for word in words)
    stage.say(f"$ OMP_NUM_THREADS=1 keepsight {quoted}", "bold")
    start = time.perf_counter()
    environment = dict(os.environ, OMP_NUM_THREADS="1", COLUMNS=str(stage.console.width))
    if stage.console.is_terminal:
        environment["FORCE_COLOR"] = "1"
    command = [sys.executable, "-m", "keepsight", *words]
    child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    seconds = time.perf_counter() - start
    if child.returncode:
        raise KeepsightError(f"the new process failed: {child.stderr.strip()[-600:]}")
    printed = Text.from_ansi(child.stdout.rstrip())
    stage.show(printed)
    stage.say(f"(a process of its own, {seconds:.1f} s, importing torch included)", "dim")
    return printed.plain


def _closing(stage: Stage, seconds: float) -> None:
    stage.act(f"That was it, in {seconds:.0f} seconds", "What was made on the way:")
    shown = table("file", "size", right=("size",))
    for path in stage.made:
        shown.add_row(str(path), bytes_text(path.stat().st_size))
    store = DiskStore(stage.out / "store").stats()
    shown.add_row(f"{store['root']} (a store)", bytes_text(store["bytes"]))
    stage.show(shown)
    stage.say(f"\nGo on: keepsight chat --image {stage.pictures[0]}")
