"""Elementwise functions whose bits do not depend on how many numbers there are.

Vector instructions compute most numbers of a call; the remainder is computed one by one and rounds
differently. So calls are padded until nothing remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

_GRAIN = 32768  # from this many numbers on, torch splits an elementwise operation over threads
_FEW = 16384  # from this many numbers on, all threads share a GELU
_WHOLE = 64  # numbers per one or two vector instructions, for any dtype


def in_whole_vectors(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Call a function of rows, padded so that vector instructions compute every number. A remainder
    would be computed one by one, with other bits."""
    count, width = inputs[0].shape
    missing = _rows_without_remainder(count, width, torch.get_num_threads()) - count
    if missing:
        inputs = tuple(functional.pad(one, (0, 0, 0, missing)) for one in inputs)
    # Numbers that are not contiguous are computed one by one, all of them.
    return function(*(one.contiguous() for one in inputs))[:count]


def fills_vectors(count: int) -> bool:
    """Whether so many numbers leave no remainder."""
    return _rows_without_remainder(count, 1, torch.get_num_threads()) == count


def _rows_without_remainder(count: int, width: int, threads: int) -> int:
    """The next number of rows that threads can share without a remainder."""
    while True:
        sharing = max(1, min(threads, -(-count * width // _GRAIN)))
        everyone = threads if count * width > _FEW else 1
        whole = _WHOLE * math.lcm(sharing, everyone)
        rows = whole // math.gcd(whole, width)
        filled = -(-count // rows) * rows
        if filled == count:
            return count
        count = filled
