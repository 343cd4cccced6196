"""Rivals that may be installed: how each is found, what it needs first, and how it is started.

They are looked for in the folder that KEEPSIGHT_BENCH_RIVALS names, which `bench/rivals/install`
fills. What is not there is left out, with a line that says so. Each file here is one rival: `NAME`,
the files that it `NEEDS`, and `contestant`, with the settings of a careful user.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

from bench.rivals import llama, openvino, transformers, vllm
from bench.servers import Contestant

VARIABLE = "KEEPSIGHT_BENCH_RIVALS"
RIVALS: dict[str, ModuleType] = {one.NAME: one for one in (transformers, vllm, llama, openvino)}


def rivals(dtype: str, threads: int) -> tuple[list[Contestant], dict[str, str]]:
    """Those that are installed, and why each other one is left out."""
    place = os.environ.get(VARIABLE)
    if not place:
        return [], dict.fromkeys(RIVALS, f"{VARIABLE} is not set")
    there, left_out = [], {}
    for name, rival in RIVALS.items():
        missing = [file for file in rival.NEEDS if not list(Path(place).glob(file))]
        if missing:
            left_out[name] = f"not installed: {', '.join(missing)} is not there"
        else:
            there.append(rival.contestant(Path(place), dtype, threads))
    return there, left_out
