"""Buffers for keys and values as a graph reads them: longer than their contents, in whole vectors.

A lane's own buffer is read in place, and a bias hides the unfilled part. The contents of a
Transformers cache are copied into a buffer for one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keepsight.core.decoding.lane_layer import LaneLayer
from keepsight.kinds import CacheLayer

_WHOLE = 64  # the number of keys in a buffer is a multiple of this
_FEW = 32  # up to this many tokens a lane's whole buffer is read; for more, only its filled part


def padded_buffers(
    layer: CacheLayer, past: tuple[Tensor, Tensor], nothing: Tensor, tokens: int
) -> tuple[Tensor, Tensor]:
    """A layer's keys and values with space for more tokens. A lane's own are used in place; for
    many tokens only the filled part is read."""
    if isinstance(layer, LaneLayer):
        keys, values = layer.stretch(tokens, nothing, nothing)
        size = _whole(max(layer.lengths) + tokens)
        if tokens < _FEW or keys.shape[2] <= size:
            return keys, values
        return keys[:, :, :size].contiguous(), values[:, :, :size].contiguous()
    missing = _whole(past[0].shape[2] + tokens) - past[0].shape[2]
    room = nothing.new_zeros(*nothing.shape[:2], missing, nothing.shape[3])
    return torch.cat([past[0], room], dim=2), torch.cat([past[1], room], dim=2)


def _whole(keys: int) -> int:
    return -(-keys // _WHOLE) * _WHOLE


def write_rows(own: Tensor, rows: Tensor, lengths: list[int], tokens: int, whole: bool) -> None:
    """Write new rows into a lane's own buffer; `whole`: they come in a complete buffer."""
    starts = lengths if len(lengths) == len(rows) else lengths * len(rows)
    for row, start in enumerate(starts):
        given = rows[row, :, start : start + tokens] if whole else rows[row]
        own[row, :, start : start + tokens] = given


def bias_of(mask: Tensor | None, at: Tensor, size: int, window: int) -> Tensor:
    """Zero where a token is seen, a large negative number elsewhere: (rows, 1, tokens, size).

    Not minus infinity: padding sees nothing, and a softmax over only that is NaN. `at` are the
    places of the tokens; what follows them is not a token yet.
    """
    hidden = torch.finfo(torch.float32).min
    rows, tokens = at.shape
    bias = torch.zeros(rows, 1, tokens, size)
    seen = torch.arange(size)
    total = int(at.max()) + 1
    if mask is not None and mask.ndim == 4:
        own = mask
        if mask.dtype == torch.bool:
            own = torch.zeros(mask.shape).masked_fill_(~mask, hidden)
        bias[..., :total] = own.float().clamp(min=hidden)
        bias[..., total:] = hidden
        return bias
    unseen = seen > at[..., None]
    if window:
        unseen |= seen <= at[..., None] - window
    bias.masked_fill_(unseen[:, None], hidden)
    if mask is not None:
        bias[..., :total].masked_fill_(~mask.bool()[:, None, None, -total:], hidden)
    return bias
