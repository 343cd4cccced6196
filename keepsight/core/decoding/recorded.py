"""Short passes on an accelerator, recorded once and replayed.

To launch the kernels of an 8 B decoder one by one takes five times as long as they run.

A recording has fixed addresses, and lanes do not. So keys and values of the sequences in work lie
in a pool too, each sequence in a stretch of its own; where stretches begin, how long they are and
which rows are new are tensors that a replay reads. One recording serves all sequences: one for each
number of sequences (to a power of two), of new tokens (likewise) and of keys. What was computed
here is copied to the lane when somebody looks at it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from keepsight.core.decoding.lane_layer import LaneLayer, WindowLayer
from keepsight.core.decoding.state import Lane, Shape
from keepsight.core.kernels import flash, passes
from keepsight.core.kernels.layers import is_quiet
from keepsight.kinds import Inputs
from keepsight.models.renamed import with_cache
from keepsight.models.tested import refuse_unknown

if TYPE_CHECKING:
    from keepsight.core.decoding.forward import Stretch

logger = logging.getLogger(__name__)

_LEAST = 8192  # keys of a pool
_STEP = 512  # keys by which stretches of a pool grow

Run = Callable[[], torch.Tensor]


@dataclass
class _Place:
    """The stretch of a pool that holds a sequence."""

    start: int
    room: int
    length: int = 0  # tokens held here
    known: int = 0  # those that the lane holds too
    used: int = 0


class _PoolLayer(DynamicLayer):
    """One layer of all sequences of a recording."""

    def __init__(self, recorder: RecordedPasses, index: int) -> None:
        super().__init__()
        self._recorder, self._index = recorder, index
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new rows to the pool; attention finds it by the returned keys."""
        self._recorder.write(self._index, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, *more: object, **options: object) -> int:
        """No place in a recording depends on it."""
        refuse_unknown("get_seq_length of a cache layer", more, options)
        return 0

    def get_mask_sizes(self, query_length: int, *more: object, **named: object) -> tuple[int, int]:
        """Those of the new tokens: attention needs no mask."""
        refuse_unknown("get_mask_sizes of a cache layer", more, named)
        return query_length, 0


