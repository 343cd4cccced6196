"""Libraries' code as it stands in memory: whether it is still what the libraries wrote.

A forward pass runs the functions of its modules' classes and what these find in their modules. A
user or a kernel library may put others in their place. Code that a library wrote is named by the
library's version, which is recorded elsewhere; what stands in its place is part of the identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

from keepsight import digests
from keepsight.kinds import Record
from keepsight.models.fingerprint import functions
from keepsight.models.fingerprint.describe import CALLED, Describer, Plain
from keepsight.models.fingerprint.evidence import Belief, Proof
from keepsight.models.fingerprint.onlookers import passes_on
from keepsight.models.fingerprint.undescribed import PLAIN, Private, class_dict
from keepsight.models.fingerprint.watch import Watch, closure

_OWNER = "code"
# Classes whose code prepares, loads and saves; a forward pass runs none of it.
_SERVING = (
    "transformers.modeling_utils",
    "transformers.generation",
    "transformers.utils",
    "transformers.integrations.peft",
    "transformers.distributed",
    "transformers.loss",
)
_first: dict[str, str] = {}  # by the names of the classes: their code when it was first read
_MANY = 1000  # entries of a table that are looked at


class LibraryCode:
    """The code of some classes and all it reads, looked at again when something of it changed."""

    def __init__(self, private: Private) -> None:
        self._private = private
        self._kinds: frozenset[type] = frozenset()
        self._watch: Watch | None = None
        self._own: dict[tuple[type, str], FunctionType] = {}  # libraries' functions, as last seen
        self.replaced: dict[type | None, list[Plain]] = {}  # by class, or None for what is shared
        self.digest = self.differs = ""
        self.beliefs: list[Belief] = []  # what stands in a class and only looks

    def refresh(self, kinds: frozenset[type]) -> None:
        """Read the code of these classes."""
        if not self.moved() and kinds == self._kinds:
            return
        self._kinds, self._watch = kinds, None
        watch = self._reading = Watch()
        self.replaced, self._all, self.beliefs = {}, list[Plain](), []
        self._names: dict[int, tuple[Record, set[str]]] = {}
        self._seen: dict[int, Any] = {}
        self._describer = Describer(watch, {}, _unread, self._private)
        bases = {base for kind in kinds for base in kind.__mro__}
        self._left: list[FunctionType] = []
        for base in sorted(bases, key=lambda base: (base.__module__, base.__qualname__)):
            self._read_class(base, watch)
        while self._left:
            self._read_globals(self._left.pop(), watch)
        for home, names in self._names.values():
            watch.home(home, _OWNER, only=frozenset(names))
        watch.seal()
        self.digest = digests.digest("code", repr(sorted(self._all, key=repr)))
        named = repr(sorted(functions.place_of(kind) for kind in kinds))
        first = _first.setdefault(named, self.digest)
        # What a library's own code was exchanged for another of its own: told apart, not named.
        self.differs = self.digest if self.digest != first else ""
        self._watch = watch

    @property
    def watches(self) -> list[Watch]:
        """What holds all of it, where it was read."""
        return [self._watch] if self._watch is not None else []

    def moved(self) -> bool:
        """Whether any of it may have changed."""
        if self._watch is not None and self._watch.moved():
            self._watch = None  # said once: it has to be read again
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
            if name in CALLED or (name in _RUNS if module else not name.startswith("__")):
                self._read_member(base, name, value)

    def _read_member(self, base: type, name: str, value: Any) -> None:
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if isinstance(function, FunctionType):
            function = self._own_one(function, base, name)
            self._all.append((*functions.place_of(base), name, *_places(function)))
            own = all(map(functions.is_library, functions.layers(function)))
            # A decorator of the library may put a function of a module into a class.
            given = own and "." not in function.__code__.co_qualname
            if not given and not functions.in_place(function, base, name):
                self._replace(base, (name, self._describer.member(value, _OWNER)))
            self._left.extend(functions.layers(function))
        elif type(value) in PLAIN and not name.startswith("_"):
            self._all.append((*functions.place_of(base), name, repr(value)))
        elif callable(value) and not isinstance(value, type) and not functions.is_builtin(value):
            known = self._own.get((base, name))
            proof = passes_on(value, known) if known is not None else None
            if proof is not None:
                self._believe(proof, base, name, value)
                self._read_member(base, name, known)
            else:
                self._replace(base, (name, self._describer.value(value, _OWNER)))

    def _own_one(self, function: FunctionType, base: type, name: str) -> FunctionType:
        """The library's own function, if the one in its class only looks at what that does."""
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

    def _believe(self, proof: Proof, base: type, name: str, value: Any) -> None:
        proof.hold(self._reading, _OWNER)
        place = functions.place_of(base)
        self.beliefs.append(Belief("*", proof, ("replaced", *place, name), value))

    def _replace(self, base: type | None, what: Plain) -> None:
        place = functions.place_of(base) if base is not None else ()
        self.replaced.setdefault(base, []).append(("replaced", *place, what))

    # -- what functions find in their modules ----------------------------------------------------

    def _read_globals(self, function: FunctionType, watch: Watch) -> None:
        if id(function) in self._seen:
            return
        self._seen[id(function)] = function
        watch.function(function, _OWNER)
        names = functions.names_in(function.__code__)
        home = function.__globals__
        self._read_names(home, str(home.get("__name__", "")), names, watch)

    def _read_names(self, home: Record, place: str, names: Iterable[str], watch: Watch) -> None:
        found = {name for name in names if name in home}
        self._names.setdefault(id(home), (home, set()))[1].update(found)
        for name in sorted(found):
            self._read_global(place, name, home[name], names, watch)

    def _read_global(
        self, place: str, name: str, value: Any, names: Iterable[str], watch: Watch
    ) -> None:
        if isinstance(value, FunctionType):
            self._all.append((place, name, *_places(value)))
            if not all(map(functions.is_library, functions.layers(value))):
                self._replace(None, (place, name, self._describer.value(value, _OWNER)))
            elif _is_followed(value):
                self._left.extend(functions.layers(value))
        elif isinstance(value, ModuleType):
            if value.__name__.startswith(_LOOKED_INTO):
                self._look_into(value, names, watch)
        elif type(value) in PLAIN and not name.startswith("_"):
            self._all.append((place, name, repr(value)))
        elif isinstance(value, type) and not functions.is_library_type(value):
            self._replace(None, (place, name, self._describer.value(value, _OWNER)))
        elif tables := list(_tables(value)):
            for table in tables:
                watch.home(table, _OWNER)
            self._read_table(place, name, {k: v for table in tables for k, v in table.items()})

    def _look_into(self, module: ModuleType, names: Iterable[str], watch: Watch) -> None:
        """The functions of a module that are called through it."""
        home = vars(module)
        found = {n for n in names if isinstance(home.get(n), FunctionType)}
        found |= {n for n in names if functions.is_builtin(home.get(n))}
        self._names.setdefault(id(home), (home, set()))[1].update(found)
        for name in sorted(found):
            value = home[name]
            self._all.append((module.__name__, name, *_places(value)))
            if isinstance(value, FunctionType) and not functions.is_library(value):
                self._replace(None, (module.__name__, name, self._describer.value(value, _OWNER)))
        for name in names:
            inner = home.get(name)
            if isinstance(inner, ModuleType) and inner.__name__ in _NESTED:
                self._look_into(inner, names, watch)

    def _read_table(self, place: str, name: str, table: dict[Any, Any]) -> None:
        """A table of functions, such as that of the implementations of attention."""
        for key, value in list(table.items())[:_MANY]:
            if isinstance(value, FunctionType):
                self._all.append((place, name, str(key), *_places(value)))
                if not all(map(functions.is_library, functions.layers(value))):
                    what = self._describer.value(value, _OWNER)
                    self._replace(None, (place, name, str(key), what))
                elif _is_followed(value):
                    self._left.extend(functions.layers(value))


_RUNS = ("_call_impl", "_wrapped_call_impl")
_LOOKED_INTO = ("torch", "transformers", "math")
_NESTED = ("torch.nn", "torch.nn.functional")


def _is_followed(function: FunctionType) -> bool:
    module = str(function.__globals__.get("__name__", ""))
    return module.startswith("transformers.") and not module.startswith(_SERVING)


def _places(function: Any) -> Iterator[str]:
    for layer in functions.layers(function):
        yield from functions.place_of(layer)
    if not isinstance(function, FunctionType):
        yield from functions.place_of(function)


def _tables(value: Any) -> Iterator[dict[Any, Any]]:
    """The dicts behind a table of functions; what is in a later one counts."""
    if isinstance(value, dict):
        yield value
    elif isinstance(value, Mapping):
        for name in ("_global_mapping", "_local_mapping"):
            home = getattr(value, name, None)
            if isinstance(home, dict):
                yield home


def _unread(tensor: torch.Tensor) -> str:
    return digests.weight_digest(tensor)
