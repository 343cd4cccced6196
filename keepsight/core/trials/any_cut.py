"""Finds out whether this machine computes a token's states from the tokens before it alone.

If so, a prompt can be cut at any token. Nothing is assumed: each shape of a linear layer and each
kind of attention is tried with numbers whose sums cancel, so that another order of adding shows. A
pass of the model is watched for products that other functions compute. Then the whole model runs
over one prompt in one pass, in pieces, token by token and beside other sequences; all bits must be
equal. If a trial fails or cannot be made, answers are equal to rounding, and `why` gives the
reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from transformers import PreTrainedModel

from keepsight import digests
from keepsight.core.decoding.forward import LanguageModel
from keepsight.core.decoding.lane_mixer import MixerLayer
from keepsight.core.kernels import mixers
from keepsight.core.kernels.attention import KEYS_READ, USUAL, QueryRows
from keepsight.core.kernels.delta import BLOCK, GRID, delta_rows_are_equal
from keepsight.core.kernels.linear import Linears, kernels_for, rows_agree
from keepsight.core.kernels.packing import Group, Packing, groups_in
from keepsight.core.kernels.passes import Kernels
from keepsight.core.settings import RuntimeSettings
from keepsight.core.tolerance import NEAR
from keepsight.core.trials import doubtful, findings
from keepsight.core.trials.cuts import Computed, Cuts, equal
from keepsight.core.trials.findings import Finding, Rules
from keepsight.kinds import Record
from keepsight.models.families import Family
from keepsight.models.identity import Identity
from keepsight.models.narrow import is_narrow
from keepsight.models.no_gradients import quiet
from keepsight.store import Store

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
_ALIKE = 0.3  # of the logits' norm: no more than rounding does by choosing other experts
_OTHER_BITS = "the whole model gives other bits"
_NOT_KNOWN = "its linear layers are not those known by their class name"
# Layers whose keys a lane can hold completely, and layers whose states are computed on a grid.
_AS_EXPORTED = ("exported graphs",)
_SHOWN = ("full", "sliding", "none", "linear")
_MOST = 8  # environments whose findings are kept


class Graphs(Protocol):
    """A runtime that computes in place of PyTorch."""

    rounding_because: str  # why a prompt cannot be cut anywhere; empty if it can
    decoder_bytes: int


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
        self._store = store
        self._model, self._family, self._decoder = model, family, decoder
        self._weights = weights
        self._is_narrow = is_narrow(model)  # once, because it walks over all modules
        self.before = Finding(None)
        pack = owned if settings.pack == "auto" else bool(settings.pack)
        self.packing = Packing(pack and not family.packages_only, sparing=settings.pack == "auto")
        self._may_pack = settings.pack is not True and bool(kernels_for(model.dtype))
        weights.on_forget = self.packing.forget
        self._graphs: Graphs | None = getattr(model, "exported", None)
        self._found: dict[str, Finding] = {}
        self._packed_for = self._shapes = ""

    def find(self, environment: Record) -> Finding:
        """Return the finding for this environment; try only once per environment."""
        weights = self._weights
        why = self._why_not(environment)
        if why:
            return Finding(None, why)
        here = digests.digest("environment", environment)  # threads: MKL packs by their number
        elsewhere = self.packing.wanted and here != self.packing.tried_in
        if weights.all != self._packed_for or self.packing.is_behind or elsewhere:
            self._shapes = self._shapes_now()
            self._remember_rules(self._name(environment), here)
            self.packing.follow(self._groups(), here)
            self._packed_for = weights.all
        name = self._name(environment)
        if name not in self._found:
            while len(self._found) >= _MOST:
                self._found.pop(next(iter(self._found)))
            self._found[name] = self._recalled(name) or self._tried(name, environment)
        found = self._found[name]
        if found.kernels is not None and (doubts := self._doubts(found.kernels)):
            found = self._found[name] = Finding(None, doubts[0])
        if found.kernels is not None:
            found.kernels.ready = partial(self._pack_for, here)
        return found

    def _pack_for(self, environment: str) -> None:
        """Pack again as in this environment: a call in another thread, with another number of
        threads, may have packed between two steps of an answer."""
        if self.packing.wanted and self.packing.tried_in != environment:
            self.packing.follow(self._groups(), environment)

    def stats(self) -> Record:
        """Bytes of packed copies."""
        return {"packed_bytes": self.packing.nbytes}

    def _name(self, environment: Record) -> str:
        """The name of a finding: everything it depends on except the machine."""
        now = (self._shapes, self.packing.wanted)
        return digests.digest(
            "any cut", environment, self._weights.code, self._weights.config, *now
        )

    def _read(self, name: str) -> findings.Noted | None:
        # A private fingerprint means nothing to other processes, so it has no note.
        store = None if self._weights.is_private else self._store
        return findings.read(store, name, lambda: self.packing.packed)

    def _remember_rules(self, name: str, here: str) -> None:
        """Reuse an earlier process's findings about packed weights."""
        if self.packing.wanted and not self.packing.rules and (noted := self._read(name)):
            self.packing.rules, self.packing.tried_in = noted.packing, here

    def _recalled(self, name: str) -> Finding | None:
        """The finding of an earlier process, if a quick check confirms it here."""
        noted = self._read(name)
        if noted is None or noted.finding.kernels is None:
            return None if noted is None else noted.finding
        with quiet(self._model):
            if self._graphs is not None:
                return noted.finding if self._graphs_agree(noted.finding.kernels) else None
            agrees = all(
                rows_agree(noted.finding.kernels.linears, layer)
                for layer in {
                    tuple(layer.weight.shape): layer for group in self._groups() for layer in group
                }.values()
            )
        return noted.finding if agrees else None

    def _tried(self, name: str, environment: Record) -> Finding:
        here = digests.digest("environment", environment) == self.packing.tried_in
        found = self._try(self.packing.rules if here else {})
        if not self._weights.is_private:
            findings.write(self._store, name, found, self.packing.rules)
        return found

    def _doubts(self, kernels: Kernels) -> list[str]:
        """Everything the model used that is not shown to be exact."""
        return [*kernels.linears.doubts, *kernels.doubts]

    def _why_not(self, environment: Record) -> str:
        """The reason that excludes any cut without a trial, or an empty text."""
        model, shape = self._model, self._decoder.shape
        kinds = sorted({kind for kind in shape.kinds if kind not in _SHOWN})
        if self._graphs is not None and self._graphs.rounding_because:
            return self._graphs.rounding_because
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
                    why = self._graphs_fail(kernels, self._graphs)
                    return Finding(None, why) if why else Finding(kernels, "", _AS_EXPORTED)
                if why := self._fails(kernels):
                    return Finding(None, why + self._advice(why, kernels))
                linears.is_watched = False
                rows = kernels.linears.rows.items()
                names = sorted(f"{name}: {rule}" for name, rule in rows)
                fillings = kernels.query_rows.fillings.items()
                names += sorted(f"{heads}: {how}" for heads, how in fillings if how != USUAL)
                if fillings:
                    names.append(KEYS_READ)
                if self._decoder.shape.has_states:
                    names.append(f"states on a grid of {GRID}, in blocks of {BLOCK}")
                return Finding(kernels, "", tuple(names))
        except Exception as error:  # a foreign model may raise anything
            why = f"it could not be tried: {type(error).__name__}: {error}"
            return Finding(None, why, lasts=False)

    def _advice(self, why: str, kernels: Kernels) -> str:
        """What the user may change to make bits equal, where other kernels are known to help."""
        if not why.startswith(_OTHER_BITS) and None not in kernels.linears.rows.values():
            return ""
        plain, dtype = self._may_pack and not self.packing.wanted, self._model.dtype
        ways = ["pack=True"] * plain + ["float32"] * (dtype != torch.float32)
        return f" ({' or '.join(ways)} may help)" if ways else ""

    def _cuts(self, count: int) -> Cuts:
        return Cuts(self._model, self._family, self._decoder, count)

    def _graphs_fail(self, kernels: Kernels, graphs: Graphs) -> str:
        """As `_fails`; nothing is known about the kernels of another runtime."""
        light = graphs.decoder_bytes <= _LIGHT
        pieces = _OF_LIGHT_GRAPHS if light else _OF_GRAPHS
        count = sum(pieces)
        cuts = self._cuts(count)
        wanted = cuts.computed(kernels, [count])
        for some in (pieces, pieces[::-1], [count - _SINGLE, *[1] * _SINGLE]):
            if not cuts.are_equal(kernels, some, wanted):
                return "its graphs give other bits when a prompt is cut"
        if not cuts.are_equal_beside_others(kernels, wanted):
            return "its graphs give other bits beside other sequences"
        return ""

    def _graphs_agree(self, kernels: Kernels) -> bool:
        """Whether a finding of an earlier process still seems true."""
        cuts = self._cuts(sum(_AGAIN))
        return cuts.are_equal(kernels, _AGAIN, cuts.computed(kernels, [sum(_AGAIN)]))

    def _fails(self, kernels: Kernels) -> str:
        """What shows that bits depend on more than earlier tokens; empty if nothing does."""
        pieces = _ON_A_GRID if self._decoder.shape.has_states else _PIECES
        cuts, others = self._cuts(sum(pieces)), set[str]()
        with doubtful.noted_in(others, len(cuts.ids)):
            wanted = cuts.computed(kernels, [len(cuts.ids)])
        if others:
            return f"results that depend on neighbouring rows come from {', '.join(sorted(others))}"
        if doubts := self._doubts(kernels):
            return doubts[0]
        if not kernels.query_rows.fillings:
            return "its attention is computed by its own functions"
        kernels.whole_steps = self._steps_are_equal(kernels, cuts, pieces, wanted)
        if why := self._mixers_fail(kernels):
            return why
        if why := self._unlike_stock(wanted[0][-1].float(), cuts):
            return why
        if not cuts.are_equal(kernels, pieces, wanted):
            return f"{_OTHER_BITS} when a prompt is cut"
        if self._family.decodes_together and not cuts.are_equal_beside_others(kernels, wanted):
            return f"{_OTHER_BITS} beside other sequences"
        return ""

    def _mixers_fail(self, kernels: Kernels) -> str:
        """What is wrong with fixed-size layers of the last pass; empty if nothing is."""
        count, met = self._decoder.shape.kinds.count("linear"), list(kernels.mixers)
        if len(met) != count:
            return "it has linear layers computed by their own functions"
        for heads in {heads for heads in met if heads is not None}:
            if not delta_rows_are_equal(heads):
                return (
                    f"the gated delta rule with {heads.values} heads depends on the number of rows"
                )
        return "" if mixers.are_upstreams(self._model, MixerLayer) else _NOT_KNOWN

    def _unlike_stock(self, ours: torch.Tensor, cuts: Cuts) -> str:
        """How the model's own logits differ from ours by more than rounding; empty if not."""
        stock = cuts.computed(None, [len(cuts.ids)])[0][-1].float()
        near, has_states = NEAR.get(self._model.dtype, 0.0), self._decoder.shape.has_states
        if has_states and (ours - stock).abs().max() > near * stock.abs().max():
            return _NOT_KNOWN
        if (ours - stock).norm() > _ALIKE * stock.norm():
            return "it computes something else than our kernels"
        return ""

    def _steps_are_equal(
        self, kernels: Kernels, cuts: Cuts, pieces: Sequence[int], wanted: Computed
    ) -> bool:
        """Whether short passes give the same without the modules of the model."""
        kernels.whole_steps = True
        try:
            found, steps = cuts.computed(kernels, pieces), self._decoder.steps
        except Exception as error:  # another torch may compile no such script
            logger.info("short passes run by the model's modules: %s", error)
            return False
        return steps is not None and steps.passes > 0 and equal(wanted, found)
