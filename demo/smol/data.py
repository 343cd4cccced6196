"""Workers that draw and ask, each into its own part of shared memory.

A unit is a fixed number of pictures (and of conversations about them), so that every batch has the
same shape. Nothing is written to disk, nothing is drawn twice.
"""

import json
import mmap
import os
import queue
import random
import threading
from collections.abc import Iterator
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer

from demo.smol.ask import Asker
from demo.smol.draw import GRID, LONGEST, SIDE, Painter, Picture, queries
from demo.smol.model import IMAGE_ID, TOKENS
from keepsight.models.demo_smol import NEW_TOKENS

ITEMS = 4  # boxes of a picture that the reading head is asked about
LENGTH = 512  # tokens of a conversation
COUNTS = (0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 4, 4)  # pictures in the conversations of a unit
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
WITHOUT = (
    "What is in the picture?", "What do you see?", "Describe the image.",
    "What color is the circle in the picture?", "What does the text in the image say?",
    "Is there a cat in the picture?", "How many shapes are in the picture?",
    "Read the text in the image.", "Which bar is the tallest?",
)  # fmt: skip

Fields = dict[str, tuple[tuple[int, ...], type]]


def tower_fields(pictures: int) -> Fields:
    return {
        "pixels": ((pictures, SIDE, SIDE, 3), np.uint8),
        "boxes": ((pictures, ITEMS, 4), np.float32),
        "labels": ((pictures, ITEMS, 3 + LONGEST), np.int16),
        "maps": ((pictures, 5, GRID, GRID), np.uint8),
    }


def talk_fields() -> Fields:
    n = len(COUNTS)
    return {
        **tower_fields(sum(COUNTS)),
        "ids": ((n, LENGTH), np.int32),
        "position": ((n, LENGTH), np.int32),
        "group": ((n, LENGTH), np.uint8),
        "turn": ((n, LENGTH), np.uint8),  # of the answer that this token belongs to; 0: not learned
    }


class Text:
    """Ids of a conversation, as Transformers' chat template and processor write it."""

    def __init__(self, tokenizer_file: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.tokenizer.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in NEW_TOKENS]
        )
        self.end = self.ids("<|im_end|>")
        self.gap = self.ids("\n")
        start = self.ids("<|im_start|>")
        self.system = start + self.ids("system\n" + SYSTEM) + self.end + self.gap
        self.start = start
        self.picture = self.ids(
            "<fake_token_around_image><global-img>"
            + "<image>" * TOKENS
            + "<fake_token_around_image>"
        )
        self.assistant = self.end + self.gap + start + self.ids("assistant\n")

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def answer(self, answer: str) -> list[int]:
        return self.ids("assistant\n" + answer)[len(self.ids("assistant\n")) :] + self.end


