"""`keepsight demo`: five short acts in which a model remembers pictures. Nothing printed is canned.

Every answer, time and exception comes from running the model, beside stock Transformers on the same
model object. One thread is used throughout: the models are tiny, and other load on the machine then
disturbs both sides least. All that is printed is recorded too, by a console of `rich` that makes a
page of it.
"""

from __future__ import annotations

import io
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import transformers
from PIL import Image
from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

import keepsight as ks
from keepsight.cli import show
from keepsight.cli.terminal import hush, plain, share_bar, table, thumbnail
from keepsight.cli.tour_stock import TOKENS, StockSession, answer, judge, question
from keepsight.demo.scene import COLORS, SHAPES, Scene, difference
from keepsight.errors import KeepsightError, MissingExtra, StoreError
from keepsight.kinds import Message
from keepsight.models import demo_smol
from keepsight.questions.decide import Decisions
from keepsight.report import Reply
from keepsight.store import DiskStore
from keepsight.system.places import expanded
from keepsight.system.units import bytes_text

if TYPE_CHECKING:
    from keepsight.session import Session
    from keepsight.vlm import VLM

_PICTURES = 4
_INDENT = " " * 7
_BAR = 18  # columns; together with the text beside it at most 80
_SIDE = 448  # pixels of the large pictures
_FORM = {
    "type": "object",
    "properties": {"color": {"enum": list(COLORS)}, "shape": {"enum": list(SHAPES)}},
    "required": ["color", "shape"],
}


def run(console: Console, out: Path, seed: int = 1, save: Path | None = None) -> None:
    """Run the tour; `save`: the page to write."""
    began, threads = time.perf_counter(), torch.get_num_threads()
    hush()
    torch.set_num_threads(1)
    try:
        stage = Stage(console, _own_folder(expanded(out)), scenes_of(seed))
        stage.draw()
        stage.say("Keepsight: look once, remember.", "bold")
        versions = f"torch {torch.__version__}, Transformers {transformers.__version__}"
        stage.say(f"{platform.machine()}, one thread, float32, {versions}", "dim")
        stage.explain(
            "Nothing here is canned: every answer and every time is of a model that runs now. ✓ is "
            "right, ✗ is wrong, with Keepsight and without it alike."
        )
        speaking(stage)
        with ks.load("demo", dtype="float32", store="") as vlm:
            stock = StockSession(vlm.model, vlm.runtime.needed_processor())
            _conversation(stage, vlm, stock)
            _one_more_picture(stage, vlm, stock)
            _package(stage, vlm)
        _restart(stage)
    finally:
        torch.set_num_threads(threads)
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


# -- the stage ---------------------------------------------------------------------------------


class Ask(NamedTuple):
    """One turn of a script: the question, its new pictures, and what a right answer says."""

    text: str
    new: tuple[int, ...]
    truth: str


def scenes_of(seed: int) -> list[Scene]:
    """Pictures that all show different things, so that every question has one answer."""
    rng = random.Random(seed)
    scenes = dict[str, Scene]()
    while len(scenes) < _PICTURES:
        scene = Scene(rng)
        scenes.setdefault(scene.name, scene)
    return list(scenes.values())


def script(scenes: Sequence[Scene]) -> list[Ask]:
    """A conversation about the pictures, with the right answers from the scenes."""
    a, b = scenes[0], scenes[1]
    both = f"Picture 1 shows a {a.name}, picture 2 shows a {b.name}. {difference(a, b)}"
    listed = " ".join(f"{i}: {scene.name}." for i, scene in enumerate(scenes, 1))
    return [
        Ask("Compare the pictures.", (0, 1), both),
        Ask("What color is the shape in picture 1?", (), f"{a.color.capitalize()}."),
        Ask("List the pictures.", (2, 3), listed),
        Ask(f"Which picture shows a {scenes[2].name}?", (), "Picture 3."),
        Ask("Where is the shape in picture 2?", (), f"{b.place[0].upper()}{b.place[1:]}."),
    ]


