"""The suite for a kind of layer: its states can be captured and restored.

Every comparison is bit for bit, with the same chunks run on a lane that was not restored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from keepsight.core.decoding.state import Lane, Shape, Tensors
from keepsight.formats.package import storage_bytes
from keepsight.models.renamed import with_cache
from support.common import expect, same_tensors


class StateTests:
    """Capture and restore equal recomputation, bit for bit, for one kind of layer.

    Define `make_model`: a small language model in eval mode with such layers, and with weights
    large enough that its logits depend on every token seen.
    """

    tokens = 45
    cuts: Sequence[int] = (7, 16, 17, 33)

    def make_model(self) -> PreTrainedModel:
        """The model, with the same weights each time."""
        raise NotImplementedError

    def lane(self, model: PreTrainedModel) -> Lane:
        """A new lane with room for the whole prompt."""
        lane = Lane(model, Shape.of(model))
        lane.reserve(self.tokens + 8)
        return lane

    def ids(self, model: PreTrainedModel, seed: int = 0) -> torch.Tensor:
        """A prompt."""
        generator = torch.Generator().manual_seed(seed)
        size = model.get_input_embeddings().num_embeddings
        return torch.randint(0, size, (1, self.tokens), generator=generator)

    @torch.inference_mode()  # as the engine does: such tensors can only be written in this mode
    def chunk(
        self, model: PreTrainedModel, lane: Lane, ids: torch.Tensor, end: int
    ) -> torch.Tensor:
        """Advance the lane to `end`; return the logits of the chunk."""
        start = lane.length
        output = model(
            input_ids=ids[:, start:end],
            position_ids=torch.arange(start, end)[None],
            **with_cache(model, lane.cache),
            use_cache=True,
        )
        lane.length = end
        logits: torch.Tensor = output.logits
        return logits

    def cold(self, model: PreTrainedModel, ids: torch.Tensor, lane: Lane) -> tuple[list, list]:
        """The whole prompt, cut by cut: the logits of each chunk and the snapshot after it."""
        logits, snapshots = [], []
        for end in [*self.cuts, self.tokens]:
            start = lane.length
            logits.append(self.chunk(model, lane, ids, end))
            snapshots.append((start, end, *lane.capture(start, end)))
        return logits, snapshots

    @torch.inference_mode()
    def restored(self, lane: Lane, snapshots: Sequence[tuple[int, int, Tensors, Tensors]]) -> Lane:
        """The lane restored to the last of the snapshots."""
        lane.restore_full([(start, full) for start, _, full, _ in snapshots])
        lane.restore_fixed(snapshots[-1][1], snapshots[-1][3])
        return lane

    def expect_rest(
        self, model: PreTrainedModel, lane: Lane, ids: torch.Tensor, logits: list
    ) -> None:
        """The rest of the prompt must give these logits."""
        ends = [end for end in [*self.cuts, self.tokens] if end > lane.length]
        for end, wanted in zip(ends, logits[len(logits) - len(ends) :], strict=True):
            expect(torch.equal(self.chunk(model, lane, ids, end), wanted), f"equal up to {end}")

    def test_restored_equals_recomputed(self) -> None:
        """From every cut on, in a new lane."""
        model = self.make_model()
        ids = self.ids(model)
        logits, snapshots = self.cold(model, ids, self.lane(model))
        for count in range(1, len(snapshots)):
            lane = self.restored(self.lane(model), snapshots[:count])
            self.expect_rest(model, lane, ids, logits)

    def test_the_state_matters(self) -> None:
        """Control: the states of another prompt give other logits."""
        model = self.make_model()
        ids = self.ids(model)
        logits, _ = self.cold(model, ids, self.lane(model))
        _, others = self.cold(model, self.ids(model, 1), self.lane(model))
        lane = self.restored(self.lane(model), others[:2])
        wrong = self.chunk(model, lane, ids, self.cuts[2])
        expect(not torch.allclose(wrong, logits[2], atol=1e-4), "a wrong state shows")

    def test_a_used_lane_is_as_good_as_a_new_one(self) -> None:
        """After another prompt, rewound to its start or overwritten by a restore."""
        model = self.make_model()
        ids = self.ids(model)
        logits, snapshots = self.cold(model, ids, self.lane(model))
        lane = self.lane(model)
        for count in (0, 2, 1):
            lane.rewind(0)
            self.cold(model, self.ids(model, 1), lane)
            lane.rewind(0)
            if count:
                self.restored(lane, snapshots[:count])
            self.expect_rest(model, lane, ids, logits)

    @torch.inference_mode()
    def test_rewinding_keeps_what_stands_before(self) -> None:
        """Full layers are cut, fixed states restored; the rest of the prompt gives the same
        result."""
        model = self.make_model()
        ids = self.ids(model)
        lane = self.lane(model)
        logits, snapshots = self.cold(model, ids, lane)
        for _, end, _, fixed in reversed(snapshots[:-1]):
            lane.rewind(end)
            lane.restore_fixed(end, fixed)
            self.expect_rest(model, lane, ids, logits)

    def test_a_snapshot_is_a_copy(self) -> None:
        """Nothing the lane does later, restored or not, changes the snapshot."""
        model = self.make_model()
        lane = self.lane(model)
        _, snapshots = self.cold(model, self.ids(model), lane)
        copies = [[{n: t.clone() for n, t in part.items()} for part in s[2:]] for s in snapshots]
        for _ in range(2):
            for token in range(4):
                self.chunk(model, lane, self.ids(model)[:, [token] * 99], lane.length + 1)
            for snapshot, copy in zip(snapshots, copies, strict=True):
                expect(all(map(same_tensors, snapshot[2:], copy)), "a snapshot stays as it was")
            lane = self.restored(self.lane(model), snapshots)

    def test_branches_of_one_snapshot_do_not_meet(self) -> None:
        """Two lanes from one snapshot, alternating token by token, give what each gives alone."""
        model = self.make_model()
        _, snapshots = self.cold(model, self.ids(model), self.lane(model))
        futures = [self.ids(model, seed) for seed in (2, 3)]
        ends = range(self.cuts[1] + 1, self.cuts[1] + 9)
        alone = []
        for ids in futures:
            lane = self.restored(self.lane(model), snapshots[:2])
            alone.append([self.chunk(model, lane, ids, end) for end in ends])
        lanes = [self.restored(self.lane(model), snapshots[:2]) for _ in futures]
        for step, end in enumerate(ends):
            for number, ids in enumerate(futures):
                logits = self.chunk(model, lanes[number], ids, end)
                expect(torch.equal(logits, alone[number][step]), "branches do not meet")

    def test_rooms_grow_without_losing_anything(self) -> None:
        """A lane without an announced length holds the same as one with it."""
        model = self.make_model()
        ids = self.ids(model).repeat(1, 8)
        lanes = [self.lane(model), self.lane(model)]
        lanes[0].reserve(ids.shape[1])
        lanes[1].reserve(0)
        for end in range(self.tokens, ids.shape[1] + 1, self.tokens):
            for lane in lanes:
                self.chunk(model, lane, ids, end)
        one, two = (lane.capture(0, ids.shape[1]) for lane in lanes)
        expect(all(map(same_tensors, one, two)), "growing changes nothing")

    def test_snapshots_stand_at_the_end_only(self) -> None:
        """A fixed-size state is the current one: no other place can be captured."""
        model = self.make_model()
        lane = self.lane(model)
        self.cold(model, self.ids(model), lane)
        for end in (0, self.cuts[0], self.tokens + 1):
            try:
                lane.capture(0, end)
            except ValueError:
                continue
            raise AssertionError(f"captured at {end} of {lane.length}")

    def test_bytes_are_those_of_storages(self) -> None:
        """A lane counts its buffers and states; a snapshot owns exactly what it holds."""
        model = self.make_model()
        lane = self.lane(model)
        _, snapshots = self.cold(model, self.ids(model), lane)
        expect(lane.nbytes > 0, "a lane takes memory")
        for *_, full, fixed in snapshots:
            tensors = [*full.values(), *fixed.values()]
            expect(storage_bytes(tensors) == sum(t.nbytes for t in tensors), "no view is kept")
