"""The run itself: items in, what became of each out, in order, with the tower kept busy.

A result comes when its package is safe: an image that was reported as encoded will be found,
whatever happens afterwards. What a store refused is a result that says so; where it lets go of what
was reported, because its budget is too small, the run ends with an error.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from typing import Any

from keepsight.encode.items import Item
from keepsight.encode.prefetch import Ahead, usual_threads
from keepsight.encode.results import Encoded, EncodeTarget

BUDGET = 512 << 20  # bytes of images and pixels that wait for the tower
_SECONDS, _BYTES = 1.0, 64 << 20  # between two acknowledgements


def run(
    items: Iterable[Item],
    target: EncodeTarget,
    shard: tuple[int, int] | None = None,
    threads: int | None = None,
    budget: int = BUDGET,
    back: int | None = None,
) -> Generator[Encoded]:
    """What became of each item. One that cannot be used is a result like any other.

    At the end `back` of the packages that were reported first, or all, must still be there.
    """
    mine = (item for item in items if item.in_shard(shard))
    ahead: Ahead[Item, Any] = Ahead(
        target.look,
        lambda item: item.nbytes,
        lambda look: int(look.nbytes),
        threads or usual_threads(),
        budget,
    )
    waiting: list[Encoded] = []
    written, since = 0, time.monotonic()
    for look in ahead.over(mine):
        result = target.settle(look)
        waiting.append(result)
        written += result.nbytes
        if written > _BYTES or time.monotonic() - since > _SECONDS:
            yield from _confirmed(target, waiting)
            waiting.clear()
            written, since = 0, time.monotonic()
    yield from _confirmed(target, waiting)
    target.look_back(back)


def _confirmed(target: EncodeTarget, results: list[Encoded]) -> list[Encoded]:
    target.flush()
    return [target.confirm(result) for result in results]
