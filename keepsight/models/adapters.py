"""Adapters that are switched off while merged, whose next pass would change the weights.

PEFT takes such an adapter out of the weights within that pass: what was read of the weights before
it, fingerprints and packed copies, is no longer true behind it. So it is done before they are read.
"""

from __future__ import annotations

import sys

import torch


def settle(model: torch.nn.Module) -> bool:
    """Do to the weights what the next pass would do; whether there was anything to do."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return False
    layers = [m for m in model.modules() if isinstance(m, tuners.BaseTunerLayer)]
    waiting = [layer for layer in layers if layer.disable_adapters and layer.merged]
    for layer in waiting:
        layer.unmerge()
    return bool(waiting)
