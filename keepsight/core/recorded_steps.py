"""Decoding without the model's Python code: a step is recorded once and run again as a list.

A small model spends a third of a decoded token between torch's operations. So after some steps of
one size, one is recorded over a scratch lane, and once more over another that says it is far
longer: only where both did the same operations does the list depend on nothing but its inputs. The
first steps that the list runs are run by the model too, and every logit, key and value must be
equal. Where anything differs the model's own code goes on, as it does with hooks and exchanged
methods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from keepsight.core.attention import grouped_queries
from keepsight.core.kernels import attention
from keepsight.core.kernels.attention import BLOCK, STEP, Room
from keepsight.core.kernels.passes import Kernels, attention_here, running
from keepsight.core.kernels.recording import CannotRecord, Name, Recording, record
from keepsight.core.kernels.script import RecordedStep, can_script, scripted
from keepsight.core.lane_layer import LaneLayer, WindowLayer
from keepsight.core.state import Lane
from keepsight.kinds import Inputs
from keepsight.models.families import Family

logger = logging.getLogger(__name__)

_AFTER = 16  # steps of one size, from which on a recording pays; so many for each sequence
_THEN = 4  # of another size of one sequence, once one could be recorded
_LONG = 0.15  # seconds of a step, beside which Python's part is small
_CHECKED = 2  # steps that both run
_MOST = 16  # sizes of steps that are recorded
_SCRATCH = ((5, 5), (700, 1_000_003))  # where scratch lanes go on, and how many tokens they claim
_HOOKS_ON_ALL = ("_global_forward_pre_hooks", "_global_forward_hooks")
_IDS, _POSITIONS = ("ids", 0, None), ("positions", 0, None)

Given = dict[Name, torch.Tensor]
Tokens = Sequence[Sequence[int]]


class Decoded(Protocol):
    """A sequence that decodes."""

    lane: Lane
    next_positions: torch.Tensor


def decode(
    model: PreTrainedModel,
    family: Family,
    kernels: Kernels | None,
    runs: Sequence[Decoded],
    tokens: Tokens,
    cache: DynamicCache,
    extra: Inputs,
) -> torch.Tensor:
    """Tokens of each sequence, as many of each, through the model: the logits behind them. The
    lanes hold them afterwards; `cache` gives the model their layers."""

    def by_model() -> torch.Tensor:
        device, count = model.device, len(tokens[0])
        positions = torch.cat([run.next_positions for run in runs], dim=-2)
        with grouped_queries(device), running(kernels):
            output = model(
                **extra,
                input_ids=torch.tensor(tokens, device=device),
                position_ids=positions + torch.arange(count, device=positions.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=count,
            )
        logits: torch.Tensor = output.logits[:, -count:]
        return logits

    if kernels is None or extra:
        return by_model()
    return _step(model, family, kernels, runs, tokens, by_model)


def _step(
    model: PreTrainedModel,
    family: Family,
    kernels: Kernels,
    runs: Sequence[Decoded],
    tokens: Tokens,
    by_model: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """The same, by a list of operations where there is one or by the model's own code."""
    known = kernels.steps.setdefault((len(runs), len(tokens[0])), RecordedStep())
    known.seen += 1
    if known.run is None:
        by_model = known.timed(by_model)
    enough = _AFTER * len(runs)  # who waits for the recording are all of them
    if len(runs) == 1 and any(one.run is not None for one in list(kernels.steps.values())):
        enough = min(_THEN, _AFTER)
    if known.given_up or (known.run is None and known.seen < enough):
        return by_model()
    try:
        if known.run is None:
            _refuse_watchers(model, family)
            _record(model, kernels, runs, len(tokens[0]), known)
            return by_model()
        given = _given(runs, tokens, known.names)
        found = known.run(given)
    except Exception as error:  # whatever a strange model runs into
        known.give_up(str(error))
        logger.info("steps are run by the model's own code: %s", error)
        return by_model()
    layers = [layer for run in runs for layer in _layers(run.lane)]
    if known.agreed < _CHECKED:
        return _compared(known, found, layers, len(tokens[0]), by_model)
    for layer in layers:
        layer.advance(len(tokens[0]))
    known.ran += 1
    return found


