"""Test conversations, and pictures of noise.

Each seed gives another picture; the same seed always gives the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
from PIL import Image

from keepsight.kinds import Message
from keepsight.prompt.messages import user_message
from keepsight.stock.generate import Generated
from keepsight.system import digests

if TYPE_CHECKING:
    from keepsight.media.medium import Picture

Messages = list[Message]
T = TypeVar("T")
_FOUND: dict[tuple[object, ...], object] = {}


def noise(seed: int, size: tuple[int, int]) -> Image.Image:
    """Noise in blocks."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.NEAREST)


def turn(text: str, *images: Picture) -> Message:
    """A user's message, pictures first."""
    return user_message(text, images)


def answered(text: str) -> Message:
    """The model's message."""
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def pictures_of(messages: Messages) -> list[Picture]:
    """The pictures of a conversation, in order."""
    parts = [part for message in messages for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


def logits_of(output: Generated) -> tuple[torch.Tensor, ...]:
    """Those behind the prompt and behind each token."""
    return output.logits or ()


def once(of: tuple[object, ...], messages: Messages, compute: Callable[[], T]) -> T:
    """Compute a value for a conversation under a name, only the first time."""
    name = (*of, digests.digest("conversation", *map(_written, messages)))
    if name not in _FOUND:
        _FOUND[name] = compute()
    return cast("T", _FOUND[name])


def _written(message: Message) -> list[object]:
    """Everything that distinguishes a message from others."""
    parts: list[object] = [message["role"]]
    for part in message["content"]:
        image = part.get("image")
        is_picture = isinstance(image, Image.Image)
        parts += [image.mode, image.size, image.tobytes()] if is_picture else [part]
    return parts
