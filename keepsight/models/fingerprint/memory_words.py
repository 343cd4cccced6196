"""Reads machine words of thousands of living objects at once, to check a whole model on each call.

CPython gives every dict a version that changes with it, and PyTorch gives every tensor a counter
and an address. Read through Python they cost a tenth of a microsecond each. Here their addresses
are found once, and one NumPy gather reads them all.

No freed memory is read: every address lies inside an object that the caller holds, or inside one
that such an object was just seen to hold. Offsets are verified on test objects, and again on every
tensor to be watched. If anything is unexpected there is no reader, and the caller compares the slow
way.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch

WORD = 8
_TYPE, _DICT = 8, -24  # offset of an object's type and of its dict
_VERSION = 24  # offset of a dict's version
_IMPL_WORDS = 32  # how far to search for the parts of a tensor
_PLACES = 8  # words of each weight's values that are compared

Array = np.ndarray[Any, np.dtype[np.uint64]]


class Words:
    """The words at some addresses, and their last accepted values."""

    def __init__(self, addresses: Iterable[int]) -> None:
        self._at = np.fromiter(addresses, dtype=np.int64)
        self._view: Array = np.zeros(1, dtype=np.uint64)
        if len(self._at):
            low = int(self._at.min())
            count = (int(self._at.max()) - low) // WORD + 1
            self._view = np.asarray(_Memory(low, count))
            self._at = (self._at - low) // WORD
        self.seen = self._read()
        self._bytes = self.seen.tobytes()

    def _read(self) -> Array:
        return self._view.take(self._at)

    def moved(self) -> Sequence[int]:
        """Which words changed; their new values are accepted."""
        now = self._read()
        if now.tobytes() == self._bytes:
            return ()
        moved: list[int] = np.flatnonzero(now != self.seen).tolist()
        self.seen, self._bytes = now, now.tobytes()
        return moved


class _Memory:
    """A stretch of this process's memory in the form that NumPy reads."""

    def __init__(self, start: int, count: int) -> None:
        words = np.dtype(np.uint64).str
        self.__array_interface__ = {
            "version": 3,
            "shape": (count,),
            "typestr": words,
            "data": (start, True),
        }


def _word(address: int) -> int:
    return int(ctypes.c_uint64.from_address(address).value)


# -- dicts and objects ---------------------------------------------------------------------------


@functools.cache
def sees_dicts() -> bool:
    """Whether this interpreter's dicts have versions at the expected place.

    Those of 3.11 to 3.13 do; free-threaded and later ones are not read.
    """
    known = sys.implementation.name == "cpython" and (3, 11) <= sys.version_info[:2] <= (3, 13)
    threads = getattr(sys, "_is_gil_enabled", lambda: True)
    if not known or not threads() or ctypes.sizeof(ctypes.c_void_p) != WORD:
        return False
    return all(map(_renews, ({}, {"a": 1}, OrderedDict(), vars(_instance()))))


def _instance() -> object:
    one = torch.nn.Module()
    _settle(one)
    return one


def _renews(home: dict[Any, object]) -> bool:
    """Whether each change of a dict changes its version, and reading does not."""

    def renewed(change: Any) -> bool:
        before = _word(id(home) + _VERSION)
        change()
        return _word(id(home) + _VERSION) != before

    changes = (
        lambda: home.__setitem__("x", 1.5),
        lambda: home.__setitem__("x", 2.5),
        lambda: home.update(x=3),
        lambda: home.pop("x"),
    )
    reads = (lambda: list(home.items()), lambda: home.get("x"))
    return all(map(renewed, changes)) and not any(map(renewed, reads))


def _settle(thing: object) -> None:
    """Give an object its own dict: since 3.13 attributes may lie in the object itself, where a
    change renews no version. This has no visible effect."""
    if sys.version_info >= (3, 13):
        object.__setattr__(thing, "__dict__", vars(thing))


def dict_words(homes: Sequence[dict[Any, object]]) -> Words | None:
    """The versions of dicts; the caller holds each."""
    return Words(id(home) + _VERSION for home in homes) if sees_dicts() else None


def object_words(things: Sequence[object]) -> Words | None:
    """Two words per object: the addresses of its type and of its dict. The caller keeps all three
    alive, so nothing else can take these addresses."""
    if not sees_dicts():
        return None
    for thing in things:
        _settle(thing)
        if _word(id(thing) + _TYPE) != id(type(thing)) or _word(id(thing) + _DICT) != id(
            vars(thing)
        ):
            return None
    return Words(id(thing) + place for thing in things for place in (_TYPE, _DICT))


@functools.cache
def _function_places() -> tuple[int, ...] | None:
    """Offsets of a function's code, defaults and keyword defaults."""

    def one(value: int = 1, *, named: int = 2) -> int:
        return value + named

    size = type(one).__basicsize__ // WORD
    found = []
    for part in (one.__code__, one.__defaults__, one.__kwdefaults__):
        spots = [WORD * i for i in range(size) if _word(id(one) + WORD * i) == id(part)]
        found += spots
    return tuple(found) if len(found) == 3 and sees_dicts() else None


def function_words(functions: Sequence[FunctionType]) -> tuple[Words, list[int]] | None:
    """Words for the replaceable parts of functions the caller holds, each with its function."""
    places = _function_places()
    if places is None:
        return None
    probe, last = CellType(places), CellType.__basicsize__ - WORD
    if _word(id(probe) + last) != id(places):
        return None
    return _many(
        [
            *(id(function) + place for place in places),
            *(id(cell) + last for cell in function.__closure__ or ()),
        ]
        for function in functions
    )


