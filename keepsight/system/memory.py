"""How much memory a process can still have, and when its garbage is collected.

Linux tells how much is free; elsewhere nothing is known, and callers go on without.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def without_collecting() -> Iterator[None]:
    """Pause garbage collection for work that makes many objects and keeps few: one collection in
    between would take longer than the work."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def free_memory(swap: bool = True) -> int | None:
    """Available bytes, including swap unless `swap` is false; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line}
    return sizes.get("MemAvailable", 0) + (sizes.get("SwapFree", 0) if swap else 0) or None
