"""The tower as a graph: one picture per call, of any size that the family takes.

For families with packed patches, what follows from the grid (positions, interpolation, windows) is
an input, computed by Transformers' own functions. Their export cuts packed patches into equal
segments, and is silently wrong if they are not equal (mixed sizes, windows at an edge). With one
picture there is one segment, and windows are looked up one by one.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from keepsight.errors import UnsupportedModel
from keepsight.export.graphs.parts import GraphPart, Sample
from keepsight.kinds import Inputs, Processor
from keepsight.models import upstream
from keepsight.models.families import Family
from keepsight.models.tested import refuse_unknown
from keepsight.system.exchanged import exchanged

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_QUERIES = 512  # patches that attend to all others at once: limits the memory of scores
_GRID = (1, 8, 12)  # size of the sample
_STATIC = ("cu_seqlens", "max_seqlen", "max_window_seqlen")


class PackedTower(GraphPart):
    """Patches of one picture, with inputs that follow from their grid."""

    def __init__(self, family: Family, blocks: bool) -> None:
        super().__init__()
        self.tower: PreTrainedModel = family.core.visual
        self.family, self.blocks = family, blocks

    def forward(self, pixel_values: Tensor, **inputs: Tensor) -> Inputs:
        patches = pixel_values.shape[0]
        whole = torch.stack([pixel_values.new_zeros((), dtype=torch.int32)] * 2)
        whole = whole + torch.arange(2, dtype=torch.int32) * patches
        with _attending(self.tower, self.blocks):
            output = self.tower(pixel_values, grid_thw=None, cu_seqlens=whole, **inputs)
        found = {"features": output.pooler_output}
        for level, features in enumerate(getattr(output, "deepstack_features", None) or []):
            found[f"deepstack_{level}"] = features
        return found

    def sample(self) -> Sample:
        """A small picture, with a partial window at its edge."""
        sample = Sample({}, {})
        grid = torch.tensor([_GRID])
        config = self.tower.config
        channels = getattr(config, "in_channels", None) or getattr(config, "in_chans", 3)
        width = channels * config.temporal_patch_size * config.patch_size**2
        sample.add("pixel_values", torch.randn(int(grid.prod()), width), 0)
        for name, tensor in self.family.tower_tensors.of({"image_grid_thw": grid}, "cpu").items():
            if name not in _STATIC:
                sample.add(name, tensor, 0)
        return sample


def _attending(tower: PreTrainedModel, blocks: bool) -> AbstractContextManager[None]:
    """Make each layer of a tower attend in a way that a graph can express."""
    layers = [block.attn for block in tower.blocks]
    config = tower.config
    # Patches of a full window; windows at an edge have fewer.
    most = (getattr(config, "window_size", 0) // config.patch_size) ** 2
    full = getattr(tower, "fullatt_block_indexes", range(len(layers)))
    return exchanged(
        *(
            (layer, "forward", types.MethodType(_forward(0 if n in full else most, blocks), layer))
            for n, layer in enumerate(layers)
        )
    )


def _forward(window: int, blocks: bool) -> Callable[..., Tensor]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *more: object,
        **options: object,
    ) -> Tensor:
        refuse_unknown("a tower's attention in a graph", more, options, ("max_seqlen",))
        count = hidden_states.shape[0]
        packed = self.qkv(hidden_states).reshape(count, 3, self.num_heads, -1)
        query, key, value = packed.permute(1, 0, 2, 3).unbind(0)
        rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb_vision
        query, key = rotate(query, key, *position_embeddings)
        if window:
            out = _in_windows(query, key, value, cu_seqlens, window, self.scaling)
        elif blocks:
            out = _all_see_all(query, key, value, self.scaling)
        else:  # the runtime has an operator that works in blocks itself
            q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
            seen = functional.scaled_dot_product_attention(q, k, v, scale=self.scaling)
            out = seen[0].transpose(0, 1)
        found: Tensor = self.proj(out.reshape(count, -1))
        return found

    return forward


def _all_see_all(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of (patches, heads, width), some queries at a time."""
    count, heads, width = query.shape
    blocks = (count + _QUERIES - 1) // _QUERIES
    padded = functional.pad(query * scale, (0, 0, 0, 0, 0, blocks * _QUERIES - count))
    cut = padded.reshape(blocks, _QUERIES, heads, width).transpose(1, 2)
    keys, values = key.permute(1, 2, 0), value.transpose(0, 1)

    def some(nothing: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        seen = functional.softmax(queries @ keys, dim=-1) @ values
        return nothing.clone(), seen

    _, out = upstream.scan(some, query.new_zeros(1), cut)
    flat: Tensor = out.transpose(1, 2).reshape(blocks * _QUERIES, heads, width)
    return flat[:count]


def _in_windows(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, most: int, scale: float
) -> Tensor:
    """Attention among the patches of each window, given the windows' bounds."""
    first, last = bounds[:-1].long(), bounds[1:].long()
    places = first[:, None] + torch.arange(most)
    there = places < last[:, None]
    places = torch.where(there, places, first[:, None])
    q, k, v = (x[places].transpose(1, 2) for x in (query, key, value))
    hidden = torch.where(there, 0.0, float("-inf"))[:, None, None]
    out = functional.softmax(q @ k.transpose(2, 3) * scale + hidden, dim=-1) @ v
    patch = torch.arange(query.shape[0])
    window = (patch[:, None] >= last).sum(1)
    return out.transpose(1, 2).flatten(0, 1)[window * most + patch - first[window]]


class WholeTower(GraphPart):
    """A picture, or a tile of one, in the single size that the family takes.

    One at a time: Transformers makes a list of features, and a graph fixes the length of a list.
    """

    def __init__(self, family: Family, image_size: tuple[int, int]) -> None:
        super().__init__()
        self.core, self.size = family.core, image_size

    def forward(self, pixel_values: Tensor) -> Inputs:
        output = self.core.get_image_features(pixel_values=pixel_values, return_dict=True)
        features = output.pooler_output
        return {"features": features if isinstance(features, Tensor) else features[0]}

    def sample(self) -> Sample:
        """A picture of noise."""
        sample = Sample({}, {})
        sample.add("pixel_values", torch.randn(1, 3, *self.size))
        return sample


def tower_of(family: Family, processor: Processor, blocks: bool = True) -> PackedTower | WholeTower:
    """Graph part for a family's tower; `blocks` if its graph must limit the memory of attention."""
    if family.mrope:
        return PackedTower(family, blocks)
    size: object = processor.image_processor.size
    crop = getattr(processor.image_processor, "crop_size", None)
    if getattr(processor.image_processor, "do_center_crop", False) and crop:
        size = crop
    height, width = (getattr(size, "get", lambda name: None)(n) for n in ("height", "width"))
    if height is None or width is None:
        raise UnsupportedModel(
            f"{type(processor.image_processor).__name__} makes pictures of many sizes ({size}); of "
            "models without a grid only those with pictures of one size can be exported"
        )
    return WholeTower(family, (height, width))
