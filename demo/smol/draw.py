# ruff: noqa: E501  lists of phrases
"""Pictures drawn on the fly, with everything that is true of them.

A picture is 448 x 448. What is in it is a list of `Item`s in reading order; the questions in
`ask.py` are about these. The maps name what stands in each patch of 16 x 16 pixels: the vision
encoder learns from them before it ever meets a language model.
"""

import colorsys
import dataclasses
import functools
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 448
PATCH = 16
GRID = SIDE // PATCH

SHAPES = (
    "circle", "square", "triangle", "rectangle", "oval", "star",
    "diamond", "pentagon", "hexagon", "heart", "cross", "ring",
)  # fmt: skip
COLORS: dict[str, list[tuple[int, int, int]]] = {
    "red": [(255, 0, 0), (220, 20, 30), (200, 30, 40), (229, 57, 53), (215, 38, 61)],
    "orange": [(255, 165, 0), (255, 140, 0), (245, 130, 32), (251, 140, 0)],
    "yellow": [(255, 255, 0), (255, 230, 0), (250, 215, 40), (253, 216, 53)],
    "green": [(0, 128, 0), (0, 255, 0), (34, 160, 60), (67, 160, 71), (0, 160, 80), (50, 205, 50)],
    "blue": [(0, 0, 255), (30, 90, 220), (25, 60, 180), (30, 136, 229), (33, 100, 243)],
    "purple": [(128, 0, 128), (140, 50, 180), (106, 27, 154), (142, 36, 170), (120, 60, 200)],
    "pink": [(255, 192, 203), (255, 105, 180), (250, 130, 180), (240, 98, 146)],
    "brown": [(139, 69, 19), (165, 42, 42), (121, 85, 72), (120, 72, 30), (150, 90, 40)],
    "black": [(0, 0, 0), (20, 20, 20), (35, 32, 34)],
    "white": [(255, 255, 255), (250, 250, 250), (245, 245, 240)],
    "gray": [(128, 128, 128), (150, 150, 150), (110, 112, 115), (160, 160, 165)],
    "cyan": [(0, 255, 255), (0, 200, 220), (38, 198, 218), (64, 224, 208)],
}
COLOR_NAMES = tuple(COLORS)
SIZES = ("small", "medium", "large")
# What a patch can show, beside nothing and the shapes.
OTHERS = ("text", "emoji", "bar", "button", "field", "empty box", "ticked box")
KINDS = ("nothing", *SHAPES, *OTHERS)
CHARS = " ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789$€£.,:!?%&-/'+#@()"
CHAR_ID = {c: i for i, c in enumerate(CHARS)}
ROWS, COLUMNS = ("top", "", "bottom"), ("left", "", "right")
LONGEST = 14  # characters of a line that the reading head spells


