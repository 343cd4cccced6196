"""Copies tensors between the host and a model's devices; and manages the host's OpenMP threads.

A device with streams computes asynchronously, and streams are not ordered among each other. So a
copy to the host runs on a separate stream after the work that makes the tensors, and comes with a
`Fence`: the copies must not be read before it. A copy to a device is queued on the computing
stream. On the host, and on devices without streams, a copy is complete when the call returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:  # commands look into a store without PyTorch
    import torch

Tensors: TypeAlias = "dict[str, torch.Tensor]"


class _Streams(Protocol):
    """The common interface of `torch.cuda` and `torch.xpu`."""

    def current_stream(self, device: torch.device) -> torch.Stream: ...
    def stream(self, stream: torch.Stream) -> contextlib.AbstractContextManager[object]: ...


@dataclass(frozen=True)
class Fence:
    """Tells when copies to the host are complete."""

    ends: tuple[torch.Event, ...] = ()

    def wait(self) -> None:
        """Wait until they are; further calls cost nothing."""
        for end in self.ends:
            end.synchronize()


COMPLETE = Fence()
_beside: dict[torch.device, torch.Stream] = {}  # the stream for copies from each device


def to_host(tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, Fence]:
    """Copy tensors to host memory; wait for the fence before reading the copies. Host tensors are
    not copied."""
    ends: list[torch.Event] = []
    return {name: _leave(tensor, ends) for name, tensor in tensors.items()}, Fence(tuple(ends))


def to_devices(
    tensors: Mapping[str, torch.Tensor],
    where: Callable[[str], torch.device],
    fence: Fence = COMPLETE,
) -> Tensors:
    """Each tensor on the device that `where` gives for its name. `fence`: of copies to the host
    that may be unfinished; the device waits for it, this thread does not."""
    arrived = {}
    for name, tensor in tensors.items():
        device = where(name)
        streams = _streams(device)
        if streams is not None and tensor.device.type == "cpu":
            for end in fence.ends:
                streams.current_stream(device).wait_event(end)
        arrived[name] = tensor.to(device, non_blocking=streams is not None and _is_pinned(tensor))
    return arrived


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory into which a device can copy asynchronously."""
    import torch

    return torch.empty_like(tensor, device="cpu", pin_memory=True)


class StreamOrder:
    """Orders the work of callers that use separate streams.

    What a model remembers was computed on one caller's stream; the next caller's stream has to wait
    for it.
    """

    def __init__(self) -> None:
        self._last: dict[torch.device, torch.Stream] = {}

    def follow(self, devices: Iterable[torch.device]) -> None:
        """Make all work queued from now on wait for the work queued before the last call."""
        for device in devices:
            streams = _streams(device)
            if streams is None:
                continue
            now, last = streams.current_stream(device), self._last.get(device)
            if last is not None and last != now:
                now.wait_stream(last)
            self._last[device] = now


def _leave(tensor: torch.Tensor, ends: list[torch.Event]) -> torch.Tensor:
    import torch

    device = tensor.device
    streams = _streams(device)
    if streams is None:
        return tensor.to("cpu")
    try:
        copy = pinned_like(tensor)
    except RuntimeError:  # no more memory can be pinned: then wait for the copy
        return tensor.to("cpu")
    beside = _beside.get(device)
    if beside is None:
        beside = _beside[device] = torch.get_device_module(device).Stream(device)
    beside.wait_stream(streams.current_stream(device))
    with streams.stream(beside):
        copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(beside)
    ends.append(beside.record_event())
    return copy


def _streams(device: torch.device) -> _Streams | None:
    """The streams of a device, if it has any."""
    if device.type in ("cpu", "meta"):
        return None
    import torch

    module = torch.get_device_module(device)
    return module if hasattr(module, "current_stream") and hasattr(module, "Stream") else None


def _is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_pinned()


_SOFT = 1  # of omp_pause_resource_t: keeps settings


def release_team() -> bool:
    """End the calling thread's OpenMP team, which is created again when that thread computes.

    While all teams together have no more threads than the machine has cores, waiting threads stay
    awake. With more they sleep, and waking them takes longer than a small layer of a model. So a
    thread that passes a model on ends its team: decoding on two cores is then a fifth faster. False
    if this torch has no GNU OpenMP, or one that cannot do it.
    """
    import torch

    found = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    flag = getattr(os, "RTLD_NOLOAD", None)  # never load a second copy of it
    if not found or flag is None:
        return False
    try:
        library = ctypes.CDLL(str(found[0]), mode=flag | os.RTLD_LAZY)
        return bool(library.omp_pause_resource_all(_SOFT) == 0)
    except (OSError, AttributeError):
        return False
