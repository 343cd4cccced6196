"""Finds out whether this machine computes a token's states from the tokens before it alone.

If so, a prompt can be cut at any token. Nothing is assumed: each shape of a linear layer and each
kind of attention is tried with numbers whose sums cancel, so that another order of adding shows. A
pass of the model is watched for products that other functions compute. Then the whole model runs
over one prompt in one pass, in pieces, token by token and beside other sequences; all bits must be
equal. If a trial fails or cannot be made, answers are equal to rounding, and `why` gives the
reason.

A trial takes seconds for a large model, so what was found is a note in the store. The name of a
note covers everything a finding depends on: processor, builds of torch and of this package,
environment, and the model's code, settings and shapes. An unreadable note counts as none.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from keepsight.core.decoding.forward import LanguageModel, Stretch, ordinary_ids
from keepsight.core.decoding.lane_mixer import MixerLayer
from keepsight.core.decoding.state import Lane
from keepsight.core.kernels import doubtful, mixers
from keepsight.core.kernels.attention import KEYS_READ, ROW_PADDINGS, USUAL, QueryRows
from keepsight.core.kernels.delta import BLOCK, GRID, delta_rows_are_equal
from keepsight.core.kernels.linear import (
    CANDIDATES,
    Linears,
    Rows,
    Shape,
    kernels_for,
    rows_agree,
)
from keepsight.core.kernels.packing import Group, Packing, groups_in
from keepsight.core.kernels.passes import Kernels
from keepsight.core.settings import RuntimeSettings
from keepsight.core.tolerance import NEAR
from keepsight.kinds import Record
from keepsight.models.families import Family
from keepsight.models.identity import Identity
from keepsight.models.narrow import is_narrow
from keepsight.models.no_gradients import quiet
from keepsight.prefix.prompt import Prompt
from keepsight.store import Store
from keepsight.system import digests

logger = logging.getLogger(__name__)

# The test prompt in pieces: of all layers, of layers that compute in chunks too, and of graphs, at
# each number of rows at which kernels are known to differ, and if a pass takes little time at more.
_PIECES = (1, 3, 5, 15, 21, 1)
_ON_A_GRID = (*_PIECES, *[1] * 21, 13, 1, 46, 2, 15, 1)
_OF_GRAPHS = (*range(1, 18), 31, 33)
_OF_LIGHT_GRAPHS = (*_OF_GRAPHS, *range(18, 31), 32, 63, 64, 65, 128)
_LIGHT = 1 << 30  # bytes of weights that a pass reads
_SINGLE = 33  # tokens at the end that graphs compute one by one: every place in a vector
_AGAIN = (1, 2, 5, 16)  # pieces of the quick check of graphs that an earlier process tried
_BESIDE, _OTHERS = 3, (5, 37)  # tokens computed beside other sequences, and the lengths of these
_ALIKE = 0.3  # of the logits' norm: no more than rounding does by choosing other experts
_OTHER_BITS = "the whole model gives other bits"
_NOT_KNOWN = "its linear layers are not those known by their class name"
# Layers whose keys a lane can hold completely, and layers whose states are computed on a grid.
_SHOWN = ("full", "sliding", "none", "linear")
_MOST = 8  # environments whose findings are kept
_KIND = "kernels"  # of notes
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
# What Linux reports about a processor and its caches, and does not change while it runs.
_PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
_CACHE = ("level", "type", "size", "ways_of_associativity")
_HOUSE = Path(__file__).parents[1]  # this package

Rules = dict[Shape, Rows | None]
Computed = list[torch.Tensor]  # logits, keys, values and states of fixed size


@dataclass(frozen=True)
class Finding:
    """The result of a trial: the kernels with which any cut is exact, or why it is not."""

    kernels: Kernels | None
    why: str = ""
    names: tuple[str, ...] = ()  # names of the kernels, part of the namespace
    lasts: bool = True  # whether another process on this machine would find the same


class AnyCut:
    """Tells whether any cut is exact for one model in the current environment."""

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        decoder: LanguageModel,
        weights: Identity,
        settings: RuntimeSettings,
        owned: bool,
        store: Store | None = None,
    ) -> None:
        mixers.begin(model)
        self._model, self._family, self._decoder = model, family, decoder
        self._weights, self._store = weights, store
        self._is_narrow = is_narrow(model)  # once, because it walks over all modules
        pack = owned if settings.pack == "auto" else bool(settings.pack)
        self.packing = Packing(pack and not family.packages_only, sparing=settings.pack == "auto")
        self._may_pack = settings.pack is not True and bool(kernels_for(model.dtype))
        weights.on_forget = self.packing.forget
        self._graphs: Any = getattr(model, "exported", None)  # of another runtime
        self._found: dict[str, Finding] = {}
        self._packed_for = self._shapes = ""

    def find(self, environment: Record) -> Finding:
        """Return the finding for this environment; try only once per environment."""
        if why := self._why_not(environment):
            return Finding(None, why)
        weights, packing = self._weights, self.packing
        here = digests.digest("environment", environment)  # threads: MKL packs by their number
        elsewhere = packing.wanted and here != packing.tried_in
        if weights.all != self._packed_for or packing.is_behind or elsewhere:
            self._shapes = self._shapes_now()
            if packing.wanted and not packing.rules and (noted := self._read(environment)):
                packing.rules, packing.tried_in = noted[1], here
            packing.follow(self._groups(), here)
            self._packed_for = weights.all
        name = self._name(environment)
        if name not in self._found:
            while len(self._found) >= _MOST:
                self._found.pop(next(iter(self._found)))
            self._found[name] = self._recalled(environment) or self._tried(name, here)
        found = self._found[name]
        if found.kernels is not None and (doubts := _doubts(found.kernels)):
            found = self._found[name] = Finding(None, doubts[0])
        if found.kernels is not None:
            found.kernels.ready = partial(self._pack_for, here)
        return found

    def _pack_for(self, environment: str) -> None:
        """Pack again as in this environment: a call in another thread, with another number of
        threads, may have packed between two steps of an answer."""
        if self.packing.wanted and self.packing.tried_in != environment:
            self.packing.follow(self._groups(), environment)

    def _name(self, environment: Record) -> str:
        """The name of a finding: everything it depends on except the machine."""
        now = (self._weights.code, self._weights.config, self._shapes, self.packing.wanted)
        return digests.digest("any cut", environment, *now)

    def _read(self, environment: Record) -> tuple[Finding, Rules] | None:
        # A private fingerprint means nothing to other processes, so it has no note.
        if self._store is None or self._weights.is_private:
            return None
        linears = Linears(lambda: self.packing.packed)
        return read_note(self._store.note(_KIND, _key(self._name(environment))), linears)

    def _recalled(self, environment: Record) -> Finding | None:
        """The finding of an earlier process, if a quick check confirms it here."""
        noted = self._read(environment)
        if noted is None or noted[0].kernels is None:
            return None if noted is None else noted[0]
        kernels = noted[0].kernels
        with quiet(self._model):
            if self._graphs is not None:
                return noted[0] if self._graphs_agree(kernels) else None
            layers = [layer for group in self._groups() for layer in group]
            of_each_shape = {tuple(layer.weight.shape): layer for layer in layers}.values()
            agrees = all(rows_agree(kernels.linears, layer) for layer in of_each_shape)
        return noted[0] if agrees else None

    def _tried(self, name: str, here: str) -> Finding:
        found = self._try(self.packing.rules if here == self.packing.tried_in else {})
        if self._store is not None and found.lasts and not self._weights.is_private:
            self._store.put_note(_KIND, _key(name), _note(found, self.packing.rules))
        return found

    def _why_not(self, environment: Record) -> str:
        """The reason that excludes any cut without a trial, or an empty text."""
        model, kinds = self._model, sorted(set(self._decoder.shape.kinds) - set(_SHOWN))
        if self._graphs is not None and self._graphs.rounding_because:
            return str(self._graphs.rounding_because)
        if model.device.type != "cpu":
            return f"its kernels were never tried on {model.device.type}"
        if self._is_narrow:
            return (
                "its weights have eight bits, and a pass over few tokens computes them differently"
            )
        if kinds:
            return f"it has layers of other kinds than attention: {', '.join(kinds)}"
        if self._family.reuse != "prefix":
            return "prompt tokens attend to later tokens"
        if not self._family.decodes_as_prefilled:
            return "decoded tokens may take another path through the model than prompt tokens"
        if environment.get("compiled") or environment.get("autocast"):
            return "it is compiled, or runs under autocast"
        return ""

    def _groups(self) -> Iterator[Group]:
        """The linear layers of the decoder and the output head; none for exported graphs."""
        if self._graphs is None:
            for part in self._family.text_modules():
                yield from groups_in(part)

    def _shapes_now(self) -> str:
        """The shapes of all weights of the language model; adapters change them."""
        parts = [part.named_parameters() for part in self._family.text_modules()]
        shapes = [[name, list(w.shape), str(w.dtype)] for part in parts for name, w in part]
        return digests.digest("shapes", shapes)

    def _try(self, tried: Rules) -> Finding:
        linears = Linears(lambda: self.packing.packed, tried)
        linears.is_watched = True
        windows = "sliding" in self._decoder.shape.kinds
        kernels = Kernels(linears, QueryRows(windows), in_graphs=self._graphs is not None)
        try:
            with quiet(self._model):
                if self._graphs is not None:
                    why = self._graphs_fail(kernels)
                    return Finding(None, why) if why else Finding(kernels, "", ("exported graphs",))
                if why := self._fails(kernels):
                    return Finding(None, why + self._advice(why, kernels))
        except Exception as error:  # a foreign model may raise anything
            why = f"it could not be tried: {type(error).__name__}: {error}"
            return Finding(None, why, lasts=False)
        linears.is_watched = False
        names = sorted(f"{name}: {rule}" for name, rule in linears.rows.items())
        fillings = kernels.query_rows.fillings.items()
        names += sorted(f"{heads}: {how}" for heads, how in fillings if how != USUAL)
        names += [KEYS_READ] if fillings else []
        if self._decoder.shape.has_states:
            names.append(f"states on a grid of {GRID}, in blocks of {BLOCK}")
        return Finding(kernels, "", tuple(names))

    def _advice(self, why: str, kernels: Kernels) -> str:
        """What the user may change to make bits equal, where other kernels are known to help."""
        if not why.startswith(_OTHER_BITS) and None not in kernels.linears.rows.values():
            return ""
        plain, dtype = self._may_pack and not self.packing.wanted, self._model.dtype
        ways = ["pack=True"] * plain + ["float32"] * (dtype != torch.float32)
        return f" ({' or '.join(ways)} may help)" if ways else ""

    def _graphs_fail(self, kernels: Kernels) -> str:
        """As `_fails`; nothing is known about the kernels of another runtime."""
        pieces = _OF_LIGHT_GRAPHS if self._graphs.decoder_bytes <= _LIGHT else _OF_GRAPHS
        cuts = self._cuts(sum(pieces))
        wanted = cuts.computed(kernels, [sum(pieces)])
        for some in (pieces, pieces[::-1], [sum(pieces) - _SINGLE, *[1] * _SINGLE]):
            if not _equal(wanted, cuts.computed(kernels, some)):
                return "its graphs give other bits when a prompt is cut"
        if not cuts.are_equal_beside_others(kernels, wanted):
            return "its graphs give other bits beside other sequences"
        return ""

    def _graphs_agree(self, kernels: Kernels) -> bool:
        """Whether a finding of an earlier process still seems true."""
        cuts = self._cuts(sum(_AGAIN))
        return _equal(cuts.computed(kernels, [sum(_AGAIN)]), cuts.computed(kernels, _AGAIN))

    def _fails(self, kernels: Kernels) -> str:
        """What shows that bits depend on more than earlier tokens; empty if nothing does."""
        pieces = _ON_A_GRID if self._decoder.shape.has_states else _PIECES
        cuts, others = self._cuts(sum(pieces)), set[str]()
        with doubtful.noted_in(others, len(cuts.ids)):
            wanted = cuts.computed(kernels, [len(cuts.ids)])
        if others:
            return f"results that depend on neighbouring rows come from {', '.join(sorted(others))}"
        if doubts := _doubts(kernels):
            return doubts[0]
        if not kernels.query_rows.fillings:
            return "its attention is computed by its own functions"
        found = self._in_pieces(kernels, cuts, pieces, wanted)
        if why := self._mixers_fail(kernels) or self._unlike_stock(wanted[0][-1].float(), cuts):
            return why
        if not _equal(wanted, found):
            return f"{_OTHER_BITS} when a prompt is cut"
        if self._family.decodes_together and not cuts.are_equal_beside_others(kernels, wanted):
            return f"{_OTHER_BITS} beside other sequences"
        return ""

    def _mixers_fail(self, kernels: Kernels) -> str:
        """What is wrong with fixed-size layers of the last pass; empty if nothing is."""
        if len(kernels.mixers) != self._decoder.shape.kinds.count("linear"):
            return "it has linear layers computed by their own functions"
        for heads in set(kernels.mixers) - {None}:
            if heads is not None and not delta_rows_are_equal(heads):
                return (
                    f"the gated delta rule with {heads.values} heads depends on the number of rows"
                )
        return "" if mixers.are_upstreams(self._model, MixerLayer) else _NOT_KNOWN

    def _unlike_stock(self, ours: torch.Tensor, cuts: _Cuts) -> str:
        """How the model's own logits differ from ours by more than rounding; empty if not."""
        stock = cuts.computed(None, [len(cuts.ids)])[0][-1].float()
        near, has_states = NEAR.get(self._model.dtype, 0.0), self._decoder.shape.has_states
        if has_states and (ours - stock).abs().max() > near * stock.abs().max():
            return _NOT_KNOWN
        if (ours - stock).norm() > _ALIKE * stock.norm():
            return "it computes something else than our kernels"
        return ""

    def _in_pieces(
        self, kernels: Kernels, cuts: _Cuts, pieces: Sequence[int], wanted: Computed
    ) -> Computed:
        """What comes of pieces: without the modules of the model in short passes, if that gives the
        same, and with them otherwise."""
        kernels.whole_steps = True
        try:
            found, steps = cuts.computed(kernels, pieces), self._decoder.steps
        except Exception as error:  # another torch may compile no such script
            logger.info("short passes run by the model's modules: %s", error)
        else:
            kernels.whole_steps = steps is not None and steps.passes > 0
            if not kernels.whole_steps or _equal(wanted, found):
                return found
        kernels.whole_steps = False
        return cuts.computed(kernels, pieces)

    def _cuts(self, count: int) -> _Cuts:
        return _Cuts(self._model, self._family, self._decoder, count)


