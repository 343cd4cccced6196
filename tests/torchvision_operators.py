"""Torchvision made importable: the only one that installs beside a CPU torch is built for CUDA, and
imports once two of its operators are declared. Beside a torch for CUDA it declares them itself.

Import this before Transformers.
"""

from __future__ import annotations

import contextlib

import torch

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

if torch.version.cuda is None:
    for _name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # a torchvision that was imported before
            torch.library.define(f"torchvision::{_name}", _BOXES)