class Conversations:
    """Writes conversations into the arrays of a unit."""

    def __init__(self, assets: Path, seed: int, test: bool) -> None:
        self.painter = Painter(assets, seed, test)
        self.r = self.painter.r
        self.asker = Asker(self.painter.emoji_names, self.r, self.painter.words)
        self.text = Text(assets / "tokenizer.json")
        chats = assets / "chats.json"
        self.chats: list[list[str]] = (
            json.loads(chats.read_text()) if chats.exists() and not test else []
        )

    def pictures(self, unit: dict[str, np.ndarray], start: int, count: int) -> list[Picture]:
        drawn = [self.painter.any() for _ in range(count)]
        for i, picture in enumerate(drawn, start):
            unit["pixels"][i] = np.asarray(picture.image)
            unit["maps"][i] = picture.maps
            unit["boxes"][i], unit["labels"][i] = queries(
                picture, self.painter.emoji_names, ITEMS, self.r
            )
        return drawn

    def fill(self, unit: dict[str, np.ndarray]) -> None:
        if "ids" not in unit:
            self.pictures(unit, 0, len(unit["pixels"]))
            return
        start = 0
        for row, count in enumerate(COUNTS):
            drawn = self.pictures(unit, start, count)
            start += count
            if not count:
                made = self.plain()
            elif self.r.random() < 0.6:
                made = self.apart(drawn)
            else:
                made = self.together(drawn)
                if made[0][:LENGTH].count(IMAGE_ID) != count * TOKENS:  # cut in a late picture
                    made = self.apart(drawn)
            for name, values in zip(("ids", "position", "group", "turn"), made, strict=True):
                unit[name][row] = (values + [0] * LENGTH)[:LENGTH]

    def apart(self, drawn: list[Picture]) -> tuple[list[int], ...]:
        """Many first questions about the same pictures; none sees another."""
        text = self.text
        ids = text.system + text.start + text.ids("user\n") + text.picture * len(drawn)
        head, group, turn = len(ids), [0] * len(ids), [0] * len(ids)
        position = list(range(head))
        for k, (question, answer) in enumerate(self.asker.turns(drawn), 1):
            ask, say = text.ids(question) + text.assistant, text.answer(answer)
            new = len(ask) + len(say)
            if len(ids) + new > LENGTH or k > 250:
                return ids, position, group, turn
            ids += ask + say
            position += range(head, head + new)
            group += [k] * new
            turn += [0] * len(ask) + [k] * len(say)
        raise AssertionError("turns end")

    def together(self, drawn: list[Picture]) -> tuple[list[int], ...]:
        """One conversation; later pictures may come in later turns."""
        r, text = self.r, self.text
        ids, turn = list(text.system), [0] * len(text.system)
        shown = len(drawn) if r.random() < 0.4 else 1
        asks = self.asker.turns(drawn[:shown])
        fresh, k = shown, 0
        while True:
            k += 1
            if fresh == 0 and shown < len(drawn) and r.random() < 0.4:
                fresh, shown = 1, shown + 1
                asks = self.asker.turns(drawn[:shown])
            if self.chats and r.random() < 0.04 and not fresh:
                question, answer = r.choice(self.chats)
                if len(answer) > 160:
                    continue
            else:
                question, answer = next(asks)
            marks = (
                "<fake_token_around_image><global-img>"
                + "<image>" * TOKENS
                + "<fake_token_around_image>"
            )
            said = marks * fresh + question if r.random() < 0.85 else question + marks * fresh
            ask = (
                (text.gap if k > 1 else [])
                + text.start
                + text.ids("user\n" + said)
                + text.assistant
            )
            say = text.answer(answer)
            if len(ids) + len(ask) + len(say) > LENGTH:
                missing = len(drawn) - shown + fresh
                if missing:  # the arrays hold its pixels: its place must stand, if only unread
                    room = LENGTH - len(text.picture) * missing
                    ids, turn = ids[:room], turn[:room]
                    ids += text.picture * missing
                    turn += [0] * (len(ids) - len(turn))
                return ids, list(range(len(ids))), [0] * len(ids), turn
            fresh = 0
            ids += ask + say
            turn += [0] * len(ask) + [k] * len(say)

    def plain(self) -> tuple[list[int], ...]:
        """Talk without pictures: SmolLM2's own answers, and that it sees none."""
        r, text = self.r, self.text
        ids, position, group, turn = list(text.system), list(range(len(text.system))), [], []
        head = len(ids)
        group, turn = [0] * head, [0] * head
        for k in range(1, 200):
            if not self.chats or r.random() < 0.15:
                question, answer = r.choice(WITHOUT), "I don't see a picture."
            else:
                question, answer = r.choice(self.chats)
            ask = text.start + text.ids("user\n" + question) + text.assistant
            say = text.answer(answer.removesuffix("…"))
            say = say[:-1] if answer.endswith("…") else say  # it was cut: its end is not learned
            new = len(ask) + len(say)
            if len(ids) + new > LENGTH:
                break
            ids += ask + say
            position += range(head, head + new)
            group += [k] * new
            turn += [0] * len(ask) + [k] * len(say)
        return ids, position, group, turn


