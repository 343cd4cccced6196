"""A file system of our own for fsspec: it counts calls, fails, waits, and loses bytes on the way.

What is asked of it is counted once, however many steps it takes inside. Everything is steered by
`Line`, which all instances of one test share.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

ASKED = ("cat_file", "info", "ls", "pipe_file", "rm_file", "mv", "makedirs")
WRITES = ("pipe_file", "rm_file", "mv", "makedirs")


class Line:
    """How the network behaves, and what went over it: a move is named by where it leads."""

    calls: ClassVar[Counter[str]] = Counter()
    names: ClassVar[list[tuple[str, str]]] = []
    fail: Callable[[str, str], BaseException | None] = staticmethod(lambda asked, path: None)
    delay: Callable[[str, str], float] = staticmethod(lambda asked, path: 0.0)
    after: Callable[[str, str], None] = staticmethod(lambda asked, path: None)
    cut: Callable[[bytes], bytes] = staticmethod(lambda data: data)

    @classmethod
    def reset(cls) -> None:
        """A fast and sound line to an empty place."""
        cls.calls, cls.names = Counter(), []
        cls.fail = staticmethod(lambda asked, path: None)
        cls.delay = staticmethod(lambda asked, path: 0.0)
        cls.after = staticmethod(lambda asked, path: None)
        cls.cut = staticmethod(lambda data: data)
        TrialFileSystem.store.clear()
        TrialFileSystem.pseudo_dirs[:] = [""]

    @classmethod
    def total(cls) -> int:
        """How often anything was asked."""
        return sum(cls.calls.values())


class TrialFileSystem(MemoryFileSystem):
    """`trial://`: objects in memory behind a `Line`. It is none of those that put objects whole."""

    protocol = "trial"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    _inside = threading.local()

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).replace("trial://", "memory://", 1))


def _watched(asked: str) -> Callable[..., Any]:
    whole = getattr(MemoryFileSystem, asked)

    def ask(self: TrialFileSystem, path: str, *arguments: Any, **options: Any) -> Any:
        if getattr(self._inside, "on", False):
            return whole(self, path, *arguments, **options)
        self._inside.on = True
        try:
            Line.calls[asked] += 1
            Line.names.append((asked, arguments[0] if asked == "mv" else path))
            time.sleep(Line.delay(asked, path))
            error = Line.fail(asked, path)
            if error is not None:
                raise error
            result = whole(self, path, *arguments, **options)
            Line.after(asked, path)
            return Line.cut(result) if asked == "cat_file" else result
        finally:
            self._inside.on = False

    return ask


for _asked in ASKED:
    setattr(TrialFileSystem, _asked, _watched(_asked))
fsspec.register_implementation("trial", TrialFileSystem, clobber=True)


def unreachable(asked: str, path: str) -> BaseException | None:
    """The network is down."""
    return ConnectionError("Network is unreachable")


def read_only(asked: str, path: str) -> BaseException | None:
    """Reading is allowed, nothing else."""
    return PermissionError("Access Denied") if asked in WRITES else None
