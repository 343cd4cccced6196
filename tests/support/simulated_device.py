"""A device that is none: tensors that say they lie elsewhere, and compute on the CPU.

`simulated:0` and `simulated:1` behave as accelerators do where it hurts: an operation over tensors
of two places is an error, a queue of work (a stream) says nothing of another queue unless somebody
waits, and a copy to the host that nobody waited for holds garbage. So a tensor left on the wrong
device, and a thread that reads before the work is done, fail on a machine without any accelerator.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "simulated"
COUNT = 2
GARBAGE = 0xA5
Clock = dict[int, int]  # by stream: how much of its work is known to come before

_aten = torch.ops.aten
_real_tensor = torch.tensor
_current = threading.local()
_done: Clock = {}  # what is complete, whoever waited for it
_hazards: list[str] = []
_queues = threading.RLock()  # the writers of a store wait for copies while others are queued


def device(index: int = 0) -> torch.device:
    return torch.device(NAME, index)


# -- streams -------------------------------------------------------------------------------------


class Event:
    """A point in a queue of work."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or {}

    def synchronize(self) -> None:
        _complete(self.clock)


class Stream:
    """A queue of work on one device. `clock` says what comes before its next piece."""

    all: dict[int, Stream] = {}  # noqa: RUF012

    def __init__(self, where: Any = None) -> None:
        self.device = _indexed(torch.device(NAME if where is None else where))
        self.number = len(Stream.all)
        self.clock: Clock = {self.number: 0}
        self.copies: list[tuple[int, int, Callable[[], Any]]] = []  # when, which memory, what
        Stream.all[self.number] = self

    def tick(self) -> int:
        self.clock[self.number] += 1
        return self.clock[self.number]

    def knows(self, other: int, number: int) -> bool:
        return max(self.clock.get(other, 0), _done.get(other, 0)) >= number

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.clock = dict(self.clock)
        return event

    def wait_event(self, event: Event) -> None:
        _merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        _merge(self.clock, other.clock)

    def synchronize(self) -> None:
        _complete(self.clock)


def _merge(clock: Clock, more: Clock) -> None:
    for number, count in more.items():
        clock[number] = max(clock.get(number, 0), count)


def _complete(clock: Clock) -> None:
    """The program waited for all of this."""
    with _queues:
        _merge(_done, clock)
        for stream in list(Stream.all.values()):
            _run_copies(stream, lambda when, _, s=stream: _done.get(s.number, 0) >= when)


def _run_copies(stream: Stream, wanted: Callable[[int, int], bool]) -> None:
    with _queues:
        left = []
        for when, memory, copy in stream.copies:
            if wanted(when, memory):
                with torch.inference_mode():
                    copy()
            else:
                left.append((when, memory, copy))
        stream.copies = left


class _Module:
    """What `torch.cuda` is to a CUDA device."""

    Stream, Event = Stream, Event

    defaults: list[Stream]

    def current_stream(self, where: Any = None) -> Stream:
        index = _indexed(torch.device(NAME if where is None else where)).index
        found: Stream | None = getattr(_current, "streams", {}).get(index)
        return found or self.defaults[index]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = dict(getattr(_current, "streams", {}))
        _current.streams = {**before, stream.device.index: stream}
        try:
            yield
        finally:
            _current.streams = before

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return False  # so that nothing else in this process chooses it

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return COUNT

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


# -- tensors -------------------------------------------------------------------------------------


class _History:
    """Who wrote a piece of memory last, and who copies it away; views share it."""

    def __init__(self, owner: Stream) -> None:
        self.owner, self.written = owner, (owner.number, owner.clock[owner.number])
        self.reads: Clock = {}
        self.recorded: set[int] = set()

    def __del__(self) -> None:
        """Memory that is given away must not be read any more."""
        for reader, when in self.reads.items():
            if reader not in self.recorded and not self.owner.knows(reader, when):
                _hazards.append(f"stream {reader} may still copy what was given away")


