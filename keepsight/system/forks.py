"""Forks: takes the indexes of stores before a process forks, and resets objects in the child.

A forked process has only the thread that forked, and a copy of all memory at that moment. So what
other threads may hold is taken first, waiting a few seconds at most. In the child, each object
learns whether that worked.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

PATIENCE = 5.0  # seconds that a fork waits for all of them together


class Held(Protocol):
    """Something that is taken before a fork."""

    def before_fork(self, seconds: float) -> bool:
        """Take it within this many seconds, if possible."""

    def after_fork(self) -> None:
        """In the parent, if it was taken: give it back."""

    def in_child(self, taken: bool) -> None:
        """In the child: give it back, or mark it as unusable."""


_held: weakref.WeakSet[Held] = weakref.WeakSet()
_renewed: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
_forking = threading.local()


def hold(thing: Held) -> None:
    """Take an object before each fork, as long as it lives."""
    _held.add(thing)


def renew(method: Callable[[], None]) -> None:
    """Call a method in each child, as long as its object lives."""
    _renewed[method.__self__] = method.__name__  # type: ignore[attr-defined]


def _before() -> None:
    end = time.monotonic() + PATIENCE
    held = list(_held)
    _forking.taken = [t for t in held if t.before_fork(max(0.0, end - time.monotonic()))]


def _after_in_parent() -> None:
    for thing in reversed(_forking.taken):
        thing.after_fork()


def _after_in_child() -> None:
    for thing, name in list(_renewed.items()):
        getattr(thing, name)()
    for thing in list(_held):
        thing.in_child(thing in _forking.taken)


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(
        before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )
