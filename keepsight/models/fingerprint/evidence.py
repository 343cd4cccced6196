"""What a proof about a function rests on, and what the function writes: watched while believed.

That a hook only looks was read off its code and the objects it names. It is believed as long as
these are the same, and only where nothing else of the model reads what the hook writes.
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

# Values of exactly these types have no code of a user's, and nothing hangs in them.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS = (list, dict, set)
_MOST_ITEMS = 64  # of a container whose values are looked at on every call
_MISSING = object()


class Unproven(Exception):
    """A step whose effect is not known."""


def is_plain(value: object) -> bool:
    """Whether a value is a number, a text or the like."""
    return type(value) in PLAIN


def are_plain(container: Any) -> bool:
    """Whether all values of a container are plain, and few enough to be compared on every call."""
    if type(container) not in (list, dict) or len(container) > _MOST_ITEMS:
        return False
    keys = container if isinstance(container, dict) else ()
    values = container.values() if isinstance(container, dict) else container
    return all(map(is_plain, keys)) and all(map(is_plain, values))


@dataclass(eq=False)
class Proof:
    """The grounds of one belief. Every object in it is held."""

    function: FunctionType | None
    # By the place: what holds a value (a dict, a cell of a function), and its name there.
    reads: dict[tuple[int, str], tuple[object, str]] = field(default_factory=dict)
    writes: dict[tuple[int, str], tuple[object, str]] = field(default_factory=dict)
    changed: dict[int, object] = field(default_factory=dict)  # containers and objects written into
    keeps: dict[int, object] = field(default_factory=dict)  # that keep what was handed over
    numbers: dict[int, object] = field(default_factory=dict)  # containers of which all is plain
    things: dict[int, object] = field(default_factory=dict)  # objects whose classes matter

    def read(self, home: object, name: str) -> object:
        """A value that the belief rests on."""
        value = _value(home, name)
        if value is _MISSING:
            raise Unproven
        self.reads[id(home), name] = (home, name)
        return value

    def absent(self, home: object, name: str) -> None:
        """Note a name that is not there, so that another one is found."""
        self.reads[id(home), name] = (home, name)

    def write(self, home: object, name: str) -> None:
        """Note a name that the function binds itself, to plain values only."""
        if not is_plain(_value(home, name)):
            raise Unproven
        self.writes[id(home), name] = (home, name)

    def number_in(self, container: object) -> bool:
        """Whether what is taken from a container is plain; the belief then rests on it."""
        if not are_plain(container):
            return False
        self.numbers[id(container)] = container
        return True

    def thing(self, thing: object) -> None:
        """Note an object whose class has no code for what was read or written."""
        self.things[id(thing)] = thing

    def state(self) -> list[object]:
        """All that has to stay as it is; of what the function writes itself, the types."""
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
        """Have it noticed when the grounds change."""
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
    """Whether operators of a value make new arrays and run no code of a user's."""
    return type(value) in (torch.Tensor, torch.nn.Parameter, np.ndarray)


@dataclass(eq=False)
class Belief:
    """Something in a model that was proven to change nothing, and what it is called if not."""

    path: str
    proof: Proof
    label: tuple[str, ...]
    thing: object


def doubted(beliefs: Iterable[Belief], watches: Callable[[], list[Watch]]) -> Iterator[Belief]:
    """Those that write into what a model reads, or whose numbers another one fills with tensors.

    Each is to be described when it is given: what is then held may cast doubt on others.
    """
    every = list(beliefs)
    if every and any(map(_may_catch, _Held(watches()).functions)):
        yield from every  # what one of them raises would become an answer
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
    """Whether a user's function may go on after an error of what it called."""
    return not functions.is_library(function) and functions.may_catch(function.__code__)


class _Held:
    """What watches hold, for asking whether something of it is written."""

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
