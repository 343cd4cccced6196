"""A small world of one-shape pictures, and all questions about them.

The demo models know only this world. It is small on purpose: every question has exactly one right
answer, so a test can check a memory by comparing strings.
"""

import math
import random
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from PIL import Image, ImageDraw

Color: TypeAlias = tuple[int, int, int]
Message: TypeAlias = "tuple[str, list[str | Scene]]"

COLORS: dict[str, Color] = {
    "red": (214, 39, 40),
    "green": (44, 150, 60),
    "blue": (31, 90, 200),
    "yellow": (240, 210, 40),
    "orange": (255, 127, 14),
    "purple": (130, 60, 190),
    "cyan": (40, 200, 220),
    "pink": (240, 130, 190),
}
BACKGROUNDS: dict[str, Color] = {
    "white": (250, 250, 250),
    "black": (12, 12, 12),
    "gray": (128, 128, 128),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
SCALES = ("small", "large")
ROWS = ("top", "middle", "bottom")
COLS = ("left", "center", "right")
SIDES = (96, 128)

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

_CENTERS = (0.2, 0.5, 0.8)
_SUPERSAMPLE = 3


class Scene:
    """One picture: a shape of one colour and size at one place on a plain background.

    ``Scene(rng)`` draws every attribute at random; ``Scene.of(color="red", ...)`` chooses some.
    """

    def __init__(self, rng: random.Random, size: tuple[int, int] | None = None) -> None:
        self.grain = rng.random()
        self.color = rng.choice(list(COLORS))
        self.shape = rng.choice(SHAPES)
        self.scale = rng.choice(SCALES)
        self.background = rng.choice(list(BACKGROUNDS))
        self.row = rng.choice(ROWS)
        self.col = rng.choice(COLS)
        self.width, self.height = size or (rng.choice(SIDES), rng.choice(SIDES))

    @classmethod
    def of(
        cls,
        *,
        color: str | None = None,
        shape: str | None = None,
        scale: str | None = None,
        background: str | None = None,
        row: str | None = None,
        col: str | None = None,
        size: tuple[int, int] | None = None,
        seed: int = 0,
    ) -> "Scene":
        """Build a scene with the attributes given; the rest come from ``seed``.

        ``seed`` also sets the slight jitter of shade and place, so that two scenes with the same
        attributes and different seeds are different pictures of the same thing.
        """
        scene = cls(random.Random(seed), size)
        chosen = {
            "color": (color, tuple(COLORS)),
            "shape": (shape, SHAPES),
            "scale": (scale, SCALES),
            "background": (background, tuple(BACKGROUNDS)),
            "row": (row, ROWS),
            "col": (col, COLS),
        }
        for field, (value, allowed) in chosen.items():
            if value is None:
                continue
            if value not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(allowed)}, not {value!r}")
            setattr(scene, field, value)
        return scene

    def __repr__(self) -> str:
        return f"<Scene {self.width}x{self.height}: {self.describe()}>"

    @property
    def name(self) -> str:
        """The colour and the shape: what the model calls the picture."""
        return f"{self.color} {self.shape}"

    @property
    def place(self) -> str:
        """Where the shape is, in the model's words."""
        return place(self.row, self.col)

    def describe(self) -> str:
        """Everything about the picture, in one sentence."""
        return f"A {self.scale} {self.name} {self.place} on a {self.background} background."

    def draw(self) -> Image.Image:
        """Paint the scene. The same scene always gives the same pixels."""
        rng = random.Random(self.grain)
        # Painted large and shrunk at the end, which gives smooth edges.
        width, height = self.width * _SUPERSAMPLE, self.height * _SUPERSAMPLE
        image = Image.new("RGB", (width, height), _jitter(rng, BACKGROUNDS[self.background], 6))
        fill = _jitter(rng, COLORS[self.color], 14)
        low, high = (0.11, 0.13) if self.scale == "small" else (0.18, 0.2)
        radius = min(width, height) * rng.uniform(low, high)
        x = width * _CENTERS[COLS.index(self.col)] + rng.uniform(-0.02, 0.02) * width
        y = height * _CENTERS[ROWS.index(self.row)] + rng.uniform(-0.02, 0.02) * height
        _paint(ImageDraw.Draw(image), self.shape, x, y, radius, fill)
        return image.resize((self.width, self.height), Image.Resampling.BOX)


def place(row: str, col: str) -> str:
    """Name a row and a column as people do: "in the center", "at the top left"."""
    if row == "middle":
        return "in the center" if col == "center" else f"on the {col}"
    return f"at the {row}" if col == "center" else f"at the {row} {col}"


def difference(a: Scene, b: Scene) -> str:
    """Name the difference of two scenes in colour and shape."""
    if a.name == b.name:
        return "They show the same thing."
    if a.shape == b.shape:
        return "Only the color differs."
    if a.color == b.color:
        return "Only the shape differs."
    return "The color and the shape differ."


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


def _jitter(rng: random.Random, color: Color, reach: int) -> Color:
    red, green, blue = (max(0, min(255, v + rng.randint(-reach, reach))) for v in color)
    return red, green, blue


def _paint(
    draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, fill: Color
) -> None:
    box = (x - r, y - r, x + r, y + r)
    if shape == "circle":
        draw.ellipse(box, fill=fill)
    elif shape == "ring":
        draw.ellipse(box, outline=fill, width=max(2, int(r * 0.38)))
    elif shape == "square":
        half = r * 0.9
        draw.rectangle((x - half, y - half, x + half, y + half), fill=fill)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x + r, y + r * 0.85), (x - r, y + r * 0.85)], fill=fill)
    elif shape == "cross":
        arm = r * 0.36
        draw.rectangle((x - arm, y - r, x + arm, y + r), fill=fill)
        draw.rectangle((x - r, y - arm, x + r, y + arm), fill=fill)
    else:
        draw.polygon(list(_star(x, y, r)), fill=fill)


def _star(x: float, y: float, r: float) -> Iterator[tuple[float, float]]:
    for tip in range(10):
        angle = -math.pi / 2 + tip * math.pi / 5
        reach = r * (1.1 if tip % 2 == 0 else 0.46)
        yield x + reach * math.cos(angle), y + reach * math.sin(angle)


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