def _compared(
    known: RecordedStep,
    found: torch.Tensor,
    layers: Sequence[LaneLayer],
    count: int,
    by_model: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """The model computes the same once more; whether logits, keys and values are equal."""
    starts = [layer.length for layer in layers]
    ours = [_rows(layer, start, count) for layer, start in zip(layers, starts, strict=True)]
    wanted = by_model()
    theirs = [_rows(layer, start, count) for layer, start in zip(layers, starts, strict=True)]
    same = all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    if same and torch.equal(found, wanted):
        known.agreed += 1
    else:
        known.give_up("a recorded step gave other bits than the model")
        logger.warning("%s; steps are run by the model's own code", known.given_up)
    return wanted


def _rows(layer: LaneLayer, start: int, count: int) -> torch.Tensor:
    """Keys and values of some tokens, copied."""
    rooms = [room for room in (layer.room_k, layer.room_v) if room is not None]
    return torch.cat([room[:, :, start : start + count].flatten() for room in rooms])


def _layers(lane: Lane) -> list[LaneLayer]:
    """The layers of a lane, where a list can go over them."""
    found = []
    for layer in lane.cache.layers:
        if type(layer) not in (LaneLayer, WindowLayer):
            raise CannotRecord(f"a layer keeps its state in a {type(layer).__name__}")
        found.append(layer)
    return found


# -- what a step is given --------------------------------------------------------------------------


def _given(runs: Sequence[Decoded], tokens: Tokens, names: Collection[Name]) -> Given:
    count = len(tokens[0])
    given: Given = {_IDS: torch.tensor(tokens)}
    positions = [run.next_positions for run in runs]
    together = positions[0] if len(runs) == 1 else torch.cat(positions, dim=-2)
    given[_POSITIONS] = together if count == 1 else together + torch.arange(count)
    for row, run in enumerate(runs):
        layers = _layers(run.lane)
        rooms = [layer.make_room(count) for layer in layers]
        _add_row(given, row, layers, rooms, run.lane.length, count, names)
    return given


def _add_row(
    given: Given,
    row: int,
    layers: Sequence[LaneLayer],
    rooms: Sequence[tuple[torch.Tensor, torch.Tensor]],
    length: int,
    count: int,
    names: Collection[Name] | None,
) -> None:
    """What one sequence needs: the blocks of its rooms that its new tokens see, their places in
    these blocks, and who sees whom."""
    end = -(-(length + count) // BLOCK) * BLOCK
    begins: dict[object, int] = {}
    for index, (layer, (keys, values)) in enumerate(zip(layers, rooms, strict=True)):
        begin = begins.get(layer.sight)
        if begin is None:
            begin = begins[layer.sight] = (layer.first_seen_by(length) or 0) // BLOCK * BLOCK
            given["places", row, layer.sight] = torch.arange(length, length + count) - begin
        given["k", row, index] = keys[:, :, begin:end]
        given["v", row, index] = values[:, :, begin:end]
    for name in names or ():
        _, of, kind = name
        if isinstance(kind, _Seen) and of == row:
            layer = layers[kind.layer]
            given[name] = _mask(layer, length, count, begins[layer.sight], end, kind)


@dataclass(frozen=True)
class _Seen:
    """For whom a mask is: all layers that see what one of them does, in groups of queries."""

    layer: int
    group: int
    dtype: torch.dtype


def _mask(
    layer: LaneLayer, length: int, count: int, begin: int, end: int, of: _Seen
) -> torch.Tensor:
    """Which keys of the blocks each new token sees, a row for each query of a group; rows that are
    there for their number only see all."""
    group, dtype = of.group, of.dtype
    rows = -(-group * count // STEP) * STEP
    values = torch.zeros(1, 1, rows, end - begin, dtype=dtype)
    for number in range(count):
        place = length + number
        own = values[0, 0, number : group * count : count]
        own[:, place + 1 - begin :] = -torch.inf
        if (first := layer.first_seen_by(place)) is not None and first > begin:
            own[:, : first - begin] = -torch.inf
    return values


# -- recording -------------------------------------------------------------------------------------


def _record(
    model: PreTrainedModel,
    kernels: Kernels,
    runs: Sequence[Decoded],
    count: int,
    known: RecordedStep,
) -> None:
    """Record a step of this size, and what can be run of it."""
    if _LONG < known.seconds < torch.inf:
        raise CannotRecord("a step takes so long that Python's part of it is small")
    if len([one for one in kernels.steps.values() if one.run is not None]) >= _MOST:
        raise CannotRecord(f"{_MOST} sizes of steps are recorded")
    if not can_script():
        raise CannotRecord("this torch makes no function of a list of operations")
    one, other = (_scratch(model, kernels, runs, count, *how) for how in _SCRATCH)
    if not one.equals(other):
        raise CannotRecord("what the model does depends on how many tokens there are")
    known.run, known.names = scripted(one), frozenset(one.given)


def _refuse_watchers(model: PreTrainedModel, family: Family) -> None:
    """Who put a hook or a method of their own into the model wants to be asked at each step."""
    run = {id(module) for part in family.text_modules() for module in part.modules()}
    for name, module in model.named_modules():
        if run.isdisjoint(map(id, module.modules())):
            continue  # a tower, which no decoded token goes through
        forward = type(module).forward
        homes = {base.__module__ for base in type(module).__mro__}
        foreign = "forward" in vars(module) or getattr(forward, "__module__", None) not in homes
        if foreign or module._forward_hooks or module._forward_pre_hooks:
            raise CannotRecord(f"{name or 'the model'} has a hook, or a method of somebody's own")
    if any(vars(torch.nn.modules.module).get(name) for name in _HOOKS_ON_ALL):
        raise CannotRecord("all modules have a hook")


def _scratch(
    model: PreTrainedModel,
    kernels: Kernels,
    runs: Sequence[Decoded],
    count: int,
    place: int,
    claimed: int,
) -> Recording:
    """A recorded step over lanes that hold nothing."""
    layers = _layers(runs[0].lane)
    memory: dict[tuple[object, ...], torch.Tensor] = {}

    def room(like: torch.Tensor | None) -> torch.Tensor:
        if like is None:
            raise CannotRecord("a layer holds nothing yet")
        shape = (*like.shape[:2], 2 * BLOCK, like.shape[-1])
        return memory.setdefault((*shape, like.dtype), like.new_zeros(shape))

    rooms = [(room(layer.room_k), room(layer.room_v)) for layer in layers]
    groups = {(heads // keys, dtype) for heads, keys, _, dtype in kernels.seen}
    positions = runs[0].next_positions
    given: Given = {
        _IDS: torch.full((len(runs), count), place % 2),
        _POSITIONS: positions.new_zeros(*positions.shape[:-2], len(runs), count)
        + torch.arange(place, place + count),
    }
    sights = {layer.sight: index for index, layer in reversed(list(enumerate(layers)))}
    for row in range(len(runs)):
        masks = [("mask", row, _Seen(i, *group)) for i in sights.values() for group in groups]
        _add_row(given, row, layers, rooms, place, count, masks)
    attending = _Attending(given, len(runs), sights)
    cache = DynamicCache(config=model.config)
    cache.layers = [_Layer(i, x, given, len(runs), claimed) for i, x in enumerate(layers)]

    def run() -> torch.Tensor:
        with grouped_queries(model.device), running(kernels, attending):
            output = model(
                input_ids=given[_IDS],
                position_ids=given[_POSITIONS],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=count,
            )
        logits: torch.Tensor = output.logits[:, -count:]
        return logits

    return record(run, given)


class _Layer(LaneLayer):
    """A layer of all lanes, while a step over them is recorded."""

    def __init__(self, index: int, like: LaneLayer, given: Given, rows: int, claimed: int) -> None:
        super().__init__()
        self.index, self.like = index, like
        self._given, self._rows, self._claimed = given, rows, claimed
        self.is_initialized, self.is_sliding = True, like.is_sliding

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a row for each token into the room of each lane."""
        for row in range(self._rows):
            places = self._given["places", row, self.like.sight]
            for what, states in (("k", key_states), ("v", value_states)):
                self._given[what, row, self.index].index_copy_(2, places, states[row : row + 1])
        here = attention_here()
        if here is not None:
            here.note(key_states, [self])
        return key_states, value_states

    def get_seq_length(self, *more: object, **options: object) -> int:
        """Tokens that the lanes are said to hold."""
        return self._claimed

    def get_mask_sizes(self, query_length: int, *more: object, **named: object) -> tuple[int, int]:
        """As many, and those that come."""
        return self._claimed + query_length, 0


class _Attending:
    """Attention over rooms and masks that each step is given."""

    def __init__(self, given: Given, rows: int, sights: dict[tuple[int, bool], int]) -> None:
        self._given, self._count, self._sights = given, rows, sights
        self._noted: dict[int, tuple[torch.Tensor, _Layer]] = {}

    def note(self, keys: torch.Tensor, layers: Sequence[Room]) -> None:
        """Say of which layer these keys are."""
        if isinstance(layers[0], _Layer):
            self._noted[id(keys)] = keys, layers[0]

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        if id(key) not in self._noted or (mask is not None and mask.shape[1:2] != (1,)):
            raise CannotRecord("attention is asked for over other keys, or with a mask by head")
        layer = self._noted[id(key)][1]
        rows = [self._row(query[row : row + 1], row, layer, scale) for row in range(self._count)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _row(
        self, query: torch.Tensor, row: int, layer: _Layer, scale: float | None
    ) -> torch.Tensor:
        """As `kernels.attention` goes over one lane."""
        keys, values = (self._given[what, row, layer.index] for what in "kv")
        _, heads, count, width = query.shape
        seen = _Seen(self._sights[layer.like.sight], heads // keys.shape[1], query.dtype)
        mask = self._given.get(("mask", row, seen))
        if mask is None:
            raise CannotRecord("its queries are grouped in another way than was tried")
        rows = query.reshape(1, keys.shape[1], -1, width)
        wanted = rows.shape[2]
        if missing := -wanted % STEP:
            rows = functional.pad(rows, (0, 0, 0, missing))
        found = attention.plain(rows, keys, values, mask, scale)
        return found[:, :, :wanted].reshape(1, heads, count, -1)
