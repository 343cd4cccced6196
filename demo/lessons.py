"""Conversations as the rows of numbers that a language model learns from."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from features import Bank
from patches import merged
from questions import (
    KINDS,
    Message,
    comparison,
    conversation,
    more_scenes,
    question,
    turn,
    which,
)
from tokenizers import Tokenizer
from torch import Tensor
from words import SPECIAL

from keepsight.demo.scene import COLORS, SHAPES, Scene

# What needs two facts at once is learned last. It is asked more often than in a conversation, and
# the words of an answer that tell whether it was understood weigh more than the rest.
HARD_KINDS = (*KINDS, "where", "list", "which", "which", "compare")
HARD_WEIGHT = 2.0
SEARCHES = 0.3

# How many pictures a search is among.
SEARCHED = (1, 2, 3, 3, 4, 4, 4)

# The role of an answer that nobody asked for and no picture tells: see ``exercise``.
EXERCISE = "exercise"


def lesson(rng: random.Random) -> list[Message]:
    """A conversation with more questions about the same pictures than anybody would ask.

    Pictures make most of a conversation's length and questions most of what can be learned from
    it. One lesson in four is a plain conversation, which keeps the ordinary course of one in view.
    """
    most = rng.choice((2, 3, 4, 4, 4, 4, 4, 6))
    if rng.random() < 0.25:
        return conversation(rng, most)
    messages: list[Message] = []
    scenes: list[Scene] = []
    colors, shapes = rng.sample(list(COLORS), 2), rng.sample(SHAPES, 2)
    alike = rng.random() < 0.5
    if rng.random() < 0.08:
        text, answer = question(rng, [])
        messages += [("user", [text]), ("assistant", [answer])]
    for _ in range(rng.randint(1, 4)):
        wanted = rng.choice((1, 1, 1, 2, 3)) if scenes else rng.choice((1, 1, 2, 2, 3))
        fresh = list(more_scenes(rng, scenes, min(most - len(scenes), wanted)))
        for scene in fresh if alike else ():
            scene.color, scene.shape = rng.choice(colors), rng.choice(shapes)
        scenes += fresh
        for _ in range(rng.randint(1, 4)):
            asked = question(rng, scenes, len(fresh), HARD_KINDS)
            if alike and rng.random() < 0.3:
                asked = which(rng.choice(colors), rng.choice(shapes), scenes)
            messages += turn(rng, fresh, asked)
            messages += exercise(rng) if rng.random() < 0.6 else []
            fresh = []
    return messages


def search(rng: random.Random) -> list[Message]:
    """A few pictures, and over and over the question which of them shows this or that.

    To name a picture by what it shows was learned last of all, and with three or four pictures
    latest. In a conversation the answer is mostly the same few, and a model that only knows whether
    there is such a picture does well. Half of the time the pictures share two colours and two
    shapes, so that each is nearly right; nothing is asked twice while the pictures are the same.
    """
    count = rng.choice(SEARCHED)
    scenes = list(more_scenes(rng, [], count))
    if rng.random() < 0.5:
        colors, shapes = rng.sample(list(COLORS), 2), rng.sample(SHAPES, 2)
        for scene in scenes:
            scene.color, scene.shape = rng.choice(colors), rng.choice(shapes)
    first = count if rng.random() < 0.6 else rng.randint(1, count)
    messages: list[Message] = []
    for part, seen in ((scenes[:first], scenes[:first]), (scenes[first:], scenes)):
        if not part:
            continue
        names = list(itertools.product({s.color: 0 for s in seen}, {s.shape: 0 for s in seen}))
        there = list({(s.color, s.shape): 0 for s in seen})
        absent = [name for name in names if name not in there] or [(Scene(rng).color, "ring")]
        wanted = [*rng.sample(there, min(4, len(there))), rng.choice(absent)]
        rng.shuffle(wanted)
        for name in wanted[: 5 if seen is scenes or first == count else 2]:
            messages += turn(rng, part, which(*name, seen))
            part = []
    return messages


def exercise(rng: random.Random) -> list[Message]:
    """A comparison of two pictures that are not there: only its last sentence is to be learned.

    Whether two words are the same is hard to find out, and a lesson seldom asks for it. For
    hundreds of steps nothing seems to be learned, then all of it at once; this brings that moment
    forward, since the sentence follows from the words before it.
    """
    a, b = more_scenes(rng, [], 2)
    color, shape = rng.choice(((a.color, a.shape), (a.color, b.shape), (b.color, a.shape)))
    if rng.random() < 0.6:
        b.color, b.shape = color, shape
    i, j = sorted(rng.sample(range(6), 2))
    return [(EXERCISE, [comparison(i, j, a, b)[1]])]


def hard_part(answer: str) -> str:
    """The end of an answer that needs two facts at once; empty when there is none."""
    if not answer.startswith(("Picture", "None")):
        return ""
    return " " + answer.rsplit(". ", 1)[1] if "shows" in answer else answer


class Writer:
    """Writes one conversation: tokens, rotary positions, weights and rows of the picture bank."""

    def __init__(self, tokenizer: Tokenizer, bank: Bank, rng: random.Random) -> None:
        self.bank, self.rng = bank, rng
        self.encode = lru_cache(4096)(lambda text: tokenizer.encode(text).ids)
        ids = [tokenizer.token_to_id(token) for token in SPECIAL]
        _, self.start, self.end, self.open, self.close, _, self.image, _ = ids

    def write(self, messages: list[Message]) -> "Row":
        """Follow the chat template: only what the assistant says, and its end, is to be learned."""
        row, number = Row(), 0
        for role, content in messages:
            weight = 1.0 if role == "assistant" else 0.0
            learned = role in ("assistant", EXERCISE)
            row.text([self.start, *self.encode("assistant\n" if learned else f"{role}\n")])
            for part in content:
                if isinstance(part, str):
                    hard = len(self.encode(hard_part(part))) if learned else 0
                    row.text(self.encode(part), weight, hard)
                    continue
                number += 1
                row.text([*self.encode(f"Picture {number}: "), self.open])
                row.picture(self.image, part, self.bank.rows(self.rng, part))
                row.text([self.close])
            row.text([self.end], weight)
            row.text(self.encode("\n"))
        return row


class Row:
    """One conversation as it grows, token by token."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.weights: list[float] = []
        self.positions: list[tuple[int, int, int]] = []
        self.pictures: list[int] = []
        self.at = 0

    def text(self, ids: list[int], weight: float = 0.0, hard: int = 0) -> None:
        """Add words, the last ``hard`` of them hard: time, row and column move on together."""
        self.ids += ids
        self.weights += [weight] * (len(ids) - hard) + [HARD_WEIGHT] * hard
        self.positions += [(p, p, p) for p in range(self.at, self.at + len(ids))]
        self.at += len(ids)

    def picture(self, image: int, scene: Scene, rows: range) -> None:
        """Add a picture: one place in time, and a row and a column for every token."""
        height, width = merged(scene.width, scene.height)
        self.ids += [image] * (height * width)
        self.weights += [0.0] * (height * width)
        self.positions += [
            (self.at, self.at + y, self.at + x) for y in range(height) for x in range(width)
        ]
        self.pictures += rows
        self.at += max(height, width)


