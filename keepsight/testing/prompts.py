"""What the suites ask about: conversations, and pictures of noise.

A picture of another seed is another picture; the same seed gives the same one each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from keepsight.core.render import user_message
from keepsight.kinds import Message

if TYPE_CHECKING:
    from keepsight.media.medium import Picture

Messages = list[Message]


def noise(seed: int, size: tuple[int, int]) -> Image.Image:
    """Noise in blocks."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.NEAREST)


def turn(text: str, *images: Picture) -> Message:
    """What a user says, pictures first."""
    return user_message(text, images)


def answered(text: str) -> Message:
    """What the model said."""
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def pictures_of(messages: Messages) -> list[Picture]:
    """The pictures of a conversation, in order."""
    parts = [part for message in messages for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]
