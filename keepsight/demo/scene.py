"""A small world of one-shape pictures, which is all that the demo models know.

It is small on purpose: every question has exactly one right answer, so a test can check a memory by
comparing strings. The questions on which the models were trained are in `demo/questions.py`.
"""

import math
import random
from collections.abc import Iterator
from typing import TypeAlias

from PIL import Image, ImageDraw

Color: TypeAlias = tuple[int, int, int]

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
