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

import torch

from keepsight import digests
from keepsight.core.kernels.attention import ROW_PADDINGS, Heads, QueryRows, RowPadding
from keepsight.core.kernels.linear import CANDIDATES, Linears, Packed, Rows, Shape
from keepsight.core.kernels.passes import Kernels
from keepsight.kinds import Record
from keepsight.store import Store

_KIND = "kernels"
_FORMAT = 4  # 3 did not know whether steps run without modules
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
        packing, why = _rules(note["packing"]), _text(note["why"])
        if why:
            return Noted(Finding(None, why), packing)
        query_rows = QueryRows(bool(note["windows"]), _paddings(note["heads"]))
        kernels = Kernels(Linears(packed), query_rows, in_graphs=bool(note["in graphs"]))
        kernels.whole_layers = bool(note["whole layers"])
        kernels.whole_steps = bool(note["whole steps"])
        kernels.linears.rows.update(_rules(note["rows"]))
        names = tuple(_text(one) for one in note["names"])
    except (KeyError, TypeError, ValueError):
        return None
    return Noted(Finding(kernels, "", names), packing)


def write(store: Store | None, name: str, finding: Finding, packing: Rules) -> None:
    """Save a finding for later processes."""
    if store is None or not finding.lasts:
        return
    found = finding.kernels
    note: Record = {"why": finding.why, "names": list(finding.names), "packing": _lines(packing)}
    note["rows"] = [] if found is None else _lines(found.linears.rows)
    note["whole layers"] = found is not None and found.whole_layers
    note["whole steps"] = found is not None and found.whole_steps
    note["in graphs"] = found is not None and found.in_graphs
    known = QueryRows() if found is None else found.query_rows
    note["windows"] = known.windows
    fillings = [(heads, how) for heads, how in known.fillings.items() if how is not None]
    note["heads"] = sorted([*h[:3], str(h[3]), how.step, how.apart] for h, how in fillings)
    store.put_note(_KIND, _key(name), note)


def _key(name: str) -> str:
    return digests.digest(_KIND, _FORMAT, machine(), name)


def _lines(rules: Rules) -> list[list[object]]:
    lines = []
    for (out, width, dtype, biased, kernel), rule in rules.items():
        own = [None] * 4 if rule is None else [rule.least, rule.step, rule.most, rule.fine]
        lines.append([out, width, str(dtype), biased, kernel, *own])
    return sorted(lines, key=str)


def _rules(lines: list[list[object]]) -> Rules:
    found: Rules = {}
    for out, width, dtype, biased, kernel, *own in lines:
        rule = None
        if own != [None] * 4:
            least, step, most, fine = own
            rule = Rows(_count(least), _count(step), _count(most), _flag(fine))
        if rule is not None and rule not in CANDIDATES:
            raise ValueError(f"{rule} is no rule")
        shape = (_count(out), _count(width), _DTYPES[str(dtype)], bool(biased), _text(kernel))
        found[shape] = rule
    return found


def _paddings(lines: list[list[object]]) -> dict[Heads, RowPadding]:
    found = {}
    for heads, keys, width, dtype, step, apart in lines:
        how = RowPadding(_count(step), apart is True)
        found[_count(heads), _count(keys), _count(width), _DTYPES[str(dtype)]] = how
        if how not in ROW_PADDINGS:
            raise ValueError(f"{how} is no padding")
    return found


def _text(given: object) -> str:
    if not isinstance(given, str):
        raise TypeError(f"{given!r} is no text")
    return given


def _count(given: object) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(f"{given!r} is no count")
    return given


def _flag(given: object) -> bool:
    if not isinstance(given, bool):
        raise TypeError(f"{given!r} is neither true nor false")
    return given


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
