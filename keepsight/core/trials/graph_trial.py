"""Finds out whether exported graphs give the same bits however a prompt is cut.

Nothing is known about the kernels that another runtime chooses: they may depend on the number of
rows, the length of the cache, the processor and the version. So the graphs are run over one prompt
in one pass, in pieces of many sizes, token by token, and beside other sequences. All logits, keys,
values and states must be equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from keepsight.core.decoding.lane_batch import LaneBatch
from keepsight.core.decoding.state import Lane
from keepsight.core.engine import Engine, Run
from keepsight.models.families import Family

# Sizes of the pieces: each row count at which kernels are known to differ.
_PIECES = (*range(1, 18), 31, 33)
_MORE = (*range(18, 31), 32, 63, 64, 65, 128)  # prompt length if a pass takes little time
_SINGLE = 33  # tokens at the end that are computed one by one: every place in a vector
_LIGHT = 1 << 30  # bytes of weights that a pass reads
_BESIDE = 3  # how many of these are computed beside other sequences
_AGAIN = (1, 2, 5, 16)  # tokens of the quick check of an earlier finding

_CUT = (_PIECES, (*_PIECES, *_MORE))


def tokens_of(decoder_bytes: int) -> int:
    """How many tokens to try, given the bytes of the weights."""
    return sum(_CUT[decoder_bytes <= _LIGHT])


class GraphTrial:
    """The graphs of one model, and their results for one prompt."""

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        engine: Engine,
        begin: Callable[[np.ndarray], Run],
        ids: np.ndarray,
    ) -> None:
        self._model, self._family, self._engine = model, family, engine
        self._begin, self._ids = begin, ids

    def fails(self) -> str:
        """What shows that bits depend on more than earlier tokens; empty if nothing does."""
        ids, count = self._ids, len(self._ids)
        whole, wanted = self._ran(ids, [count])
        pieces = next(one for one in _CUT if sum(one) == count)
        for cuts in (pieces, pieces[::-1], [count - _SINGLE, *[1] * _SINGLE]):
            if not equal(wanted, self._ran(ids, cuts)[1]):
                return "its graphs give other bits when a prompt is cut"
        if not self._equal_beside_others(whole, wanted[0]):
            return "its graphs give other bits beside other sequences"
        return ""

    def agrees(self) -> bool:
        """Whether a finding of an earlier process still seems true: checks a few tokens."""
        few = self._ids[: sum(_AGAIN)]
        return equal(self._ran(few, [len(few)])[1], self._ran(few, _AGAIN)[1])

    def _ran(self, ids: np.ndarray, pieces: Sequence[int]) -> tuple[Run, list[torch.Tensor]]:
        """Logits, keys, values and states of a prompt computed in the given pieces."""
        run, logits, start = self._begin(ids), [], 0
        run.next_positions = run.positions[..., :1]
        for count in pieces:
            logits.append(self._engine.forward(run, ids[start : start + count].tolist()))
            start += count
        self._engine.decode_steps -= len(pieces)
        return run, [torch.cat(logits), *states_of(run.lane)]

    def _equal_beside_others(self, whole: Run, logits: torch.Tensor) -> bool:
        """Whether the last tokens get the same states when decoded beside other sequences."""
        ids = self._ids
        lengths = [len(ids) - _BESIDE, 5, 37]
        runs = [self._ran(ids[:count], [count])[0] for count in lengths]
        batch = LaneBatch(self._model, self._family, runs)
        for place in range(_BESIDE):
            at = [length + place for length in lengths]
            if not torch.equal(batch.step(ids[at].tolist()), logits[at]):
                return False
        short = [equal(_keys(run.lane), _keys(whole.lane, run.lane.length)) for run in runs]
        return all(short) and equal(states_of(runs[0].lane), states_of(whole.lane))


def _keys(lane: Lane, count: int | None = None) -> list[torch.Tensor]:
    """Keys and values of the first tokens on a lane."""
    rows = lane.capture_full(0, lane.length if count is None else count)
    return list(rows.values())


def states_of(lane: Lane) -> list[torch.Tensor]:
    """Everything a lane holds: keys, values and states of fixed size."""
    kv, fixed = lane.capture(0, lane.length)
    return [*kv.values(), *(fixed[name] for name in sorted(fixed))]


def equal(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
