"""The inputs of a tower, and small helpers that all families share.

`Pixels` are the tensors of one medium and what the prompt needs to know about it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from keepsight.errors import ImageError, InputError, UnsupportedInput
from keepsight.formats.package import Layout, Package
from keepsight.kinds import Grid, Record
from keepsight.system import digests

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPooling

Tensors = dict[str, torch.Tensor]
Part = tuple[Package, int, int]  # rows a to b of a package
# Parameters of encoders that say how to run, not what to read.
SWITCHES = {
    "args", "kwargs", "return_dict", "output_attentions", "output_hidden_states", "downsample_mode",
    "vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy",
}  # fmt: skip


@dataclass(frozen=True)
class Pixels:
    """One medium, ready for the tower: its tensors, and what the prompt needs to know about it."""

    tensors: Tensors
    grid: Grid
    layout: Layout
    modality: str = "image"
    times: Record = field(default_factory=dict)  # values for positions, besides the grid

    @property
    def key(self) -> str:
        """The digest of everything the tower reads, and of whatever else tells two media apart."""
        parts = [p for name in sorted(self.tensors) for p in self._part(name)]
        return digests.digest(self.modality, *parts, *([self.times] if self.times else []))

    def _part(self, name: str) -> tuple[str, torch.Tensor]:
        return name, self.tensors[name]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.nbytes for t in self.tensors.values())


def parameters(function: Callable[..., object]) -> list[str]:
    """The names of a function's parameters."""
    return list(inspect.signature(function).parameters)


def is_numeric(value: object) -> bool:
    """Whether a value consists of numbers, not of truth values."""
    try:
        return torch.as_tensor(value).dtype != torch.bool
    except (TypeError, ValueError, RuntimeError):
        return False


def all_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers of a module; shared ones under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def embedding_of(model: PreTrainedModel) -> torch.nn.Embedding:
    """The table of token embeddings, without the wrapper of an adapter."""
    around = model.get_input_embeddings()
    parts = (part for part in around.modules() if hasattr(part, "num_embeddings"))
    table: torch.nn.Embedding = next(parts, around)
    return table


def own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it is a view, so that it does not keep a larger tensor alive."""
    tensor = tensor.detach()
    if tensor.untyped_storage().nbytes() > tensor.nbytes or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def features_in(
    output: BaseModelOutputWithPooling, media: Sequence[Pixels]
) -> list[tuple[Tensors, str]]:
    """The features of each medium, and the form in which the model takes several."""
    pooled = output.pooler_output
    container = "tensor" if isinstance(pooled, torch.Tensor) else "list"
    tokens = [sum(part for part in one.layout if isinstance(part, int)) for one in media]
    if container == "list" and len(pooled) != len(media):  # a list of tiles
        pooled = torch.cat(list(pooled))
    if isinstance(pooled, torch.Tensor):  # tiles, or rows, of all media
        each = pooled.shape[:-1].numel() // len(pooled)
        pooled = pooled.split([n // each for n in tokens]) if len(media) > 1 else [pooled]
    levels = getattr(output, "deepstack_features", None) or []
    made = []
    for number, wanted in enumerate(tokens):
        rows = pooled[number].shape[:-1].numel()
        if wanted and rows != wanted:  # Idefics drops a tile of zeros as padding
            raise ImageError(f"the vision encoder gave {rows} rows for {wanted} tokens")
        tensors = {"features": pooled[number]}
        tensors |= {f"deepstack.{n}": level[number] for n, level in enumerate(levels)}
        made.append(({name: own(tensor) for name, tensor in tensors.items()}, container))
    return made


def joined(media: Sequence[Pixels], axis: int = 0) -> Tensors:
    """The tensors of all media in sequence, each filled with zeros to the size of the largest."""
    names = media[0].tensors if media else {}
    return {name: _in_sequence([m.tensors[name] for m in media], axis) for name in names}


def _in_sequence(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    sizes = [max(lengths) for lengths in zip(*(part.shape for part in parts), strict=True)]
    sizes[axis] = sum(part.shape[axis] for part in parts)
    room, start = parts[0].new_zeros(sizes), 0
    for part in parts:
        place = [slice(length) for length in part.shape]
        place[axis] = slice(start, start := start + part.shape[axis])
        room[tuple(place)] = part
    return room


def rows_of(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Some rows of features, in any of their forms."""
    return tensor.reshape(-1, tensor.shape[-1])[start:end]


def with_others(media: list[Pixels], tensors: Tensors, names: set[str]) -> list[Pixels]:
    """The media with their parts of all other tensors of these names, such as masks, that have a
    row per medium or per row of pixels."""
    for name in sorted(names & tensors.keys()):
        counts = [[1] * len(media), [len(medium.tensors["pixel_values"]) for medium in media]]
        tensor = tensors[name]
        fitting = [c for c in counts if tensor.dim() and sum(c) == len(tensor)]
        if not fitting or any(name in medium.tensors for medium in media):
            continue
        media = [
            replace(medium, tensors={**medium.tensors, name: part})
            for medium, part in zip(media, tensor.split(fitting[0]), strict=True)
        ]
    return media


def refuse_dropped(media: Sequence[Pixels], tensors: Tensors, names: set[str]) -> None:
    """Every tensor that the encoder takes must reach it with some medium."""
    carried = {name for medium in media for name in medium.tensors}
    for name in sorted(names & tensors.keys() - carried):
        if tensors[name].numel():
            raise UnsupportedInput(
                f"{name} of shape {tuple(tensors[name].shape)} belongs to none of the "
                f"{len(media)} media of this prompt, so it would be ignored; leave it out, or "
                "give all tensors of one processor call"
            )


def settled(config: Record) -> Record:
    """A configuration without values of the language model, the version or the dtype."""
    drop = ("text_config", "transformers_version", "_name_or_path", "dtype", "torch_dtype")
    remaining = {name: value for name, value in config.items() if name not in drop}
    return {n: settled(v) if isinstance(v, dict) else v for n, v in remaining.items()}


def with_sizes(tensors: Tensors, *axes: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`pixel_values` with one image per row, and each image's height and width from
    `image_sizes`."""
    pixels, sizes = tensors.get("pixel_values"), tensors.get("image_sizes")
    if pixels is None:
        return None
    if pixels.dim() != len(axes) or sizes is None or sizes.shape != (len(pixels), 2):
        raise InputError(
            f"expected pixel_values of shape ({', '.join(axes)}) and image_sizes of shape "
            f"(images, 2), got {tuple(pixels.shape)} and "
            f"{None if sizes is None else tuple(sizes.shape)}"
        )
    if sizes.is_floating_point() or (len(sizes) and int(sizes.min()) < 1):
        raise InputError(f"image_sizes must be heights and widths, got {sizes.tolist()}")
    return pixels, sizes
