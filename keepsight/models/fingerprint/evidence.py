"""The grounds of a proof about a function, and what the function writes; watched while believed.

A hook's code and the objects it names show that it only observes. That is believed while these stay
the same, and only if nothing else in the model reads what the hook writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch

from keepsight.models.fingerprint import functions
from keepsight.models.fingerprint.undescribed import class_dict
from keepsight.models.fingerprint.watch import Owner, Watch, closure

# Values of exactly these types run no user code and hold no other values.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS = (list, dict, set)
_MOST_ITEMS = 64  # most items of a container whose values are compared
_MISSING = object()


class Unproven(Exception):
    """An instruction whose effect is unknown."""


def is_plain(value: object) -> bool:
    """Whether a value is a number, a text or the like."""
    return type(value) in PLAIN


def are_plain(container: Any) -> bool:
    """Whether all values of a container are plain, and few enough to compare on every call."""
    if type(container) not in (list, dict) or len(container) > _MOST_ITEMS:
        return False
    keys = container if isinstance(container, dict) else ()
    values = container.values() if isinstance(container, dict) else container
    return all(map(is_plain, keys)) and all(map(is_plain, values))


@dataclass(eq=False)
class Proof:
    """The grounds of one belief. Every object in it is held."""

    function: FunctionType | None
    # by place: the holder of a value (a dict, a cell of a function), and its name there
    reads: dict[tuple[int, str], tuple[object, str]] = field(default_factory=dict)
    writes: dict[tuple[int, str], tuple[object, str]] = field(default_factory=dict)
    changed: dict[int, object] = field(default_factory=dict)  # containers and objects written into
    keeps: dict[int, object] = field(default_factory=dict)  # those that keep arguments
    numbers: dict[int, object] = field(default_factory=dict)  # containers with only plain values
    things: dict[int, object] = field(default_factory=dict)  # objects whose classes matter

    def read(self, home: object, name: str) -> object:
        """Add a value that the belief rests on."""
        value = _value(home, name)
        if value is _MISSING:
            raise Unproven
        self.reads[id(home), name] = (home, name)
        return value

    def absent(self, home: object, name: str) -> None:
        """Add a name that must stay absent, because another one is used."""
        self.reads[id(home), name] = (home, name)

    def write(self, home: object, name: str) -> None:
        """Add a name that the function itself sets, to plain values only."""
        if not is_plain(_value(home, name)):
            raise Unproven
        self.writes[id(home), name] = (home, name)

    def number_in(self, container: object) -> bool:
        """Whether a value taken from a container is plain; the belief then rests on the
        container."""
        if not are_plain(container):
            return False
        self.numbers[id(container)] = container
        return True

    def thing(self, thing: object) -> None:
        """Add an object whose class has no code for the accesses made."""
        self.things[id(thing)] = thing

    def state(self) -> list[object]:
        """What must stay the same; of values that the function writes, only the types."""
        found: list[object] = []
        if self.function is not None:
            own = self.function
            found += [own.__code__, own.__defaults__, own.__kwdefaults__]
        for place, (home, name) in {**self.reads, **self.writes}.items():
            value = _value(home, name)
            found.append(type(value) if place in self.writes else value)
        found += [are_plain(container) for container in self.numbers.values()]
        return found + [type(thing) for thing in self.things.values()]

    def hold(self, watch: Watch, owner: Owner) -> None:
        """Register the grounds with a watch, which then notices changes."""
        watch.reading(self.state, owner)
        for thing in self.things.values():
            for base in type(thing).__mro__:
                if not functions.is_library_type(base):
                    watch.home(class_dict(base), owner)


def _value(home: Any, name: str) -> Any:
    if isinstance(home, CellType):
        try:
            return home.cell_contents
        except ValueError:
            return _MISSING
    return home.get(name, _MISSING)


def array_like(value: object) -> bool:
    """Whether operators of a value make new arrays and run no user code."""
    return type(value) in (torch.Tensor, torch.nn.Parameter, np.ndarray)


@dataclass(eq=False)
class HarmlessObject:
    """An object in a model that was proven to change nothing, and its description otherwise."""

    path: str
    proof: Proof
    label: tuple[str, ...]
    thing: object


def failed_proofs(
    beliefs: Iterable[HarmlessObject], watches: Callable[[], list[Watch]]
) -> Iterator[HarmlessObject]:
    """Yield beliefs that fail: the function writes into what the model reads, or another one stores
    tensors in its numbers.

    Describe each when it is yielded: what is then held may refute others.
    """
    every = list(beliefs)
    if every and any(map(_may_catch, _Held(watches()).functions)):
        yield from every  # an exception would change the answer
        return
    left = [one for one in every if one.proof.changed or one.proof.writes or one.proof.numbers]
    needed = {number for one in left for number in one.proof.keeps}
    while left:
        held = _Held(watches())
        found = [one for one in left if not needed.isdisjoint(one.proof.numbers)]
        found += [one for one in left if held.reads(one.proof) and one not in found]
        if not found:
            return
        yield from found
        left = [one for one in left if not any(one is other for other in found)]


def _may_catch(function: FunctionType) -> bool:
    """Whether a user's function may continue after an error in a call."""
    return not functions.is_library(function) and functions.may_catch(function.__code__)


class _Held:
    """The objects that watches hold, to check writes against."""

    def __init__(self, watches: list[Watch]) -> None:
        self._numbers: set[int] = set()
        self._names: dict[int, set[str]] = {}
        self.functions: list[FunctionType] = []
        for watch in watches:
            things, names, code = watch.held()
            self._numbers |= things
            for number, some in names:
                self._names.setdefault(number, set()).update(some)
            self.functions += code
            for function in code:
                self._numbers.update(map(id, function.__closure__ or ()))
                self._numbers.update(map(id, closure(function)))

    def reads(self, proof: Proof) -> bool:
        """Whether anything that a function writes is held."""
        if any(number in self._numbers or number in self._names for number in proof.changed):
            return True
        return any(
            number in self._numbers or name in self._names.get(number, ())
            for number, name in proof.writes
        )
