"""All questions about the small world of `keepsight.demo.scene`, and conversations made of them."""

import random
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from keepsight.demo.scene import Scene, difference

Message: TypeAlias = "tuple[str, list[str | Scene]]"

# How often each kind of question is asked; a kind named twice is asked twice as often.
KINDS = (
    "describe",
    "describe",
    "color",
    "shape",
    "where",
    "background",
    "size",
    "count",
    "compare",
    "compare",
    "which",
    "list",
)

SMALL_TALK = (
    ("Hello!", "Hello! Show me a picture."),
    ("Hi", "Hello! Show me a picture."),
    ("What can you do?", "I can see shapes and answer questions about them."),
    ("Who are you?", "I am a tiny demo model that sees shapes."),
    ("How many pictures have you seen?", "0."),
)


def question(
    rng: random.Random,
    scenes: Sequence[Scene],
    new: int = 0,
    kinds: Sequence[str] = KINDS,
) -> tuple[str, str]:
    """Ask about the pictures seen so far: a question and its one right answer.

    ``new`` is the number of pictures that came with this turn; no question depends on it today.
    ``kinds`` says which kinds of question may come and how often.
    """
    if not scenes:
        return rng.choice(SMALL_TALK)
    kind = rng.choice(kinds)
    if kind == "compare" and len(scenes) < 2:
        kind = "describe"
    if kind == "count":
        return _count(rng, scenes)
    if kind == "compare":
        return _compare(rng, scenes)
    if kind == "which":
        return _which(rng, scenes)
    if kind == "list":
        names = (f"{number}: {scene.name}." for number, scene in enumerate(scenes, 1))
        return "List the pictures.", " ".join(names)
    return _about_one(rng, scenes, kind)


def comparison(i: int, j: int, a: Scene, b: Scene) -> tuple[str, str]:
    """Ask to compare two pictures, given with their places in the conversation."""
    both = f"Picture {i + 1} shows a {a.name}, picture {j + 1} shows a {b.name}."
    return f"Compare picture {i + 1} and picture {j + 1}.", f"{both} {difference(a, b)}"


def which(color: str, shape: str, scenes: Sequence[Scene]) -> tuple[str, str]:
    """Ask which of the pictures shows a shape of a colour."""
    name = f"{color} {shape}"
    hits = [str(k) for k, scene in enumerate(scenes, 1) if scene.name == name]
    if not hits:
        answer = "None of them."
    elif len(hits) == 1:
        answer = f"Picture {hits[0]}."
    else:
        answer = f"Pictures {' and '.join(hits)}."
    return f"Which picture shows a {name}?", answer


def conversation(
    rng: random.Random,
    max_images: int = 6,
    size: tuple[int, int] | None = None,
) -> list[Message]:
    """Make up a chat: messages with a role and contents, in which pictures are ``Scene``
    objects."""
    messages: list[Message] = []
    scenes: list[Scene] = []
    if rng.random() < 0.1:
        text, answer = question(rng, [])
        messages += [("user", [text]), ("assistant", [answer])]
    for _ in range(rng.randint(1, 4)):
        wanted = rng.choice([0, 1, 1, 1, 2, 3]) if scenes else rng.choice([1, 1, 2, 2, 3])
        fresh = list(more_scenes(rng, scenes, min(max_images - len(scenes), wanted), size))
        scenes += fresh
        asked = question(rng, scenes, len(fresh))
        messages += turn(rng, fresh, asked)
    return messages


def more_scenes(
    rng: random.Random,
    seen: Sequence[Scene],
    count: int,
    size: tuple[int, int] | None = None,
) -> Iterator[Scene]:
    """Draw new scenes, some of them similar to earlier ones.

    Otherwise two pictures would nearly always differ in both colour and shape, and could be
    compared without looking at either.
    """
    known = list(seen)
    for _ in range(count):
        scene = Scene(rng, size)
        if known and rng.random() < 0.35:
            twin = rng.choice(known)
            share = rng.random()
            if share < 0.7:
                scene.color = twin.color
            if share > 0.3:
                scene.shape = twin.shape
        known.append(scene)
        yield scene


def turn(rng: random.Random, fresh: Sequence[Scene], asked: tuple[str, str]) -> list[Message]:
    """One question with new pictures before it, or sometimes after it, and its answer."""
    text, answer = asked
    content: list[str | Scene] = [*fresh, text] if rng.random() < 0.85 else [text, *fresh]
    return [("user", content), ("assistant", [answer])]


def _pick(rng: random.Random, scenes: Sequence[Scene]) -> tuple[Scene, str]:
    """Choose a picture and one of the ways to refer to it; the newest is chosen most often."""
    last = len(scenes) - 1
    index = rng.randrange(len(scenes)) if rng.random() < 0.6 else last
    names = [f"picture {index + 1}"]
    if last == 0:
        names += ["the picture", "the picture", "this image", "the image"]
    elif index == last:
        names += ["the last picture", "the new picture"]
    elif index == 0:
        names += ["the first picture"]
    return scenes[index], rng.choice(names)


def _about_one(rng: random.Random, scenes: Sequence[Scene], kind: str) -> tuple[str, str]:
    scene, it = _pick(rng, scenes)
    if kind == "background":
        return f"What is the background of {it}?", _sentence(scene.background)
    if kind == "size":
        return f"How big is the shape in {it}?", _sentence(scene.scale)
    texts, answer = {
        "describe": (
            ("Describe {}.", "What is in {}?", "What do you see in {}?", "Describe {}"),
            scene.describe(),
        ),
        "color": (
            ("What color is the shape in {}?", "Which color is in {}?"),
            _sentence(scene.color),
        ),
        "shape": (("What shape is in {}?", "Which shape is in {}?"), f"A {scene.shape}."),
        "where": (("Where is the shape in {}?", "Where is it in {}?"), _sentence(scene.place)),
    }[kind]
    return rng.choice(texts).format(it), answer


def _count(rng: random.Random, scenes: Sequence[Scene]) -> tuple[str, str]:
    texts = (
        "How many pictures have you seen?",
        "How many pictures are there?",
        "How many images are there?",
    )
    return rng.choice(texts), f"{len(scenes)}."


def _compare(rng: random.Random, scenes: Sequence[Scene]) -> tuple[str, str]:
    if len(scenes) == 2 and rng.random() < 0.6:
        texts = (
            "Compare the pictures.",
            "Compare the images.",
            "Compare the two pictures.",
            "What is different between the pictures?",
        )
        return rng.choice(texts), comparison(0, 1, *scenes)[1]
    i, j = sorted(rng.sample(range(len(scenes)), 2))
    return comparison(i, j, scenes[i], scenes[j])


def _which(rng: random.Random, scenes: Sequence[Scene]) -> tuple[str, str]:
    target = rng.choice(scenes) if rng.random() < 0.8 else Scene(rng)
    return which(target.color, target.shape, scenes)


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."
