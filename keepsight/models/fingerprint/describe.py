"""Describes values in words that are equal in every process, and holds them for comparison.

Most of a model is plain: numbers, names, configurations, weights. Their description is their value,
so an equal model has an equal description tomorrow. An object without a description, such as a
user's stateful hook, gets a unique number: a model with it equals no other, in this process or any
other.
"""

from __future__ import annotations

import enum
import functools
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from keepsight import digests
from keepsight.errors import KeepsightError
from keepsight.models.fingerprint import functions
from keepsight.models.fingerprint.undescribed import (
    BY_NAME,
    LARGE,
    PLAIN,
    WITHOUT_VALUE,
    ObjectNumbers,
    class_dict,
    follow,
    slots_of,
)
from keepsight.models.fingerprint.watch import Owner, Watch, closure

Plain = str | tuple["Plain", ...]

# Parts of a configuration that name its origin and change no result.
ORIGIN = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map"}
    | {"_post_init_done", "dtype", "torch_dtype"}
)
_METHODS = (
    type(str.join),
    type(object.__init__),
    type(vars(dict)["fromkeys"]),
)
# Methods of a class that no forward pass calls on an existing object.
_BUILD_AND_SHOW = ("__init__", "__new__", "__del__", "__repr__", "__str__", "__reduce__")
CALLED = ("__call__", "__getattr__", "__getattribute__")


