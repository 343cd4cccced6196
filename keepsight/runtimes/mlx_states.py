"""Cache objects for the layers of mlx-vlm: filled before a pass and read after it.

Each has the interface of mlx-vlm's own cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from keepsight.core.decoding.lane_layer import LaneLayer
from keepsight.kinds import CacheLayer
from keepsight.runtimes.mlx_library import Array, Mlx


@dataclass(frozen=True)
class HeldArrays:
    """A layer's keys and values in MLX, valid while the layer does not change."""

    layer: LaneLayer
    changes: int
    keys: Array
    values: Array

    def is_of(self, layer: CacheLayer) -> bool:
        """Whether these are the current states of a layer."""
        return layer is self.layer and self.layer.changes == self.changes


class PastArrays:
    """Keys and values of a layer before a pass; the pass appends its own."""

    def __init__(self, mlx: Mlx, keys: Array, values: Array, mask: Array) -> None:
        self._mlx, self._keys, self._values, self._mask = mlx, keys, values, mask
        self._held, self.offset = keys.shape[2], keys.shape[2]
        self._rows = self.whole = (keys, values)

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """All keys and values, including those of the pass."""
        self._rows = self.whole = (keys, values)
        if self._held:
            both = [self._keys, keys], [self._values, values]
            before, after = (self._mlx.core.concatenate(parts, axis=2) for parts in both)
            self.whole = (before, after)
        return self.whole

    def make_mask(self, count: int, *more: object, **options: object) -> Array:
        """The mask given by the engine."""
        return self._mask

    def after(self) -> tuple[Array, Array]:
        """The rows that the pass added."""
        return self._rows


class FixedArrays:
    """A layer's states of fixed size. Transformers stores the last inputs of a convolution by
    column, with one more than is read, and transposes a delta rule's state."""

    def __init__(
        self, mlx: Mlx, conv: Tensor, recurrent: Tensor, present: Tensor, dtype: object
    ) -> None:
        self._mlx, self._present = mlx, present
        self.cache = mlx.arrays_cache(2)
        self.cache.make_mask = self.make_mask
        self.cache[0] = mlx.given(conv[..., 1:].transpose(1, 2), dtype)
        self.cache[1] = mlx.given(recurrent.transpose(-1, -2))

    def make_mask(self, count: int) -> Array | None:
        """Which tokens are not padding; None if all are."""
        whole = bool(self._present.all())
        return None if whole else self._mlx.given(self._present > 0)

    def after(self) -> tuple[Array, Array]:
        """The states after the pass, as MLX orders them."""
        return self.cache[0], self.cache[1]

    @staticmethod
    def as_stored(conv: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor]:
        """These states as Transformers orders them."""
        return functional.pad(conv.transpose(1, 2), (1, 0)), recurrent.transpose(-1, -2)
