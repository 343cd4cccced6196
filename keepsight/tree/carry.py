"""Tensors carried from the model's device to the host and back, bit for bit.

On CUDA nothing waits: a copy goes out on a stream of its own into pinned memory, and the allocator
gives the tensor's bytes away only after that stream has read them. Whoever brings the copy back
lets the device wait for it, not the program. Where the device is the host, a copy is a copy.
"""

from __future__ import annotations

import torch

from keepsight.node import Part, Tensors, Way


class Carrier:
    """Moves the tensors of parts; which ones, and when, others decide."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @torch.inference_mode()
    def out(self, part: Part) -> Tensors:
        """Copies in host memory. The part remembers where its tensors lived."""
        tensors = part.tensors or {}
        way = Way({name: tensor.device for name, tensor in tensors.items()}, [])
        copies = {name: self._copy(tensor, way) for name, tensor in tensors.items()}
        part.way = way
        return copies

    def _copy(self, tensor: torch.Tensor, way: Way) -> torch.Tensor:
        if tensor.device.type != "cuda":
            return tensor.to("cpu", copy=True)
        try:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError:  # no more memory can be pinned: then the copy is waited for
            return tensor.to("cpu")
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            copy.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
        way.ends.append(stream.record_event())
        return copy

    @torch.inference_mode()
    def back(self, part: Part) -> Tensors:
        """The tensors where they lived before."""
        way, back = part.way, {}
        if way is None:
            return part.tensors or {}
        for name, tensor in (part.tensors or {}).items():
            device = way.devices[name]
            if device.type == "cuda":
                for end in way.ends:
                    torch.cuda.current_stream(device).wait_event(end)
            back[name] = tensor.to(device, non_blocking=tensor.is_pinned())
        part.way = None
        return back
