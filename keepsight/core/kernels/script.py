"""A recorded step as a TorchScript function, which runs operations without Python between them.

Operations are neither fused nor reordered, so the bits are those of the model's own code. The GIL
is free meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch.jit import optimized_execution  # type: ignore[attr-defined]

from keepsight.core.kernels.recording import Name, Operation, Recording, Slot
from keepsight.models.private import FUNCTION

StepSize = tuple[int, int, int]  # rows, tokens of each, and where the open block of a rule begins
Step = Callable[[Mapping[Name, torch.Tensor]], torch.Tensor]


@dataclass
class RecordedStep:
    """What is known about steps of one size: how many ran, and the function, if there is one that
    gives the bits of the model's own code."""

    seen: int = 0
    run: Step | None = None
    names: frozenset[Name] = frozenset()  # its inputs
    seconds: float = torch.inf  # shortest time of a step by the model's own code
    agreed: int = 0  # steps that the model ran too, with equal bits
    ran: int = 0  # steps run by the function alone
    given_up: str = ""  # why there is no function

    def timed(self, by_model: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run the model's own code and note its shortest time."""

        def run() -> torch.Tensor:
            start = time.perf_counter()
            found = by_model()
            self.seconds = min(self.seconds, time.perf_counter() - start)
            return found

        return run

    def give_up(self, why: str) -> None:
        """Leave steps of this size to the model's own code."""
        self.run, self.given_up = None, why


def can_script() -> bool:
    """Whether this torch accepts lists of operations."""
    return FUNCTION.found() is not None


def scripted(recording: Recording) -> Step:
    """Turn a recording into a function of its inputs."""
    graph = _Graph(recording)
    function = FUNCTION.needed()("step", graph.made)
    names, weights = list(recording.given), list(recording.weights.values())

    def run(given: Mapping[Name, torch.Tensor]) -> torch.Tensor:
        with optimized_execution(False):  # for this thread: fuse nothing
            found: torch.Tensor = function(*[given[name] for name in names], *weights)
        return found

    return run


class _Value(Protocol):
    def setType(self, kind: torch.JitType) -> None: ...


class _Node(Protocol):
    def output(self) -> _Value: ...

    def outputs(self) -> Iterator[_Value]: ...


class _Builder(Protocol):
    """The part of torch's graph builder used here."""

    def addInput(self) -> _Value: ...

    def create(self, kind: str, values: Sequence[_Value], outputs: int) -> _Node: ...

    def insertNode(self, node: _Node) -> _Node: ...

    def insertConstant(self, value: object) -> _Value: ...

    def registerOutput(self, value: _Value) -> None: ...


class _Graph:
    """The graph of a recording."""

    def __init__(self, recording: Recording) -> None:
        self.made = cast(_Builder, torch.Graph())
        self._values: dict[Slot, _Value] = {}
        self._constants: dict[tuple[type, str], _Value] = {}
        for slot in (*recording.given.values(), *recording.weights):
            value = self._values[slot] = self.made.addInput()
            value.setType(torch.TensorType.get())
        for operation in recording.operations:
            self._add(operation)
        self.made.registerOutput(self._values[recording.result])

    def _add(self, operation: Operation) -> None:
        schema = operation.function._schema
        values = []
        for number, argument in enumerate(schema.arguments):
            if number < len(operation.arguments):
                given = operation.arguments[number]
            else:
                given = operation.options.get(argument.name, argument.default_value)
            values.append(self._value(given, argument.type))
        node = self.made.insertNode(self.made.create(schema.name, values, len(schema.returns)))
        outputs = list(node.outputs())
        for value, wanted in zip(outputs, schema.returns, strict=True):
            value.setType(wanted.type)
        if len(outputs) == 1 and isinstance(schema.returns[0].type, torch.ListType):
            parts = self.made.create("prim::ListUnpack", outputs, len(operation.fills))
            outputs = list(self.made.insertNode(parts).outputs())
            for value in outputs:
                value.setType(torch.TensorType.get())
        for value, slot in zip(outputs, operation.fills, strict=True):
            self._values.setdefault(slot, value)  # in-place results have one already

    def _value(self, given: object, wanted: torch.JitType) -> _Value:
        if isinstance(given, Slot):
            return self._values[given]
        if not isinstance(given, list):
            name = (type(given), repr(given))
            if name not in self._constants:
                self._constants[name] = self.made.insertConstant(given)
            return self._constants[name]
        if isinstance(wanted, torch.OptionalType):
            wanted = wanted.getElementType()
        element = wanted.getElementType()
        node = self.made.create("prim::ListConstruct", [self._value(x, element) for x in given], 1)
        value = self.made.insertNode(node).output()
        if given and not isinstance(given[0], Slot):
            value.setType(torch.ListType(self._constant_type(given[0])))
        else:
            value.setType(torch.ListType(element))
        return value

    def _constant_type(self, given: object) -> torch.JitType:
        if isinstance(given, bool):
            return torch.BoolType.get()
        return torch.IntType.get() if isinstance(given, int) else torch.FloatType.get()
