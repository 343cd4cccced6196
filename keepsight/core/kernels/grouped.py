"""Makes attention read grouped keys and values in place, in our own passes.

With a mask, Transformers first copies all keys and values once per query of a group, in every layer
and pass. That is most of the cost of a short chunk on a long prefix. One function of theirs decides
this, and it only listens to an environment variable. A variable would affect other models in the
process, change under a running thread, and be written while C code reads it without a lock. So we
wrap that function; the wrapper answers per thread.
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
    """How many of our passes are active in this thread; they may be nested."""
    found: int = vars(_here).get("passes", 0)
    return found


def _wanted() -> bool:
    # A tracer cannot see thread state, so compiled code keeps the behaviour of Transformers.
    return not torch.compiler.is_compiling() and _passes() > 0


@functools.cache
def begin() -> None:
    """Wrap the function of Transformers: once per process, before its code is first inspected."""
    upstream.ask_first(_wanted)


@contextmanager
def grouped_queries(device: torch.device, on_lanes: bool = False) -> Iterator[None]:
    """Let attention in this thread read grouped keys and values in place: on a CPU, and where our
    own attention reads them on their lanes.

    Else an accelerator needs the copy: its fast kernels take no groups with masks.
    """
    if device.type != "cpu" and not on_lanes:
        yield
        return
    begin()
    _here.passes = _passes() + 1
    try:
        yield
    finally:
        _here.passes = _passes() - 1