@dataclass
class Stage:
    """Where to print, the folder for files, and the pictures of this run."""

    console: Console
    out: Path
    scenes: list[Scene]
    pictures: list[Path] = field(default_factory=list)
    made: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        colours: Any = {"force_terminal": True, "color_system": "truecolor", "width": 100}
        self.recorder = Console(record=True, file=io.StringIO(), legacy_windows=False, **colours)

    def draw(self) -> None:
        """Write the pictures to files."""
        self.pictures = [self.drawn(f"picture-{n}", s) for n, s in enumerate(self.scenes, 1)]

    def drawn(self, name: str, scene: Scene) -> Path:
        """The file of one picture."""
        path = self.out / "pictures" / f"{name}.png"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scene.draw().save(path)
        except OSError as error:
            why = error.strerror or error
            raise StoreError(f"{path.parent} cannot be written: {why}") from error
        self.made.append(path)
        return path

    def show(self, shown: RenderableType = "", soft_wrap: bool = False) -> None:
        """Print something, and record it."""
        for console in (self.console, self.recorder):
            console.print(shown, soft_wrap=soft_wrap and console is self.console)

    def say(self, text: str = "", style: str = "") -> None:
        """One line."""
        self.show(Text(plain(text), style), soft_wrap=True)

    def explain(self, text: str) -> None:
        """A paragraph, wrapped between words."""
        self.show(Text(text, "dim"))

    def act(self, title: str, about: str) -> None:
        """The heading of an act."""
        self.show()
        self.show(Rule(Text(title, "bold"), align="left"))
        self.explain(about)
        self.show()

    def exchange(self, asked: str, reply: Reply, truth: str) -> None:
        """Print a question and its answer, with what was reused."""
        right = truth.lower() in reply.text.lower()
        mark, style = ("✓ ", "green") if right else ("✗ ", "red")
        wrong = "" if right else f"  (it is: {truth})"
        self.show(Text.assemble(("you    ", "bold cyan"), asked))
        self.show(
            Text.assemble(
                ("model  ", "bold magenta"), (mark, style), plain(reply.text), (wrong, "red")
            )
        )
        cached, prompt, usage = reply.report.cached_tokens, reply.report.prompt_tokens, reply.usage
        reused = f" {cached} of {prompt} tokens reused"
        if usage.images:
            reused += f", {usage.images_encoded} of {usage.images} pictures looked at"
        self.show(Text.assemble(_INDENT, share_bar(cached, prompt, _BAR), reused))

    def talk(
        self, vlm: VLM, stock: StockSession, asks: list[Ask], pictures: list[Path]
    ) -> tuple[Session, list[float]]:
        """A conversation beside stock; how many times sooner turns without new pictures began."""
        session, messages, sooner = vlm.session(), list[Message](), list[float]()
        for ask in asks:
            new = [pictures[i] for i in ask.new]
            start, first, pieces = time.perf_counter(), 0.0, []
            for piece in session.stream(ask.text, new or None):
                first = first or 1e3 * (time.perf_counter() - start)
                pieces.append(piece)
            reply = Reply.of(pieces)
            messages.append(question(ask.text, new))
            stock_ms = stock.first_token_ms(messages)
            heard = stock.answer(stock.inputs(messages)).text
            messages.append(answer(reply.text))
            if new:
                self.show_pictures(new)
            else:
                sooner.append(stock_ms / first)
            self.exchange(ask.text, reply, ask.truth)
            same = "the same words" if reply.text.strip() == heard else f"OTHER words: {heard}"
            times = f"first token after {first:.0f} ms; stock {stock_ms:.0f} ms"
            self.say(f"{_INDENT}{times}, {same}\n", "dim")
        return session, sooner

    def show_pictures(self, paths: Sequence[Path]) -> None:
        """Small pictures where there are colours; their names in any case."""
        images = [Image.open(path) for path in paths]
        row = Table.grid(padding=(0, 3))
        row.add_row(" " * 4, *map(thumbnail, images))
        for console in (self.console, self.recorder):
            if console.color_system is not None:
                console.print(row)
        for path, image in zip(paths, images, strict=True):
            self.say(f"{_INDENT}{path.name}, {image.width}x{image.height}", "dim")

    def verdict(self, who: str, text: str, verdict: str, right: bool) -> None:
        """Who answered, how that compares with the truth, and the answer."""
        mark, style = ("✓ ", "green") if right else ("✗ ", "red")
        self.show(Text.assemble((mark, style), (who, "bold"), ": ", (verdict, style)))
        self.show(Text(f"     {plain(text)}"))

    def save(self, path: Path) -> None:
        """Write what was printed as one page, without scripts and without network."""
        try:
            expanded(path).write_text(self.recorder.export_html(), encoding="utf-8")
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


# -- the acts ----------------------------------------------------------------------------------