class _Cuts:
    """Computes the first tokens of an ordinary text in pieces, on lanes of its own."""

    def __init__(
        self, model: PreTrainedModel, family: Family, decoder: LanguageModel, count: int
    ) -> None:
        self._decoder, self._lane = decoder, lambda: Lane(model, decoder.shape)
        self.ids = ordinary_ids(model, family, count)
        self._positions = family.positions(self.ids, np.zeros(count, dtype=np.int8), [])

    def computed(self, kernels: Kernels | None, pieces: Sequence[int]) -> Computed:
        """What comes of pieces of these lengths, one behind another."""
        lane = self._lane()
        logits = [self._together([lane], [count], kernels)[0] for count in pieces]
        return [torch.cat(logits), *_states_of(lane)]

    def are_equal_beside_others(self, kernels: Kernels, wanted: Computed) -> bool:
        """Whether the last tokens get the same when read and decoded beside other sequences."""
        lengths = [len(self.ids) - _BESIDE, *(n for n in _OTHERS if n + _BESIDE < len(self.ids))]
        lanes, at = [self._lane() for _ in lengths], list(lengths)
        self._together(lanes, lengths, kernels)
        for _ in range(_BESIDE):
            found = self._together(lanes, [1] * len(lanes), kernels)
            if not torch.equal(torch.cat(found), wanted[0][at]):
                return False
            at = [row + 1 for row in at]
        return _equal(wanted[1:], _states_of(lanes[0]))

    def _together(
        self, lanes: Sequence[Lane], counts: Sequence[int], kernels: Kernels | None
    ) -> list[torch.Tensor]:
        """The logits of the next tokens of several sequences."""
        segments = []
        for lane, count in zip(lanes, counts, strict=True):
            some, prompt = slice(lane.length, lane.length + count), Prompt(self.ids)
            segment = Stretch(lane, prompt, self.ids[some], self._positions[..., some], count)
            segments.append(segment)
        found = self._decoder.forward(segments, kernels)
        return [rows for rows in found if rows is not None]


