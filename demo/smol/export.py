"""Put trained eyes into the package: eight bits a weight, a scale for each row.

    python -m demo.smol.export PARTS     # the folder that `demo.smol.train` writes

`keepsight/models/demo_smol.py` merges them with SmolLM2's own weights at the first load.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from demo.smol.model import Tower, load_parts
from keepsight.models.demo_smol import PARTS, SHIPPED


def packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 with a scale for each row, everything else as float16.

    A matrix that is higher than wide by far, as the second of an adapter, goes by its columns.
    """
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.ndim < 2:
            found[name] = value.half()
            continue
        rows = value.flatten(1)
        if len(rows) > 8 * rows.shape[1]:
            name, rows = f"{name}.T", rows.T
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        found[name] = (rows / scale).round().to(torch.int8).contiguous()
        found[f"{name}.scale"] = scale
    return found


def main(folder: Path) -> None:
    tower = Tower()
    tower.load_state_dict(load_parts(folder, "tower"))
    for name, tensors in zip(
        PARTS, (tower.named_for_transformers(), load_parts(folder, "adapter")), strict=True
    ):
        save_file(packed(tensors), SHIPPED / name)
        print(f"{SHIPPED / name}: {(SHIPPED / name).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main(Path(sys.argv[1]))