class SimulatedTensor(torch.Tensor):
    """Memory of the host that says it lies on a device."""

    host: torch.Tensor
    place: torch.device
    history: _History

    @staticmethod
    def __new__(
        cls, host: torch.Tensor, place: torch.device, history: _History | None = None
    ) -> SimulatedTensor:
        made: Any = torch.Tensor._make_subclass(
            cls, host.detach(), False, dispatch_device=True, device_for_backend_keys=place
        )
        made.host, made.place = host, place
        made.history = history or _History(module.current_stream(place))
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(operation, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert a {self.place} tensor to numpy; copy it to the host first")

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index), value)

    def record_stream(self, stream: Any) -> None:
        self.history.recorded.add(stream.number)

    def __repr__(self, **kwargs: Any) -> str:
        return f"{self.host!r} on {self.place}"

    def __format__(self, spec: str) -> str:
        return format(self.host, spec)


def _indexed(place: torch.device) -> torch.device:
    return device(0) if place.type == NAME and place.index is None else place


def _indices(index: Any) -> tuple[Any, ...]:
    """Lists as tensors, which upstream would make as `torch.tensor` does."""
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(_real_tensor(part) if isinstance(part, list) else part for part in parts)


_COPIES = (_aten.copy_.default, _aten._to_copy.default)
_INDICES = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_WAITS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default)


class _Seen:
    """The tensors of one operation, as what they are on the host."""

    def __init__(self) -> None:
        self.on_device: list[SimulatedTensor] = []
        self.on_host: list[torch.Tensor] = []

    def take(self, value: Any) -> Any:
        if isinstance(value, SimulatedTensor):
            self.on_device.append(value)
            return value.host
        if isinstance(value, torch.Tensor):
            self.on_host.append(value)
        return value

    def check(self, operation: Any) -> None:
        """One place for all of them, but for numbers (and indices, as everywhere)."""
        places = {tensor.place for tensor in self.on_device}
        if operation not in _INDICES:
            places |= {tensor.device for tensor in self.on_host if tensor.dim()}
        if len(places) > 1:
            found = ", ".join(sorted(map(str, places)))
            raise RuntimeError(f"{operation}: expected all tensors on one device, found {found}")

    def read(self, stream: Stream, operation: Any) -> None:
        for tensor in self.on_device:
            writer, when = tensor.history.written
            if writer != stream.number and not stream.knows(writer, when):
                raise RuntimeError(
                    f"{operation}: stream {stream.number} reads what stream {writer} may not have "
                    "written yet"
                )
        memories = {tensor.data_ptr() for tensor in self.on_host}
        for other in [found for found in list(Stream.all.values()) if found.copies]:
            _run_copies(
                other,
                lambda when, memory, o=other: memory in memories and stream.knows(o.number, when),
            )


@functools.cache
def _is_composite(operation: Any) -> bool:
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    return implicit in operation.py_kernels or operation.has_kernel_for_dispatch_key(implicit)