@dataclass
class Batch:
    """Conversations of about one length, padded on the right."""

    ids: Tensor
    weights: Tensor
    positions: Tensor
    pictures: Tensor

    @classmethod
    def of(cls, rows: list[Row]) -> "Batch":
        """Pad to a multiple of eight, which keeps the number of different shapes small."""
        length = -(-max(len(row.ids) for row in rows) // 8) * 8
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        weights = torch.zeros(len(rows), length)
        positions = torch.zeros(3, len(rows), length, dtype=torch.long)
        for number, row in enumerate(rows):
            used = len(row.ids)
            ids[number, :used] = torch.tensor(row.ids)
            weights[number, :used] = torch.tensor(row.weights)
            positions[:, number, :used] = torch.tensor(row.positions).T
        pictures = torch.tensor([at for row in rows for at in row.pictures], dtype=torch.long)
        return cls(ids, weights, positions, pictures)


def batches(
    tokenizer: Tokenizer, bank: Bank, size: int, seed: int, searches: float = SEARCHES
) -> Iterator[Batch]:
    """Endless batches of lessons, sorted by length in pools so that little is padding."""
    rng = random.Random(seed)
    writer = Writer(tokenizer, bank, rng)
    while True:
        chats = (search(rng) if rng.random() < searches else lesson(rng) for _ in range(size * 8))
        pool = sorted(map(writer.write, chats), key=_length)
        parts = [pool[at : at + size] for at in range(0, len(pool), size)]
        rng.shuffle(parts)
        yield from map(Batch.of, parts)


def _length(row: Row) -> int:
    return len(row.ids)
