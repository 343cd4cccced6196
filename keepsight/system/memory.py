"""How much memory a process can still have.

Linux tells how much is free; elsewhere nothing is known, and callers go on without.
"""

from __future__ import annotations

from pathlib import Path


def free_memory(swap: bool = True) -> int | None:
    """Available bytes, including swap unless `swap` is false; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line}
    return sizes.get("MemAvailable", 0) + (sizes.get("SwapFree", 0) if swap else 0) or None
