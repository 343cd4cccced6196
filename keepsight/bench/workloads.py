"""The measured conversations: what people do with pictures, without randomness.

Pictures are noise in blocks, written as PNG files as users have them. Replies in a history are
written here, not generated, so that every contestant, dtype and repetition sees the same prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from keepsight.bench.options import Scale
from keepsight.kinds import Message

_TEXT = (
    "the page shows a table with names and values in the upper left part next to a small red "
    "button that opens another list of files where each row has a date an owner and a size"
)


class Pictures:
    """A folder of pictures, each made when first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, seed: int, width: int, height: int) -> str:
        """The file of one picture; each seed is another picture."""
        path = self._folder / f"{seed}-{width}x{height}.png"
        if not path.exists():
            rng = np.random.default_rng(seed)
            blocks = rng.integers(0, 256, (height // 32, width // 32, 3), dtype=np.uint8)
            image = Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC)
            image.save(path)
        return str(path)


@dataclass(frozen=True)
class Step:
    """One prompt of a workload."""

    name: str
    messages: list[Message]


@dataclass(frozen=True)
class Workload:
    """A series of prompts, run in order on one memory."""

    name: str
    about: str
    steps: list[Step]
    repetitions: int


def words(seed: int, count: int) -> str:
    """A text of `count` words; different seeds give texts that differ from the first word."""
    rng = np.random.default_rng(seed)
    return f"{seed} " + " ".join(rng.choice(_TEXT.split(), count - 1))


def user(text: str, *images: str, before: str = "") -> Message:
    """A user's message: an opening, pictures, and the text."""
    opening: list[Message] = [{"type": "text", "text": before}] if before else []
    parts: list[Message] = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*opening, *parts, {"type": "text", "text": text}]}


def assistant(text: str) -> Message:
    """A reply in a history."""
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def workloads(names: list[str], pictures: Pictures, scale: Scale) -> Iterator[Workload]:
    """The workloads of these names, in order; a large W1 follows the usual one."""
    for name in names:
        if name in _MAKERS:
            yield _MAKERS[name](pictures, scale)
        if name == "W1" and scale.large is not None:
            turns = min(scale.turns, 3)
            large = replace(
                scale, picture=scale.large, turns=turns, repetitions=scale.fewer, large=None
            )
            yield replace(_chat(pictures, large), name="W1 large")


def _chat(pictures: Pictures, scale: Scale) -> Workload:
    history: list[Message] = []
    steps = []
    for turn in range(scale.turns):
        images = [] if turn else [pictures.path(100, *scale.picture)]
        history = [*history, user(words(turn, scale.question), *images)]
        steps.append(Step(f"turn {turn + 1}", history))
        history = [*history, assistant(words(50 + turn, scale.answer))]
    return Workload("W1", f"chat on one image of {_size(scale)}", steps, scale.repetitions)


def _size(scale: Scale) -> str:
    return f"{scale.picture[0]}x{scale.picture[1]}"


def _pages(pictures: Pictures, scale: Scale) -> Workload:
    """Each request has other pages in another order; most were seen before."""
    rng = np.random.default_rng(4)
    shelf = 2 * scale.pages
    steps = []
    for turn in range(scale.requests):
        chosen = rng.permutation(shelf)[: scale.pages]
        images = [pictures.path(400 + int(page), *scale.page) for page in chosen]
        steps.append(Step(f"request {turn + 1}", [user(words(turn, scale.question), *images)]))
    about = f"{scale.pages} of {shelf} pages of {scale.page[0]}x{scale.page[1]}, order changes"
    return Workload("W4", about, steps, scale.fewer)


def _agent(pictures: Pictures, scale: Scale) -> Workload:
    history: list[Message] = [{"role": "system", "content": words(7, scale.system)}]
    steps = []
    for turn in range(scale.requests):
        shot = pictures.path(500 + turn, *scale.picture)
        history = [*history, user(words(turn, 2 * scale.question), shot)]
        steps.append(Step(f"step {turn + 1}", history))
        history = [*history, assistant(words(50 + turn, scale.answer))]
    about = f"agent, one more screenshot of {_size(scale)} a step"
    return Workload("W5", about, steps, scale.fewer)


def _references(pictures: Pictures, scale: Scale) -> Workload:
    fixed = [pictures.path(700 + i, *scale.picture) for i in range(scale.references)]
    steps = []
    for turn in range(scale.requests):
        new = pictures.path(750 + turn, *scale.picture)
        steps.append(Step(f"request {turn + 1}", [user(words(turn, scale.question), *fixed, new)]))
    about = f"{scale.references} fixed images and a new one of {_size(scale)}"
    return Workload("W7", about, steps, scale.fewer)


def peers(pictures: Pictures, scale: Scale) -> Workload:
    """The conversation with which other engines are measured too (`bench/`)."""
    one, two, three, four, five = (pictures.path(i, scale.peers, scale.peers) for i in range(5))
    said = "The first image is a pattern of coloured squares and the second one is another pattern."
    first = [user("Describe both images in detail, then compare the colours of the two.", one, two)]
    second = [*first, assistant(said), user("Which of the two images is brighter, and why?")]
    third = [
        *second,
        assistant("The second image is brighter in the upper half."),
        user("And how does this third image compare with them?", three),
    ]
    asked = "Tell me what they show."
    other = [user(asked, one, two, before="You are looking at a new page of an album.")]
    never = [user(asked, four, five, before="Please consider the next two pictures here.")]
    prompts = {"T1": first, "T1r": first, "T2": second, "T3": third, "X": other, "C": never}
    about = (
        "two new images, the same again, a text turn, a third image, another opening, new images"
    )
    steps = [Step(name, prompt) for name, prompt in prompts.items()]
    return Workload("peers", about, steps, scale.repetitions)


_MAKERS = {"W1": _chat, "W4": _pages, "W5": _agent, "W7": _references, "peers": peers}