def speaking(stage: Stage) -> None:
    """A trained model, whose weights are a package of their own; without it the act says so."""
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
    names = ("color", "shape", "background", "row", "col")
    a, b = stage.scenes[:2]
    pictures = [
        stage.drawn(
            f"large-{number}",
            Scene.of(**{n: getattr(s, n) for n in names}, scale="large", size=(_SIDE, _SIDE)),
        )
        for number, s in enumerate((a, b), 1)
    ]
    asks = [
        Ask("What is in the picture?", (0,), a.name),
        Ask("What color is it?", (), a.color),
        Ask(f"Which picture shows a {b.name}?", (1,), "second picture"),
        Ask(f"Is there a {a.name} in the first picture?", (), "Yes"),
    ]
    with ks.load("demo-smol", dtype="float32", store="") as vlm:
        stock = StockSession(vlm.model, vlm.runtime.needed_processor())
        # The first calls of a process cost more.
        vlm.ask(pictures[1], "Hello!", max_new_tokens=2)
        stock.answer(stock.inputs([question("Hello!", pictures[1:])]), max_new_tokens=2)
        vlm.clear()
        _, sooner = stage.talk(vlm, stock, asks, pictures)
        stage.say(
            "The first turn has nothing to remember. Those about remembered pictures alone start "
            f"{statistics.median(sooner):.0f} times sooner than stock."
        )
        stage.say("\nDecisions: typed questions about the picture, answered by probabilities.")
        named = [scene.name for scene in stage.scenes]
        questions = {
            name: {"type": "noul", "instructions": f"Is there a {name} in the picture?"}
            for name in named
        }
        shown = {"<picture>": pictures[0]}
        found = cast(Decisions, vlm.decide("<picture>", questions, assets=shown))
        for name in named:
            stage.say(f"{_INDENT}{found[name]['noul']:6.1%}  a {name}")
        looked, reused = found.report.images_encoded, found.report.cached_tokens
        told = f"{len(named)} questions, {looked} pictures looked at, {reused} tokens reused"
        stage.say(f"{_INDENT}{told}", "dim")
        stage.say("\nAnd as JSON, which fits its schema whatever the model would like to say.")
        asked = "Which color and which shape is in the picture?"
        stage.say(f"{_INDENT}{vlm.ask(pictures[0], asked, response_format=_FORM, do_sample=False)}")


def _conversation(stage: Stage, vlm: VLM, stock: StockSession) -> None:
    stage.act(
        "2  A conversation over several pictures",
        "Two tiny models come with the package. They were trained on pictures of one coloured "
        "shape, and what they say is what they see. They are too small for times to say much: look "
        "at words and tokens.",
    )
    session, _ = stage.talk(vlm, stock, script(stage.scenes), stage.pictures)
    stage.made.append(session.save(stage.out / "conversation.keep"))


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
    fresh = stock.answer(stock.inputs(second)).text
    stage.verdict("stock, no cache", fresh, "everything computed afresh", True)
    _keepsight(stage, vlm, stock, second)
    for outcome in stock.attempts(first, second):
        stage.verdict(*outcome)
    stage.say("\nTwo conversations in turn: another one about three pictures, then back to this.")
    between = [question("List the pictures.", stage.pictures[1:])]
    third = [*first, printed, question("Where is the shape in the picture?")]
    vlm.chat(between)
    _keepsight(stage, vlm, stock, third)
    stage.verdict(*stock.interrupted(first, third, between))


def _keepsight(stage: Stage, vlm: VLM, stock: StockSession, messages: list[Message]) -> None:
    """Keepsight's answer to the tensors that stock was given, beside a fresh one of stock."""
    inputs = stock.inputs(messages)
    fresh = stock.answer(inputs)
    output = vlm.generate(
        **inputs, max_new_tokens=TOKENS, return_dict_in_generate=True, output_logits=True
    )
    length = output.usage.prompt_tokens
    text = stock.text(output.sequences[0, length:])
    verdict, right = judge(text, (output.logits or ())[0], fresh)
    reused = f"{output.usage.cached_tokens} of {length} tokens reused"
    stage.verdict("Keepsight", text, f"{verdict}, {reused}", right)


def _package(stage: Stage, vlm: VLM) -> None:
    path = vlm.encode(stage.pictures[0]).save(stage.out / "picture-1.sight")
    stage.made.append(path)
    about = f"What the model saw in one picture, as a file: keepsight show {path}"
    stage.act("4  A package", about)
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
    store = DiskStore(stage.out / "store").stats()
    rows = [(str(path), bytes_text(path.stat().st_size)) for path in stage.made]
    rows.append((f"{store['root']} (a store)", bytes_text(store["bytes"])))
    stage.show(table("file", "size", right=("size",), rows=rows))
    stage.say(f"\nGo on: keepsight chat --image {stage.pictures[0]}")
