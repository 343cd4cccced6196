"""Stores what was found about a model's kernels as a note for the next process.

A trial takes seconds for a large model, so it is made once per machine. The name of a note covers
everything a finding depends on: the processor with caches and cores, the builds of torch and of
this package, the environment, and the model's code, settings and shapes. If any of them changes,
the trial is repeated. An unreadable note counts as none.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keepsight import digests
from keepsight.core.kernels.attention import ROW_PADDINGS, QueryRows
from keepsight.core.kernels.linear import CANDIDATES, Linears, Packed, Rows, Shape
from keepsight.core.kernels.passes import Kernels
from keepsight.kinds import Record
from keepsight.store import Store

_KIND = "kernels"
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
# Facts that Linux reports about a processor and that do not change while it runs.
_PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
_CPUINFO, _CACHES = Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu/cpu0/cache")

Rules = dict[Shape, Rows | None]


@dataclass(frozen=True)
class Finding:
    """The result of a trial: the kernels with which any cut is exact, or why it is not."""

    kernels: Kernels | None
    why: str = ""
    names: tuple[str, ...] = ()  # names of the kernels, part of the namespace
    lasts: bool = True  # whether another process on this machine would find the same


@dataclass(frozen=True)
class Noted:
    """A finding as an earlier process left it."""

    finding: Finding
    packing: Rules  # how packed weights pad their rows


def read(store: Store | None, name: str, packed: Callable[[], dict[int, Packed]]) -> Noted | None:
    """Read what an earlier process on this machine found under a name."""
    note = None if store is None else store.note(_KIND, _key(name))
    if note is None:
        return None
    try:
        packing, why, names = _rules(note["packing"]), note["why"], tuple(note["names"])
        if not all(isinstance(text, str) for text in (why, *names)):
            return None
        if why:
            return Noted(Finding(None, why), packing)
        heads = {
            (*sizes, _DTYPES[dtype]): ROW_PADDINGS[number]
            for *sizes, dtype, number in note["heads"]
        }
        kernels = Kernels(
            Linears(packed),
            QueryRows(bool(note["windows"]), heads),
            whole_steps=bool(note["whole steps"]),
            in_graphs=bool(note["in graphs"]),
        )
        kernels.linears.rows.update(_rules(note["rows"]))
        return Noted(Finding(kernels, "", names), packing)
    except (KeyError, TypeError, ValueError, IndexError):
        return None


def write(store: Store | None, name: str, finding: Finding, packing: Rules) -> None:
    """Save a finding for later processes."""
    if store is None or not finding.lasts:
        return
    found = finding.kernels or Kernels()
    fillings = found.query_rows.fillings.items()
    note: Record = {
        "why": finding.why,
        "names": list(finding.names),
        "packing": _lines(packing),
        "rows": _lines(found.linears.rows),
        "whole steps": found.whole_steps,
        "in graphs": found.in_graphs,
        "windows": found.query_rows.windows,
        "heads": [[*h[:3], str(h[3]), ROW_PADDINGS.index(how)] for h, how in fillings if how],
    }
    store.put_note(_KIND, _key(name), note)


def _key(name: str) -> str:
    return digests.digest(_KIND, machine(), name)


def _lines(rules: Rules) -> list[list[object]]:
    return [
        [out, width, str(dtype), biased, name, None if rule is None else CANDIDATES.index(rule)]
        for (out, width, dtype, biased, name), rule in rules.items()
    ]


def _rules(lines: list[list[Any]]) -> Rules:
    found: Rules = {}
    for out, width, dtype, biased, kernel, number in lines:
        shape = (int(out), int(width), _DTYPES[str(dtype)], bool(biased), str(kernel))
        found[shape] = None if number is None else CANDIDATES[int(number)]
    return found


# -- the machine ---------------------------------------------------------------------------------


def code_files(house: Path) -> list[Path]:
    """The files whose code decides what a trial finds."""
    return [file for room in ("core", "runtimes") for file in (house / room).rglob("*.py")]


@functools.cache
def machine() -> str:
    """A digest of everything on this machine that decides which kernels run, and of the code that
    tries them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    house = Path(digests.__file__).parent
    sources = [[str(file.relative_to(house)), file.read_bytes()] for file in code_files(house)]
    code = digests.digest("code", *[part for source in sorted(sources) for part in source])
    system = [platform.system(), platform.machine(), platform.processor(), *platform.libc_ver()]
    about = [system, _processor(), _caches(), os.cpu_count(), cores]
    return digests.digest("machine", about, torch.__config__.show(), code)


def _processor() -> list[str]:
    try:
        lines = _CPUINFO.read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return [platform.version()]
    return [line for line in lines if line.split(":")[0].strip() in _PROCESSOR]


def _caches() -> list[str]:
    found = []
    for file in sorted(_CACHES.glob("index*/*")):
        if file.name in ("level", "type", "size", "ways_of_associativity"):
            try:
                found.append(f"{file.parent.name}/{file.name}: {file.read_text().strip()}")
            except OSError:
                continue
    return found