def _views(buffer: Any, slot: int, fields: Fields) -> dict[str, np.ndarray]:
    offset, found = slot * _size(fields), {}
    for name, (shape, kind) in fields.items():
        count = int(np.prod(shape))
        found[name] = np.frombuffer(buffer, kind, count, offset).reshape(shape)
        offset += -(-count * np.dtype(kind).itemsize // 64) * 64
    return found


def _size(fields: Fields) -> int:
    return sum(-(-int(np.prod(s)) * np.dtype(k).itemsize // 64) * 64 for s, k in fields.values())


def _work(pipe: Any, buffer: Any, fields: Fields, assets: Path, seed: int, test: bool) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    maker = Conversations(assets, seed, test)
    while True:
        slot = pipe.recv()
        if slot is None:
            return
        maker.fill(_views(buffer, slot, fields))
        pipe.send(slot)


class Units:
    """Units as tensors on a device, drawn by `workers` processes while the model learns.

    `next(count)` never waits once the first have come: where drawing is slower than learning, a
    unit is used again, and `drawn` and `used` say how often.
    """

    def __init__(
        self, assets: Path, fields: Fields, workers: int, device: str, seed: int,
        test: bool = False,
        keep: int = 0,
    ) -> None:  # fmt: skip
        context = get_context("fork")
        each = 2
        self.fields, self.device = fields, device
        self.buffer = mmap.mmap(-1, _size(fields) * workers * each)
        self.pipes, self.processes = [], []
        for i in range(workers):
            here, there = context.Pipe()
            process = context.Process(
                target=_work,
                args=(there, self.buffer, fields, assets, seed * 1000 + i, test),
                daemon=True,
            )
            process.start()
            for j in range(each):
                here.send(i * each + j)
            self.pipes.append(here)
            self.processes.append(process)
        self.keep, self.pool, self.fresh = (
            keep or (256 if device == "cuda" else 24),
            [],
            queue.Queue(8),
        )  # type: ignore[var-annotated]
        self.drawn = self.used = 0
        self.r = random.Random(seed)
        self.closed = False

    def start(self) -> "Units":
        """Move units to the device from now on; after this no process may be forked."""
        threading.Thread(target=self._move, daemon=True).start()
        return self

    def _move(self) -> None:
        try:
            self._move_to_device()
        except (EOFError, OSError):
            if not self.closed:  # else the workers were ended by `close`
                raise

    def _move_to_device(self) -> None:
        if self.device == "cuda":
            main, side = torch.cuda.default_stream(), torch.cuda.Stream()
            whole = np.frombuffer(self.buffer, np.uint8)
            torch.cuda.cudart().cudaHostRegister(
                whole.ctypes.data, whole.nbytes, 0
            )  # copies without a stop
            with torch.cuda.stream(side):
                self._move_all(main, side)
        else:
            self._move_all(None, None)

    def _move_all(self, main: Any, side: Any) -> None:
        while not self.closed:
            for pipe in connection.wait(self.pipes, 1.0):
                slot = pipe.recv()  # type: ignore[union-attr]
                unit = {
                    name: torch.from_numpy(array).to(self.device, copy=True, non_blocking=True)
                    for name, array in _views(self.buffer, slot, self.fields).items()
                }
                if side is not None:
                    side.synchronize()
                    for tensor in unit.values():
                        tensor.record_stream(main)
                pipe.send(slot)  # type: ignore[union-attr]
                self.fresh.put(unit)

    def next(self, count: int, again: bool = True) -> dict[str, torch.Tensor]:
        units: list[dict[str, torch.Tensor]] = []
        while len(units) < count:
            if self.fresh.empty() and again and len(self.pool) >= min(self.keep, 4 * count):
                units.append(self.r.choice(self.pool))
                continue
            unit = self.fresh.get(timeout=120)
            self.drawn += 1
            self.pool.append(unit)
            if len(self.pool) > self.keep:
                self.pool.pop(0)
            units.append(unit)
        self.used += count
        return {name: torch.cat([unit[name] for unit in units]) for name in self.fields}

    def close(self) -> None:
        self.closed = True
        for process in self.processes:
            process.terminate()

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield self.next(1, again=False)
