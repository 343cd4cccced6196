"""Detects library code that was replaced in memory.

A forward pass runs the functions of its modules' classes and what these find in their Python
modules. A user or a kernel library may replace them. Original code is named by the library's
version, which is recorded elsewhere; a replacement becomes part of the identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partialmethod
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from keepsight import digests
from keepsight.kinds import Record
from keepsight.models.fingerprint import functions
from keepsight.models.fingerprint.describe import CALLED, Describer, Plain
from keepsight.models.fingerprint.evidence import HarmlessObject, Proof
from keepsight.models.fingerprint.observers import passes_on
from keepsight.models.fingerprint.undescribed import BY_NAME, PLAIN, ObjectNumbers, class_dict
from keepsight.models.fingerprint.watch import Watch, closure

_OWNER = "code"
# Classes for preparing, loading and saving; a forward pass runs none of their code.
_SERVING = (
    "transformers.modeling_utils",
    "transformers.generation",
    "transformers.utils",
    "transformers.integrations.peft",
    "transformers.distributed",
    "transformers.loss",
)
_first: dict[str, str] = {}  # by class names: their code when it was first read
_MANY = 1000  # entries of a table that are checked


class LibraryCode:
    """The code of some classes and everything it reads; checked again after each change."""

    def __init__(self, private: ObjectNumbers, steady: bool = False) -> None:
        """`steady`: what cannot be watched is assumed to stay the same."""
        self._private, self._steady = private, steady
        self._kinds: frozenset[type] = frozenset()
        self._written = ""  # facts about the model recorded elsewhere
        self._watch: Watch | None = None
        self._restless: set[int] = set()  # private objects whose state cannot be watched
        self._own: dict[tuple[type, str], FunctionType] = {}  # library functions, as last seen
        self.replaced: dict[type | None, list[Plain]] = {}  # by class, or None for shared entries
        self.digest = self.differs = ""
        self.beliefs: list[HarmlessObject] = []  # functions in classes that only observe

    def refresh(self, kinds: frozenset[type], written: str) -> bool:
        """Read the code of these classes, in a model with these facts. Returns whether anything had
        to be read."""
        if not self.moved() and (kinds, written) == (self._kinds, self._written):
            return False
        self._kinds, self._written, self._watch = kinds, written, None
        watch = self._reading = Watch()
        self.replaced, self._all, self.beliefs = {}, list[Plain](), []
        self._names: dict[int, tuple[Record, set[str]]] = {}
        self._seen: dict[int, Any] = {}
        self._describer = Describer(watch, {}, digest_of, self._private)
        bases = {base for kind in kinds for base in kind.__mro__}
        self._left: list[FunctionType] = []
        self._mentioned: set[str] = set()  # names and strings in the functions
        self._guests: list[_AddedFunction] = []
        for base in sorted(bases, key=lambda base: (base.__module__, base.__qualname__)):
            self._read_class(base, watch)
        self._read_tensors(watch)
        self._read_left(watch)
        self._read_guests(watch)
        for home, names in self._names.values():
            watch.home(home, _OWNER, only=frozenset(names))
        watch.seal()
        self._restless = set() if self._steady else self._describer.restless
        self.digest = digests.digest("code", repr(sorted(self._all, key=repr)))
        named = repr(sorted(functions.place_of(kind) for kind in kinds))
        first = _first.setdefault(named, self.digest)
        # A library's function replaced by another of its own: distinguished, not named.
        self.differs = self.digest if self.digest != first else ""
        self._watch = watch
        return True

    @property
    def watches(self) -> list[Watch]:
        """The watches that hold everything that was read."""
        return [self._watch] if self._watch is not None else []

    def moved(self) -> bool:
        """Whether any of it may have changed."""
        if self._watch is not None and (found := self._watch.moved() | self._restless):
            for owner in found:
                if isinstance(owner, int):
                    self._private.changes[owner] += 1
            self._watch = None  # reported once; then it must be read again
        return self._watch is None

    # -- classes ---------------------------------------------------------------------------------

    def _read_class(self, base: type, watch: Watch) -> None:
        if base is object or base.__module__.startswith(_SERVING):
            return
        if not functions.is_library_type(base):
            self._replace(base, self._describer.value(base, _OWNER))
            return
        watch.home(class_dict(base), _OWNER)
        module = base is torch.nn.Module
        for name, value in list(vars(base).items()):
            usual = name in _RUNS if module else not name.startswith("__")
            if name in CALLED or usual or not _is_library_member(value):
                self._read_member(base, name, value)

    def _read_member(self, base: type, name: str, value: object) -> None:
        function = _function_of(value)
        if isinstance(function, FunctionType):
            function = self._own_one(function, base, name)
            self._all.append((*functions.place_of(base), name, *_places(function)))
            own = all(map(functions.is_library, functions.layers(function)))
            # A decorator of the library may put another module's function into a class.
            given = own and "." not in function.__code__.co_qualname
            if not given and not functions.in_place(function, base, name):
                self._replace(base, (name, self._describer.member(value, _OWNER)))
            self._left.extend(functions.layers(function))
        elif type(value) in PLAIN and not name.startswith("_"):
            self._all.append((*functions.place_of(base), name, repr(value)))
        elif functions.is_builtin(function):
            self._all.append((*functions.place_of(base), name, *functions.place_of(function)))
        elif not _is_library_member(value) or (callable(value) and not isinstance(value, type)):
            known = self._own.get((base, name))
            proof = passes_on(value, known) if known is not None else None
            if proof is not None:
                self._believe(proof, base, name, value)
                self._read_member(base, name, known)
            else:
                self._replace(base, (name, self._describer.value(value, _OWNER)))

    def _own_one(self, function: FunctionType, base: type, name: str) -> FunctionType:
        """The library's own function, if the one in its class only observes it."""
        if functions.in_place(function, base, name):
            self._own[base, name] = function
            return function
        known = self._own.get((base, name))
        inside = [held for held in closure(function) if isinstance(held, FunctionType)]
        own = next((f for f in inside if functions.in_place(f, base, name)), known)
        proof = passes_on(function, own) if own is not None else None
        if own is None or proof is None:
            return function
        self._believe(proof, base, name, function)
        return own

    def _believe(self, proof: Proof, base: type, name: str, value: object) -> None:
        proof.hold(self._reading, _OWNER)
        place = functions.place_of(base)
        self.beliefs.append(HarmlessObject("*", proof, ("replaced", *place, name), value))

    def _replace(self, base: type | None, what: Plain) -> None:
        place = functions.place_of(base) if base is not None else ()
        self.replaced.setdefault(base, []).append(("replaced", *place, what))

    def _read_tensors(self, watch: Watch) -> None:
        """Read replacements of the methods that torch gives all tensors."""
        for kind in (torch.Tensor, torch.nn.Parameter):
            watch.home(class_dict(kind), _OWNER)
            for name, value in list(vars(kind).items()):
                function = _function_of(value)
                where = (*functions.place_of(kind), name)
                if isinstance(function, FunctionType):
                    if _is_added(name, function):
                        self._guests.append(_AddedFunction(where, name, function, False))
                    else:
                        self._read_function(where, function, followed=False)
                elif functions.is_builtin(function) or not _is_library_member(value):
                    self._read_object(where, value)

    # -- globals of functions --------------------------------------------------------------------

    def _read_left(self, watch: Watch) -> None:
        while self._left:
            self._read_globals(self._left.pop(), watch)

    def _read_globals(self, function: FunctionType, watch: Watch) -> None:
        if id(function) in self._seen:
            return
        self._seen[id(function)] = function
        watch.function(function, _OWNER)
        names = functions.names_in(function.__code__)
        self._mentioned |= names | functions.strings_in(function.__code__)
        home = function.__globals__
        self._read_names(home, str(home.get("__name__", "")), names, watch)

    def _read_names(self, home: Record, place: str, names: Iterable[str], watch: Watch) -> None:
        # Absent names too: a global of that name would hide a built-in.
        self._names.setdefault(id(home), (home, set()))[1].update(names)
        for name in sorted(name for name in names if name in home):
            self._read_global(place, name, home[name], names, watch)

    def _read_global(
        self, place: str, name: str, value: object, names: Iterable[str], watch: Watch
    ) -> None:
        if isinstance(value, FunctionType):
            self._read_function((place, name), value, followed=True)
        elif isinstance(value, ModuleType):
            self._read_module((place, name), value, names, watch)
        elif tables := list(_tables(value)):
            if name.startswith("_global_"):  # hooks on all modules, which are read elsewhere
                return
            for table in tables:
                watch.home(table, _OWNER)
            self._read_table(place, name, {k: v for table in tables for k, v in table.items()})
        elif type(value) not in PLAIN or not name.startswith("_"):
            self._read_object((place, name), value)

    def _read_function(self, where: tuple[str, ...], value: FunctionType, followed: bool) -> None:
        self._all.append((*where, *_places(value)))
        if not all(map(functions.is_library, functions.layers(value))):
            self._replace(None, (*where, self._describer.value(value, _OWNER)))
        elif followed and _is_followed(value):
            self._left.extend(functions.layers(value))

    def _read_module(
        self, where: tuple[str, ...], module: ModuleType, names: Iterable[str], watch: Watch
    ) -> None:
        """The functions of a Python module that are called through it."""
        self._all.append((*where, module.__name__))
        if not functions.is_library_module(module):
            self._replace(None, (*where, self._describer.stateful(module)))
        elif module.__name__.startswith(_LOOKED_INTO):
            self._look_into(module, names, watch)

    def _look_into(self, module: ModuleType, names: Iterable[str], watch: Watch) -> None:
        home, place = vars(module), module.__name__
        self._names.setdefault(id(home), (home, set()))[1].update(names)
        for name in sorted(name for name in names if name in home):
            value = home[name]
            if isinstance(value, FunctionType):
                self._read_function((place, name), value, followed=False)
            elif not isinstance(value, ModuleType):
                self._read_object((place, name), value)
            elif value.__name__ in _NESTED or not functions.is_library_module(value):
                self._read_module((place, name), value, names, watch)

    def _read_object(self, where: tuple[str, ...], value: object) -> None:
        """Describe an object that is no function. If a user made it, it counts as a replacement."""
        if functions.is_builtin(value):
            self._all.append((*where, *functions.place_of(value)))
        elif type(value) in PLAIN or _is_described(value):
            made = isinstance(value, type) and not functions.is_library_type(value)
            describe = self._describer
            found = describe.stateful(value) if made else describe.value(value, _OWNER)
            self._all.append((*where, found))
            if is_users(found):
                self._replace(None, (*where, found))

    def _read_table(self, place: str, name: str, table: dict[Any, object]) -> None:
        """Read a table of functions, such as the implementations of attention."""
        for key, value in list(table.items())[:_MANY]:
            where = (place, name, str(key))
            if isinstance(value, FunctionType):
                if _is_foreign_entry(place, value):
                    self._guests.append(_AddedFunction(where, str(key), value, True))
                else:
                    self._read_function(where, value, followed=True)
            elif type(value) not in PLAIN or not name.startswith("_"):
                self._read_object(where, value)

    def _read_guests(self, watch: Watch) -> None:
        """Read what libraries added to tables and to tensors, if the model or its code uses the
        name.

        Any import may add entries. An unused one changes no forward pass, and must not hide what a
        process with fewer imports remembered.
        """
        found = True
        while found:
            wanted = [guest for guest in self._guests if self._is_wanted(guest.key)]
            self._guests = [guest for guest in self._guests if guest not in wanted]
            for where, _, function, followed in wanted:
                self._read_function(where, function, followed)
            self._read_left(watch)
            found = bool(wanted)

    def _is_wanted(self, key: str) -> bool:
        return key in self._mentioned or repr(key) in self._written


