"""Makes torchvision importable beside a torch for CPUs, in the environment that runs this.

Its compiled operators do not load there. Two are declared, so that what is registered for them
finds a name; no model here calls them. Pictures are decoded by Pillow in their place.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

DECLARED = """# declared: the compiled operators do not load beside this torch
import torch as _torch

_operators = _torch.library.Library("torchvision", "FRAGMENT")
_operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
DECODED = """

# declared: the compiled decoders do not load beside this torch
def decode_image(input, mode=ImageReadMode.UNCHANGED, apply_exif_orientation=False):
    import io

    import numpy
    from PIL import Image

    picture = Image.open(io.BytesIO(input.numpy().tobytes())).convert("RGB")
    return torch.from_numpy(numpy.array(picture)).permute(2, 0, 1).contiguous()
"""


def main() -> None:
    """Change the two files, once."""
    folder = Path(sysconfig.get_paths()["purelib"]) / "torchvision"
    first = folder / "__init__.py"
    if "# declared:" not in first.read_text():
        first.write_text(DECLARED + first.read_text())
    decoders = folder / "io" / "image.py"
    if "# declared:" not in decoders.read_text():
        decoders.write_text(decoders.read_text() + DECODED)


if __name__ == "__main__":
    main()
