"""Numbers, holds and follows objects without a description, such as a user's stateful hook.

A number stands for one living object of this process. With it is counted how often the object
changed. So results of one state are never used under another, nor when the same state returns.
"""

from __future__ import annotations

import enum
import functools
import gc
import logging
import re
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Container
from types import (
    FunctionType,
    GenericAlias,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    UnionType,
)
from typing import Any

import numpy as np
import torch

from keepsight.kinds import Record
from keepsight.models.fingerprint.functions import (
    globals_read,
    is_builtin,
    is_library,
    is_library_module,
    is_library_type,
)
from keepsight.models.fingerprint.watch import Watch, closure

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
BY_NAME = (torch.dtype, torch.layout, torch.memory_format, np.dtype)
WITHOUT_VALUE = (
    torch.device,  # the environment records where something is computed
    logging.Logger,
    type(threading.Lock()),
    type(threading.RLock()),
    weakref.ReferenceType,
)
LARGE = 1 << 20  # bytes of an array that are compared on every call
_MOST = 20_000  # values followed from one object


class ObjectNumbers:
    """Numbers for objects, each with its count of seen changes."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(16)
        self.changes: dict[int, int] = {}
        self._numbers: dict[int, tuple[object, int]] = {}

    def number(self, thing: object) -> int:
        """The number of an object, constant while it lives."""
        key = id(thing)
        known = self._numbers.get(key)
        if known is not None and _held(known[0]) is thing:
            return known[1]
        number = len(self.changes)
        try:
            self._numbers[key] = (weakref.ref(thing), number)
        except TypeError:
            self._numbers[key] = (thing, number)  # held, because its end cannot be noticed
        self.changes[number] = 0
        return number


def _held(thing: object) -> object:
    return thing() if isinstance(thing, weakref.ReferenceType) else thing


def follow(thing: object, number: int, watch: Watch, places: Container[int]) -> bool:
    """Hold everything reachable from an object; return whether that is all it depends on.

    Stops at libraries, and at the modules in `places`, which are held anyway.
    """
    left, seen = [thing], dict[int, object]()
    while left:
        value = left.pop()
        if id(value) in seen or id(value) in places:
            continue
        seen[id(value)] = value
        try:
            more = _parts(value, number, watch)
        except Exception:  # a user's object may raise anything
            return False
        if more is None or len(seen) > _MOST:
            return False
        left += more
    return True


def _is_settled(value: object) -> bool:
    """Whether a value contains nothing that could change."""
    if isinstance(value, type):
        return is_library_type(value)
    if isinstance(value, FunctionType):
        return is_library(value) and not value.__closure__
    if isinstance(value, ModuleType):
        return is_library_module(value)
    by_name = (*PLAIN, *BY_NAME, *WITHOUT_VALUE, enum.Enum, np.generic, re.Pattern)
    return isinstance(value, by_name) or is_builtin(value)


def _parts(value: Any, number: int, watch: Watch) -> list[Any] | None:
    """The parts of a value, which are held; None if it may hide something."""
    if _is_settled(value):
        return []
    if isinstance(value, FunctionType):
        watch.function(value, number)
        if is_library(value):
            return closure(value)
        reads = globals_read(value)
        watch.home(value.__globals__, number, only=frozenset(reads))
        given = (value.__defaults__, value.__kwdefaults__, vars(value))
        return [*closure(value), *reads.values(), *given]
    if isinstance(value, type):
        watch.home(class_dict(value), number)
        return [*vars(value).values(), *value.__bases__, type(value)]
    if isinstance(value, ModuleType):
        watch.home(vars(value), number)
        return [*vars(value).values()]
    if isinstance(value, torch.Tensor):
        watch.tensor(value, number)
        return []
    if isinstance(value, np.ndarray) and value.dtype != object and value.nbytes <= LARGE:
        watch.reading(lambda: [value.tobytes()], number)
        return []
    bound = _bound(value)
    return bound if bound is not None else _contents(value, number, watch)


def _bound(value: object) -> list[object] | None:
    """The objects behind a callable or a descriptor."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, GenericAlias):  # `vars` of it makes a new view of its class each time
        return [value.__origin__, value.__args__]
    if isinstance(value, UnionType):
        return [value.__args__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    return None


def _contents(value: object, number: int, watch: Watch) -> list[object] | None:
    parts: list[object] | None = None
    if isinstance(value, dict):
        watch.home(value, number)
        parts = [*value.values()]
    elif isinstance(value, list | set | frozenset | tuple | deque):
        if not isinstance(value, tuple | frozenset):
            watch.sequence(value, number)
        parts = [*value]
    if hasattr(value, "__dict__"):
        watch.thing(value, number)
        parts = [*(parts or ()), *vars(value).values(), type(value)]
    if slots := slots_of(value):
        watch.reading(lambda: [*slots_of(value).values()], number)
        parts = [*(parts or ()), *slots.values(), type(value)]
    return parts


def slots_of(value: object) -> Record:
    """The values in the slots of an object."""
    homes = [vars(base) for base in type(value).__mro__ if not is_library_type(base)]
    names = [n for home in homes for n, m in home.items() if type(m) is MemberDescriptorType]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def class_dict(kind: type) -> Record:
    """The dict behind the read-only view of a class."""
    return next(found for found in gc.get_referents(vars(kind)) if type(found) is dict)
