"""Holds everything that a description was made of, and tells whether any of it changed.

A forward pass reads dicts, lists, cells of functions and tensors. Each is held with a copy of its
contents. So only living objects are compared, and no new object can take an old one's address. If
the interpreter allows it, machine words of thousands of dicts and tensors are checked first
(`memory_words.py`), and only those with a changed word are compared.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import torch

from keepsight.models.fingerprint import memory_words

Owner = Hashable  # owner of a change: the path of a module, or the number of a private object
QUIET: Owner = ("quiet",)  # stands for owners whose changes concern no weights
_MISSING = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def same(one: object, other: object) -> bool:
    """Whether two values are one object, or plain and equal."""
    if one is other:
        return True
    kind = type(one)
    return kind is type(other) and kind in _PLAIN and repr(one) == repr(other)


@dataclass
class _DictCopy:
    """A copy of a dict: all of it except some names, or only some names."""

    home: dict[Any, object]
    owners: set[Owner]
    ignored: frozenset[str]
    quiet: frozenset[str]  # names whose change concerns no weight
    only: frozenset[str] | None
    copy: dict[Any, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.copy = self._now()

    def _now(self) -> dict[Any, object]:
        if self.only is None:
            # A subclass may make its values when they are asked for.
            return dict(self.home if type(self.home) is dict else dict.items(self.home))
        return {name: self.home[name] for name in self.only if name in self.home}

    def changed(self) -> set[Owner]:
        """The owner of a change, or None."""
        now, then = self._now(), self.copy
        if list(now) == list(then) and all(map(operator.is_, now.values(), then.values())):
            return set()
        names = [name for name in {**now, **then} if name not in self.ignored]
        other = {n for n in names if not same(now.get(n, _MISSING), then.get(n, _MISSING))}
        if not other and [n for n in now if n in names] == [n for n in then if n in names]:
            return set()
        return {QUIET} if other and other <= self.quiet else self.owners


class Stamp:
    """Evidence that one tensor is unchanged, without reading all of it."""

    __slots__ = ("_state", "_views")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._views = _views(tensor)
        self._state = self._look(tensor)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is unchanged."""
        return self._look(tensor) == self._state

    def _look(self, tensor: torch.Tensor) -> tuple[object, ...]:
        version = None if tensor.is_inference() else tensor._version
        where = (_address(tensor), version, tensor.shape, _strides(tensor), tensor.dtype)
        before = self._state[:-1] if hasattr(self, "_state") else where
        # The views point to its old place: read them only while it lies there.
        return (*where, [bytes(view) for view in self._views] if where == before else None)


