"""Functions of single numbers, whose bits do not depend on how many numbers there are.

Most numbers of a call are computed by vector instructions, and those that are left over one by one,
which rounds otherwise. So calls are filled up until nothing is left over.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

_GRAIN = 32768  # numbers of an elementwise operation, from which on torch shares them out
_FEW = 16384  # those of a GELU, from which on all threads share them
_WHOLE = 64  # numbers that are computed by one vector instruction or two, whatever their dtype


def evenly(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """A function of each row, on so many rows that vector instructions compute all: numbers that
    are left over are computed one by one, and come out with other bits."""
    count, width = inputs[0].shape
    missing = _fill(count, width, torch.get_num_threads()) - count
    if missing:
        inputs = tuple(functional.pad(one, (0, 0, 0, missing)) for one in inputs)
    # Numbers that lie apart are computed one by one, all of them.
    return function(*(one.contiguous() for one in inputs))[:count]


def _fill(count: int, width: int, threads: int) -> int:
    """The next number of rows that threads can share without a rest."""
    while True:
        sharing = max(1, min(threads, -(-count * width // _GRAIN)))
        everyone = threads if count * width > _FEW else 1
        whole = _WHOLE * math.lcm(sharing, everyone)
        rows = whole // math.gcd(whole, width)
        filled = -(-count // rows) * rows
        if filled == count:
            return count
        count = filled
