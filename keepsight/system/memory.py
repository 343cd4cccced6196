"""How much memory a process can still have, where the system says so.

Linux does; elsewhere nothing is known, and whoever asks goes on without.
"""

from __future__ import annotations

from pathlib import Path


def free_memory(swap: bool = True) -> int | None:
    """Bytes that can be had, swap among them unless not `swap`; None where nothing says so."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line}
    return sizes.get("MemAvailable", 0) + (sizes.get("SwapFree", 0) if swap else 0) or None