def _states_of(lane: Lane) -> list[torch.Tensor]:
    """Everything a lane holds: keys, values and states of fixed size."""
    kv, fixed = lane.capture(0, lane.length)
    return [*kv.values(), *(fixed[name] for name in sorted(fixed))]


def _equal(one: Computed, other: Computed) -> bool:
    """Whether all bits are equal."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _doubts(kernels: Kernels) -> list[str]:
    """Everything the model used that is not shown to be exact."""
    return [*kernels.linears.doubts, *kernels.doubts]


# -- notes for the next process --------------------------------------------------------------------


def read_note(note: Any, linears: Linears) -> tuple[Finding, Rules] | None:
    """What an earlier process on this machine found, and how packed weights pad their rows."""
    try:
        packing, why, names = _rules(note["packing"]), note["why"], tuple(note["names"])
        if not all(isinstance(text, str) for text in (why, *names)):
            return None
        if why:
            return Finding(None, why), packing
        heads = {
            (*sizes, _DTYPES[dtype]): ROW_PADDINGS[number]
            for *sizes, dtype, number in note["heads"]
        }
        rows, how = QueryRows(bool(note["windows"]), heads), ("whole steps", "in graphs")
        whole_steps, in_graphs = (bool(note[name]) for name in how)
        kernels = Kernels(linears, rows, whole_steps=whole_steps, in_graphs=in_graphs)
        linears.rows.update(_rules(note["rows"]))
        return Finding(kernels, "", names), packing
    except (KeyError, TypeError, ValueError, IndexError):
        return None


def _note(finding: Finding, packing: Rules) -> Record:
    found = finding.kernels or Kernels()
    fillings = found.query_rows.fillings.items()
    return {
        "why": finding.why,
        "names": list(finding.names),
        "packing": _lines(packing),
        "rows": _lines(found.linears.rows),
        "whole steps": found.whole_steps,
        "in graphs": found.in_graphs,
        "windows": found.query_rows.windows,
        "heads": [[*h[:3], str(h[3]), ROW_PADDINGS.index(how)] for h, how in fillings if how],
    }


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


def _key(name: str) -> str:
    return digests.digest(_KIND, machine(), name)


def code_files() -> list[Path]:
    """The files whose code decides what a trial finds."""
    return [file for room in ("core", "runtimes") for file in (_HOUSE / room).rglob("*.py")]


@functools.cache
def machine() -> str:
    """A digest of everything on this machine that decides which kernels run, and of the code that
    tries them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    sources = [[str(file.relative_to(_HOUSE)), file.read_bytes()] for file in code_files()]
    code = digests.digest("code", *[part for source in sorted(sources) for part in source])
    about = [platform.system(), platform.machine(), platform.processor(), *platform.libc_ver()]
    about += [*_processor(), str(os.cpu_count()), str(cores)]
    return digests.digest("machine", about, torch.__config__.show(), code)


def _processor() -> list[str]:
    found = [platform.version()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
        found = [line for line in lines if line.split(":")[0].strip() in _PROCESSOR]
    for file in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/*")):
        with contextlib.suppress(OSError):
            if file.name in _CACHE:
                found.append(f"{file.parent.name}/{file.name}: {file.read_text().strip()}")
    return found
