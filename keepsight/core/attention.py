"""Attention that reads grouped keys and values where they lie, in passes of ours on a CPU.

With a mask, upstream first copies all keys and values once for each query of a group, in every
layer and every pass: most of what a short chunk on a long prefix costs. It asks one function
whether to, and only an environment variable makes that say no. A variable is the whole process's:
it would reach other people's models, change under a pass that runs in another thread, and move
memory that C code reads without a lock. So the function is asked through ours, which answers for
the thread whose pass it is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from keepsight.models import upstream

_here = threading.local()


def _passes() -> int:
    """How many of ours this thread is in, one inside the other."""
    found: int = vars(_here).get("passes", 0)
    return found


def _wanted() -> bool:
    # A tracer cannot look into a thread; what is compiled is as upstream has it.
    return not torch.compiler.is_compiling() and _passes() > 0


@functools.cache
def begin() -> None:
    """Install our answer in front of upstream's: once in a process, before upstream's code is first
    looked at."""
    upstream.ask_first(_wanted)


@contextmanager
def grouped_queries(device: torch.device) -> Iterator[None]:
    """Let attention of this thread read grouped keys and values where they lie, on a CPU.

    On an accelerator the copy is right: its fast kernels take no groups with masks.
    """
    if device.type != "cpu":
        yield
        return
    begin()
    _here.passes = _passes() + 1
    try:
        yield
    finally:
        _here.passes = _passes() - 1
