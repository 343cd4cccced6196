"""A medium as a prompt knows it: named, measured, and with access to its features.

An entry is the plain record of a medium seen before; a store keeps entries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from keepsight.errors import ImageError
from keepsight.formats.package import Layout, Package
from keepsight.kinds import Grid, Message, Record
from keepsight.models.families import Pixels

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image

    from keepsight.media.sources import Readable, Source

# A picture, a video or a sound, in any of the forms that callers hand in.
Picture: TypeAlias = (
    "Readable | Image.Image | np.ndarray | torch.Tensor | Source | Package | Medium"
)
Pictures: TypeAlias = "Picture | Sequence[Picture]"

# The part of a composite processor that prepares each modality.
PROCESSORS = {
    "image": "image_processor",
    "video": "video_processor",
    "audio": "feature_extractor",
}


MEDIA = tuple(PROCESSORS)  # all modalities


@dataclass(frozen=True)
class VideoStep:
    """One time step of a video whose tower processes steps alone: a medium of its own.

    `path` names it in a prompt, and also covers the number of the step and the speed of the video.
    """

    key: str
    identity: str
    feature_id: str
    path: str


@dataclass(frozen=True, eq=False)
class Medium:
    """One named image: everything a prompt needs to know of it, and access to its features."""

    key: str
    identity: str
    feature_id: str
    grid: Grid
    layout: Layout
    source: str | None
    recall: Callable[[], Pixels] | Package  # remakes the pixels, or returns the package
    modality: str = "image"
    steps: tuple[VideoStep, ...] = ()  # of a video, if features are made step by step
    opened: Source | None = None  # what was given, unless it was tensors or a package
    makers: str = ""  # the settings and libraries that made pixels of it

    @property
    def tokens(self) -> int:
        """The number of its prompt tokens."""
        return sum(part for part in self.layout if isinstance(part, int))

    def __repr__(self) -> str:
        return f"<Medium {self.modality}, {self.tokens} tokens, key {self.key[:12]}…>"


def opened(image: object) -> object:
    """The package in a `.sight` file that is given by its path; anything else as it is."""
    name = os.fsdecode(image) if isinstance(image, str | os.PathLike) else ""
    if name.lower().endswith(".sight") and "://" not in name:
        try:
            return Package.load(name)
        except OSError as error:
            raise ImageError(f"{name}: no package can be read there ({error.strerror})") from error
    return image


def entry_of(what: Pixels | Medium, **more: object) -> Record:
    """The record that is remembered of a medium."""
    known = {"key": what.key, "grid": what.grid, "layout": list(what.layout)}
    if isinstance(what, Medium) and what.steps:
        known["steps"] = [step.key for step in what.steps]
    return {**known, "modality": what.modality, **more}


def is_entry(entry: Record) -> bool:
    """Whether a note has the fields of an entry."""
    grid, layout = entry.get("grid"), entry.get("layout")
    if not isinstance(entry.get("key"), str) or not isinstance(grid, dict):
        return False
    if not isinstance(layout, list) or not all(isinstance(rows, list) for rows in grid.values()):
        return False
    if entry.get("modality", "image") not in PROCESSORS:
        return False
    runs = [part for part in layout if not isinstance(part, str)]
    if not runs or not all(type(run) is int and run > 0 for run in runs):
        return False
    steps = entry.get("steps", [])
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        return False
    return not steps or sum(runs) % len(steps) == 0


def is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(v) for key, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)


def without_arrays(part: object) -> Record:
    """The attributes of a processor, without tables computed from the others (mel filters)."""
    return {k: v for k, v in vars(part).items() if not hasattr(v, "__array__")}


def medium_in(part: Message) -> tuple[str, object]:
    """The medium in a part like `{"type": "video", "video": ...}`."""
    for modality in PROCESSORS:
        if part.get("type", modality) == modality and modality in part:
            return modality, part[modality]
    raise ImageError(
        "a dict is not an image; expected {'type': 'image' | 'video' | 'audio', <that type>: ...}"
    )