class _AddedFunction(NamedTuple):
    """A function that a library added to another library's table or to tensors."""

    where: tuple[str, ...]
    key: str
    function: FunctionType
    followed: bool


_RUNS = ("_call_impl", "_wrapped_call_impl")
_LOOKED_INTO = ("torch", "transformers", "math")
_CONSTANTS = (list, tuple, set, frozenset, torch.Tensor, np.ndarray, SimpleNamespace)
_NESTED = ("torch.nn", "torch.nn.functional")


def _is_foreign_entry(place: str, function: FunctionType) -> bool:
    """Whether a library's function is in another library's table."""
    inside = list(functions.layers(function))
    home = functions.place_of(inside[-1])[0]
    own = home.partition(".")[0] == place.partition(".")[0]
    return not own and all(map(functions.is_library, inside))


def _is_added(name: str, function: FunctionType) -> bool:
    """Whether a library added this method to tensors: it was not defined inside a class
    `Tensor`."""
    inside = list(functions.layers(function))
    written = inside[-1].__code__.co_qualname.partition(".")[0] == "Tensor"
    return not written and not name.startswith("__") and all(map(functions.is_library, inside))


def _is_followed(function: FunctionType) -> bool:
    module = str(function.__globals__.get("__name__", ""))
    return module.startswith("transformers.") and not module.startswith(_SERVING)