class Watch:
    """Everything that was described, and whether it is unchanged."""

    def __init__(self) -> None:
        self._homes: dict[tuple[int, frozenset[str] | None], _DictCopy] = {}
        self._things: dict[int, tuple[object, type, dict[Any, object], set[Owner]]] = {}
        self._lists: dict[int, tuple[Collection[object], list[object], set[Owner]]] = {}
        self._others: list[tuple[Callable[[], Sequence[object]], Sequence[object], Owner]] = []
        self._tensors: dict[int, tuple[torch.Tensor, Stamp, set[Owner]]] = {}
        self._functions: dict[int, tuple[FunctionType, list[object], set[Owner]]] = {}
        self._kept: list[object] = []
        self.moved_tensors: set[Owner] = set()  # owners of tensors that were changed

    # -- collecting ------------------------------------------------------------------------------

    def home(
        self,
        home: dict[Any, object],
        owner: Owner,
        ignored: frozenset[str] = frozenset(),
        only: frozenset[str] | None = None,
        quiet: frozenset[str] = frozenset(),
    ) -> None:
        """Hold a dict."""
        known = self._homes.get((id(home), only))
        if known is None:
            self._homes[id(home), only] = _DictCopy(home, {owner}, ignored, quiet, only)
        else:
            known.owners.add(owner)

    def thing(
        self,
        thing: Any,
        owner: Owner,
        ignored: frozenset[str] = frozenset(),
        quiet: frozenset[str] = frozenset(),
    ) -> None:
        """Hold an object by its type and its attributes."""
        home = vars(thing)
        known = self._things.setdefault(id(thing), (thing, type(thing), home, set()))
        known[-1].add(owner)
        self.home(home, owner, ignored, quiet=quiet)

    def sequence(self, values: Collection[object], owner: Owner) -> None:
        """Hold a list, a set or a deque."""
        self._lists.setdefault(id(values), (values, list(values), set()))[-1].add(owner)

    def reading(self, read: Callable[[], Sequence[object]], owner: Owner) -> None:
        """Hold the values that a function returns, compared object by object."""
        self._others.append((read, read(), owner))

    def tensor(self, tensor: torch.Tensor, owner: Owner) -> None:
        """Hold a tensor."""
        known = self._tensors.get(id(tensor))
        if known is None:
            known = self._tensors[id(tensor)] = (tensor, Stamp(tensor), set())
        known[-1].add(owner)

    def function(self, function: FunctionType, owner: Owner) -> None:
        """Hold the replaceable parts of a function."""
        known = self._functions.get(id(function))
        if known is None:
            known = self._functions[id(function)] = (function, exchangeable(function), set())
        known[-1].add(owner)

    def keep(self, thing: object) -> None:
        """Hold something immutable, so that nothing else takes its address."""
        self._kept.append(thing)

    def held(self) -> tuple[set[int], list[tuple[int, frozenset[str]]], list[FunctionType]]:
        """Ids of objects held whole and of dicts held by some names, and the functions."""
        whole = {id(values) for values, _, _ in self._lists.values()} | {*self._things}
        whole |= {id(thing) for thing in self._kept}
        whole |= {number for number, only in self._homes if only is None}
        parts = [(number, only) for number, only in self._homes if only is not None]
        return whole, parts, [function for function, _, _ in self._functions.values()]

    def seal(self) -> None:
        """Finish collecting: find the machine words that show changes."""
        homes, things = list(self._homes.values()), list(self._things.values())
        lists, tensors = list(self._lists.values()), list(self._tensors.values())
        self._all_homes, self._all_things, self._all_tensors = homes, things, tensors
        self._all_lists = [values for values, _, _ in lists]
        self._items = list(itertools.chain.from_iterable(copy for _, copy, _ in lists))
        self._sizes = [len(copy) for _, copy, _ in lists]
        quick = memory_words.sees_dicts()
        self._home_words = memory_words.dict_words([h.home for h in homes]) if quick else None
        self._thing_words = memory_words.object_words([t[0] for t in things]) if quick else None
        self._all_functions = list(self._functions.values())
        code = [function for function, _, _ in self._all_functions]
        self._function_words = memory_words.function_words(code) if quick else None
        read = [memory_words.can_be_read(tensor) for tensor, *_ in tensors]
        self._slow_tensors = [number for number, can in enumerate(read) if not can]
        self._quick_tensors = [number for number, can in enumerate(read) if can]
        quickly = [tensors[number][0] for number in self._quick_tensors]
        self._tensor_words = memory_words.TensorWords(quickly) if quickly else None

    # -- looking ---------------------------------------------------------------------------------

    def moved(self) -> set[Owner]:
        """The owners of changes since collecting; usually none."""
        found: set[Owner] = set()
        for owners in self._changes():
            found |= owners
        for owners in self._changed_tensors():
            self.moved_tensors |= owners
        return found | self.moved_tensors

    def unchanged(self) -> bool:
        """Compare everything; used right after collecting."""
        homes = not any(home.changed() for home in self._all_homes)
        return homes and all(stamp.holds(t) for t, stamp, _ in self._all_tensors)

    def _changes(self) -> Iterator[set[Owner]]:
        for number in _asked(self._home_words, len(self._all_homes)):
            if owners := self._all_homes[number].changed():
                yield owners
        for number in _asked(self._thing_words, 2 * len(self._all_things)):
            thing, kind, home, owners = self._all_things[number // 2]
            if type(thing) is not kind or vars(thing) is not home:
                yield owners
        yield from self._changed_functions()
        yield from self._changed_lists()
        for read, then, owner in self._others:
            now = read()
            if len(now) != len(then) or not all(map(same, now, then)):
                yield {owner}

    def _changed_functions(self) -> Iterator[set[Owner]]:
        found = self._function_words
        moved: Iterable[int] = range(len(self._all_functions))
        if found is not None:
            moved = {found[1][number] for number in found[0].moved()}
        for number in moved:
            function, then, owners = self._all_functions[number]
            now = exchangeable(function)
            if len(now) != len(then) or not all(map(same, now, then)):
                yield owners

    def _changed_lists(self) -> Iterator[set[Owner]]:
        sizes = list(map(len, self._all_lists))
        items = itertools.chain.from_iterable(self._all_lists)
        if sizes == self._sizes and all(map(operator.is_, items, self._items)):
            return
        for values, copy, owners in self._lists.values():
            if len(values) != len(copy) or not all(map(same, values, copy)):
                yield owners

    def _changed_tensors(self) -> Iterator[set[Owner]]:
        for number in self._slow_tensors:
            tensor, stamp, owners = self._all_tensors[number]
            if not stamp.holds(tensor):
                yield owners
        quick = self._tensor_words
        if quick is None:
            return
        for number in quick.moved():
            tensor, stamp, owners = self._all_tensors[self._quick_tensors[number]]
            if number in quick.lost or not stamp.holds(tensor):
                yield owners

    def stamps(self) -> Iterable[tuple[torch.Tensor, Stamp]]:
        """The tensors held, each with its evidence."""
        return ((tensor, stamp) for tensor, stamp, _ in self._tensors.values())


def exchangeable(function: FunctionType) -> list[object]:
    """The replaceable parts of a function: its code, its defaults, the contents of its cells."""
    given = (function.__code__, function.__defaults__, function.__kwdefaults__)
    return [*given, *closure(function)]


def closure(function: FunctionType) -> list[object]:
    """The contents of a function's cells; empty ones are left out."""
    return [held for cell in function.__closure__ or () for held in _inside(cell)]


def _inside(cell: CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _asked(found: memory_words.Words | None, count: int) -> Iterable[int]:
    """The entries to compare: those whose words changed, or all."""
    return range(count) if found is None else found.moved()


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0  # a wrapper around others, which are watched themselves


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout == torch.strided else None


def _views(tensor: torch.Tensor) -> list[memoryview]:
    """Live views of a few bytes of a tensor."""
    if tensor.device.type != "cpu" or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return []
    if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.is_quantized:
        return []
    raw: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    data, start, size = memoryview(raw), tensor.data_ptr(), tensor.nbytes
    places = (at - start for at in memory_words.spread(start, size))
    return [data[max(at, 0) : at + memory_words.WORD] for at in places]
