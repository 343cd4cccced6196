"""One prompt, computed in one pass, in pieces, token by token, and beside other sequences.

A token's bits may depend on how many rows a pass has, and which kernel takes so many. So a trial
compares everything that comes of a prompt (logits, keys, values and states) between ways to cut it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from keepsight.core.decoding.forward import LanguageModel, Stretch, ordinary_ids
from keepsight.core.decoding.state import Lane
from keepsight.core.kernels.passes import Kernels
from keepsight.models.families import Family
from keepsight.prefix.prompt import Prompt

_BESIDE = 3  # tokens at the end that are computed beside other sequences
_OTHERS = (5, 37)  # the lengths of these

Computed = list[torch.Tensor]  # logits, keys, values and states of fixed size


class Cuts:
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
        return [torch.cat(logits), *states_of(lane)]

    def are_equal(self, kernels: Kernels, pieces: Sequence[int], wanted: Computed) -> bool:
        """Whether these pieces give what was computed before."""
        return equal(wanted, self.computed(kernels, pieces))

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
        return equal(wanted[1:], states_of(lanes[0]))

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


def states_of(lane: Lane) -> list[torch.Tensor]:
    """Everything a lane holds: keys, values and states of fixed size."""
    kv, fixed = lane.capture(0, lane.length)
    return [*kv.values(), *(fixed[name] for name in sorted(fixed))]


def equal(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    """Whether all bits are equal."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