def _is_described(value: object) -> bool:
    """Whether a global may be called, or read as a constant."""
    if callable(value) or isinstance(value, (*BY_NAME, *_CONSTANTS)):
        return True
    return not functions.is_library_type(type(value))


def _function_of(value: object) -> object:
    """The function inside a method, a property or the like."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    if isinstance(value, cached_property | partialmethod):
        return value.func
    return value


def _is_library_member(value: object) -> bool:
    """Whether a class attribute came with a library, judging by its type or its code."""
    function = _function_of(value)
    if isinstance(function, FunctionType):
        return all(map(functions.is_library, functions.layers(function)))
    return functions.is_library_type(type(function))


def is_users(found: Plain) -> bool:
    """Whether a description names user code, or an object without a description."""
    if isinstance(found, str):
        return False
    return found[:1] in (("code",), ("class",), ("private",)) or any(map(is_users, found))


def _places(function: object) -> Iterator[str]:
    for layer in functions.layers(function):
        yield from functions.place_of(layer)
    if not isinstance(function, FunctionType):
        yield from functions.place_of(function)


def _tables(value: object) -> Iterator[dict[Any, object]]:
    """The dicts behind a table of functions; later ones win."""
    if isinstance(value, dict):
        yield value
    elif isinstance(value, Mapping):
        for name in ("_global_mapping", "_local_mapping"):
            home = getattr(value, name, None)
            if isinstance(home, dict):
                yield home


def digest_of(tensor: torch.Tensor) -> str:
    """The digest of a tensor that code reads."""
    return digests.weight_digest(tensor)
