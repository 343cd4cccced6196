"""Tensors carried from the model's device to the host and back, bit for bit.

Nothing waits where a device copies by itself: whoever brings a copy back lets the device wait for
it, not the program. Where the device is the host, a copy is a copy.
"""

from __future__ import annotations

import torch

from keepsight.prefix.node import Part, Tensors, Way
from keepsight.system.devices import to_devices, to_host


class Carrier:
    """Moves the tensors of parts; which ones, and when, others decide."""

    @torch.inference_mode()
    def out(self, part: Part) -> Tensors:
        """Copies in host memory. The part remembers where its tensors lived."""
        tensors = part.tensors or {}
        copies, fence = to_host(tensors)
        part.way = Way({name: tensor.device for name, tensor in tensors.items()}, fence)
        return {name: c.clone() if c is tensors[name] else c for name, c in copies.items()}

    @torch.inference_mode()
    def back(self, part: Part) -> Tensors:
        """The tensors where they lived before."""
        way, tensors = part.way, part.tensors or {}
        part.way = None
        return tensors if way is None else to_devices(tensors, way.devices.__getitem__, way.fence)
