"""Helpers of the suites.

A broken promise is an `AssertionError` that names it; pytest shows its text.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import torch

from keepsight.core.decoding.state import Tensors

E = TypeVar("E", bound=Exception)


def expect(condition: object, promise: str) -> None:
    """Fail with the name of the broken promise. (`assert` would vanish under `python -O`.)"""
    if not condition:
        raise AssertionError(promise)


class Clock:
    """Time as the test says."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def same_tensors(one: Tensors, two: Tensors) -> bool:
    """Whether names, dtypes and values are equal."""
    return one.keys() == two.keys() and all(
        tensor.dtype == two[name].dtype and torch.equal(tensor, two[name])
        for name, tensor in one.items()
    )


def bits(tensors: Tensors) -> dict[str, tuple[torch.dtype, torch.Size, list[int]]]:
    """Names, dtypes, shapes and bytes, which tell even zeros of two signs apart."""
    return {
        name: (t.dtype, t.shape, t.contiguous().view(-1).view(torch.uint8).tolist())
        for name, t in tensors.items()
    }


def entered(order: list[str], name: str) -> Callable[[object], None]:
    """A listener that enters a name whenever something comes."""
    return lambda piece: order.append(name)


def in_threads(*work: Callable[[], object]) -> None:
    """Do all of it at the same moment, each in a thread of its own."""
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def until(holds: Callable[[], object]) -> None:
    """Wait for what other threads are about to bring about."""
    end = time.monotonic() + 60
    while not holds():
        expect(time.monotonic() < end, "it comes about within a minute")
        time.sleep(0.005)


@contextlib.contextmanager
def swapped_in(owner: object, name: str, value: object) -> Iterator[None]:
    """Temporarily replace a value under a name of an object or module."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def gone(*_: object, **__: object) -> NoReturn:
    """Replaces a tower that must not run."""
    raise RuntimeError("the tower was asked to encode a picture that is known")


def raised(kind: type[E], call: Callable[[], object]) -> E | None:
    """The error of this kind that a call raises, or None."""
    try:
        call()
    except kind as error:
        return error
    return None
