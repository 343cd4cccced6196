# ruff: noqa: E501  lists of phrases
"""Questions and answers about pictures, in the ways people ask.

`turns(pictures, emoji, r)` yields (question, answer) forever. The form of an answer follows from
the question: a sentence, unless a word, yes or no, a letter, a number or JSON is asked for.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from demo.smol.draw import COLOR_NAMES, SHAPES, SIZES, Item, Picture

Turn = tuple[str, str]
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
WORD = (
    "Answer in one word.",
    "One word.",
    "Answer with one word.",
    "Just the word, please.",
    "Reply with a single word.",
)
NUMBER = (
    "Answer with a number.",
    "Just the number.",
    "Reply with a number only.",
    "Give only the number.",
)
YES_NO = ("Answer yes or no.", "Yes or no?", "Answer with yes or no.", "Reply yes or no.")
PLURALS = {"hexagon": "hexagons", "cross": "crosses"}
MISS = "I don't see {}."


def a(noun: str) -> str:
    if noun in ("jeans", "glasses", "scissors", "headphones", "grapes", "cherries", "fries", "books", "bread",
                "lightning", "popcorn", "broccoli", "thumbs up", "fire", "coffee", "corn"):  # fmt: skip
        return noun
    return f"{'an' if noun[0].lower() in 'aeiou' and not noun.startswith('uni') else 'a'} {noun}"


def plural(noun: str) -> str:
    return PLURALS.get(noun, f"{noun}s")


def many(count: int, noun: str) -> str:
    word = NUMBERS[count] if count < len(NUMBERS) else str(count)
    return f"{word} {noun if count == 1 else plural(noun)}"


def listed(parts: Sequence[str]) -> str:
    if len(parts) < 2:
        return "".join(parts)
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def first_up(text: str) -> str:
    return text[:1].upper() + text[1:]


def at(place: str) -> str:
    return {
        "center": "in the center", "left": "on the left", "right": "on the right", "top": "at the top",
        "bottom": "at the bottom",
    }.get(place, f"in the {place}")  # fmt: skip


def name_of(item: Item) -> str:
    if item.kind in SHAPES:
        return f"{item.color} {item.kind}"
    if item.kind == "text":
        return f"the text “{item.text}”".replace("“", '"').replace("”", '"')
    return item.name or item.text


def brief(item: Item) -> str:
    return name_of(item) if item.kind == "text" else a(name_of(item))


class Asker:
    """Asks about pictures with one stream of chance. `where` names a picture among several."""

    def __init__(self, emoji: Sequence[str], r: random.Random, words: Sequence[str]) -> None:
        self.emoji, self.r, self.words = emoji, r, words

    # -- forms -----------------------------------------------------------------------------------

    def yes_no(self, question: str, true: bool, why: str = "") -> Turn:
        if self.r.random() < 0.6:
            return f"{question} {self.r.choice(YES_NO)}", "Yes" if true else "No"
        return question, ("Yes" if true else "No") + (f", {why}" if why else ".")

    def short(self, question: str, word: str, sentence: str, number: bool = False) -> Turn:
        if self.r.random() < 0.45:
            return f"{question} {self.r.choice(NUMBER if number else WORD)}", word
        return question, sentence

    def choice(self, question: str, right: str, wrong: Sequence[str]) -> Turn:
        r = self.r
        others = [w for w in dict.fromkeys(wrong) if w != right]
        options = [right, *r.sample(others, min(len(others), r.choice((1, 2, 2, 3, 3))))]
        r.shuffle(options)
        mark, gap = r.choice(
            (("{}) {}", " "), ("{}. {}", "\n"), ("({}) {}", " "), ("{}: {}", ", "))
        )
        text = gap.join(mark.format("ABCD"[i], option) for i, option in enumerate(options))
        ask = r.choice(
            (
                "Answer with the letter.",
                "Which letter?",
                "Give only the letter.",
                "Reply with one letter.",
            )
        )
        between = "\n" if gap == "\n" else " "
        return f"{question}{between}{text}{between}{ask}", "ABCD"[options.index(right)]

    def as_json(self, what: str, keys: dict[str, object]) -> Turn:
        names = listed([f'"{key}"' for key in keys])
        ask = self.r.choice(
            (
                "Answer as JSON with the key{s} {n}.",
                "Reply in JSON with {n}.",
                "Give JSON with the key{s} {n}.",
            )
        ).format(s="s" if len(keys) > 1 else "", n=names)
        return f"{what} {ask}", json.dumps(keys, ensure_ascii=False)

    # -- one picture -----------------------------------------------------------------------------

    def things(self, p: Picture) -> list[Item]:
        return [i for i in p.items if i.kind in SHAPES or i.kind in ("emoji", "text")]

    def describe(self, p: Picture, w: str) -> Turn:
        r = self.r
        ask = r.choice((
            "What is in {w}?", "What do you see in {w}?", "Describe {w}.", "What does {w} show?",
            "Tell me what is in {w}.", "What can you see in {w}?", "Please describe {w}.",
        )).format(w=w)  # fmt: skip
        if p.topic == "chart":
            names = listed([i.text for i in p.items])
            return ask, f"It is a bar chart with {many(len(p.items), 'bar')}: {names}."
        if p.topic == "screen":
            parts = [f"a {i.name} field" for i in p.items if i.kind == "field"]
            parts += [f'a "{i.name}" checkbox' for i in p.items if i.kind == "tick"]
            parts += [f"a {i.color} {i.text} button" for i in p.items if i.kind == "button"]
            return ask, f"It is a screen with {listed(parts)}."
        if p.topic == "text":
            return (
                ask,
                f"I see the text {listed([json.dumps(i.text, ensure_ascii=False) for i in p.items])}.",
            )
        counted = Counter(brief(i) for i in p.items)
        alone = {brief(i): name_of(i) for i in p.items}
        parts = [k if n == 1 else f"{NUMBERS[n]} {plural(alone[k])}" for k, n in counted.items()]
        return ask, f"I see {listed(parts)}."

    def background(self, p: Picture, w: str) -> Turn | None:
        if not p.background or p.topic in ("chart", "screen"):
            return None
        ask = self.r.choice(
            ("What color is the background of {w}?", "What is the background color of {w}?")
        )
        return self.short(ask.format(w=w), p.background, f"The background is {p.background}.")

    def count_all(self, p: Picture, w: str) -> Turn:
        items = self.things(p)
        shapes = [i for i in items if i.kind in SHAPES]
        if len(shapes) == len(items) and self.r.random() < 0.7:
            word, n = "shape", len(shapes)
        else:
            word, n = self.r.choice(("thing", "object")), len(items)
        ask = self.r.choice(
            ("How many {x} are in {w}?", "How many {x} do you see in {w}?", "Count the {x} in {w}.")
        )
        verb = "is" if n == 1 else "are"
        return self.short(
            ask.format(x=plural(word), w=w), str(n), f"There {verb} {many(n, word)}.", number=True
        )

    def count_some(self, p: Picture, w: str) -> Turn:
        r = self.r
        shapes = [i for i in p.items if i.kind in SHAPES]
        kind = r.choice([i.kind for i in shapes] * 2 + list(SHAPES)) if r.random() < 0.6 else ""
        color = (
            r.choice([i.color for i in shapes] * 3 + list(COLOR_NAMES))
            if not kind or r.random() < 0.25
            else ""
        )
        n = sum((not kind or i.kind == kind) and (not color or i.color == color) for i in shapes)
        noun = f"{color} {kind or 'shape'}".strip()
        ask = r.choice(
            (
                "How many {x} are in {w}?",
                "How many {x} do you see in {w}?",
                "How many {x} are there in {w}?",
            )
        )
        said = (
            f"There {'is' if n == 1 else 'are'} {many(n, noun)}."
            if n
            else f"There are no {plural(noun)}."
        )
        return self.short(ask.format(x=plural(noun), w=w), str(n), said, number=True)

    def color_of(self, p: Picture, w: str) -> Turn:
        r = self.r
        shapes = [i for i in p.items if i.kind in SHAPES]
        kinds = Counter(i.kind for i in shapes)
        single = [i for i in shapes if kinds[i.kind] == 1]
        if not single or r.random() < 0.12:
            kind = r.choice([s for s in SHAPES if s not in kinds])
            return f"What color is the {kind} in {w}?", MISS.format(f"{a(kind)}")
        item = r.choice(single)
        ask = r.choice(
            (
                "What color is the {k} in {w}?",
                "Which color does the {k} in {w} have?",
                "What is the color of the {k} in {w}?",
            )
        )
        ask = ask.format(k=item.kind, w=w)
        if r.random() < 0.2:
            return self.choice(ask, item.color, COLOR_NAMES)
        return self.short(ask, item.color, f"The {item.kind} is {item.color}.")

    def shape_of(self, p: Picture, w: str) -> Turn:
        r = self.r
        shapes = [i for i in p.items if i.kind in SHAPES]
        colors = Counter(i.color for i in shapes)
        single = [i for i in shapes if colors[i.color] == 1]
        if not single or r.random() < 0.12:
            color = r.choice([c for c in COLOR_NAMES if c not in colors])
            return f"What shape is {color} in {w}?", MISS.format(f"{a(f'{color} shape')}")
        item = r.choice(single)
        ask = r.choice(
            (
                "What shape is {c} in {w}?",
                "Which shape is {c} in {w}?",
                "What shape is the {c} thing in {w}?",
                "What is the {c} shape in {w}?",
            )
        )
        ask = ask.format(c=item.color, w=w)
        if r.random() < 0.2:
            return self.choice(ask, item.kind, SHAPES)
        return self.short(ask, item.kind, f"The {item.color} shape is {a(item.kind)}.")

    def unique(self, p: Picture) -> list[tuple[Item, str]]:
        names = Counter(name_of(i) for i in self.things(p))
        return [(i, name_of(i)) for i in self.things(p) if names[name_of(i)] == 1]

    def where(self, p: Picture, w: str) -> Turn | None:
        r = self.r
        known = [(i, n) for i, n in self.unique(p) if i.place]
        if r.random() < 0.12:
            gone = self.absent(p)
            return f"Where is the {gone} in {w}?", MISS.format(a(gone))
        if not known:
            return None
        item, noun = r.choice(known)
        noun = noun if item.kind == "text" else f"the {noun}"
        ask = r.choice(
            ("Where is {n} in {w}?", "In which part of {w} is {n}?", "Where in {w} do you see {n}?")
        )
        return ask.format(n=noun, w=w), f"{first_up(noun)} is {at(item.place)}."

    def at_place(self, p: Picture, w: str) -> Turn | None:
        r = self.r
        places = Counter(i.place for i in self.things(p))
        found = [i for i in self.things(p) if i.place and places[i.place] == 1]
        if not found or any(not i.place for i in self.things(p)):
            return None
        item = r.choice(found)
        ask = r.choice(
            ("What is {a} of {w}?", "What do you see {a} of {w}?", "Which thing is {a} of {w}?")
        )
        return ask.format(a=at(item.place), w=w), f"{first_up(brief(item))}."

    def absent(self, p: Picture) -> str:
        r = self.r
        here = {name_of(i) for i in p.items} | {i.kind for i in p.items}
        while True:
            noun = r.choice(
                (
                    r.choice(SHAPES),
                    f"{r.choice(COLOR_NAMES)} {r.choice(SHAPES)}",
                    r.choice(self.emoji),
                )
            )
            shape_colors = {(i.color, i.kind) for i in p.items if i.kind in SHAPES}
            if noun in ("flag", "ring", "star", "heart", "gem") or noun in here:
                continue
            if (
                shape_colors and self.r.random() < 0.35
            ):  # near: only the colour or only the shape is right
                color, kind = r.choice(sorted(shape_colors))
                noun = (
                    f"{r.choice(COLOR_NAMES)} {kind}"
                    if r.random() < 0.5
                    else f"{color} {r.choice(SHAPES)}"
                )
                if noun in here:
                    continue
            return noun

    def is_there(self, p: Picture, w: str) -> Turn:
        r = self.r
        real = [i for i in self.things(p) if i.kind != "text"]
        if real and r.random() < 0.5:
            item = r.choice(real)
            noun = name_of(item) if r.random() < 0.6 or item.kind == "emoji" else item.kind
            true = True
        else:
            noun, true = self.absent(p), False
        ask = r.choice(
            (
                "Is there {n} in {w}?",
                "Do you see {n} in {w}?",
                "Does {w} show {n}?",
                "Can you see {n} in {w}?",
            )
        )
        why = f"there is {a(noun)}." if true else f"I don't see {a(noun)}."
        return self.yes_no(ask.format(n=a(noun), w=w), true, why)

    def size_of(self, p: Picture, w: str) -> Turn | None:
        r = self.r
        known = [(i, n) for i, n in self.unique(p) if i.size]
        if not known:
            return None
        item, noun = r.choice(known)
        ask = r.choice(
            (
                "What size is the {n} in {w}: small, medium or large?",
                "Is the {n} in {w} small, medium or large?",
            )
        )
        if r.random() < 0.25:
            return self.choice(f"What size is the {noun} in {w}?", item.size, SIZES)
        return self.short(ask.format(n=noun, w=w), item.size, f"The {noun} is {item.size}.")

    def compare(self, p: Picture, w: str) -> Turn | None:
        r = self.r
        known = self.unique(p)
        if len(known) < 2:
            return None
        (i, n), (j, m) = r.sample(known, 2)
        n, m = (x if y.kind == "text" else f"the {x}" for x, y in ((n, i), (m, j)))
        (ix, iy), (jx, jy) = i.middle, j.middle
        if i.size and j.size and i.size != j.size and r.random() < 0.4:
            bigger = SIZES.index(i.size) > SIZES.index(j.size)
            if r.random() < 0.5:
                word = r.choice(("larger", "smaller"))
                pick = n if bigger == (word == "larger") else m
                return f"Which is {word} in {w}, {n} or {m}?", f"{first_up(pick)} is {word}."
            return self.yes_no(f"Is {n} larger than {m} in {w}?", bigger)
        across = abs(ix - jx) > abs(iy - jy)
        if max(abs(ix - jx), abs(iy - jy)) < 40:
            return None
        word = (
            ("left of" if ix < jx else "right of") if across else ("above" if iy < jy else "below")
        )
        flip = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
        if r.random() < 0.4:
            return f"Where is {n} compared to {m} in {w}?", f"{first_up(n)} is {word} {m}."
        said = word if r.random() < 0.5 else flip[word]
        return self.yes_no(f"Is {n} {said} {m} in {w}?", said == word, f"{n} is {word} {m}.")

    def extreme(self, p: Picture, w: str) -> Turn | None:
        """The leftmost, the topmost, the largest thing."""
        r, items = self.r, self.things(p)
        if len(items) < 2:
            return None
        way = r.choice(("left", "right", "top", "bottom"))
        axis, sign = (0 if way in ("left", "right") else 1), (1 if way in ("left", "top") else -1)
        order = sorted(items, key=lambda i: sign * i.middle[axis])
        if abs(order[0].middle[axis] - order[1].middle[axis]) < 25:
            return None
        ask = r.choice(
            ("Which thing is farthest to the {d} in {w}?", "What is the {m} thing in {w}?")
        )
        most = {"left": "leftmost", "right": "rightmost", "top": "topmost", "bottom": "lowest"}[way]
        return ask.format(d=way, m=most, w=w), f"{first_up(brief(order[0]))}."

    def shape_json(self, p: Picture, w: str) -> Turn | None:
        r = self.r
        shapes = [i for i in p.items if i.kind in SHAPES]
        if len(shapes) == 1:
            item = shapes[0]
            keys = {"shape": item.kind, "color": item.color, "size": item.size}
            some = r.sample(sorted(keys), r.choice((2, 2, 3)))
            return self.as_json(f"What shape is in {w}?", {k: keys[k] for k in some})
        if not shapes:
            return None
        if r.random() < 0.5:
            return self.as_json(f"How many shapes are in {w}?", {"count": len(shapes)})
        return f"List the shapes in {w} as a JSON list of strings.", json.dumps(
            [name_of(i) for i in shapes]
        )

    def emoji_what(self, p: Picture, w: str) -> Turn | None:
        found = [i for i in p.items if i.kind == "emoji"]
        if not found:
            return None
        r = self.r
        if len(p.items) == 1:
            item = found[0]
            ask = r.choice(
                (
                    "What is this in {w}?",
                    "What is in {w}?",
                    "What does {w} show?",
                    "Which object is in {w}?",
                    "What do you see in {w}?",
                    "Name the thing in {w}.",
                )
            )
            ask = ask.format(w=w)
            if r.random() < 0.25:
                return self.choice(ask, item.name, r.sample(list(self.emoji), 6))
            if r.random() < 0.15:
                return self.as_json(ask, {"object": item.name})
            return self.short(
                ask,
                item.name,
                f"It is {a(item.name)}." if "see" not in ask else f"I see {a(item.name)}.",
            )
        if r.random() < 0.5:
            names = [i.name for i in found]
            return f"List the objects in {w} as a JSON list of strings.", json.dumps(names)
        one = r.choice(found)
        n = sum(i.name == one.name for i in found)
        ask = f"How many times do you see {a(one.name)} in {w}?"
        return self.short(
            ask,
            str(n),
            f"I see it {('once', 'twice')[n - 1]}." if n < 3 else f"I see it {n} times.",
            True,
        )

    # -- text ------------------------------------------------------------------------------------

    def text(self, p: Picture, w: str) -> Turn:
        r, lines = self.r, [i for i in p.items if i.kind == "text"]
        quoted = [json.dumps(i.text, ensure_ascii=False) for i in lines]
        roll = r.random()
        if len(lines) == 1 or roll < 0.2:
            ask = r.choice((
                "What does it say in {w}?", "What is written in {w}?", "Read the text in {w}.", "What does the text in {w} say?",
                "What text is in {w}?", "What words are in {w}?", "Transcribe the text in {w}.",
            )).format(w=w)  # fmt: skip
            kind = r.random()
            if len(lines) == 1 and kind < 0.15:
                return self.as_json(ask, {"text": lines[0].text})
            if kind < 0.45:
                ask += " " + r.choice(
                    ("Only the text.", "Reply with the text only.", "Just the text, please.")
                )
                return ask, "\n".join(i.text for i in lines)
            if len(lines) == 1 and kind < 0.6:
                return self.yes_no(*self._says(lines[0].text, w))
            return ask, f"It says {listed(quoted)}."
        sorts = Counter(i.name for i in lines)
        colors = Counter(i.color for i in lines)
        item = r.choice(lines)
        if roll < 0.35 and sorts[item.name] == 1 and item.name != "line":
            ask = r.choice(
                (
                    "What is the {s} in {w}?",
                    "Which {s} is written in {w}?",
                    "What {s} do you see in {w}?",
                )
            )
            return self.short(
                ask.format(s=item.name, w=w), item.text, f"The {item.name} is {item.text}."
            )
        if roll < 0.5 and colors[item.color] == 1:
            ask = r.choice(
                (
                    "What is written in {c} in {w}?",
                    "Which text in {w} is {c}?",
                    "What does the {c} text in {w} say?",
                )
            )
            return self.short(
                ask.format(c=item.color, w=w),
                item.text,
                f'The {item.color} text says "{item.text}".',
            )
        if roll < 0.65:
            ask = f'What color is the text "{item.text}" in {w}?'
            if sum(i.text == item.text for i in lines) == 1:
                return self.short(ask, item.color, f"It is {item.color}.")
        if roll < 0.75:
            n = len(lines)
            return self.short(
                f"How many texts are in {w}?", str(n), f"There are {many(n, 'text')}.", number=True
            )
        if roll < 0.85:
            top, end = lines[0], lines[-1]
            if r.random() < 0.5:
                return self.short(
                    f"What is the topmost text in {w}?", top.text, f'It says "{top.text}".'
                )
            return self.short(
                f"What is the lowest text in {w}?", end.text, f'It says "{end.text}".'
            )
        return self.yes_no(*self._says(item.text, w))

    def _says(self, text: str, w: str) -> tuple[str, bool]:
        r = self.r
        if r.random() < 0.5:
            return f'Does {w} say "{text}"?', True
        other = r.choice(self.words)
        other = (
            other.upper() if text.isupper() else other.capitalize() if text[:1].isupper() else other
        )
        if r.random() < 0.4:
            i = r.randrange(len(text))
            letter = r.choice("abcdefghijklmnopqrstuvwxyz")
            other = text[:i] + (letter.upper() if text[i].isupper() else letter) + text[i + 1 :]
            if other == text:
                return f'Does {w} say "{text}"?', True
        return f'Does {w} say "{other}"?', other.lower() == text.lower()

    def spell(self, p: Picture, w: str) -> Turn | None:
        words = [i for i in p.items if i.kind == "text" and i.name == "word"]
        if len(words) != 1 or len(words[0].text) > 9:
            return None
        return f"Spell the word in {w} letter by letter.", "-".join(words[0].text.upper())

    # -- charts ----------------------------------------------------------------------------------

    def chart(self, p: Picture, w: str) -> Turn | None:
        r, bars = self.r, p.items
        order = sorted(bars, key=lambda i: i.value)
        clear = order[-1].value - order[-2].value > p.about["top"] * 0.03
        low = order[1].value - order[0].value > p.about["top"] * 0.03
        roll, item = r.random(), r.choice(bars)
        labels = [i.text for i in bars]
        if roll < 0.2 and clear:
            ask = r.choice(
                (
                    "Which bar is the tallest in {w}?",
                    "Which bar is the highest in {w}?",
                    "What has the largest value in {w}?",
                    "Which label has the highest bar in {w}?",
                )
            )
            ask = ask.format(w=w)
            if r.random() < 0.2:
                return self.choice(ask, order[-1].text, labels)
            if r.random() < 0.15:
                return self.as_json(
                    ask, {"label": order[-1].text, "value": _plain(order[-1].value)}
                )
            return self.short(ask, order[-1].text, f"{order[-1].text} has the tallest bar.")
        if roll < 0.32 and low:
            ask = r.choice(
                (
                    "Which bar is the shortest in {w}?",
                    "Which bar is the lowest in {w}?",
                    "What has the smallest value in {w}?",
                )
            )
            return self.short(
                ask.format(w=w), order[0].text, f"{order[0].text} has the shortest bar."
            )
        if roll < 0.62:
            ask = r.choice(
                (
                    "What is the value of {n} in {w}?",
                    "How high is the bar {n} in {w}?",
                    "What value does {n} have in {w}?",
                    "How much is {n} in {w}?",
                )
            )
            ask, value = ask.format(n=item.text, w=w), _plain(item.value)
            if r.random() < 0.15:
                return self.as_json(ask, {"value": value})
            return self.short(ask, str(value), f"{item.text} is about {value}.", number=True)
        if roll < 0.7:
            n = len(bars)
            return self.short(
                f"How many bars are in {w}?", str(n), f"There are {many(n, 'bar')}.", number=True
            )
        if roll < 0.78:
            return r.choice(
                (f"What are the labels of the bars in {w}?", f"List the labels in {w}.")
            ), f"The labels are {listed(labels)}."
        if roll < 0.83 and p.title:
            return self.short(f"What is the title of {w}?", p.title, f'The title is "{p.title}".')
        if roll < 0.88 and not p.about["alike"]:
            return self.short(
                f"What color is the bar {item.text} in {w}?",
                item.color,
                f"The bar {item.text} is {item.color}.",
            )
        if roll < 0.92:
            gone = r.choice([x for x in self.words if x.capitalize() not in labels]).capitalize()
            return f"What is the value of {gone} in {w}?", MISS.format(f"a bar named {gone}")
        if roll < 0.94:
            return self.as_json(
                f"Give the values in {w} by label.", {i.text: _plain(i.value) for i in bars}
            )
        other = r.choice([i for i in bars if i is not item])
        if abs(item.value - other.value) < p.about["top"] * 0.03:
            return None
        if r.random() < 0.5:
            higher = item if item.value > other.value else other
            return (
                f"Which is higher in {w}, {item.text} or {other.text}?",
                f"{higher.text} is higher.",
            )
        return self.yes_no(
            f"Is {item.text} higher than {other.text} in {w}?", item.value > other.value
        )

    # -- screens ---------------------------------------------------------------------------------

    def screen(self, p: Picture, w: str) -> Turn | None:
        r = self.r
        fields = [i for i in p.items if i.kind == "field"]
        ticks = [i for i in p.items if i.kind == "tick"]
        buttons = [i for i in p.items if i.kind == "button"]
        roll = r.random()
        if roll < 0.1 and p.title:
            return self.short(
                f"What is the title of the window in {w}?", p.title, f"The title is {p.title}."
            )
        if roll < 0.35 and fields:
            item = r.choice(fields)
            ask = r.choice(
                (
                    "What is written in the {n} field in {w}?",
                    "What does the {n} field say in {w}?",
                    "Which text is in the {n} field of {w}?",
                )
            )
            ask = ask.format(n=item.name, w=w)
            if not item.text:
                return self.short(ask, "nothing", f"The {item.name} field is empty.")
            if r.random() < 0.2:
                return self.as_json(
                    f"Read the {item.name} field in {w}.", {item.name.lower(): item.text}
                )
            return self.short(ask, item.text, f'The {item.name} field says "{item.text}".')
        if roll < 0.42 and fields:
            item = r.choice(fields)
            return self.yes_no(f"Is the {item.name} field empty in {w}?", not item.text)
        if roll < 0.55 and ticks:
            item = r.choice(ticks)
            ask = r.choice(
                (
                    'Is "{n}" ticked in {w}?',
                    'Is the box "{n}" checked in {w}?',
                    "Is {n} checked in {w}?",
                )
            )
            return self.yes_no(ask.format(n=item.name, w=w), item.on)
        if not buttons:
            return None
        item = r.choice(buttons)
        colors = Counter(i.color for i in buttons)
        if roll < 0.65:
            n = len(buttons)
            return self.short(
                f"How many buttons are in {w}?",
                str(n),
                f"There {'is' if n == 1 else 'are'} {many(n, 'button')}.",
                True,
            )
        if roll < 0.76:
            return self.short(
                f"What color is the {item.text} button in {w}?",
                item.color,
                f"The {item.text} button is {item.color}.",
            )
        if roll < 0.88 and colors[item.color] == 1:
            ask = r.choice(
                (
                    "What does the {c} button say in {w}?",
                    "What is written on the {c} button in {w}?",
                    "Which button is {c} in {w}?",
                )
            )
            return self.short(
                ask.format(c=item.color, w=w),
                item.text,
                f'The {item.color} button says "{item.text}".',
            )
        if roll < 0.92:
            return f"Which buttons are in {w}?", f"I see {listed([i.text for i in buttons])}."
        if r.random() < 0.5:
            return self.yes_no(f"Is there a {item.text} button in {w}?", True)
        gone = r.choice(
            [
                b
                for b in ("Save", "Cancel", "Send", "Delete", "Login", "Help", "Print", "Pay")
                if all(b != i.text for i in buttons)
            ]
        )
        return self.yes_no(
            f"Is there a {gone} button in {w}?", False, f"I don't see a {gone} button."
        )

    # -- any ------------------------------------------------------------------------------------

    def about(self, p: Picture, w: str) -> Turn | None:
        """One question about one picture."""
        r = self.r
        if r.random() < 0.1:
            return self.describe(p, w)
        if r.random() < 0.1:
            return self.is_there(p, w)
        if p.topic == "chart":
            return self.chart(p, w)
        if p.topic == "screen":
            return self.screen(p, w)
        if p.topic == "text":
            return r.choice(
                (
                    self.text,
                    self.text,
                    self.text,
                    self.text,
                    self.spell,
                    self.background,
                    self.where,
                    self.compare,
                )
            )(p, w)
        asks: list[Callable[[Picture, str], Turn | None]] = [
            self.where,
            self.at_place,
            self.count_all,
            self.compare,
            self.extreme,
            self.background,
            self.is_there,
        ]
        if any(i.kind in SHAPES for i in p.items):
            asks += [
                self.color_of,
                self.shape_of,
                self.count_some,
                self.size_of,
                self.shape_json,
            ] * 2
        if any(i.kind == "emoji" for i in p.items):
            asks += [self.emoji_what] * 5
        if any(i.kind == "text" for i in p.items):
            asks += [self.text] * 3
        return r.choice(asks)(p, w)

    def name(self, i: int, total: int) -> str:
        """What a person calls picture i of several."""
        r = self.r
        word = r.choice(("picture", "picture", "image"))
        if total == 1:
            return f"the {word}" if r.random() < 0.7 else f"this {word}"
        if i == total - 1 and r.random() < 0.2:
            return f"the last {word}"
        return f"the {ORDINALS[i]} {word}" if r.random() < 0.75 else f"{word} {i + 1}"

    def several(self, pictures: Sequence[Picture]) -> Turn | None:
        """A question that needs more than one picture."""
        r, n = self.r, len(pictures)
        roll = r.random()
        nouns = [
            {name_of(i) for i in self.things(p) if i.kind != "text"}
            | {i.kind for i in p.items if i.kind in SHAPES}
            for p in pictures
        ]
        if roll < 0.08:
            return self.short(
                r.choice(
                    (
                        "How many pictures are there?",
                        "How many images did I show you?",
                        "How many pictures do you see?",
                    )
                ),
                str(n),
                f"There {'is' if n == 1 else 'are'} {many(n, 'picture')}.",
                True,
            )
        if roll < 0.5:
            k = r.randrange(n)
            own = sorted(x for x in nouns[k] if sum(x in other for other in nouns) == 1)
            noun = r.choice(own) if own else ""
            kind = {
                "chart": "a bar chart",
                "screen": "a screen with buttons",
                "text": "only text",
            }.get(pictures[k].topic)
            if (
                (not noun or r.random() < 0.2)
                and kind
                and sum(p.topic == pictures[k].topic for p in pictures) == 1
            ):
                what = kind
            elif noun:
                what = a(noun)
            else:
                words = [i.text for i in pictures[k].items if i.kind == "text"]
                if not words:
                    return None
                what = f'the text "{r.choice(words)}"'
            ask = r.choice(
                (
                    "Which picture shows {x}?",
                    "In which picture do you see {x}?",
                    "Which of the pictures has {x}?",
                    "Which image shows {x}?",
                )
            ).format(x=what)
            if r.random() < 0.25:
                return self.choice(
                    ask, f"the {ORDINALS[k]}", [f"the {ORDINALS[j]}" for j in range(n)]
                )
            if r.random() < 0.3:
                return f"{ask} {r.choice(NUMBER)}", str(k + 1)
            return ask, f"The {ORDINALS[k]} picture shows {what}."
        if roll < 0.58:
            gone = self.absent(pictures[0])
            if any(gone in x for x in nouns) or any(
                gone == i.kind for p in pictures for i in p.items
            ):
                return None
            return f"Which picture shows {a(gone)}?", f"I don't see {a(gone)} in any picture."
        if roll < 0.72:
            shapes = [sum(i.kind in SHAPES for i in p.items) for p in pictures]
            i, j = r.sample(range(n), 2)
            if shapes[i] == shapes[j] or 0 in (shapes[i], shapes[j]):
                return None
            more = i if shapes[i] > shapes[j] else j
            ask = f"Which picture has more shapes, the {ORDINALS[i]} or the {ORDINALS[j]}?"
            return ask, f"The {ORDINALS[more]} picture has more shapes."
        if roll < 0.86:
            lone = [
                (k, p.items[0])
                for k, p in enumerate(pictures)
                if len(p.items) == 1 and p.items[0].kind in SHAPES
            ]
            if len(lone) < 2:
                i, j = r.sample(range(n), 2)
                both = sorted(nouns[i] & nouns[j])
                noun = r.choice(both) if both and r.random() < 0.6 else self.absent(pictures[i])
                true = noun in nouns[i] and noun in nouns[j]
                return self.yes_no(
                    f"Do the {ORDINALS[i]} and the {ORDINALS[j]} picture both show {a(noun)}?", true
                )
            (i, x), (j, y) = r.sample(lone, 2)
            what = r.choice(("color", "shape"))
            same = x.color == y.color if what == "color" else x.kind == y.kind
            return self.yes_no(
                f"Do the shapes in the {ORDINALS[i]} and the {ORDINALS[j]} picture have the same {what}?".replace(
                    "have the same shape", "look the same"
                ),
                same,
            )
        parts = [f"The {ORDINALS[k]} shows {self.gist(p)}." for k, p in enumerate(pictures)]
        return r.choice(
            (
                "Describe each picture briefly.",
                "What is in each picture?",
                "Say in a few words what each picture shows.",
            )
        ), " ".join(parts)

    def gist(self, p: Picture) -> str:
        if p.topic == "chart":
            return f"a bar chart with {many(len(p.items), 'bar')}"
        if p.topic == "screen":
            return "a screen with buttons"
        if p.topic == "text":
            return f'the text "{p.items[0].text}"' if p.items else "nothing"
        return (
            listed([brief(i) for i in p.items[:3]])
            if len(p.items) < 4
            else f"{many(len(p.items), 'thing')}"
        )

    def turns(self, pictures: Sequence[Picture]) -> Iterator[tuple[str, str]]:
        """Questions without end, none twice."""
        said: set[str] = set()
        n = len(pictures)
        while True:
            if n > 1 and self.r.random() < 0.28:
                turn = self.several(pictures)
            else:
                k = self.r.randrange(n)
                w = self.name(k, n)
                turn = self.about(pictures[k], w)
                if turn and n == 1 and self.r.random() < 0.5:
                    turn = (self.shorter(turn[0], w), turn[1])
            if turn and turn[0] not in said:
                said.add(turn[0])
                yield self.manner(turn[0]), turn[1]

    def manner(self, question: str) -> str:
        """Other spellings and habits."""
        roll = self.r.random()
        if "color" in question and roll < 0.25:
            return question.replace("color", "colour")
        if roll < 0.3 and '"' not in question:
            return question[:1].lower() + question[1:].removesuffix("?")
        if roll < 0.34:
            return f"{self.r.choice(('Can you tell me', 'Tell me', 'Please tell me', 'Look closely'))}: {question[:1].lower()}{question[1:]}"
        return question

    def shorter(self, question: str, w: str) -> str:
        """With one picture people often do not name it."""
        for joint in (f" in {w}", f" of {w}"):
            if question.count(w) == 1 and joint in question:
                bare = question.replace(joint, "")
                whole = not any(f"{verb}{end}" in bare for verb in (" is", " are") for end in ".?")
                return bare if whole and self.r.random() < 0.9 else question.replace(joint, " here")
        return question


def _plain(value: float) -> int | float:
    return int(value) if value == int(value) else value