def _run(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if operation is torch.ops.prim.device.default:
        return args[0].place
    if operation is _aten._fused_sdp_choice.default:
        return 0  # plain arithmetic, whatever the device
    if _is_composite(operation):
        return operation.decompose(*args, **kwargs)
    if operation is _aten.histc.default:  # devices count integers, the CPU does not
        args = (args[0].float(), *args[1:])
    seen = _Seen()
    plain_args, plain = tree_map(seen.take, args), tree_map(seen.take, kwargs)
    if operation not in _COPIES:
        seen.check(operation)
    place = _place_of(args, kwargs, seen)
    stream = module.current_stream(place if place.type == NAME else seen.on_device[0].place)
    elsewhere = {tensor.place for tensor in seen.on_device} - {stream.device}
    for other in map(module.current_stream, elsewhere):
        stream.wait_stream(other)
    stream.tick()
    seen.read(stream, operation)
    if "device" in plain and plain["device"] is not None:
        plain["device"] = torch.device("cpu")
    plain.pop("pin_memory", None)
    if operation is _aten.copy_.default and not isinstance(args[0], SimulatedTensor):
        return _copy_out(stream, *args, **kwargs)
    found = operation(*plain_args, **plain)
    if operation in _WAITS or place.type != NAME:
        stream.synchronize()
    for other in map(module.current_stream, elsewhere):  # both wait, before and behind a copy
        other.wait_stream(stream)
    return _wrapped(found, place, seen, stream)


def _place_of(args: Any, kwargs: dict[str, Any], seen: _Seen) -> torch.device:
    if kwargs.get("device") is not None:
        return _indexed(torch.device(kwargs["device"]))
    if args and isinstance(args[0], torch.Tensor):  # what is copied into, among others
        return args[0].device
    return seen.on_device[0].place if seen.on_device else device(0)


def _copy_out(
    stream: Stream, target: torch.Tensor, source: SimulatedTensor, non_blocking: bool = False
) -> torch.Tensor:
    if non_blocking:
        when, value = stream.clock[stream.number], source.host.clone()
        source.history.reads[stream.number] = when
        with _queues:
            stream.copies.append((when, target.data_ptr(), lambda: target.copy_(value)))
        return target
    target.copy_(source.host)
    stream.synchronize()
    return target


def _wrapped(found: Any, place: torch.device, seen: _Seen, stream: Stream) -> Any:
    known = {id(tensor.host): tensor for tensor in seen.on_device}
    memories = {t.host.untyped_storage().data_ptr(): t.history for t in seen.on_device}

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or place.type != NAME:
            return value
        assert not isinstance(value, SimulatedTensor), "an operation made a tensor by itself"
        made = known.get(id(value))
        if made is None:
            history = memories.get(value.untyped_storage().data_ptr())
            made = SimulatedTensor(value, place, history)
            if history is not None:
                return made  # a view writes nothing
        if made.shape != made.host.shape:
            raise NotImplementedError("an operation changed the size of a simulated tensor")
        made.history.written = (stream.number, stream.clock[stream.number])
        return made

    return tree_map(wrap, found)


def _tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    """`torch.tensor`, which cannot make tensors of a subclass itself."""
    plain = tree_map(lambda x: x.tolist() if isinstance(x, SimulatedTensor) else x, data)
    made = _real_tensor(plain, **options)
    return made if device is None else made.to(device)


def garbage_like(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for pinned memory: nothing is in it until a copy is complete."""
    room = torch.empty(tensor.shape, dtype=tensor.dtype)
    room.view(torch.uint8).fill_(GARBAGE) if room.dim() else room.fill_(-1)
    return room


# -- registered once for a process, where a test asks for it -------------------------------------

module: Any = None
_libraries: list[Any] = []
_SIZED = ("arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m")


def _register() -> None:
    global module
    if module is not None:
        return
    module = _Module()
    _setup_privateuseone_for_python_backend(NAME, module)
    module.defaults = [Stream(device(index)) for index in range(COUNT)]
    everything, sized = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    for name in _SIZED:  # upstream makes these by growing an empty tensor, which no subclass can
        base, _, overload = name.partition(".")
        op = getattr(getattr(_aten, base), overload or "default")
        sized.impl(name, lambda *args, op=op, **kw: _run(op, args, kw), "PrivateUse1")
    _libraries.extend([everything, sized])


@contextlib.contextmanager
def simulation(monkeypatch: Any) -> Iterator[Any]:
    """The device while a test runs; what was given away while it was read fails the test."""
    from keepsight.models import identity
    from keepsight.system import devices

    _register()
    # A real device's tensors are plain ones, and its code is torch's: none of it is a model's own.
    monkeypatch.setattr(identity, "_USUAL", (*identity._USUAL, SimulatedTensor))
    known = identity.is_library
    monkeypatch.setattr(identity, "is_library", lambda name: name == __name__ or known(name))
    monkeypatch.setattr(torch, "tensor", _tensor)
    monkeypatch.setattr(devices, "pinned_like", garbage_like)
    # In place, a moved parameter would change its memory and not what it says of itself.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    _hazards.clear()
    yield module
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert not _hazards, _hazards[0]
