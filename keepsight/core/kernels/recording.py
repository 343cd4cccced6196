"""Records one step of a model as a list of torch operations that runs without the model's code.

A step is recorded while it runs. Its inputs are known by name; everything else it reads is weights.
Nothing is recorded if the code reads a number out of a tensor, draws random numbers or writes into
a weight: a list would not repeat that. Operations that change nothing are dropped, nested views
become one view, and a mean or a square is written as torch's own operations for it, if they give
its bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode

from keepsight.models import upstream
from keepsight.models.upstream import TorchFunction

# Operations that hand numbers to Python without calling a kernel.
_READS = frozenset(
    {
        *("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__", "__array__"),
        *("__contains__", "data_ptr", "untyped_storage"),
    }
)
_DIFFERS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}

_VIEW, _MUL, _DIV = (
    torch.ops.aten.view.default,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.div.Tensor,
)
_ADD = torch.ops.aten.add.Tensor
_SUM, _MEAN = torch.ops.aten.sum.dim_IntList, torch.ops.aten.mean.dim
_POWER = torch.ops.aten.pow.Tensor_Scalar

Name = tuple[str, int, object]  # an input of a step: kind, lane or layer, and details


class CannotRecord(Exception):
    """A step does something that a list of operations cannot repeat."""


@dataclass(frozen=True)
class _Traits:
    """What torch says of a function; asking takes as long as the function itself."""

    writes: bool
    gives_views: bool
    seen: list[bool]  # by argument: whether what it gives may be a view of it
    changes: list[tuple[int, str]]  # arguments that it changes


@functools.cache
def _traits(function: TorchFunction) -> _Traits:
    schema, changes = function._schema, []
    for number, one in enumerate(schema.arguments):
        if one.is_out or (one.alias_info is not None and one.alias_info.is_write):
            changes.append((number, one.name))
    return _Traits(
        bool(schema.is_mutable),
        any(one.alias_info is not None for one in schema.returns),
        [bool(one.alias_info) for one in schema.arguments],
        changes,
    )


@dataclass(frozen=True)
class Slot:
    """A tensor of a step, by number."""

    number: int


@dataclass(frozen=True)
class Operation:
    """One call: its arguments with slots for tensors, and the slots it fills."""

    function: TorchFunction
    arguments: list[object]
    options: dict[str, object]
    fills: list[Slot]

    @property
    def writes(self) -> bool:
        """Whether it changes one of its arguments."""
        return _traits(self.function).writes

    def renamed(self, name: Callable[[Slot], Slot]) -> Operation:
        """The same operation with other slots."""
        arguments = [_replaced(one, name) for one in self.arguments]
        options = {key: _replaced(one, name) for key, one in self.options.items()}
        return Operation(self.function, arguments, options, [name(slot) for slot in self.fills])


@dataclass(frozen=True)
class Recording:
    """The operations of one step, and the tensors they read from outside."""

    given: dict[Name, Slot]
    weights: dict[Slot, torch.Tensor]
    operations: list[Operation]
    result: Slot

    def equals(self, other: Recording) -> bool:
        """Whether two steps ran the same operations; then these depend neither on the inputs nor on
        the sequence length."""
        return (
            self.given == other.given
            and self.result == other.result
            and self.operations == other.operations
            and self.weights.keys() == other.weights.keys()
            and all(_same(one, other.weights[slot]) for slot, one in self.weights.items())
        )


def record(step: Callable[[], torch.Tensor], given: Mapping[Name, torch.Tensor]) -> Recording:
    """Record a step. `given` may get more names while it runs."""
    recorder = _Recorder()
    with _NoReads(), upstream.watched(recorder.run):
        result = step()
    return recorder.recording({id(tensor): name for name, tensor in given.items()}, result)


class _NoReads(TorchFunctionMode):
    """Refuses code that reads numbers out of tensors: it may branch differently next time."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if getattr(func, "__name__", "") in _READS:
            raise CannotRecord(f"{func.__name__} reads a number")
        return func(*args, **(kwargs or {}))


