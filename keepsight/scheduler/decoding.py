"""Groups sequences for decoding: similar lengths in one batch, one forward pass per step.

A single sequence decodes on its own lane, as in a direct call. A sequence so much longer than the
others that a step would read more padding than weights decodes separately. If a pass fails, its
sequences are computed again one by one, so that only the one at fault ends.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from transformers import PreTrainedModel

from keepsight.core.decoding.batch import Batch
from keepsight.core.decoding.lane_batch import LaneBatch, batch_of
from keepsight.core.engine import Engine, Run
from keepsight.errors import KeepsightError
from keepsight.kinds import Record
from keepsight.models.families import Family
from keepsight.scheduler.policy import SequenceSizes

logger = logging.getLogger(__name__)

_ROOM = 256  # columns kept free when a batch is laid out

Group = Batch | LaneBatch | Run


class Decoding:
    """The sequences that are decoding."""

    def __init__(
        self, model: PreTrainedModel, family: Family, engine: Engine, sizes: SequenceSizes
    ) -> None:
        self._model, self._family, self._engine, self._sizes = model, family, engine, sizes
        self.groups: list[Group] = []
        self._loners: set[Run] = set()  # these decode alone to their end
        self._unsound: list[Batch | LaneBatch] = []
        self._keep: set[Run] = set()  # need their lanes back at the end
        self.passes = self.rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all batches, and of the lanes of single sequences."""
        return sum(
            group.lane.nbytes if isinstance(group, Run) else group.nbytes for group in self.groups
        )

    def stats(self) -> Record:
        """How sequences share passes."""
        return {
            "batches": len(self.groups),
            "batch_bytes": self.nbytes,
            "passes": self.passes,
            "rows_per_pass": round(self.rows / max(1, self.passes), 3),
        }

    def planned(self, columns: Callable[[Run], int]) -> int:
        """Bytes when all have their greatest length; `columns` gives that length."""
        return sum(
            self._sizes.of(len(runs), max(map(columns, runs))) for runs in map(_runs, self.groups)
        )

    # -- joining and leaving ---------------------------------------------------------------------

    def join(self, run: Run, keeps_lane: bool = False) -> None:
        """Add a prefilled sequence."""
        if keeps_lane:
            self._keep.add(run)
        if not self._family.decodes_together:
            self._loners.add(run)
        self._settle(run)

    def leave(self, run: Run, ended: bool = True) -> None:
        """Remove a sequence, at its end or earlier; its lane is then free."""
        group = next((group for group in self.groups if run in _runs(group)), None)
        failed: Exception | None = None
        if isinstance(group, Batch | LaneBatch):
            try:
                if ended and run in self._keep:
                    group.put_back(run)
            except Exception as error:  # its lane is unusable; the others continue without it
                failed = error
            try:
                group.leave(run)
            except Exception as error:  # its rows are inconsistent: the next step separates them
                logger.warning("a batch could not be copied: %s", error)
                group.runs = [other for other in group.runs if other is not run]
                self._unsound += [group] if group.runs else []
        if group is run or (isinstance(group, Batch | LaneBatch) and not group.runs):
            self.groups.remove(group)
        self._loners.discard(run)
        self._keep.discard(run)
        self._merge()
        if failed is not None:
            raise failed

    def _settle(self, group: Group) -> None:
        """Put sequences into the groups in which the next steps read the least."""
        best, gain = None, 0
        for other in self.groups:
            less = self._gain(group, other)
            if less > gain:
                best, gain = other, less
        if best is None or (joined := self._joined(best, group)) is None:
            self.groups.append(group)
        else:
            self.groups[self.groups.index(best)] = joined

    def _merge(self) -> None:
        """Merge groups that became similar."""
        for one, other in itertools.combinations(list(self.groups), 2):
            joined = self._joined(one, other) if self._gain(one, other) > 0 else None
            if joined is not None:
                self.groups[self.groups.index(one)] = joined
                self.groups.remove(other)
                self._merge()
                return

    def _gain(self, one: Group, other: Group) -> int:
        """The bytes that a step saves when two groups become one."""
        if self._loners & {*_runs(one), *_runs(other)} or {one, other} & {*self._unsound}:
            return -1
        own = {run.kernels is not None for run in (*_runs(one), *_runs(other))}
        if own != {False}:  # rows on separate lanes add no cost to each other
            return 1 if own == {True} else -1
        rows, columns = [len(_runs(g)) for g in (one, other)], [_columns(one), _columns(other)]
        apart = sum(map(self._sizes.cost, rows, columns))
        return apart - self._sizes.cost(sum(rows), max(columns))

    def _joined(self, one: Group, other: Group) -> Batch | LaneBatch | None:
        """Both in one batch, or None if memory does not suffice."""
        if isinstance(one, Run):
            one, other = other, one
        try:
            if isinstance(one, Run) and isinstance(other, Run):
                batch = batch_of(self._model, self._family, [other, one], _ROOM)
            else:
                batch = _added(one, other)
        except Exception as error:  # mostly memory; apart they can go on unchanged
            logger.warning("sequences go on apart, they could not be laid together: %s", error)
            return None
        for run in (one, other):
            if isinstance(run, Run) and run.kernels is None and run not in self._keep:
                self._engine.leave_lane(run)
        return batch

    # -- stepping --------------------------------------------------------------------------------

    def step(
        self,
        tokens: dict[Run, int],
        history: Callable[[Run], list[int]],
        resting: Collection[Run] = (),
    ) -> Iterator[tuple[Run, torch.Tensor | Exception]]:
        """Run one token of each sequence through the model: its logits (1, n), or an error.

        `history` gives all tokens of an answer so far, to compute it again. Sequences in `resting`
        are left out if they do not share rows with others.
        """
        for group in list(self.groups):
            part, runs, others = self._without(group, resting)
            if not runs:
                continue
            self.passes += 1
            self.rows += len(runs)
            try:
                if isinstance(part, Run):
                    yield part, self._engine.step(part, tokens[part])
                    continue
                if group in self._unsound:
                    raise KeepsightError("the rows of this batch are inconsistent")
                logits = part.step([tokens[run] for run in runs])
                self._engine.decode_steps += 1
            except Exception as error:  # any failure of a forward pass, mostly memory
                if isinstance(group, Run):
                    yield group, error
                    continue
                self.groups.remove(group)
                self.groups += [LaneBatch(self._model, self._family, others)] if others else []
                self._unsound = [other for other in self._unsound if other is not group]
                yield from self._one_by_one(runs, tokens, history)
                continue
            yield from ((run, logits[row : row + 1]) for row, run in enumerate(runs))

    def _without(
        self, group: Group, resting: Collection[Run]
    ) -> tuple[Group, list[Run], list[Run]]:
        """The group to run, its members, and those that rest, if its rows are separate."""
        runs = _runs(group)
        rest = [run for run in runs if run in resting]
        if rest and len(rest) < len(runs) and isinstance(group, LaneBatch):
            runs = [run for run in runs if run not in resting]
            return LaneBatch(self._model, self._family, runs), runs, rest
        return (group, [], []) if len(rest) == len(runs) else (group, runs, [])

    def _one_by_one(
        self, runs: Iterable[Run], tokens: dict[Run, int], history: Callable[[Run], list[int]]
    ) -> Iterator[tuple[Run, torch.Tensor | Exception]]:
        """After a pass that failed half way nothing in its batch can be trusted: compute each
        sequence alone."""
        for run in runs:
            self.groups.append(run)
            self._loners.add(run)
            try:
                self._engine.again(run, history(run)[:-1])
                yield run, self._engine.step(run, tokens[run])
            except Exception as error:  # its own fault, or not enough memory even for it alone
                yield run, error


def _runs(group: Group) -> list[Run]:
    return [group] if isinstance(group, Run) else list(group.runs)


def _added(batch: Group, other: Group) -> Batch | LaneBatch:
    """A batch with one more sequence, or with those of another batch."""
    if isinstance(batch, Run):
        raise KeepsightError("a sequence that decodes alone cannot be joined by others")
    if isinstance(other, Run):
        batch.join([other], _ROOM)
    elif isinstance(batch, LaneBatch):
        batch.join(other.runs)
    elif isinstance(other, Batch):
        batch.absorb(other, _ROOM)
    return batch


def _columns(group: Group) -> int:
    return group.lane.length if isinstance(group, Run) else group.longest