class RecordedPasses:
    """Records and replays the short passes of one model."""

    MOST = 64  # tokens of a pass; longer ones keep the device busy

    def __init__(self, model: PreTrainedModel, room: int) -> None:
        self._model, self._room, self._most_keys = model, room, 0
        self._pools: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each layer: rows first
        self._windows: list[int | None] = []
        self._places: weakref.WeakKeyDictionary[Lane, _Place] = weakref.WeakKeyDictionary()
        self._recordings: dict[tuple[int, int, int], _Recording] = {}
        self._held: dict[int, tuple[torch.Tensor, int]] = {}  # keys of the pass in work, by id
        self._now: _Recording | None = None
        self._memory: Any = None  # that all recordings share
        self._turn = 0
        self.replays = 0

    @staticmethod
    def can(model: PreTrainedModel, shape: Shape) -> bool:
        """Whether short passes of a model can be recorded: all on one accelerator, with keys that
        grow, and nobody who listens at a module."""
        places = {weight.device for weight in model.parameters()}
        half = model.dtype in (torch.float16, torch.bfloat16)
        grows = {"full", "sliding"}.issuperset(shape.kinds)
        on_one = len(places) == 1 and next(iter(places)).type == "cuda"
        return on_one and half and grows and is_quiet(list(model.modules()))

    def run(self, segments: Sequence[Stretch]) -> list[torch.Tensor | None] | None:
        """The logits that each segment asked for; None where the pass has to run as it is."""
        rows, count = len(segments), max(len(one.ids) for one in segments)
        if rows * count > self.MOST or (rows > 1 and count > 1):
            return None
        count = 1 << (count - 1).bit_length()
        if not self._ready([one.lane for one in segments]):
            return None
        self._turn += 1
        ends = [one.start + count for one in segments]
        places = self._placed(segments, ends)
        if places is None:
            return None
        key = 1 << (rows - 1).bit_length(), count, 1 << (max(ends) - 1).bit_length()
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._recordings[key] = _Recording(self._model.device, *key)
        recording.fill(segments, places)
        logits = self._replayed(recording, segments)
        found = list[torch.Tensor | None]()
        for row, (one, place) in enumerate(zip(segments, places, strict=True)):
            place.length = one.end
            one.lane.behind = self._settle
            first = row * count + len(one.ids)
            found.append(logits[first - one.logits : first].clone() if one.logits else None)
        self.replays += 1
        return found

    # -- where sequences lie -----------------------------------------------------------------------

    def _ready(self, lanes: Sequence[Lane]) -> bool:
        """Make the pool as the lanes are; not before these hold something."""
        if self._pools:
            return True
        layers = lanes[0].cache.layers
        if any(type(x) not in (LaneLayer, WindowLayer) or x.key_buffer is None for x in layers):
            return False
        if any(layer.sight[1] for layer in layers):  # chunks of attention
            return False
        if not all(flash.fits(x.key_buffer, x.value_buffer) for x in layers):
            return False
        self._windows = [layer.sight[0] or None for layer in layers]
        rooms = [
            (x.key_buffer[0].transpose(0, 1), x.value_buffer[0].transpose(0, 1)) for x in layers
        ]
        of_one = sum(x[0].numel() * x.element_size() for pair in rooms for x in pair)
        self._most_keys = self._room // of_one
        if self._most_keys < _LEAST:
            return False
        self._make(rooms, _LEAST)
        return True

    def _make(self, like: Sequence[tuple[torch.Tensor, torch.Tensor]], keys: int) -> None:
        """Pools of that many keys, and `MOST` more for rows that no sequence has."""
        self._pools, self._recordings, self._memory = [], {}, None  # before there are new ones
        for pair in like:
            of_k, of_v = (x.new_zeros(keys + self.MOST, *x.shape[1:]) for x in pair)
            self._pools.append((of_k, of_v))

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._pools)

    def _placed(self, segments: Sequence[Stretch], ends: Sequence[int]) -> list[_Place] | None:
        """The places of sequences, with what their lanes hold, and room up to these ends."""
        for one, end in zip(segments, ends, strict=True):
            place = self._places.get(one.lane)
            if place is not None and place.room < end:
                one.lane.settle()
                del self._places[one.lane]
        needed = [one.lane for one in segments]
        while missing := [i for i, lane in enumerate(needed) if lane not in self._places]:
            first = missing[0]  # the pool may grow for it, which takes the places of all
            wanted = max(ends[first], *(layer.reserved for layer in needed[first].full))
            room = -(-wanted // _STEP) * _STEP + self.MOST
            start = self._space(room, needed)
            if start is None:
                return None
            self._places[needed[first]] = _Place(start, room)
        places = []
        for one in segments:
            place = self._places[one.lane]
            self._bring(one.lane, place, one.start)
            place.used = self._turn
            places.append(place)
        return places

    def _space(self, room: int, needed: Sequence[Lane]) -> int | None:
        """The first of that many free keys; others make way, and the pool grows, if need be."""
        while True:
            start = self.MOST
            for place in sorted(self._places.values(), key=lambda one: one.start):
                if place.start - start >= room:
                    return start
                start = place.start + place.room
            have = len(self._pools[0][0])
            if have - start >= room:
                return start
            others = [lane for lane in self._places if lane not in needed]
            if others:
                oldest = min(others, key=lambda lane: self._places[lane].used)
                oldest.settle()
                del self._places[oldest]
                continue
            if not self._grow(room):
                return None

    def _grow(self, room: int) -> bool:
        """Twice the pool, or as much as is missing; what lies in it goes to the lanes."""
        for lane in list(self._places):
            lane.settle()
        have = len(self._pools[0][0]) - self.MOST
        keys = min(max(2 * have, have + room), self._most_keys)
        if keys < have + room:
            return False
        self._places.clear()
        like = [
            (k.new_empty(0, *k.shape[1:]), v.new_empty(0, *v.shape[1:])) for k, v in self._pools
        ]
        self._make(like, keys)
        return True

    def _bring(self, lane: Lane, place: _Place, length: int) -> None:
        """Copy what a lane holds to its place, where that differs."""
        if lane.behind is None:
            place.length = min(place.length, lane.copied)
            some = slice(place.start + place.length, place.start + length)
            held = slice(place.length, length)
            for (keys, values), layer in zip(self._pools, lane.full, strict=True):
                if place.length == length or layer.keys is None or layer.values is None:
                    break
                keys[some] = layer.keys[0, :, held].transpose(0, 1)
                values[some] = layer.values[0, :, held].transpose(0, 1)
            place.length = place.known = lane.copied = length

    def _settle(self, lane: Lane) -> None:
        """Copy what was computed here to a lane."""
        place = self._places[lane]
        some = slice(place.start + place.known, place.start + place.length)
        for (keys, values), layer in zip(self._pools, lane.full, strict=True):
            layer.append(keys[some].transpose(0, 1)[None], values[some].transpose(0, 1)[None])
        place.known = lane.copied = place.length

    # -- passes ------------------------------------------------------------------------------------

    def _replayed(self, recording: _Recording, segments: Sequence[Stretch]) -> torch.Tensor:
        if recording.replay is None:
            if self._memory is None:
                self._memory = _shared_memory(self._model.device)
            recording.record(lambda: self._forward(recording), self._memory)
        if recording.replay is not None:
            recording.replay()
        if recording.logits is None:
            raise ValueError("a pass was not recorded")
        return recording.logits

    def _forward(self, recording: _Recording) -> torch.Tensor:
        cache = DynamicCache()
        cache.layers = [_PoolLayer(self, index) for index in range(len(self._pools))]
        inputs: Inputs = {"input_ids": recording.ids, "position_ids": recording.positions}
        inputs |= {"use_cache": True, **with_cache(self._model, cache)}
        self._now, self._held = recording, {}
        try:
            with passes.grouped_queries(self._model.device, True), passes.side_by_side(self):
                logits: torch.Tensor = self._model(**inputs).logits[0]
        finally:
            self._now, self._held = None, {}
        return logits

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write new rows of a layer to the pool."""
        if self._now is None:
            raise ValueError("no pass is being recorded")
        pool_k, pool_v = self._pools[index]
        pool_k.index_copy_(0, self._now.rows, keys[0].transpose(0, 1))
        pool_v.index_copy_(0, self._now.rows, values[0].transpose(0, 1))
        self._held[id(keys)] = keys, index

    def note(self, *of: object) -> None:
        """Lanes have no part in a recording."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """`scaled_dot_product_attention` over the pool."""
        now = self._now
        if now is None or id(key) not in self._held:
            raise ValueError("attention over keys that no layer of a recording holds")
        index = self._held[id(key)][1]
        keys, values = self._pools[index]
        found = flash.in_a_pool(
            query[0].transpose(0, 1),
            keys,
            values,
            edges=now.edges,
            starts=now.starts,
            lengths=now.lengths,
            rows=now.count,
            longest=now.longest,
            scale=scale,
            window=self._windows[index],
        )
        return found.transpose(0, 1)[None]


class _Recording:
    """A pass with its inputs at fixed addresses: `sequences` times `count` new tokens."""

    def __init__(self, device: torch.device, sequences: int, count: int, longest: int) -> None:
        self.sequences, self.count, self.longest = sequences, count, longest
        self._device, tokens = device, sequences * count
        self.ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(0, device=device)  # as the family has them
        self.rows = torch.arange(tokens, device=device)
        each = range(0, tokens + 1, count)
        self.edges = torch.tensor(each, dtype=torch.int32, device=device)
        self.starts = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
        self.lengths = torch.ones(sequences, dtype=torch.int32, device=device)
        self.logits: torch.Tensor | None = None
        self.replay: Callable[[], object] | None = None

    def fill(self, segments: Sequence[Stretch], places: Sequence[_Place]) -> None:
        """Set the inputs. Rows that no sequence has go to the first of the pool."""
        tokens = self.sequences * self.count
        ids, rows = torch.zeros(1, tokens, dtype=torch.int64), torch.arange(tokens)
        of_one = segments[0].positions
        positions = of_one.new_zeros(*of_one.shape[:-1], tokens)
        starts = torch.zeros(self.sequences + 1, dtype=torch.int32)
        lengths = torch.full((self.sequences,), self.count, dtype=torch.int32)
        for i, (one, place) in enumerate(zip(segments, places, strict=True)):
            at, size = i * self.count, len(one.ids)
            ids[0, at : at + size] = torch.from_numpy(one.ids)
            positions[..., at : at + size] = one.positions
            first = place.start + one.start
            rows[at : at + self.count] = torch.arange(first, first + self.count)
            starts[i], lengths[i] = place.start, one.start + self.count
        if self.positions.shape != positions.shape:
            self.positions = positions.to(self._device)
        for room, given in (
            *((self.ids, ids), (self.positions, positions), (self.rows, rows)),
            *((self.starts, starts), (self.lengths, lengths)),
        ):
            room.copy_(given)

    def record(self, run: Run, memory: Any) -> None:
        """Run once as usual, so that everything is loaded, and then record."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            self.logits = run()
        self.replay = graph.replay


def _shared_memory(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return torch.cuda.graph_pool_handle()
