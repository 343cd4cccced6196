"""Cut a picture into the patches a Qwen vision tower reads.

The processor's own code does the same for one request; this is the same arithmetic without the
resizing, since every demo picture already has a size that needs none.
"""

import numpy as np
import numpy.typing as npt
from PIL import Image

PATCH, MERGE, TEMPORAL = 16, 2, 2


def cut(image: Image.Image) -> tuple[npt.NDArray[np.float32], tuple[int, int, int]]:
    """Return the patches of one picture, in merge order, and its grid of (time, rows, columns)."""
    pixels = (np.asarray(image, np.float32) / 255.0 - 0.5) / 0.5
    rows, cols = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    twice = pixels.transpose(2, 0, 1)[None].repeat(TEMPORAL, 0)
    blocks = twice.reshape(TEMPORAL, 3, rows // MERGE, MERGE, PATCH, cols // MERGE, MERGE, PATCH)
    ordered = blocks.transpose(2, 5, 3, 6, 1, 0, 4, 7)
    return ordered.reshape(rows * cols, -1), (1, rows, cols)


def merged(width: int, height: int) -> tuple[int, int]:
    """How many rows and columns of tokens the language model sees of a picture."""
    return height // (PATCH * MERGE), width // (PATCH * MERGE)
