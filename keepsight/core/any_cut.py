"""Whether a model's states depend on the tokens before them and on nothing else, on this machine.

Nothing is assumed. Each shape of a linear layer and each kind of attention that the model uses is
tried with numbers whose sums cancel, so that another order of adding shows; a pass of the model is
watched for products that are computed by other functions; and the whole model is run over one
prompt in one pass, in pieces, token by token and beside others, which must give equal bits. Where
one of these fails, or cannot be asked, the model runs by boundaries, and `why` says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from keepsight import digests
from keepsight.core import doubtful, findings
from keepsight.core.engine import Engine, Run
from keepsight.core.findings import Finding, Rules
from keepsight.core.graph_trial import GraphTrial, equal, states_of, tokens_of
from keepsight.core.kernels import mixers
from keepsight.core.kernels.attention import USUAL, QueryRows
from keepsight.core.kernels.delta import BLOCK, GRID, delta_rows_are_equal
from keepsight.core.kernels.linear import Linears, kernels_for, rows_agree
from keepsight.core.kernels.packing import Group, Packing, groups_in
from keepsight.core.kernels.passes import Kernels
from keepsight.core.lane_batch import LaneBatch
from keepsight.core.lane_mixer import MixerLayer
from keepsight.core.settings import RuntimeSettings
from keepsight.core.state import Lane
from keepsight.kinds import Record
from keepsight.models.families import Family
from keepsight.models.narrow import is_narrow
from keepsight.models.no_gradients import quiet
from keepsight.models.weights import Weights
from keepsight.prefix.node import Node
from keepsight.prefix.prompt import Prompt, Rule
from keepsight.store.contract import Store

TOKENS = 46  # of the prompt that is run
CUTS = (1, 4, 9, 24, 45)  # where it is cut
_TOKENS_ON_A_GRID = 145  # of the prompt, where layers compute tokens in chunks
_CUTS_ON_A_GRID = (*CUTS, *range(46, 68), 80, 81, 127, 129, 144)
_NEAR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the logits' scale
_ALIKE = 0.3  # of the logits' length: no more than experts that are chosen otherwise by rounding
_APART, _LONGEST = 16, 512  # tokens of a snapshot, where any cut gives the same bits
_CHOSEN = "the caller chose boundaries, with grain="
_OTHER_BITS = "the whole model gives other bits"
_NOT_KNOWN = "its linear layers are not the ones that are known under their name"
# Layers all of whose keys a lane can hold, and those whose states are computed on a grid.
_AS_EXPORTED = ("graphs as they were exported",)
_SHOWN = ("full", "sliding", "none", "linear")
_MOST = 8  # environments whose findings are remembered


class Graphs(Protocol):
    """What computes in the place of torch."""

    boundaries_because: str  # what excludes any cut, where something does
    decoder_bytes: int


class AnyCut:
    """What holds for one model, in the environment of the moment."""

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        engine: Engine,
        weights: Weights,
        settings: RuntimeSettings,
        owned: bool,
        store: Store | None = None,
    ) -> None:
        mixers.begin(model)
        self._store = store
        self._model, self._family, self._engine = model, family, engine
        self._weights = weights
        self._is_narrow = is_narrow(model)  # once: it walks over all modules
        # A caller who names a grain wants boundaries.
        self.asked = settings.grain is None and not family.packages_only
        self.before = Finding(None, "" if self.asked else _CHOSEN)
        pack = owned if settings.pack == "auto" else bool(settings.pack)
        self.packing = Packing(pack and self.asked, sparing=settings.pack == "auto")
        self._may_pack = settings.pack is not True and bool(kernels_for(model.dtype))
        weights.on_forget = self.packing.forget
        self._graphs: Graphs | None = getattr(model, "exported", None)
        self._found: dict[str, Finding] = {}
        self._packed_for = self._shapes = ""

    def rule(self, boundaries: Rule, environment: Record, engine: Engine) -> tuple[Rule, Finding]:
        """Whether a prompt can be cut anywhere now, or at boundaries only; and what was found. The
        engine that will run it is given."""
        found = self.find(environment)
        engine.lanes.grows, engine.kernels = found.kernels is not None, found.kernels
        if found.kernels is None:
            return boundaries, found
        rule = replace(boundaries, kernels=found.names, grain=_APART, run=_LONGEST)
        return replace(rule, states=self._engine.shape.has_states), found

    def find(self, environment: Record) -> Finding:
        """What holds now; it is tried once for all that it can depend on."""
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
            self.forget_steps()
        name = self._name(environment)
        if name not in self._found:
            while len(self._found) >= _MOST:
                self._found.pop(next(iter(self._found)))
            self._found[name] = self._recalled(name) or self._tried(name, environment)
        found = self._found[name]
        if found.kernels is not None and (doubts := self._doubts(found.kernels)):
            found = self._found[name] = Finding(None, doubts[0])
        return found

    def forget_steps(self) -> None:
        """Record steps again: old ones read what was packed before, or miss what came since."""
        for known in self._found.values():
            if known.kernels is not None:
                known.kernels.steps.clear()

    def stats(self) -> Record:
        """Bytes of packed copies, and how many decoded steps were run as a list of operations
        since the model was last seen to change."""
        # Copies of both: another thread may be adding to them.
        kernels = [known.kernels for known in list(self._found.values()) if known.kernels]
        ran = sum(step.ran for one in kernels for step in list(one.steps.values()))
        return {"packed_bytes": self.packing.nbytes, "recorded_steps": ran}

    def _name(self, environment: Record) -> str:
        """What a finding depends on, beside the machine."""
        now = (self._shapes, self.packing.wanted)
        return digests.digest(
            "any cut", environment, self._weights.code, self._weights.config, *now
        )

    def _read(self, name: str) -> findings.Noted | None:
        # What only this process can know is in no note.
        store = None if self._weights.is_private else self._store
        return findings.read(store, name, lambda: self.packing.packed)

    def _remember_rules(self, name: str, here: str) -> None:
        """How packed weights are read, where a process before this one tried it."""
        if self.packing.wanted and not self.packing.rules and (noted := self._read(name)):
            self.packing.rules, self.packing.tried_in = noted.packing, here

    def _recalled(self, name: str) -> Finding | None:
        """What a process before this one found, where this machine still does the same."""
        noted = self._read(name)
        if noted is None or noted.finding.kernels is None:
            return None if noted is None else noted.finding
        with quiet(self._model):
            if self._graphs is not None:
                return noted.finding if self._trial(noted.finding.kernels).agrees() else None
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
        """What was met, when it was tried or since, that is not shown to be exact."""
        return [*kernels.linears.doubts, *kernels.doubts]

    def _why_not(self, environment: Record) -> str:
        """What excludes it, without trying."""
        model, shape = self._model, self._engine.shape
        kinds = sorted({kind for kind in shape.kinds if kind not in _SHOWN})
        if self._graphs is not None and self._graphs.boundaries_because:
            return self._graphs.boundaries_because
        if model.device.type != "cpu":
            return f"its kernels were never tried on {model.device.type}"
        if self._is_narrow:
            return "its weights have eight bits, and few tokens are computed otherwise than many"
        if kinds:
            return f"it has layers of other kinds than attention: {', '.join(kinds)}"
        if self._family.reuse != "prefix":
            return "tokens of the prompt see those behind them"
        if not self._family.decodes_as_prefilled:
            return "a decoded token may go another way through the model than one of a prompt"
        if environment.get("compiled") or environment.get("autocast"):
            return "it is compiled, or runs under autocast"
        return ""

    def _groups(self) -> Iterator[Group]:
        """The linear layers of the decoder and the output head; in graphs there are none."""
        if self._graphs is None:
            for part in self._family.text_modules():
                yield from groups_in(part)

    def _shapes_now(self) -> str:
        """The shapes of all weights of the language model: adapters come in others."""
        parts = [part.named_parameters() for part in self._family.text_modules()]
        shapes = [[name, list(w.shape), str(w.dtype)] for part in parts for name, w in part]
        return digests.digest("shapes", shapes)

    def _try(self, tried: Rules) -> Finding:
        linears = Linears(lambda: self.packing.packed, tried)
        linears.is_watched = True
        windows = "sliding" in self._engine.shape.kinds
        kernels = Kernels(linears, QueryRows(windows), in_graphs=self._graphs is not None)
        try:
            with quiet(self._model):
                if kernels.in_graphs:
                    why = self._trial(kernels).fails()
                    return Finding(None, why) if why else Finding(kernels, "", _AS_EXPORTED)
                if why := self._fails(kernels):
                    return Finding(None, why + self._advice(why, kernels))
                linears.is_watched = False
                rows = kernels.linears.rows.items()
                names = sorted(f"{name}: {rule}" for name, rule in rows)
                fillings = kernels.query_rows.fillings.items()
                names += sorted(f"{heads}: {how}" for heads, how in fillings if how != USUAL)
                if self._engine.shape.has_states:
                    names.append(f"states on a grid of {GRID}, in blocks of {BLOCK}")
                return Finding(kernels, "", tuple(names))
        except Exception as error:  # whatever a strange model runs into
            why = f"it could not be tried: {type(error).__name__}: {error}"
            return Finding(None, why, lasts=False)

    def _advice(self, why: str, kernels: Kernels) -> str:
        """What may help where bits differ that other kernels give alike."""
        if not why.startswith(_OTHER_BITS) and None not in kernels.linears.rows.values():
            return ""
        plain, dtype = self._may_pack and not self.packing.wanted, self._model.dtype
        ways = ["pack=True"] * plain + ["float32"] * (dtype != torch.float32)
        return f" ({' or '.join(ways)} may help)" if ways else ""

    def _trial(self, kernels: Kernels) -> GraphTrial:
        count = tokens_of(0 if self._graphs is None else self._graphs.decoder_bytes)

        def begin(ids: np.ndarray) -> Run:
            return self._run(kernels, ids)

        return GraphTrial(self._model, self._family, self._engine, begin, self._ids(count))

    def _fails(self, kernels: Kernels) -> str:
        """What shows that bits depend on something else; empty where nothing does."""
        ids = self._ids(_TOKENS_ON_A_GRID if self._on_a_grid else TOKENS)
        others: set[str] = set()
        with doubtful.noted_in(others, len(ids)):
            wanted = self._states(kernels, ids, ())
        if others:
            return (
                f"numbers that depend on their company are computed by {', '.join(sorted(others))}"
            )
        if doubts := self._doubts(kernels):
            return doubts[0]
        if not kernels.query_rows.fillings:
            return "its attention is computed by functions of its own"
        if why := self._mixers_fail(kernels):
            return why
        if why := self._unlike_stock(wanted[-1].float(), ids):
            return why
        if not equal(wanted, self._states(kernels, ids, self._cuts)):
            return f"{_OTHER_BITS} when a prompt is cut"
        if not self._equal_beside_others(kernels, ids, wanted):
            return f"{_OTHER_BITS} beside other sequences"
        return ""

    @property
    def _on_a_grid(self) -> bool:
        return self._engine.shape.has_states

    @property
    def _cuts(self) -> tuple[int, ...]:
        return _CUTS_ON_A_GRID if self._on_a_grid else CUTS

    def _mixers_fail(self, kernels: Kernels) -> str:
        """What is wrong with layers that have a state of fixed size, of which the last pass had
        some; empty where nothing is."""
        count, met = self._engine.shape.kinds.count("linear"), list(kernels.mixers)
        if len(met) != count:
            return "it has linear layers that are computed by functions of their own"
        for heads in {heads for heads in met if heads is not None}:
            if not delta_rows_are_equal(heads):
                return f"a gated delta rule of {heads.values} heads depends on its rows"
        return "" if mixers.are_upstreams(self._model, MixerLayer) else _NOT_KNOWN

    def _unlike_stock(self, ours: torch.Tensor, ids: np.ndarray) -> str:
        """What shows that the model's own code gives other logits, more than by rounding."""
        stock = self._states(None, ids, ())[-1].float()
        near = _NEAR.get(self._model.dtype, 0.0)
        if self._on_a_grid and (ours - stock).abs().max() > near * stock.abs().max():
            return _NOT_KNOWN
        if (ours - stock).norm() > _ALIKE * stock.norm():
            return "it computes something else than our kernels do in its place"
        return ""

    def _ids(self, tokens: int) -> np.ndarray:
        """Ids of text."""
        count = self._model.get_input_embeddings().num_embeddings
        kept = set(self._family.placeholders.values())
        some = (np.arange(tokens * 2) * 7919 + 11) % count
        return np.array([one for one in some if one not in kept][:tokens], dtype=np.int64)

    def _run(self, kernels: Kernels | None, ids: np.ndarray) -> Run:
        engine, types = self._engine, np.zeros(len(ids), dtype=np.int8)
        lane = Lane(self._model, engine.shape, engine.lanes.making, grows=True)
        positions = self._family.positions(ids, types, [])
        behind = positions[..., -1:] + 1
        return Run(Prompt(ids), positions, lane, Node(None, 0, 0, ""), behind, kernels=kernels)

    def _states(
        self, kernels: Kernels | None, ids: np.ndarray, cuts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Keys, values, states and logits of a prompt that is computed in these pieces."""
        run, engine = self._run(kernels, ids), self._engine
        counted, logits = engine.prefill_tokens, None
        for start, stop in pairwise([0, *cuts, len(ids)]):
            logits = engine.chunk(run, start, stop, [])
        engine.prefill_tokens = counted
        return [*states_of(run.lane), *([] if logits is None else [logits])]

    def _equal_beside_others(
        self, kernels: Kernels, ids: np.ndarray, wanted: list[torch.Tensor]
    ) -> bool:
        """Whether the last tokens, decoded beside other sequences, have the states of before."""
        engine, first = self._engine, len(ids) - 2
        runs = [self._run(kernels, ids[:count]) for count in (first, 5)]
        counted = engine.prefill_tokens
        for run in runs:
            engine.chunk(run, 0, len(run.prompt), [])
        engine.prefill_tokens = counted
        batch, logits = LaneBatch(self._model, self._family, runs), torch.empty(0)
        for token in ids[first:]:
            logits = batch.step([int(token)] * len(runs))
        return equal(wanted, [*states_of(runs[0].lane), logits[:1]])
