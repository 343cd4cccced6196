"""Families that show an image as a list of tiles, each with placeholders and its own mark.

Idefics 2 and 3, SmolVLM, LFM2-VL, MiniCPM-V 4.6. A processor's packed output holds the tiles of all
images in sequence, without a tensor that says where an image ends. The prompt says it: each family
writes other tokens between two images than between two tiles of one.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from keepsight.errors import InputError, PlaceholderMismatch
from keepsight.formats.package import Layout
from keepsight.kinds import Decoded, Grid, Options, Record
from keepsight.models.families.base import Family
from keepsight.models.families.pixels import Pixels, Tensors, joined

if TYPE_CHECKING:
    from transformers import (
        Idefics2Processor,
        Lfm2VlProcessor,
        MiniCPMV4_6Processor,
        ProcessorMixin,
    )

Span = tuple[int, int]  # range of the placeholders of one tile


class MarkedTiles(Family):
    """Shared code of these families. A family says how tiles are packed and where an image
    begins."""

    names: tuple[str, ...] = ("pixel_values",)

    # -- to override -----------------------------------------------------------------------------

    def tiles(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> tuple[Tensors, list[int]]:
        """All tiles in sequence, and the number of tokens of each."""
        raise NotImplementedError

    def begins(self, ids: np.ndarray, spans: Sequence[Span], number: int) -> bool:
        """Whether this tile (number 1 or more) starts another image."""
        raise NotImplementedError

    def cut(self, tiles: Tensors, start: int, end: int) -> Tensors:
        """The tower inputs for some tiles only."""
        raise NotImplementedError

    # -- images in -------------------------------------------------------------------------------

    def preprocess(self, processor: ProcessorMixin, image: Decoded, options: Options) -> Pixels:
        """Preprocess with the processor, which knows the number of rows, columns and tokens."""
        processed, layout = self.processed(processor, image, options)
        ids = np.full(sum(n for n in layout if isinstance(n, int)), self.image_token_id)
        tensors = {name: torch.as_tensor(processed[name]) for name in self.names}
        tiles, counts = self.tiles(tensors, [ids])
        return Pixels(self.cut(tiles, 0, len(counts)), {}, layout)

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
        """The tiles of each image, found by the marks in the prompts."""
        if tensors.get("pixel_values") is None:
            return []
        tiles, counts = self.tiles(tensors, rows)
        media, used = [], 0
        for ids in rows:
            for first, end in self._images(ids, counts[used:]):
                layout = tuple(counts[used + first : used + end])
                media.append(Pixels(self.cut(tiles, used + first, used + end), {}, layout))
            used = sum(len(pixels.layout) for pixels in media)
        if used != len(counts):
            raise PlaceholderMismatch(f"{len(counts)} tiles for placeholders of {used}")
        return media

    def _images(self, ids: np.ndarray, counts: Sequence[int]) -> list[Span]:
        """The range of tiles of each image of one prompt."""
        spans = self._spans(ids, counts)
        firsts = [i for i in range(len(spans)) if i == 0 or self.begins(ids, spans, i)]
        return list(itertools.pairwise([*firsts, len(spans)]))

    def _spans(self, ids: np.ndarray, counts: Sequence[int]) -> list[Span]:
        spots = np.flatnonzero(ids == self.image_token_id)
        spans: list[Span] = []
        used = 0
        while used < len(spots):
            count = counts[len(spans)] if len(spans) < len(counts) else 0
            found = spots[used : used + count]
            if count < 1 or len(found) < count or found[-1] - found[0] != count - 1:
                raise PlaceholderMismatch(
                    f"tile {len(spans)} has {count} tokens, the prompt has no such run at "
                    f"{spots[used]}"
                )
            spans.append((int(found[0]), int(found[-1]) + 1))
            used += count
        return spans


class Idefics3(MarkedTiles):
    """`pixel_values` of shape (prompts, most tiles, channels, height, width), with a mask.

    A token that names its place precedes each tile. The same kind of token closes the last tile of
    an image, which is the whole picture. A prompt with fewer tiles ends in empty ones.
    """

    names = ("pixel_values", "pixel_attention_mask")

    def tiles(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> tuple[Tensors, list[int]]:
        pixels, mask = tensors["pixel_values"], tensors.get("pixel_attention_mask")
        if pixels.dim() != 5 or len(pixels) != len(rows):
            raise InputError(
                f"expected pixel_values of shape ({len(rows)}, tiles, channels, height, width), "
                f"got {tuple(pixels.shape)}"
            )
        if mask is None:
            mask = torch.ones((*pixels.shape[:2], *pixels.shape[3:]), dtype=torch.long)
        if mask.shape != (*pixels.shape[:2], *pixels.shape[3:]):
            raise InputError(f"pixel_attention_mask has shape {tuple(mask.shape)}")
        each = int(self.core.image_seq_len)
        used = [int((ids == self.image_token_id).sum()) // each for ids in rows]
        for row, count in zip(pixels, used, strict=True):
            if count > len(row) or row[count:].any():
                raise PlaceholderMismatch(
                    f"pixel_values has {len(row)} tiles for a prompt, its placeholders are those "
                    f"of {count}"
                )
        return {
            "pixel_values": torch.cat([row[:n] for row, n in zip(pixels, used, strict=True)]),
            "pixel_attention_mask": torch.cat([row[:n] for row, n in zip(mask, used, strict=True)]),
        }, [each] * sum(used)

    def begins(self, ids: np.ndarray, spans: Sequence[Span], number: int) -> bool:
        """Between two images, one token closes and another of its kind opens."""
        mark = ids[spans[-1][1] : spans[-1][1] + 1]
        gap = ids[spans[number - 1][1] : spans[number][0]]
        inside = len(gap) > 1 and len(mark) and (gap[0] != mark[0] or mark[0] not in gap[1:])
        return not inside

    def cut(self, tiles: Tensors, start: int, end: int) -> Tensors:
        return {name: tensor[start:end][None] for name, tensor in tiles.items()}

    def join_pixels(self, media: Sequence[Pixels]) -> Tensors:
        """The tiles of one prompt in sequence, each in the upper left corner of the largest."""
        return joined(media, 1)


class Idefics2(Idefics3):
    """Images of any shape, each padded to the largest of a call; the mask gives its real size.

    One token stands before and after an image and between its parts, and a single one between two
    adjacent images. So the prompt does not tell parts from images, and `generate` takes each part
    for an image: the answers are equal, less is shared.
    """

    def preprocess(self, processor: Idefics2Processor, image: Decoded, options: Options) -> Pixels:
        """The token after the image is written by `prompt_text`, which knows what follows."""
        processed = processor.image_processor([[image]], **{**options, "return_tensors": "pt"})
        tensors = {name: processed[name] for name in self.names if name in processed}
        parts, each = tensors["pixel_values"].shape[1], int(self.core.image_seq_len)
        tiles, _ = self.tiles(tensors, [np.full(parts * each, self.image_token_id)])
        layout = (processor.fake_image_token, int(processor.image_seq_len)) * parts
        return Pixels(self.cut(tiles, 0, parts), {}, layout)

    def prompt_text(self, processor: Idefics2Processor, text: str, written: re.Pattern[str]) -> str:
        mark, parts, cursor = processor.fake_image_token, [], 0
        spots = list(written.finditer(text))
        starts = {spot.start() for spot in spots}
        for spot in spots:
            parts.append(text[cursor : spot.end()])
            cursor = spot.end()
            if cursor not in starts:
                parts.append(mark)
                # Transformers separates a word that would touch it.
                parts.append(" " if re.match(r"[^\s<]", text[cursor:]) else "")
        return "".join([*parts, text[cursor:]])

    def begins(self, ids: np.ndarray, spans: Sequence[Span], number: int) -> bool:
        return True

    def cut(self, tiles: Tensors, start: int, end: int) -> Tensors:
        """Drop the padding that only a larger neighbour caused."""
        part = super().cut(tiles, start, end)
        seen = part["pixel_attention_mask"].bool().flatten(0, 1).any(0)
        if not seen.any():
            return part
        height, width = (int(seen.any(axis).nonzero()[-1]) + 1 for axis in (1, 0))
        return {name: tensor[..., :height, :width] for name, tensor in part.items()}


class Lfm2Vl(MarkedTiles):
    """`pixel_values` of shape (tiles, most patches, values), with a mask and a shape per tile.

    One token before each tile names it. Between two images are at least two: one closes, one opens.
    Without such tokens, each tile is taken for an image.
    """

    names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")

    def settings(self, processor: Lfm2VlProcessor) -> Record:
        marks = {"use_image_special_tokens": processor.use_image_special_tokens}
        return {**super().settings(processor), **marks}

    def tiles(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> tuple[Tensors, list[int]]:
        pixels, mask, shapes = (tensors[name] for name in self.names)
        patches = shapes.long().prod(-1)
        if pixels.dim() != 3 or mask.shape != pixels.shape[:2] or shapes.shape != (len(pixels), 2):
            raise InputError(
                "expected pixel_values (tiles, patches, values), pixel_attention_mask (tiles, "
                f"patches) and spatial_shapes (tiles, 2), got {tuple(pixels.shape)}, "
                f"{tuple(mask.shape)} and {tuple(shapes.shape)}"
            )
        factor = int(self.model.config.downsample_factor)
        wanted = torch.arange(pixels.shape[1]) < patches.cpu()[:, None]
        whole = int(shapes.min()) > 0 and not (shapes % factor).any()
        if not whole or int(patches.max()) > pixels.shape[1] or not mask.cpu().bool().equal(wanted):
            raise InputError(
                f"spatial_shapes {shapes.tolist()} do not describe pixel_attention_mask, or are "
                f"not made of cells of {factor} by {factor} patches"
            )
        tiles = {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}
        return tiles, (patches // factor**2).tolist()

    def begins(self, ids: np.ndarray, spans: Sequence[Span], number: int) -> bool:
        closing = ids[spans[-1][1] : spans[-1][1] + 1]
        gap = ids[spans[number - 1][1] : spans[number][0]]
        return len(gap) != 1 or gap[0] in closing

    def cut(self, tiles: Tensors, start: int, end: int) -> Tensors:
        """Only as much padding as these tiles need."""
        part = {name: tensor[start:end] for name, tensor in tiles.items()}
        most = int(part["spatial_shapes"].long().prod(-1).max())
        padded = {name: part[name][:, :most] for name in self.names[:2]}
        return {**part, **padded}

    def join_pixels(self, media: Sequence[Pixels]) -> Tensors:
        """Each tile padded to the most patches."""
        return joined(media)


class MiniCpmV(MarkedTiles):
    """`pixel_values` of shape (1, channels, patch side, columns): all patches on the last axis.

    The whole picture comes first, after the token that opens an image; slices have another token.
    The processor numbers the images of a prompt, so the text of an image depends on its number.
    """

    names = ("pixel_values", "target_sizes")

    def patches_of_a_token(self) -> int:
        """How many patches the tower and its projector merge into one token."""
        return 4 if self.model.config.downsample_mode == "4x" else 16

    def preprocess(
        self, processor: MiniCPMV4_6Processor, image: Decoded, options: Options
    ) -> Pixels:
        """Split the image's text in two: the template writes the image's number between them."""
        pixels = super().preprocess(processor, image, options)
        numbered = processor.use_image_id
        numbered = processor.default_use_image_id if numbered is None else numbered
        if not numbered:
            return pixels
        first, *rest = pixels.layout
        layout = (processor.image_id_start_token, f"{processor.image_id_end_token}{first}", *rest)
        return Pixels(pixels.tensors, pixels.grid, layout)

    def placed(self, layout: Layout, number: int) -> Layout:
        if len(layout) < 2 or not isinstance(layout[0], str) or not isinstance(layout[1], str):
            return layout
        return (layout[0], str(number), *layout[1:])

    def tiles(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> tuple[Tensors, list[int]]:
        pixels, sizes = (tensors[name] for name in self.names)
        if pixels.dim() != 4 or len(pixels) != 1 or sizes.dim() != 2 or sizes.shape[1] != 2:
            raise InputError(
                "expected pixel_values (1, channels, patch, columns) and target_sizes (tiles, 2), "
                f"got {tuple(pixels.shape)} and {tuple(sizes.shape)}"
            )
        patches = sizes.long().prod(-1)
        side = self.patches_of_a_token()
        cell = int(side**0.5)
        if int(sizes.min()) < 1 or (sizes % cell).any():
            raise InputError(
                f"target_sizes {sizes.tolist()} are not made of cells of {cell} by {cell} patches"
            )
        if int(patches.sum()) * pixels.shape[2] != pixels.shape[3]:
            raise PlaceholderMismatch(
                f"target_sizes describe {int(patches.sum())} patches, pixel_values has "
                f"{pixels.shape[3] / pixels.shape[2]:g}"
            )
        return {"pixel_values": pixels, "target_sizes": sizes}, (patches // side).tolist()

    def begins(self, ids: np.ndarray, spans: Sequence[Span], number: int) -> bool:
        if spans[0][0] == 0:
            return True
        return bool(ids[spans[number][0] - 1] == ids[spans[0][0] - 1])

    def cut(self, tiles: Tensors, start: int, end: int) -> Tensors:
        pixels, sizes = tiles["pixel_values"], tiles["target_sizes"]
        ends = [0, *(sizes.long().prod(-1).cumsum(0) * pixels.shape[2]).tolist()]
        return {
            "pixel_values": pixels[..., ends[start] : ends[end]],
            "target_sizes": sizes[start:end],
        }

    def join_pixels(self, media: Sequence[Pixels]) -> Tensors:
        """All patches on the last axis."""
        if not media:
            return {}
        return {
            "pixel_values": torch.cat([m.tensors["pixel_values"] for m in media], -1),
            "target_sizes": torch.cat([m.tensors["target_sizes"] for m in media]),
        }


_SIZES = "target_sizes"


class MiniCpmV47(MiniCpmV):
    """MiniCPM-V 4.7: tiles as in 4.6, with positions on three axes.

    The position of a token follows from the sizes of all tiles before it and the marks between
    them. So the sizes of a picture's tiles are its grid.
    """

    def preprocess(
        self, processor: MiniCPMV4_6Processor, image: Decoded, options: Options
    ) -> Pixels:
        return _with_sizes(super().preprocess(processor, image, options))

    def split_tensors(self, tensors: Tensors, rows: Sequence[np.ndarray]) -> list[Pixels]:
        return [_with_sizes(pixels) for pixels in super().split_tensors(tensors, rows)]

    def _grid_tokens(self, grid: Grid) -> int | None:
        tokens = 0
        for row in grid.get(_SIZES, []):
            match row:
                case [int(height), int(width)] if min(height, width) > 0:
                    tokens += height * width // self.patches_of_a_token()
                case _:
                    return None
        return tokens or None

    def rope_grid(self, grids: Sequence[Grid]) -> Grid:
        rows = [row for grid in grids for row in grid.get(_SIZES, [])]
        return {_SIZES: rows} if rows else {}


def _with_sizes(pixels: Pixels) -> Pixels:
    return dataclasses.replace(pixels, grid={_SIZES: pixels.tensors[_SIZES].tolist()})
