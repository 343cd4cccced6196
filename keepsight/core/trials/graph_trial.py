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

from keepsight.core.decoding.forward import LanguageModel, Stretch
from keepsight.core.decoding.state import Lane
from keepsight.core.kernels.passes import Kernels
from keepsight.models.families import Family
from keepsight.prefix.prompt import Prompt

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


class ScratchRun:
    """A prompt on a lane of its own, which nobody asked about."""

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        decoder: LanguageModel,
        ids: np.ndarray,
        kernels: Kernels | None,
    ) -> None:
        self.decoder, self.ids, self.kernels = decoder, ids, kernels
        self.lane = Lane(model, decoder.shape)
        self._positions = family.positions(ids, np.zeros(len(ids), dtype=np.int8), [])

    def next(self, count: int) -> Stretch:
        """The next tokens as a segment; the logits of each are wanted."""
        some = slice(self.lane.length, self.lane.length + count)
        prompt, positions = Prompt(self.ids), self._positions[..., some]
        return Stretch(self.lane, prompt, self.ids[some], positions, count)

    def go_on(self, count: int) -> torch.Tensor:
        """Compute the next tokens; return their logits."""
        return together([self], [count])[0]


def together(runs: Sequence[ScratchRun], counts: Sequence[int]) -> list[torch.Tensor]:
    """Compute the next tokens of several in one pass; return their logits."""
    segments = [run.next(count) for run, count in zip(runs, counts, strict=True)]
    found = runs[0].decoder.forward(segments, runs[0].kernels)
    return [rows for rows in found if rows is not None]


class GraphTrial:
    """The graphs of one model, and their results for one prompt."""

    def __init__(self, new: Callable[[np.ndarray], ScratchRun], ids: np.ndarray) -> None:
        self._new, self._ids = new, ids

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

    def _ran(self, ids: np.ndarray, pieces: Sequence[int]) -> tuple[ScratchRun, list[torch.Tensor]]:
        """Logits, keys, values and states of a prompt computed in the given pieces."""
        run = self._new(ids)
        logits = [run.go_on(count) for count in pieces]
        return run, [torch.cat(logits), *states_of(run.lane)]

    def _equal_beside_others(self, whole: ScratchRun, logits: torch.Tensor) -> bool:
        """Whether the last tokens get the same states when decoded beside other sequences."""
        ids = self._ids
        runs = [self._new(ids) for _ in range(3)]
        places = [len(ids) - _BESIDE, 5, 37]
        for run, place in zip(runs, places, strict=True):
            run.go_on(place)
        for step in range(_BESIDE):
            found = together(runs, [1] * len(runs))
            at = [place + step for place in places]
            if not torch.equal(torch.cat(found), logits[at]):
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
