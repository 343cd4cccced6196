"""Describes the machine of a run: the parts on which its numbers depend.

A load above zero at the start says that the machine was not quiet. No path, host or user name is
recorded, because results are committed.
"""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

import keepsight
from keepsight.kinds import Record


def describe() -> Record:
    """Plain data for the result."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "amx": _has_amx(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "keepsight": keepsight.__version__,
    }


def _cpu_lines(start: str) -> list[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(start)]


def _processor() -> str:
    names = _cpu_lines("model name")
    return names[0] if names else platform.machine()


def _has_amx() -> bool:
    flags = _cpu_lines("flags")
    return bool(flags) and "amx_tile" in flags[0].split()
