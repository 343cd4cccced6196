"""A full-attention layer of a lane: keys and values in one buffer at a fixed address.

Buffers hold whole blocks of keys, with zeros behind the last one, so attention can read them in
place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicLayer

from keepsight.core.kernels.attention import BLOCK
from keepsight.core.kernels.passes import attention_here
from keepsight.errors import ModelError
from keepsight.formats.package import storage_bytes
from keepsight.models.tested import refuse_unknown

_ROUND = BLOCK  # capacities are multiples of this, which also aligns the rows of every head


class LaneLayer(DynamicLayer):
    """A full-attention layer in one preallocated buffer. Rows past `length` are undefined."""

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized: bool = False
        self.length = 0
        self.changes = 0  # number of writes and removals
        self.reserved = 0
        self.key_buffer: torch.Tensor | None = None
        self.value_buffer: torch.Tensor | None = None
        self._written = 0  # rows ever written since the buffer was allocated
        self._clean = 0  # rows behind the end are zero up to here

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and return all keys and values so far."""
        start = self.length
        self.append(key_states, value_states)
        attention = attention_here()
        if attention is not None:
            attention.note(self.keys, self.values, [self])
            return self.keys, self.values
        if start == 0:
            # The first chunk gets the same contiguous tensors as in stock code.
            return key_states, value_states
        return self.keys, self.values

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._begin(keys)
        start, end = self.length, self.length + keys.shape[-2]
        self._ensure(end, keys, values)
        self.key_buffer[:, :, start:end] = keys  # type: ignore[index]
        self.value_buffer[:, :, start:end] = values  # type: ignore[index]
        self._view(end)
        if attention_here() is not None:
            self._clear_behind(end)

    def _begin(self, like: torch.Tensor) -> None:
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = like.dtype, like.device, True

    def _clear_behind(self, end: int) -> None:
        """Zero the rest of the last block: attention reads whole blocks."""
        self._written = max(self._written, end)
        whole = -(-end // BLOCK) * BLOCK
        if self._written > end and self._clean < whole:
            for room in (self.key_buffer, self.value_buffer):
                room[:, :, end : min(whole, self._written)] = 0  # type: ignore[index]
        self._clean = whole

    def _ensure(self, end: int, like_k: torch.Tensor, like_v: torch.Tensor) -> None:
        for room, like in ((self.key_buffer, like_k), (self.value_buffer, like_v)):
            if room is not None and not _alike(room, like):
                self._make_anew(room, like)
        have = 0 if self.key_buffer is None else self.key_buffer.shape[-2]
        if end <= have:
            return
        wanted = max(end, self.reserved, have + have // 2)
        capacity = -(-wanted // _ROUND) * _ROUND
        new_k = like_k.new_zeros(*like_k.shape[:2], capacity, like_k.shape[-1])
        new_v = like_v.new_zeros(*like_v.shape[:2], capacity, like_v.shape[-1])
        if self.length and self.key_buffer is not None and self.value_buffer is not None:
            new_k[:, :, : self.length] = self.key_buffer[:, :, : self.length]
            new_v[:, :, : self.length] = self.value_buffer[:, :, : self.length]
        # Both or none, where memory does not suffice.
        self.key_buffer, self.value_buffer = new_k, new_v
        self._written, self._clean = self.length, 0

    def _make_anew(self, room: torch.Tensor, like: torch.Tensor) -> None:
        """Drop buffers of another dtype or device; they must be empty."""
        if self.length:
            raise ModelError(
                f"the model computed in {room.dtype} on {room.device} when this turn began, and "
                f"now in {like.dtype} on {like.device}: it was cast or moved, or autocast was "
                "entered or left, while the turn was running; ask again"
            )
        self.key_buffer = self.value_buffer = None

    def _view(self, length: int) -> None:
        self.length = length
        self.changes += 1
        self.keys = self.key_buffer[:, :, :length]  # type: ignore[index]
        self.values = self.value_buffer[:, :, :length]  # type: ignore[index]

    def rewind(self, length: int) -> None:
        """Forget everything from `length` on. Rows before it come from the same chunks as
        without."""
        if length > self.length:
            raise ValueError(f"cannot rewind from {self.length} to {length}")
        self._written, self._clean = max(self._written, self.length), 0
        self.changes += 1
        if self.key_buffer is not None:
            self._view(length)
        if length == 0:
            # As new: PaliGemma and Mllama use it to detect the first chunk.
            self.is_initialized = False

    def write(
        self, start: int, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        """Write remembered keys and values, (heads, rows, width) each, back to their place."""
        like_k, like_v = keys[0][None], values[0][None]
        self._begin(like_k)
        end = start + sum(piece.shape[-2] for piece in keys)
        self._written, self._clean = max(self._written, self.length, end), 0
        self.length = start
        self._ensure(end, like_k, like_v)
        for room, pieces in ((self.key_buffer, keys), (self.value_buffer, values)):
            torch.cat(list(pieces), dim=-2, out=room[0, :, start:end])  # type: ignore[index]
        self._view(end)

    def stretch(
        self, tokens: int, like_k: torch.Tensor, like_v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffer, with space for more tokens; whoever writes them then calls `advance`."""
        self._begin(like_k)
        reserved, self.reserved = self.reserved, 0  # a graph reads all of it
        self._ensure(self.length + tokens, like_k, like_v)
        self.reserved = reserved
        return self.key_buffer, self.value_buffer  # type: ignore[return-value]

    def room(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The buffers, with zeros behind space for more tokens; None if nothing is held yet."""
        if self.key_buffer is None or self.value_buffer is None:
            return None
        end = self.length + tokens
        self._ensure(end, self.key_buffer, self.value_buffer)
        self._clear_behind(end)
        return self.key_buffer, self.value_buffer

    def advance(self, tokens: int) -> None:
        """Count tokens that were written behind the end."""
        self._view(self.length + tokens)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each lane, for layers of several lanes."""
        return [self.length]

    def first_seen_by(self, place: int) -> int:
        """The first key that the token at a place sees."""
        return 0

    @property
    def sight(self) -> tuple[int, bool]:
        """Layers with equal values need the same mask."""
        return 0, False

    def get_seq_length(self, *more: object, **options: object) -> int:
        refuse_unknown("get_seq_length of a cache layer", more, options)
        return self.length

    def get_mask_sizes(self, query_length: int, *more: object, **named: object) -> tuple[int, int]:
        """The number of keys a mask covers, and the place of the first."""
        refuse_unknown("get_mask_sizes of a cache layer", more, named)
        return self.length + query_length, 0

    def reset(self) -> None:
        self.rewind(0)

    @property
    def nbytes(self) -> int:
        return storage_bytes(t for t in (self.key_buffer, self.value_buffer) if t is not None)


class JoinedLayer(LaneLayer):
    """One layer of several lanes, whose tokens lie end to end in a pass."""

    def __init__(self, layers: Sequence[LaneLayer], edges: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self._layers, self.edges = layers, edges
        self.is_initialized, self.is_sliding = True, layers[0].is_sliding

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the tokens of each lane; attention finds the lanes by the returned keys."""
        for layer, (start, stop) in zip(self._layers, self.edges, strict=True):
            layer.append(key_states[:, :, start:stop], value_states[:, :, start:stop])
        attention = attention_here()
        if attention is not None:
            attention.note(key_states, value_states, self._layers, self.edges)
        return key_states, value_states

    def get_seq_length(self, *more: object, **options: object) -> int:
        """As if no token was there before this pass: masks are made of this and the next."""
        return 0

    def get_mask_sizes(self, query_length: int, *more: object, **named: object) -> tuple[int, int]:
        """Of the tokens of this pass alone: attention makes the masks of each lane itself."""
        return query_length, 0


class RowsLayer(LaneLayer):
    """One layer of several lanes side by side, for a graph that takes one token of each."""

    def __init__(self, layers: Sequence[LaneLayer]) -> None:
        super().__init__()
        self._layers = layers
        self._copied: list[int] = []  # the write counter of each lane when it was last copied
        self.is_initialized, self.is_sliding = True, layers[0].is_sliding

    @property
    def lengths(self) -> list[int]:
        return [layer.length for layer in self._layers]

    def stretch(
        self, tokens: int, like_k: torch.Tensor, like_v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The lanes side by side, with space for more tokens; lanes that changed since the last
        call are copied again."""
        rooms = [layer.stretch(tokens, like_k[:1], like_v[:1]) for layer in self._layers]
        most = max(keys.shape[-2] for keys, _ in rooms)
        if self.key_buffer is None or self.value_buffer is None or self.key_buffer.shape[-2] < most:
            size = (len(rooms), *rooms[0][0].shape[1:2], most)
            self.key_buffer = like_k.new_zeros(*size, like_k.shape[-1])
            self.value_buffer = like_v.new_zeros(*size, like_v.shape[-1])
            self._copied = []
        for row, layer in enumerate(self._layers):
            if self._copied[row : row + 1] != [layer.changes]:
                self.key_buffer[row, :, : layer.length] = layer.keys[0]
                self.value_buffer[row, :, : layer.length] = layer.values[0]
        return self.key_buffer, self.value_buffer

    def advance(self, tokens: int) -> None:
        """Copy the tokens written here back to their lanes."""
        if self.key_buffer is None or self.value_buffer is None:
            raise ValueError("rows of a graph that was given no buffers")
        for row, layer in enumerate(self._layers):
            rows, new = slice(row, row + 1), slice(layer.length, layer.length + tokens)
            layer.append(self.key_buffer[rows, :, new], self.value_buffer[rows, :, new])
        self._copied = [layer.changes for layer in self._layers]

    def get_seq_length(self, *more: object, **options: object) -> int:
        return max(layer.length for layer in self._layers)

    def get_mask_sizes(self, query_length: int, *more: object, **named: object) -> tuple[int, int]:
        """Of the longest lane; a graph gets the lengths of all."""
        return self.get_seq_length() + query_length, 0


class WindowLayer(LaneLayer):
    """A layer whose tokens see only nearby tokens. It holds all keys and values, so any prefix can
    be taken; masks limit what is seen."""

    is_sliding = True

    def __init__(self, window: int, chunked: bool) -> None:
        super().__init__()
        self._window, self._chunked = window, chunked

    def first_seen_by(self, place: int) -> int:
        if self._chunked:
            return place // self._window * self._window
        return max(0, place - self._window + 1)

    @property
    def sight(self) -> tuple[int, bool]:
        return self._window, self._chunked


def _alike(room: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether rows of one tensor fit the other without conversion."""
    if room.dtype != like.dtype or room.device != like.device:
        return False
    return room.shape[:2] == like.shape[:2] and room.shape[-1] == like.shape[-1]


class CrossLayer(LaneLayer):
    """Keys and values of the media in cross attention, one row per media token."""