class Describer:
    """One walk over values: each is described once, and held by the watch if there is one."""

    def __init__(
        self,
        watch: Watch | None,
        places: Mapping[int, str],
        digest: Callable[[torch.Tensor], str],
        private: ObjectNumbers,
    ) -> None:
        self.watch, self._places, self._digest, self.private = watch, places, digest, private
        self._known: dict[int, tuple[object, Plain]] = {}
        self.restless: set[int] = set()  # private objects whose state cannot be watched
        self.is_private = False

    def value(self, value: object, owner: Owner) -> Plain:
        """The description of a value."""
        kind = type(value)
        if kind in PLAIN:
            return (kind.__name__, repr(value))
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        self._known[id(value)] = (value, ("again",))  # it contains itself
        try:
            found = self._describe(value, owner)
        except KeepsightError:
            raise
        except Exception:  # a user's object may raise anything
            found = self.stateful(value)
        self._known[id(value)] = (value, found)
        return found

    def _describe(self, value: object, owner: Owner) -> Plain:
        kind = functions.place_of(type(value))
        if isinstance(value, torch.Tensor):
            return self.tensor(value, owner)
        if isinstance(value, torch.nn.Module) and id(value) in self._places:
            return ("part", self._places[id(value)])
        if isinstance(value, type):
            return self._type(value, owner)
        if isinstance(value, enum.Enum):
            return (*kind, value.name)
        if isinstance(value, (*BY_NAME, np.generic, re.Pattern)):
            return (*kind, str(value))
        if isinstance(value, WITHOUT_VALUE):
            return kind
        if isinstance(value, ModuleType):
            return ("module", value.__name__)
        if callable(value) and (found := self._callable(value, owner)) is not None:
            return found
        if isinstance(value, dict):
            self._hold_home(value, owner)
            return (*kind, *self._items(value, owner))
        if isinstance(value, list | tuple | set | frozenset | deque):
            return (*kind, *self._sequence(value, owner))
        return self._object(value, kind, owner)

    def _items(self, home: Mapping[Any, object], owner: Owner) -> Iterator[Plain]:
        pairs = [(self.value(name, owner), self.value(part, owner)) for name, part in home.items()]
        yield from sorted(pairs, key=repr)

    def _sequence(self, value: Any, owner: Owner) -> list[Plain]:
        if self.watch is not None and not isinstance(value, tuple | frozenset):
            self.watch.sequence(value, owner)
        found = [self.value(part, owner) for part in value]
        return sorted(found, key=repr) if isinstance(value, set | frozenset) else found

    def _hold_home(self, home: dict[Any, object], owner: Owner) -> None:
        if self.watch is not None:
            self.watch.home(home, owner)

    def tensor(self, tensor: torch.Tensor, owner: Owner) -> Plain:
        """A tensor, described by its values."""
        if self.watch is not None:
            self.watch.tensor(tensor, owner)
        return ("tensor", str(tensor.dtype), self._digest(tensor))

    def _object(self, value: Any, kind: tuple[str, ...], owner: Owner) -> Plain:
        if isinstance(value, np.ndarray) and value.dtype != object:
            if self.watch is not None and value.nbytes <= LARGE:
                self.watch.reading(lambda: [value.tobytes()], owner)
            return (*kind, digests.digest("array", value))
        if isinstance(value, torch.ScriptObject):
            return (*kind, self._packed(value, owner))
        library = functions.is_library_type(type(value))
        if not hasattr(value, "__dict__"):
            return self.unnamed(value) if library else self.stateful(value)
        if callable(value) and not library and not isinstance(value, torch.nn.Module):
            return self.stateful(value)
        ignored = ORIGIN if isinstance(value, PreTrainedConfig) else frozenset()
        if self.watch is not None:
            self.watch.thing(value, owner, ignored)
        made = () if library else (self._type(type(value), owner),)
        own = {name: part for name, part in vars(value).items() if name not in ignored}
        slots: Plain = ()
        if isinstance(value, dict | list | set | tuple):  # a tensor class of a user or library
            slots = tuple(self._sequence(list(value), owner))
        if not library and (named := slots_of(value)):
            if self.watch is not None:
                self.watch.reading(lambda: [*slots_of(value).values()], owner)
            slots = (slots, *self._items(named, owner))
        return (*kind, *made, *self._items(own, owner), slots)

    def _packed(self, value: object, owner: Owner) -> Plain:
        """Weights in a kernel's packed form."""
        try:
            state = value.__getstate__()
        except (RuntimeError, AttributeError, TypeError):
            return self.unnamed(value)
        silent = Describer(None, self._places, self._digest, self.private)  # our copy
        return silent.value(state, owner)

    def unnamed(self, value: object) -> Plain:
        """The number of an object without a description."""
        self.is_private = True
        number = self.private.number(value)
        if self.watch is not None:
            self.watch.keep(value)
        return ("private", self.private.name, str(number), str(self.private.changes[number]))

    # -- code ------------------------------------------------------------------------------------

    def _callable(self, value: object, owner: Owner) -> Plain | None:
        if isinstance(value, FunctionType):
            return self.function(value, owner)
        if isinstance(value, MethodType):
            own: object = value.__self__
            bound = self._bound(own, owner)
            return ("method", bound, self.value(value.__func__, owner))
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return ("partial", *(self.value(part, owner) for part in parts))
        if isinstance(value, torch.jit.ScriptFunction):
            return self._compiled(value)
        if isinstance(value, BuiltinFunctionType) and not functions.is_builtin(value):
            return ("method", self._bound(value.__self__, owner), value.__name__)
        if functions.is_builtin(value) or isinstance(value, _METHODS):
            return ("builtin", *functions.place_of(value))
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(value, functools._lru_cache_wrapper) and wrapped is not None:
            return ("cached", self.value(wrapped, owner))
        return None

    def _compiled(self, function: Any) -> Plain:
        """TorchScript, described by its graph if the text contains all constants."""
        text = function.inlined_graph.str(False)
        if "<" in text:
            return self.unnamed(function)
        return ("code", function.name, digests.digest("graph", text))

    def _bound(self, own: object, owner: Owner) -> Plain:
        named = isinstance(own, type) or id(own) in self._places
        if named or functions.is_library_type(type(own)):
            return self.value(own, owner)
        return self.stateful(own)

    def function(self, function: FunctionType, owner: Owner) -> Plain:
        """A function, described by its place in a library, by its code, or by a number."""
        if self.watch is not None:
            self.watch.function(function, owner)
        if functions.is_library(function):
            inside = [self.value(part, owner) for part in closure(function)]
            given = self.value(function.__defaults__, owner) if inside else ()
            return ("function", *functions.place_of(function), *inside, given)
        pure = self._pure(function, set(), owner)
        return self.stateful(function) if pure is None else pure

    def _pure(self, function: FunctionType, seen: set[int], owner: Owner) -> Plain | None:
        """A user's function, described by its code if nothing it depends on can change unseen."""
        code, home = function.__code__, function.__globals__
        name = ("code", code.co_qualname, functions.code_digest(code))
        if id(function) in seen:
            return name
        seen.add(id(function))
        reads = functions.globals_read(function)
        cells = dict(zip(code.co_freevars, closure(function), strict=False))
        if functions.writes_outside(code) or len(cells) < len(code.co_freevars):
            return None
        named = tuple(sorted((function.__kwdefaults__ or {}).items()))
        given = {"defaults": function.__defaults__, "named": named}
        attributes = {**vars(function)}
        attributes.pop("__wrapped__", None)
        found: list[Plain] = []
        for read, value in [*cells.items(), *reads.items(), *given.items(), *attributes.items()]:
            plain = self._plain_read(value, seen, owner)
            if plain is None:
                return None
            found.append((read, plain))
        if self.watch is not None:
            self.watch.home(home, owner, only=frozenset(reads))
        return (*name, *found)

    def _plain_read(self, value: object, seen: set[int], owner: Owner) -> Plain | None:
        """A value that a function reads, described if it is plain and immutable."""
        if type(value) in PLAIN:
            return (type(value).__name__, repr(value))
        if isinstance(value, tuple):
            parts = [self._plain_read(part, seen, owner) for part in value]
            return None if None in parts else ("tuple", *(part for part in parts if part))
        if isinstance(value, FunctionType) and not functions.is_library(value):
            if self.watch is not None:
                self.watch.function(value, owner)
            return self._pure(value, seen, owner)
        if isinstance(value, ModuleType):
            return ("module", value.__name__) if functions.is_library_module(value) else None
        if isinstance(value, type) and not functions.is_library_type(value):
            return None
        by_name = (type, FunctionType, enum.Enum, *BY_NAME)
        if isinstance(value, by_name) or functions.is_builtin(value):
            return self.value(value, owner)
        if isinstance(value, torch.nn.Module) and id(value) in self._places:
            return ("part", self._places[id(value)])
        return None

    def _type(self, kind: type, owner: Owner) -> Plain:
        """A class: a library's by its place, a user's by the code of its functions."""
        if functions.is_library_type(kind):
            return functions.place_of(kind)
        found: list[Plain] = []
        for base in kind.__mro__:
            if functions.is_library_type(base):
                found.append(functions.place_of(base))
                continue
            found.append(base.__qualname__)
            found += self.members(base, owner)
        return ("class", *found)

    def members(self, kind: type, owner: Owner) -> Iterator[Plain]:
        """The functions and values that a class defines."""
        self._hold_home(class_dict(kind), owner)
        for name, value in sorted(vars(kind).items()):
            code = isinstance(value, FunctionType) and name not in _BUILD_AND_SHOW
            if not name.startswith("__") or name in CALLED or code:
                yield (name, self.member(value, owner))

    def member(self, value: object, owner: Owner) -> Plain:
        """One attribute of a class, with descriptors such as `staticmethod` removed."""
        if isinstance(value, staticmethod | classmethod):
            return (type(value).__name__, self.value(value.__func__, owner))
        if isinstance(value, property):
            return ("property", self.value(value.fget, owner))
        return self.value(value, owner)

    # -- objects with state ----------------------------------------------------------------------

    def stateful(self, thing: object) -> Plain:
        """A user's object that may change: its number, and how many changes were seen."""
        number = self.private.number(thing)
        if self.watch is not None and not follow(thing, number, self.watch, self._places):
            self.restless.add(number)
        return self.unnamed(thing)