@dataclasses.dataclass
class Item:
    """One thing in a picture: where it is, and all that can be asked of it."""

    kind: str
    box: tuple[float, float, float, float]  # left, top, right, bottom
    color: str = ""
    size: str = ""
    text: str = ""
    name: str = ""  # of an emoji, a field, a tick box
    value: float = 0.0
    on: bool = False

    @property
    def middle(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2

    @property
    def place(self) -> str:
        """Its name in a grid of three by three; empty when it is too near to a border."""
        x, y = (v / SIDE * 3 for v in self.middle)
        if min(abs(v - border) for v in (x, y) for border in (1, 2)) < 0.12:
            return ""
        found = f"{ROWS[int(min(y, 2.99))]} {COLUMNS[int(min(x, 2.99))]}".strip()
        return found or "center"


@dataclasses.dataclass
class Picture:
    """Pixels, what they show, and a map of five labels for each patch."""

    image: Image.Image
    topic: str
    items: list[Item]
    background: str
    maps: np.ndarray  # (5, GRID, GRID) uint8: kind, colour, emoji, left letter, right letter
    title: str = ""
    about: dict[str, Any] = dataclasses.field(default_factory=dict)


def reading_order(item: Item) -> tuple[int, float]:
    """Row by row of a grid of three, each from the left."""
    return int(item.middle[1] / SIDE * 3), item.middle[0]


class Painter:
    """Draws pictures of one stream of chance from a folder of fonts and one sheet of emoji."""

    def __init__(self, assets: Path, seed: int, test: bool = False) -> None:
        self.r = random.Random(seed * 2 + test)
        self.test = test
        sheet = json.loads((assets / "emoji.json").read_text())
        self.emoji_names: list[str] = sheet["names"]
        tiles = Image.open(assets / "emoji.png").convert("RGBA")
        side, across = sheet["side"], tiles.width // sheet["side"]
        self.emoji = [
            tiles.crop((i % across * side, i // across * side, (i % across + 1) * side,
                        (i // across + 1) * side))
            for i in range(len(self.emoji_names))
        ]  # fmt: skip
        fonts = sorted((assets / "fonts").glob("*.ttf"))
        held = [f for f in fonts if "OpenSans" in f.name]
        self.fonts = [str(f) for f in (fonts if test else [f for f in fonts if f not in held])]
        words = json.loads((assets / "words.json").read_text())
        self.words: list[str] = words["test" if test else "train"]

    # -- small things ----------------------------------------------------------------------------

    def color(self, name: str) -> tuple[int, int, int]:
        base = self.r.choice(COLORS[name])
        wobble = self.r.choice((0, 0, 8))
        return tuple(min(255, max(0, c + self.r.randint(-wobble, wobble))) for c in base)  # type: ignore[return-value]

    def word(self) -> str:
        word = self.r.choice(self.words)
        if not self.test and self.r.random() < 0.3:  # letters in any order, so that all are read
            n = self.r.randint(2, 9)
            word = "".join(self.r.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(n))
        return self.r.choice((word.upper(), word.capitalize(), word.lower(), word.capitalize()))

    def price(self) -> str:
        r = self.r
        whole, cents = r.choice((r.randint(0, 20), r.randint(1, 999))), r.randint(0, 99)
        form = r.choice(("${}.{:02}", "${}.{:02}", "€{}.{:02}", "£{}.{:02}", "{}.{:02} €", "${}"))
        return form.format(whole, cents)

    def number(self) -> str:
        return str(self.r.randrange(10 ** self.r.randint(1, 6)))

    def line(self) -> tuple[str, str]:
        """A line of text and what it is."""
        r, roll = self.r, self.r.random()
        if roll < 0.45:
            return self.word(), "word"
        if roll < 0.6:
            return self.price(), "price"
        if roll < 0.7:
            return self.number(), "number"
        if roll < 0.76:
            return f"{r.randint(0, 23)}:{r.randint(0, 59):02}", "time"
        if roll < 0.8:
            return f"{r.randint(1, 100)}%", "percentage"
        parts = [self.word() for _ in range(r.choice((2, 2, 3)))]
        style = r.choice((str.upper, str.capitalize, str.title, str.lower))
        text = style(" ".join(parts))
        return text + r.choice(("", "", "", "!", "?")), "line"

    @staticmethod
    @functools.lru_cache(4096)
    def font(path: str, size: int) -> ImageFont.FreeTypeFont:
        return ImageFont.truetype(path, size)

    def any_font(self) -> str:
        return self.r.choice(self.fonts)

    def background(self, calm: bool = False) -> tuple[str, tuple[int, int, int]]:
        r, roll = self.r, self.r.random()
        if roll < 0.5:
            return "white", self.color("white")
        if roll < 0.62 or calm:
            light = colorsys.hsv_to_rgb(r.random(), r.uniform(0.02, 0.14), r.uniform(0.92, 1))
            return "", tuple(int(255 * c) for c in light)  # type: ignore[return-value]
        name = r.choice(COLOR_NAMES)
        return name, self.color(name)

    def start(self, calm: bool = False) -> None:
        self.ground_name, self.ground = self.background(calm)
        self.image = Image.new("RGB", (SIDE, SIDE), self.ground)
        self.pen = ImageDraw.Draw(self.image)
        self.map_images = [Image.new("L", (GRID, GRID), 0) for _ in range(5)]
        self.map_pens = [ImageDraw.Draw(m) for m in self.map_images]
        self.items: list[Item] = []

    def done(self, topic: str, title: str = "", **about: Any) -> Picture:
        maps = np.stack([np.asarray(m) for m in self.map_images])
        return Picture(self.image, topic, self.items, self.ground_name, maps, title, about)

    def mark(self, which: int, points: Any, value: int) -> None:
        """The same outline on a map of patches."""
        small = [(x / PATCH - 0.5, y / PATCH - 0.5) for x, y in points]
        self.map_pens[which].polygon(small, fill=value)

    def mark_box(self, which: int, box: tuple[float, float, float, float], value: int) -> None:
        x0, y0, x1, y1 = (round(v / PATCH - 0.5) for v in box)
        self.map_pens[which].rectangle((x0, y0, max(x0, x1), max(y0, y1)), fill=value)

    def free_box(
        self, w: float, h: float, taken: list[tuple[float, ...]], gap: float = 6
    ) -> tuple[float, float, float, float] | None:
        for _ in range(40):
            x, y = self.r.uniform(4, SIDE - w - 4), self.r.uniform(4, SIDE - h - 4)
            if all(x > b[2] + gap or x + w < b[0] - gap or y > b[3] + gap or y + h < b[1] - gap
                   for b in taken):  # fmt: skip
                return x, y, x + w, y + h
        return None

    # -- shapes ----------------------------------------------------------------------------------

    def outline(
        self, shape: str, box: tuple[float, float, float, float]
    ) -> list[tuple[float, float]]:
        left, t, r, b = box
        cx, cy, rx, ry = (left + r) / 2, (t + b) / 2, (r - left) / 2, (b - t) / 2
        turn = self.r.uniform(-0.25, 0.25) if self.r.random() < 0.25 else 0.0

        def ring(
            n: int, start: float, radii: tuple[float, ...] = (1.0,)
        ) -> list[tuple[float, float]]:
            return [
                (cx + rx * radii[i % len(radii)] * math.cos(start + turn + 2 * math.pi * i / n),
                 cy + ry * radii[i % len(radii)] * math.sin(start + turn + 2 * math.pi * i / n))
                for i in range(n)
            ]  # fmt: skip

        if shape in ("circle", "oval", "ring"):
            return ring(40, 0)
        if shape in ("square", "rectangle"):
            corners = [(left, t), (r, t), (r, b), (left, b)]
            if turn:
                c, s = math.cos(turn), math.sin(turn)
                corners = [
                    (
                        cx + 0.88 * ((x - cx) * c - (y - cy) * s),
                        cy + 0.88 * ((x - cx) * s + (y - cy) * c),
                    )
                    for x, y in corners
                ]
            return corners
        if shape == "triangle":
            return [(cx, t), (r, b), (left, b)] if not turn else ring(3, -math.pi / 2)
        if shape == "star":
            return ring(10, -math.pi / 2, (1.0, self.r.choice((0.382, 0.45, 0.5))))
        if shape == "diamond":
            return [(cx, t), (cx + rx * 0.8, cy), (cx, b), (cx - rx * 0.8, cy)]
        if shape in ("pentagon", "hexagon"):
            n = 5 if shape == "pentagon" else 6
            return ring(n, -math.pi / 2 if n == 5 else self.r.choice((0, math.pi / 6)))
        if shape == "heart":
            points = []
            for i in range(36):
                a = 2 * math.pi * i / 36
                x = 16 * math.sin(a) ** 3
                y = 13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)
                points.append((cx + rx * x / 16, cy - ry * (y + 2.5) / 14.5))
            return points
        a = self.r.uniform(0.27, 0.4)  # the arms of a cross
        xs, ys = (left, cx - rx * a, cx + rx * a, r), (t, cy - ry * a, cy + ry * a, b)
        return [
            (xs[1], ys[0]), (xs[2], ys[0]), (xs[2], ys[1]), (xs[3], ys[1]), (xs[3], ys[2]),
            (xs[2], ys[2]), (xs[2], ys[3]), (xs[1], ys[3]), (xs[1], ys[2]), (xs[0], ys[2]),
            (xs[0], ys[1]), (xs[1], ys[1]),
        ]  # fmt: skip

    def shape(self, kind: str, color: str, size: str, taken: list[tuple[float, ...]]) -> bool:
        r = self.r
        low, high = {"small": (38, 64), "medium": (84, 110), "large": (140, 200)}[size]
        w = h = r.uniform(low, high)
        if kind in ("rectangle", "oval"):
            ratio = r.uniform(0.45, 0.62)
            w, h = (w, w * ratio) if r.random() < 0.7 else (w * ratio, w)
        box = self.free_box(w, h, taken)
        if box is None:
            return False
        points, fill = self.outline(kind, box), self.color(color)
        roll = r.random()
        dark = tuple(int(c * 0.55) for c in fill)
        if roll < 0.12 and kind != "ring":  # outline only
            width = r.randint(5, 9)
            self.pen.line([*points, points[0], points[1]], fill=fill, width=width, joint="curve")
        elif roll < 0.3:
            self.pen.polygon(points, fill=fill, outline=dark, width=r.randint(1, 4))
        else:
            self.pen.polygon(points, fill=fill)
        self.mark(0, points, KINDS.index(kind))
        self.mark(1, points, 1 + COLOR_NAMES.index(color))
        if kind == "ring":
            inner = r.uniform(0.5, 0.72)
            cx, cy = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
            hole = [(cx + (x - cx) * inner, cy + (y - cy) * inner) for x, y in points]
            self.pen.polygon(hole, fill=self.ground)
        taken.append(box)
        self.items.append(Item(kind, box, color, size))
        return True

    def color_apart(self, *avoid: str) -> str:
        near = {"white": "gray", "orange": "red", "cyan": "blue", "pink": "purple", "brown": "red"}
        bad = {*avoid}
        if self.ground_name == "":
            bad.add("white")
        bad |= {near.get(a, "") for a in avoid if a and self.r.random() < 0.3}
        return self.r.choice([c for c in COLOR_NAMES if c not in bad])

    def shapes(self) -> Picture:
        self.start()
        r, taken = self.r, []
        count = r.choice((1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6))
        few = r.random() < 0.45  # several alike, so that counting counts
        kinds = r.sample(SHAPES, 2 if few else 6)
        colors = [self.color_apart(self.ground_name) for _ in range(2 if few else 8)]
        taken = []
        for _ in range(count):
            size = r.choice(SIZES if count < 4 else ("small", "small", "medium", "large"))
            self.shape(r.choice(kinds), r.choice(colors), size, taken)
        self.items.sort(key=reading_order)
        return self.done("shapes")

    # -- text ------------------------------------------------------------------------------------

    def write(
        self, x: float, y: float, text: str, font: ImageFont.FreeTypeFont, fill: Any
    ) -> tuple[float, float, float, float]:
        """Write a line with its upper left corner at a place, and its letters into the maps."""
        x0, t, r, b = self.pen.textbbox((0, 0), text, font=font)
        self.pen.text((x - x0, y - t), text, font=font, fill=fill)
        box = (x, y, x + r - x0, y + b - t)
        rows = [row for row in range(GRID) if min(box[3], (row + 1) * PATCH) - max(box[1], row * PATCH)
                > min(PATCH, box[3] - box[1]) * 0.45]  # fmt: skip
        kind_pixels = self.map_images[0].load()
        left, right = self.map_images[3].load(), self.map_images[4].load()
        begin = x - x0
        for i, char in enumerate(text):
            if char == " ":
                continue
            start, stop = begin + font.getlength(text[:i]), begin + font.getlength(text[: i + 1])
            code = CHAR_ID.get(char, 0)
            for column in range(max(0, int(start // PATCH)), min(GRID - 1, int(stop // PATCH)) + 1):
                for row in rows:
                    kind_pixels[column, row] = KINDS.index("text")
                    for pixels, spot in ((left, 4), (right, 12)):
                        if start <= column * PATCH + spot < stop:
                            pixels[column, row] = code
        return box

    def fitting(
        self, text: str, wide: float, high: float, most: int = 72
    ) -> ImageFont.FreeTypeFont:
        path, low = self.any_font(), 15
        size = int(min(most, high))
        font = self.font(path, max(low, size))
        length = font.getlength(text)
        if length > wide:
            font = self.font(path, max(12, int(font.size * wide / length)))
        return font

    def text_color(self) -> tuple[str, tuple[int, int, int]]:
        """A colour that can be read on this ground."""
        light = sum(self.ground) / 3
        for _ in range(30):
            name = (
                self.r.choice(COLOR_NAMES)
                if self.r.random() < 0.6
                else ("black" if light > 128 else "white")
            )
            found = self.color(name)
            far = sum(abs(a - b) for a, b in zip(found, self.ground, strict=True))
            if name != self.ground_name and far > 230 and abs(sum(found) / 3 - light) > 60:
                return name, found
        return ("black", (0, 0, 0)) if light > 128 else ("white", (255, 255, 255))

    def texts(self) -> Picture:
        self.start()
        r, taken = self.r, []
        count = r.choice((1, 1, 1, 2, 2, 3, 4))
        what = []
        for _ in range(count):
            text, sort = self.line()
            big = r.choice((20, 24, 28, 32, 40, 48, 56, 72))
            font = self.fitting(text, SIDE - 30, big)
            box = self.pen.textbbox((0, 0), text, font=font)
            w, h = box[2] - box[0], box[3] - box[1]
            plate = r.random() < 0.3
            rim = r.uniform(8, 18) if plate else 0
            place = self.free_box(w + 2 * rim, h + 2 * rim, taken, 10)
            if count == 1 and r.random() < 0.4:  # in the middle, as people write
                x, y = (SIDE - w) / 2 - rim, (SIDE - h) / 2 - rim
                place = (x, y, SIDE - x, SIDE - y)
            if place is None:
                continue
            ground, name = self.ground, self.ground_name
            if plate:
                self.ground_name = r.choice(COLOR_NAMES)
                self.ground = self.color(self.ground_name)
                self.pen.rounded_rectangle(
                    place, r.choice((0, 6, 14)), self.ground, r.choice((None, "black"))
                )
            color, fill = self.text_color()
            self.ground, self.ground_name = ground, name
            spot = self.write(place[0] + rim, place[1] + rim, text, font, fill)
            self.mark_box(1, spot, 1 + COLOR_NAMES.index(color))
            taken.append(place)
            self.items.append(Item("text", spot, color, text=text, name=sort))
            what.append(sort)
        self.items.sort(key=lambda item: item.middle[1])
        return self.done("text")

    # -- emoji -----------------------------------------------------------------------------------

    def put_emoji(
        self, which: int, taken: list[tuple[float, ...]], low: int = 48, high: int = 190
    ) -> bool:
        side = self.r.randint(low, high)
        box = self.free_box(side, side, taken)
        if box is None:
            return False
        tile = self.emoji[which].resize((side, side), Image.Resampling.BILINEAR)
        if self.r.random() < 0.15:
            tile = tile.rotate(self.r.uniform(-15, 15), Image.Resampling.BILINEAR)
        spot = int(box[0]), int(box[1])
        self.image.paste(tile, spot, tile)
        inner = (
            box[0] + side * 0.15,
            box[1] + side * 0.15,
            box[2] - side * 0.15,
            box[3] - side * 0.15,
        )
        self.mark_box(0, inner, KINDS.index("emoji"))
        self.mark_box(2, inner, which + 1)
        taken.append(box)
        self.items.append(Item("emoji", box, name=self.emoji_names[which]))
        return True

    def emojis(self) -> Picture:
        self.start(calm=self.r.random() < 0.6)
        r, taken = self.r, []
        count = r.choice((1, 1, 1, 2, 2, 3, 4, 5))
        some = r.sample(range(len(self.emoji)), count)
        if count > 1 and r.random() < 0.3:
            some[-1] = some[0]
        taken = []
        for which in some:
            self.put_emoji(which, taken, 44 if count > 1 else 60, 120 if count > 2 else 220)
        self.items.sort(key=reading_order)
        return self.done("things")

    def mixed(self) -> Picture:
        self.start()
        r, taken = self.r, []
        taken = []
        for _ in range(r.randint(1, 2)):
            self.shape(
                r.choice(SHAPES), self.color_apart(self.ground_name), r.choice(SIZES[:2]), taken
            )
        for _ in range(r.randint(0, 2)):
            self.put_emoji(r.randrange(len(self.emoji)), taken, 50, 110)
        for _ in range(r.randint(0 if len(self.items) > 1 else 1, 2)):
            text, sort = self.line()
            font = self.fitting(text, 300, r.choice((22, 26, 32, 40)))
            box = self.pen.textbbox((0, 0), text, font=font)
            place = self.free_box(box[2] - box[0], box[3] - box[1], taken)
            if place:
                color, fill = self.text_color()
                spot = self.write(place[0], place[1], text, font, fill)
                self.mark_box(1, spot, 1 + COLOR_NAMES.index(color))
                taken.append(place)
                self.items.append(Item("text", spot, color, text=text, name=sort))
        self.items.sort(key=reading_order)
        return self.done("mixed")

    # -- bars ------------------------------------------------------------------------------------

    def bars(self) -> Picture:
        self.start(calm=True)
        self.ground = (255, 255, 255) if self.r.random() < 0.6 else self.ground
        self.ground_name = "white" if self.ground == (255, 255, 255) else ""
        self.pen.rectangle((0, 0, SIDE, SIDE), fill=self.ground)
        r = self.r
        count = r.choice((3, 3, 4, 4, 5, 5, 2, 6))
        sort = r.choice(("words", "words", "letters", "months", "years", "days", "names"))
        first = r.randrange(12)
        start = r.randint(1990, 2024)
        names = {
            "words": [self.r.choice(self.words).capitalize()[:9] for _ in range(9)],
            "letters": list("ABCDEFGH") if r.random() < 0.6 else r.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 8),
            "months": [(["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"] * 2)[first + i] for i in range(8)],
            "years": [str(start + i) for i in range(8)],
            "days": ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"],
            "names": r.sample(["Ann", "Ben", "Cat", "Dan", "Eva", "Finn", "Gus", "Ida", "Jon", "Kim", "Leo", "Mia", "Noah", "Oli", "Pia", "Rob", "Sam", "Tom", "Uma", "Zoe"], 8),
        }[sort]  # fmt: skip
        names = list(dict.fromkeys(names))[:count]
        count = len(names)
        top = r.choice((10, 20, 50, 100, 100, 100, 200, 500, 1000))
        step = top / r.choice((4, 5, 5))
        values = [top * r.uniform(0.06, 1) for _ in names]
        fine = top / 20 if r.random() < 0.5 else top / 100
        values = [max(fine, round(v / fine) * fine) for v in values]
        values = [float(round(v)) if top > 10 else round(v, 1) for v in values]
        path, ink = self.any_font(), (0, 0, 0) if r.random() < 0.7 else (70, 70, 70)
        title = ""
        if r.random() < 0.5:
            title = " ".join(self.word() for _ in range(r.choice((1, 2)))).capitalize()
            font = self.fitting(title, 300, r.choice((20, 24, 28)))
            box = self.pen.textbbox((0, 0), title, font=font)
            self.write((SIDE - box[2] + box[0]) / 2, 12, title, font, ink)
        flat = r.random() < 0.15
        left, upper, right, lower = (96 if flat else 58), 56, SIDE - 20, SIDE - 52
        small = self.font(path, r.choice((15, 16, 18)))
        ticks = r.random() < 0.85
        numbers = r.random() < 0.4 or not ticks
        alike = r.random() < 0.45
        one = self.color_apart("white", self.ground_name)
        colors = [one if alike else self.color_apart("white", self.ground_name) for _ in names]
        span = (right - left) if flat else (lower - upper)
        self.pen.line((left, upper, left, lower, right, lower), fill=ink, width=2)
        if ticks:
            for i in range(round(top / step) + 1):
                value = step * i
                text = f"{value:g}"
                at = span * value / top * 0.95
                if flat:
                    self.pen.line((left + at, lower, left + at, lower + 5), fill=ink)
                    self.write(left + at - small.getlength(text) / 2, lower + 8, text, small, ink)
                else:
                    if r.random() < 0.5:
                        self.pen.line((left, lower - at, right, lower - at), fill=(205, 205, 205))
                    self.pen.line((left - 5, lower - at, left, lower - at), fill=ink)
                    self.write(left - 8 - small.getlength(text), lower - at - 6, text, small, ink)
        room = ((lower - upper) if flat else (right - left)) / count
        thick = room * r.uniform(0.45, 0.8)
        for i, (name, value, color) in enumerate(zip(names, values, colors, strict=True)):
            long = span * value / top * 0.95
            near = (upper if flat else left) + room * i + (room - thick) / 2
            box = (
                (left + 1, near, left + long, near + thick)
                if flat
                else (near, lower - long, near + thick, lower)
            )
            self.pen.rectangle(box, fill=self.color(color))
            self.mark_box(0, box, KINDS.index("bar"))
            self.mark_box(1, box, 1 + COLOR_NAMES.index(color))
            label = small
            room_for = (left - 10) if flat else room - 2
            if label.getlength(name) > room_for:
                label = self.font(path, max(11, int(label.size * room_for / label.getlength(name))))
            length = label.getlength(name)
            if flat:
                self.write(left - 8 - length, near + thick / 2 - 6, name, label, ink)
            else:
                self.write(near + thick / 2 - length / 2, lower + 8, name, label, ink)
            if numbers:
                text = f"{value:g}"
                at = small.getlength(text)
                if flat:
                    self.write(
                        min(left + long + 5, SIDE - at - 2), near + thick / 2 - 6, text, small, ink
                    )
                else:
                    self.write(near + thick / 2 - at / 2, lower - long - 18, text, small, ink)
            self.items.append(Item("bar", box, color, text=name, value=value))
        return self.done("chart", title, alike=alike, top=top)

    # -- screens ---------------------------------------------------------------------------------

    FIELDS = (
        "Name",
        "Email",
        "Password",
        "Phone",
        "City",
        "Street",
        "Country",
        "Search",
        "Date",
        "Amount",
        "Comment",
        "Company",
        "Code",
        "Title",
        "Age",
    )
    BUTTONS = (
        "OK",
        "Cancel",
        "Save",
        "Delete",
        "Send",
        "Login",
        "Submit",
        "Next",
        "Back",
        "Search",
        "Close",
        "Help",
        "Yes",
        "No",
        "Edit",
        "Buy",
        "Pay",
        "Continue",
        "Reset",
        "Apply",
        "Upload",
        "Download",
        "Add",
        "Remove",
        "Open",
        "Print",
        "Share",
        "Retry",
        "Accept",
        "Decline",
        "Start",
        "Stop",
    )
    TICKS = (
        "Remember me",
        "Newsletter",
        "I agree",
        "Dark mode",
        "Notifications",
        "Sound",
        "Updates",
        "Public",
        "Gift wrap",
        "Express",
        "Wifi",
        "Bluetooth",
        "Autosave",
        "Location",
    )
    TITLES = (
        "Settings",
        "Login",
        "Sign up",
        "Checkout",
        "Profile",
        "Contact",
        "Search",
        "Order",
        "Account",
        "Payment",
        "Welcome",
        "Upload",
    )

    def screen(self) -> Picture:
        self.start(calm=True)
        r = self.r
        dark = r.random() < 0.2
        paper, ink = ((40, 42, 48), (235, 235, 235)) if dark else ((255, 255, 255), (30, 30, 30))
        path, size = self.any_font(), r.choice((17, 18, 20, 22))
        font = self.font(path, size)
        wide, x0 = r.randint(330, 430), 0
        x0 = (SIDE - wide) // 2
        title = r.choice(self.TITLES) if r.random() < 0.8 else ""
        self.pen.rounded_rectangle(
            (x0, 12, x0 + wide, SIDE - 12), r.choice((0, 8, 14)), paper, (150, 150, 150)
        )
        y = r.choice((26.0, 26.0, r.uniform(26, 120)))
        if title:
            bar = r.random() < 0.4
            if bar:
                self.pen.rectangle(
                    (x0, y - 14, x0 + wide, y + 28),
                    fill=self.color(r.choice(("blue", "gray", "green", "purple"))),
                )
            self.write(
                x0 + 18, y, title, self.font(path, size + 4), (255, 255, 255) if bar else ink
            )
            y += 42
        for name in r.sample(self.FIELDS, r.choice((0, 1, 1, 2, 2, 3))):
            beside = r.random() < 0.3
            self.write(x0 + 18, y + (9 if beside else 0), name, font, ink)
            if not beside:
                y += size + 8
            left = x0 + 130 if beside else x0 + 18
            box = (left, y, x0 + wide - 18, y + 36)
            self.pen.rounded_rectangle(
                box,
                r.choice((0, 5)),
                (255, 255, 255) if not dark else (60, 62, 70),
                (140, 140, 140),
            )
            text = ""
            if r.random() < 0.75:
                text = {
                    "Phone": self.number, "Amount": self.price, "Age": lambda: str(r.randint(1, 99)), "Code": self.number,
                }.get(name, self.word)()  # fmt: skip
                self.write(left + 10, y + 10, text, self.font(path, size - 1), ink)
            self.mark_box(0, box, KINDS.index("field")) if not text else None
            self.items.append(Item("field", box, text=text, name=name))
            y += 52
        for name in r.sample(self.TICKS, r.choice((0, 0, 1, 2)) if y < 300 else 0):
            on = r.random() < 0.5
            box = (x0 + 20, y, x0 + 40, y + 20)
            self.pen.rectangle(box, fill=(255, 255, 255), outline=(60, 60, 60), width=2)
            if on:
                green = r.choice(((0, 120, 0), (0, 0, 0), (30, 100, 230)))
                if r.random() < 0.5:
                    self.pen.line(
                        (x0 + 24, y + 10, x0 + 29, y + 16, x0 + 37, y + 4), fill=green, width=3
                    )
                else:
                    self.pen.line((x0 + 24, y + 4, x0 + 36, y + 16), fill=green, width=3)
                    self.pen.line((x0 + 36, y + 4, x0 + 24, y + 16), fill=green, width=3)
            self.write(x0 + 50, y + 2, name, font, ink)
            self.mark_box(0, box, KINDS.index("ticked box" if on else "empty box"))
            self.items.append(Item("tick", box, name=name, on=on))
            y += 36
        labels = r.sample(self.BUTTONS, r.choice((1, 2, 2, 3)))
        beside = r.random() < 0.7
        x = x0 + 18.0
        colors = r.sample([c for c in COLOR_NAMES if c not in ("white", "black")], 3)
        for label, color in zip(labels, colors, strict=False):
            w = max(84, font.getlength(label) + 30)
            if x + w > x0 + wide - 8 or y + 40 > SIDE - 14:
                break
            box = (x, y, x + w, y + 40)
            fill = self.color(color)
            self.pen.rounded_rectangle(box, r.choice((0, 6, 12, 20)), fill)
            self.mark_box(0, box, KINDS.index("button"))
            self.mark_box(1, box, 1 + COLOR_NAMES.index(color))
            over = (255, 255, 255) if sum(fill) < 420 else (0, 0, 0)
            tall = self.pen.textbbox((0, 0), label, font=font)
            self.write(
                x + (w - font.getlength(label)) / 2,
                y + 20 - (tall[3] - tall[1]) / 2,
                label,
                font,
                over,
            )
            self.items.append(Item("button", box, color, text=label))
            if beside:
                x += w + 14
            else:
                y += 52
        return self.done("screen", title)

    def any(self) -> Picture:
        roll = self.r.random()
        for share, draw in (
            (0.3, self.shapes), (0.26, self.texts), (0.16, self.emojis), (0.08, self.mixed), (0.1, self.bars),
        ):  # fmt: skip
            if roll < share:
                return draw()
            roll -= share
        return self.screen()


def queries(
    picture: Picture, emoji: list[str], most: int, r: random.Random
) -> tuple[np.ndarray, np.ndarray]:
    """Boxes in a picture, and what a reader must say of each: kind, colour, emoji, letters."""
    boxes = np.zeros((most, 4), np.float32)
    labels = np.full((most, 3 + LONGEST), -1, np.int16)
    items = picture.items if len(picture.items) <= most else r.sample(picture.items, most)
    for i, item in enumerate(items):
        boxes[i] = [v / SIDE for v in item.box]
        kind = {"tick": "ticked box" if item.on else "empty box"}.get(item.kind, item.kind)
        labels[i, 0] = KINDS.index(kind)
        labels[i, 1] = 1 + COLOR_NAMES.index(item.color) if item.color else -1
        labels[i, 2] = emoji.index(item.name) + 1 if item.kind == "emoji" else -1
        if item.kind in ("text", "button", "field", "bar"):
            text = item.text[:LONGEST].ljust(LONGEST)
            labels[i, 3:] = [CHAR_ID.get(c, 0) for c in text]
    return boxes, labels
