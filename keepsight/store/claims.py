"""Removing what has expired, while another process may write it again under the same name.

Most addresses know no removal under a condition. So whoever removes says so first, in a small
object beside the entry (a claim), and only then looks once more whether the entry is still over.
Whoever writes looks afterwards: as long as a claim lies there a removal may yet come, and after the
last one is gone it is seen whether the entry is still there, else it is written again. A claim
whose process was killed is waited for no longer than a removal may take, and goes with other
leftovers.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator

from keepsight.store.address import PART, Address

_STALE = 600.0  # seconds; the clocks of two machines may disagree
_TIMES = 3  # that a write is tried


@contextlib.contextmanager
def claim(link: Address, name: str) -> Iterator[None]:
    """Claim an entry while it is removed. A removal without an answer may still happen, so after an
    error the claim stays."""
    folder, _, last = name.rpartition("/")
    mine = f"{folder}/{PART}{uuid.uuid4().hex}{_ending(last)}"
    link.write(mine, [b"{}"], lambda: False)
    yield
    link.remove(mine)


def write(
    link: Address,
    name: str,
    parts: list[bytes | memoryview],
    unwanted: Callable[[], bool],
    careful: bool,
) -> None:
    """Put an entry in place; with `careful` also where a removal is on its way there."""
    for _ in range(_TIMES):
        link.write(name, parts, unwanted)
        if unwanted() or not careful:
            return
        _wait_for_removals(link, name)
        if link.exists(name):
            return


def _wait_for_removals(link: Address, name: str) -> None:
    folder, _, last = name.rpartition("/")
    end, pause = time.monotonic() + 3 * link.timeout, 0.02
    while time.monotonic() < end and any(
        one.name.endswith(_ending(last)) and time.time() - one.written < _STALE
        for one in link.listed([folder])
        if one.is_part
    ):
        time.sleep(pause)
        pause = min(1.0, 2 * pause)


def _ending(last: str) -> str:
    return f"-over-{last}"