@functools.cache
def _torch_makes_them_so() -> bool:
    """Whether this torch computes squares, scalar sums and means by these operations. Tried with
    many numbers, because those of one step may agree by chance."""
    rows = torch.randn(256, 768, generator=torch.Generator().manual_seed(0)).exp()
    pairs = [(_POWER(rows, 2), rows * rows), (_ADD(rows, 1e-6), rows + torch.tensor(1e-6))]
    for width in (5, 64, 768):
        part = rows[:, :width].contiguous()
        pairs.append((_MEAN(part, [-1], True), _SUM(part, [-1], True) / torch.tensor(float(width))))
    return all(torch.equal(one, other) for one, other in pairs)


class _Recorder:
    """Collects operations. It holds all tensors, so each keeps its own number."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._tensors: list[torch.Tensor] = []
        self._outside: list[Slot] = []
        self._operations: list[Operation] = []
        self._own: dict[Slot, Slot] = {}  # the step's own memory, and the slot it is a view of
        self._shapes: dict[tuple[Slot, torch.Size], Slot] = {}
        self._held: list[torch.Tensor] = []

    def run(
        self, function: TorchFunction, args: tuple[object, ...], options: dict[str, object]
    ) -> object:
        """Run one operation and note it."""
        if _DIFFERS & set(function.tags) and not _drops_nothing(function, args, options):
            raise CannotRecord(f"{function} depends on values or on random numbers")
        arguments = [self._noted(one) for one in args]
        named = {key: self._noted(one) for key, one in options.items()}
        found = function(*args, **options)
        known = isinstance(found, torch.Tensor) and not _traits(function).writes
        if known and (found is args[0] or self._is_shape_of(args[0], found)):
            return found
        if known and not options and self._in_parts(function, args, found):
            return found
        self._note(function, arguments, named, found)
        return found

    def _note(
        self,
        function: TorchFunction,
        arguments: list[object],
        named: dict[str, object],
        found: object,
    ) -> None:
        """Note an operation unchanged."""
        fills = []
        for one in found if isinstance(found, list | tuple) else [found]:
            if not isinstance(one, torch.Tensor):
                raise CannotRecord(f"{function} returns something that is not a tensor")
            fills.append(self._slots.get(id(one)) or self._number(one))
        if function._schema.name == "aten::detach_":  # a number that became a tensor
            return
        self._operations.append(Operation(function, arguments, named, fills))
        if not _traits(function).gives_views or arguments[0] in self._own:
            self._own.update((slot, slot) for slot in fills)

    def _is_shape_of(self, given: object, found: torch.Tensor) -> bool:
        """Whether the result only views the step's own memory in another shape. A single view, or
        none, is then recorded in place of several, which might fix the lengths of inputs."""
        whole = self._own.get(self._slots.get(id(given), Slot(-1)))
        if whole is None or not isinstance(given, torch.Tensor) or id(found) in self._slots:
            return False
        own = self._tensors[whole.number]
        if not all(one.layout is torch.strided and one.is_contiguous() for one in (own, found)):
            return False
        same = (found.data_ptr(), found.numel(), found.dtype)
        if same != (own.data_ptr(), own.numel(), own.dtype) or not found.numel():
            return False
        key = whole, found.shape
        slot = whole if found.shape == own.shape else self._shapes.get(key)
        if slot is None:
            slot = self._shapes[key] = self._number(found)
            self._own[slot] = whole
            self._operations.append(Operation(_VIEW, [whole, list(found.shape)], {}, [slot]))
        self._slots[id(found)] = slot
        self._held.append(found)
        return True

    def _in_parts(
        self, function: TorchFunction, args: tuple[object, ...], found: torch.Tensor
    ) -> bool:
        """Note a square or a mean as the operations that torch composes it of, without the scalar
        tensors it makes each time."""
        one, *rest = args
        if not isinstance(one, torch.Tensor) or {one.dtype, found.dtype} != {torch.float32}:
            return False  # in few digits a Python number is more precise than a tensor
        if not _torch_makes_them_so():
            return False
        if function is _POWER and rest == [2]:
            self._note(_MUL, [self._noted(one)] * 2, {}, found)
        elif function is _ADD and isinstance(rest[0], float):
            number = torch.tensor(rest[0], dtype=one.dtype)
            self._note(_ADD, [self._noted(one), self._noted(number)], {}, found)
        elif function is _MEAN and found.numel():
            added = _SUM(one, *rest)
            count = torch.tensor(one.numel() / found.numel(), dtype=one.dtype)
            self._note(_SUM, [self._noted(one), *rest], {}, added)
            self._note(_DIV, [self._noted(added), self._noted(count)], {}, found)
        else:
            return False
        return True

    def _noted(self, given: object) -> object:
        if isinstance(given, torch.Tensor):
            slot = self._slots.get(id(given))
            if slot is None:
                slot = self._number(given)
                self._outside.append(slot)
            return slot
        return [self._noted(one) for one in given] if isinstance(given, list | tuple) else given

    def _number(self, tensor: torch.Tensor) -> Slot:
        slot = self._slots[id(tensor)] = Slot(len(self._tensors))
        self._tensors.append(tensor)
        return slot

    def recording(self, names: dict[int, Name], result: torch.Tensor) -> Recording:
        """The noted operations without unused ones, numbered in order of use."""
        if id(result) not in self._slots:
            raise CannotRecord("its result is not computed in the step")
        given = {slot for slot in self._outside if id(self._tensors[slot.number]) in names}
        weights = set(self._outside) - given
        live = _live(self._operations, self._slots[id(result)], given, weights)
        order: dict[Slot, Slot] = {}

        def renamed(slot: Slot) -> Slot:
            return order.setdefault(slot, Slot(len(order)))

        operations = [one.renamed(renamed) for one in live]
        tensor = {slot: self._tensors[slot.number] for slot in order}
        return Recording(
            {names[id(tensor[slot])]: new for slot, new in order.items() if slot in given},
            {new: tensor[slot] for slot, new in order.items() if slot in weights},
            operations,
            renamed(self._slots[id(result)]),
        )


def _live(
    operations: list[Operation], result: Slot, given: set[Slot], weights: set[Slot]
) -> list[Operation]:
    """The operations on which the result or an input depends."""
    whole = _BufferReuse()
    for one in operations:
        whole.join(one)
    live = {whole.of(slot) for slot in (result, *given)}
    read, found = {result}, []
    for one in reversed(operations):
        changed = list(_slots(_written(one)))
        if any(whole.of(slot) in map(whole.of, weights) for slot in changed):
            raise CannotRecord(f"{one.function} writes into weights")
        wanted = any(whole.of(slot) in live for slot in changed)
        if wanted or any(slot in read for slot in one.fills):
            used = set(_slots([one.arguments, list(one.options.values())]))
            read |= used
            live |= {whole.of(slot) for slot in used}
            found.append(one)
    return found[::-1]


class _BufferReuse:
    """Groups tensors that may share memory."""

    def __init__(self) -> None:
        self._above: dict[Slot, Slot] = {}

    def of(self, slot: Slot) -> Slot:
        """The tensor that represents a group."""
        while slot in self._above:
            slot = self._above[slot]
        return slot

    def join(self, operation: Operation) -> None:
        """Note that results of an operation may be views of its arguments."""
        traits = _traits(operation.function)
        if not traits.gives_views:
            return
        shared = [one for one, seen in zip(operation.arguments, traits.seen, strict=False) if seen]
        first, *others = [*_slots(shared), *operation.fills]
        for slot in others:
            if self.of(slot) != self.of(first):
                self._above[self.of(slot)] = self.of(first)


def _drops_nothing(
    function: TorchFunction, args: tuple[object, ...], options: dict[str, object]
) -> bool:
    """Whether randomness would only come from dropout, and dropout is off."""
    names = [argument.name for argument in function._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **options}
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0


def _written(operation: Operation) -> list[object]:
    """The arguments that an operation changes."""
    written = []
    for number, name in _traits(operation.function).changes:
        if number < len(operation.arguments):
            written.append(operation.arguments[number])
        elif name in operation.options:
            written.append(operation.options[name])
    return written


def _slots(given: object) -> Iterator[Slot]:
    if isinstance(given, Slot):
        yield given
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _slots(one)


def _replaced(given: object, name: Callable[[Slot], Slot]) -> object:
    if isinstance(given, list):
        return [_replaced(one, name) for one in given]
    return name(given) if isinstance(given, Slot) else given


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are one weight, or one number that the code wrote twice."""
    if one is other:
        return True
    alike = one.dtype == other.dtype and one.shape == other.shape and not one.is_mkldnn
    return alike and torch.equal(one, other)
