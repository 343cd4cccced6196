"""A process that works a store hard until it is killed, and a check of what it left behind.

It is forked, so it starts at once and can be killed hundreds of times. What it was promised goes
through a pipe that outlives it: `+ n` after a flush, `~ n` before a delete and `- n` after it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from keepsight.store import About, DiskStore, index, layout
from keepsight.system import digests, private_files

SIZE = 700


def key_of(number: int) -> str:
    return digests.digest("load", number)


def put(store: DiskStore, number: int) -> None:
    """Four entries of one number; its snapshot depends on the one before of its thread."""
    key, media = key_of(number), (f"image {number % 7}",)
    store.put("package", key, {"a": torch.full((SIZE,), float(number))}, {"n": number}, About(9.0))
    store.put_note("alias", key, {"n": number}, About(media=media))
    base = ("snapshot", key_of(number - 2)) if number // 2 % 5 else None
    tensors = {"a": torch.full((SIZE,), float(number))}
    store.put("snapshot", key, tensors, {"n": number}, About(1.0, base))
    store.put("state", key, tensors, {"n": number}, About(1.0, ("snapshot", key)))


def is_right(store: DiskStore, number: int) -> bool:
    """Whether whatever is there of a number is of that number."""
    key = key_of(number)
    for kind in ("package", "snapshot", "state"):
        found = store.get(kind, key)
        if found and not ((found[0]["a"] == number).all() and found[1]["n"] == number):
            return False
    return store.note("alias", key) in (None, {"n": number})


def work(store: DiskStore, pipe: int, numbers: list[int], seed: int) -> None:
    """Put, flush, read, delete; never again what was deleted."""
    chance, kept = random.Random(seed), []
    for start in range(0, len(numbers), 3):
        some = numbers[start : start + 3]
        for number in some:
            put(store, number)
        store.flush()
        kept += some
        os.write(pipe, "".join(f"+ {number}\n" for number in some).encode())
        for number in chance.sample(kept, min(4, len(kept))):
            if not is_right(store, number):
                os.write(pipe, f"! {number}\n".encode())
        if chance.random() < 0.3:
            gone = chance.choice(kept)
            kept.remove(gone)
            os.write(pipe, f"~ {gone}\n".encode())
            store.delete("package", key_of(gone))
            os.write(pipe, f"- {gone}\n".encode())


def forked(root: Path, first: int, budget: int | None, seed: int) -> tuple[int, int]:
    """A process with two threads at work from a number on; its id, and where its words come out."""
    out, pipe = os.pipe()
    child = os.fork()
    if child:
        os.close(pipe)
        return child, out
    try:
        os.close(out)
        store = DiskStore(root, budget)
        ranges = [list(range(first + lane, first + 100_000, 2)) for lane in range(2)]
        threads = [
            threading.Thread(target=work, args=(store, pipe, numbers, seed + lane))
            for lane, numbers in enumerate(ranges)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        os.write(pipe, f"! {traceback.format_exc()!r}\n".encode())
    os._exit(0)


def killed(child: int, out: int, seconds: float | None, spoken: bool = False) -> list[str]:
    """Let it work (from its first word on, if it must have spoken), kill -9 (unless it does that
    itself), and all that it said."""
    with os.fdopen(out) as said:
        first = said.readline() if spoken else ""
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        lines = (first + said.read()).split("\n")
    os.waitpid(child, 0)
    return [line for line in lines if line]


def dies_at(root: Path, step: int) -> list[str]:
    """The same few things each time, killed -9 at a certain step of them; what was promised.

    A step is a part of a file written, a sync, a rename, a removal, or a row of the index
    changed.
    """
    out, pipe = os.pipe()
    child = os.fork()
    if not child:
        left = [step]

        def one_more() -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def counted(owner: Any, name: str) -> None:
            real = getattr(owner, name)

            def call(*arguments: Any, **options: Any) -> Any:
                one_more()
                done = real(*arguments, **options)
                one_more()
                return done

            setattr(owner, name, call)

        def slowly(*arguments: Any) -> Any:
            for part in spelled(*arguments):
                yield bytes(part)[: len(part) // 2]
                one_more()
                yield bytes(part)[len(part) // 2 :]

        with contextlib.suppress(BaseException):
            spelled, layout.spelled = layout.spelled, slowly
            private_files.BUFFER = 0
            for name in ("fsync", "replace", "unlink"):
                counted(os, name)
            for name in ("put", "drop", "_transaction"):
                counted(index, name)
            store = DiskStore(root)
            for number in (1, 3):
                put(store, number)
                store.flush()
                os.write(pipe, f"+ {number}\n".encode())
            os.write(pipe, b"~ 1\n")
            store.delete("package", key_of(1))
            os.write(pipe, b"- 1\n")
            store.close()
            os.write(pipe, b"end\n")
        os._exit(0)
    os.close(pipe)
    return killed(child, out, None)