# -- tensors -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TensorLayout:
    """Where PyTorch keeps the parts of a tensor, as byte offsets in each object."""

    impl: int  # in the Python object
    storage: int  # in the implementation, including everything up to `data`
    counter: int
    sizes: int
    strides: int
    offset: int
    dtype: int
    data: int  # in the storage
    version: int  # in the counter

    def parts(self, tensor: torch.Tensor) -> list[int]:
        """What identifies a tensor: its storage, its counter, its shape and dtype."""
        shape = [
            start + WORD * i for start in (self.sizes, self.strides) for i in range(tensor.dim())
        ]
        places = (self.storage, self.counter, *shape, self.offset, self.dtype)
        return [tensor._cdata + place for place in places]

    def live(self, tensor: torch.Tensor) -> list[int]:
        """The address of its values, and how often they were written."""
        counter = _word(tensor._cdata + self.counter)
        return [tensor.untyped_storage()._cdata + self.data, counter + self.version]


@functools.cache
def _layout() -> _TensorLayout | None:
    try:
        return _find_layout()
    except (AttributeError, RuntimeError, StopIteration, ValueError):
        return None


def _find_layout() -> _TensorLayout:
    """Find the layout from tensors whose parts are known."""

    def made() -> torch.Tensor:
        return torch.empty(90_000, dtype=torch.int8).as_strided((37, 41), (43, 2003), 1237)

    one, other = made(), made()
    shared = one.detach()  # shared storage and counter
    numbers = (one._cdata, shared._cdata, other._cdata)
    spot = _spots(id(one), type(one).__basicsize__ // WORD, numbers[0])
    ends = next(i for i in range(_IMPL_WORDS) if _word(numbers[0] + WORD * i) == 1237)
    rows = [[_word(at + WORD * i) for i in range(ends + 3)] for at in numbers]
    storage = rows[0].index(one.untyped_storage()._cdata)
    sizes, strides = rows[0].index(37), rows[0].index(43)
    expected = (rows[0][sizes + 1], rows[0][strides + 1], rows[0][ends + 1])
    if expected != (41, 2003, 37 * 41):
        raise ValueError("sizes are not at the expected place")
    common = [i for i in range(2, ends) if rows[0][i] == rows[1][i] != rows[2][i]]
    (counter,) = (i for i in common if i != storage)
    base = one.untyped_storage()
    data = _spots(base._cdata, 8, base.data_ptr())
    return _TensorLayout(
        impl=spot,
        storage=WORD * storage,
        counter=WORD * counter,
        sizes=WORD * sizes,
        strides=WORD * strides,
        offset=WORD * ends,
        dtype=WORD * (ends + 2),  # after the number of values
        data=data,
        version=_find_version(one, rows[0][counter]),
    )


def _spots(start: int, words: int, value: int) -> int:
    return next(WORD * i for i in range(words) if _word(start + WORD * i) == value)


def _find_version(tensor: torch.Tensor, counter: int) -> int:
    """Find the count in a version counter: a table, its owners and the count, 24 bytes."""
    spots = {8, 16}
    for _ in range(3):
        tensor.add_(0)
        spots = {at for at in spots if _word(counter + at) & 0xFFFFFFFF == tensor._version}
    (spot,) = spots
    return spot


class TensorWords:
    """Addresses, shapes and write counts of tensors, and some of their values."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        where = _layout()
        if where is None:
            raise ValueError("PyTorch keeps tensors in another way than expected")
        # Detached tensors hold storage and counter; a held tensor holds its implementation.
        self._held = [(tensor, tensor.detach()) for tensor in tensors]
        self.lost: set[int] = set()  # those that surely changed
        self._implementations = Words(id(tensor) + where.impl for tensor in tensors)
        self._parts, self._part_of = _many(where.parts(tensor) for tensor in tensors)
        self._live, self._live_of = _many(where.live(tensor) for tensor in tensors)
        self._values, self._value_of = _many(map(_places, tensors))

    def moved(self) -> set[int]:
        """The indices of the tensors that may have changed."""
        found = {*self._implementations.moved()}
        found |= {self._part_of[number] for number in self._parts.moved()} if not found else set()
        self.lost |= found  # their memory may be freed
        if self.lost:
            return self.lost
        if found := {self._live_of[number] for number in self._live.moved()}:
            return found
        return {self._value_of[number] for number in self._values.moved()}


def _many(places: Iterable[list[int]]) -> tuple[Words, list[int]]:
    """The words of several objects, and the object of each word."""
    listed = list(places)
    whose = [number for number, some in enumerate(listed) for _ in some]
    return Words(place for some in listed for place in some), whose


def can_be_read(tensor: torch.Tensor) -> bool:
    """Whether everything to be read of a tensor is at the expected place."""
    where = _layout()
    if where is None or tensor.is_inference() or tensor.dim() > 5 or tensor.layout != torch.strided:
        return False
    try:
        impl, storage = tensor._cdata, tensor.untyped_storage()
        start = storage.data_ptr()  # a wrapper around other tensors has none
    except (RuntimeError, NotImplementedError):
        return False
    if _word(id(tensor) + where.impl) != impl or _word(impl + where.storage) != storage._cdata:
        return False
    counter = _word(impl + where.counter)
    if not counter or _word(storage._cdata + where.data) != start:
        return False
    return _word(counter + where.version) & 0xFFFFFFFF == tensor._version


def spread(start: int, size: int) -> list[int]:
    """Some aligned words spread evenly over a stretch. The first and last may exceed its ends, by
    bytes of the same page."""
    if not size:
        return []
    first, last = start // WORD, (start + size - 1) // WORD
    count = min(_PLACES, last - first + 1)
    steps = max(count - 1, 1)
    return [WORD * (first + (last - first) * i // steps) for i in range(count)]


def _places(tensor: torch.Tensor) -> list[int]:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return []
    return spread(tensor.data_ptr(), tensor.nbytes)
