"""Removes expired entries safely while another process may write them again under the same name.

Most addresses have no conditional removal. So a remover first writes a small object beside the
entry (a claim), and only then checks again whether the entry is expired. A writer checks
afterwards: while a claim exists, a removal may still happen; when the last claim is gone, it checks
that the entry still exists and writes it again if not. The claim of a killed process is ignored
after the longest time a removal may take, and is removed with other leftovers.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator

from keepsight.store.addresses.address import PART, Address

_STALE = 600.0  # seconds; the clocks of two machines may disagree
_TIMES = 3  # attempts to write


@contextlib.contextmanager
def claim(link: Address, name: str) -> Iterator[None]:
    """Claim an entry while it is removed. A removal without an answer may still happen, so the
    claim stays after an error."""
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
    """Write an entry; `careful` also handles a concurrent removal."""
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
