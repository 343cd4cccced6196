"""The stack and names of an interpreted function, and the rules for its operations.

Doubtful operations are refused: an error here would take a changed answer for the old one.
"""

from __future__ import annotations

import dis
from types import FunctionType, ModuleType

from keepsight.models.fingerprint.evidence import Proof, Unproven, array_like, is_plain
from keepsight.models.fingerprint.functions import is_library_type
from keepsight.models.fingerprint.kinds import (
    CLASS,
    CLOCKS,
    FRESH,
    ITERATE,
    LOOKS,
    NOTHING,
    NULL,
    NUMBERS,
    OF_PARTS,
    ON_TENSORS,
    OWN,
    OWN_KINDS,
    PART,
    PASSED,
    SEEN,
    STRANGE,
    TAKES,
    TENSOR,
    TENSOR_ONLY,
    TYPES,
    WRITES,
    Kind,
    KnownObject,
    check_attribute,
    is_rest,
)


class Values:
    """The objects of one function, and the rules for operations on values."""

    def __init__(self, function: FunctionType, hooked: bool) -> None:
        self.proof = Proof(function)
        self._objects: dict[int, object] = {}
        self._hooked = hooked  # the argument passed second is then a tuple

    def _known(self, thing: object) -> Kind:
        if thing is None:
            return NOTHING
        self._objects[id(thing)] = thing
        return KnownObject(id(thing))

    def _own(self, kind: Kind) -> object:
        """The object behind a kind, if it belongs to the function."""
        return self._objects[kind.number] if isinstance(kind, KnownObject) else None

    def _is_own(self, kind: Kind) -> bool:
        """Whether a value is plain and not part of an argument."""
        return (
            is_plain(self._own(kind)) if isinstance(kind, KnownObject) else kind in (OWN, NOTHING)
        )

    def _ask(self, kind: Kind, containers: bool = False) -> None:
        """Allow only values that answer operators and truth tests without user code."""
        own = self._own(kind)
        handed = isinstance(kind, tuple) and kind[0] in ("argument", "rest", "options")
        if self._is_own(kind) or kind in (SEEN, TENSOR, PASSED) or array_like(own):
            return
        if handed and kind not in (("argument", 0), ("rest", 0)):
            return
        if not (containers and type(own) in OWN_KINDS):
            raise Unproven

    def _mixed(self, kinds: list[Kind]) -> Kind:
        """The kind of a container of these kinds."""
        if all(map(self._is_own, kinds)):
            return OWN
        try:
            for kind in kinds:
                self._ask(kind)
        except Unproven:
            return STRANGE
        return SEEN

    def _is_part(self, kind: Kind) -> bool:
        return kind in (PART, ("argument", 0), ("rest", 0))

    def _lies_in(self, own: object, name: str) -> object:
        """A value stored in an object; a property or a class with its own lookup is code."""
        if type(own) is ModuleType:
            return self.proof.read(vars(own), name)
        check_attribute(own, name)
        self.proof.thing(own)
        return self.proof.read(vars(own), name)

    def _made(self, thing: Kind, name: str) -> Kind:
        """The result of a caller's value's method, if that method only observes."""
        if self._is_part(thing):
            made = {**dict.fromkeys(OF_PARTS, FRESH), "detach": TENSOR, "clone": TENSOR}
            return made[name]
        if thing == TENSOR and name in ON_TENSORS:
            return TENSOR
        self._ask(thing)
        if name in NUMBERS:
            return OWN
        if name in TENSOR_ONLY:
            return TENSOR
        if name in LOOKS:
            return FRESH if name in ("keys", "values", "items") else SEEN
        raise Unproven

    def _written(self, own: object, values: list[Kind]) -> None:
        self.proof.changed[id(own)] = own
        if not all(map(self._is_own, values)):
            self.proof.keeps[id(own)] = own

    def _is_tuple(self, kind: Kind) -> bool:
        """Whether iterating over a value uses nothing up."""
        return (
            self._is_own(kind)
            or kind == TENSOR
            or is_rest(kind)
            or (self._hooked and kind == ("argument", 1))
        )

    def _own_method(self, name: str, own: object, given: list[Kind]) -> Kind:
        if name in WRITES:
            if isinstance(own, set) and not all(map(self._is_own, given)):
                raise Unproven  # its hash and equality would be called
            self._written(own, given)
            return NOTHING
        if not all(map(self._is_own, given)):
            raise Unproven
        if name in TAKES:
            self.proof.changed[id(own)] = own
        return OWN if self.proof.number_in(own) else STRANGE

    def _built_in(self, thing: object, given: list[Kind]) -> Kind:
        if thing is id:
            return OWN
        if thing is type and len(given) == 1:
            return CLASS
        if thing is isinstance:
            return self._instance_of(*given)
        for kind in given:
            if not (thing in ITERATE and kind == FRESH):
                self._ask(kind, containers=thing is len)
        if thing in ITERATE and not all(kind == FRESH or self._is_tuple(kind) for kind in given):
            raise Unproven
        if thing is type or (thing is range and self._mixed(given) != OWN):
            raise Unproven
        if thing in (len, float, int, str, bool, repr) or thing in CLOCKS:
            return OWN
        return STRANGE if FRESH in given else self._mixed(given)

    def _instance_of(self, thing: Kind, kinds: Kind) -> Kind:
        own = self._own(kinds)
        if kinds != TYPES and not (isinstance(own, type) and is_library_type(own)):
            raise Unproven
        if not self._is_part(thing):
            self._ask(thing)
        return OWN

    # -- instructions that only move values -------------------------------------------------------

    _stack: list[Kind]
    _locals: dict[str, Kind]

    def _pop(self) -> Kind:
        return self._stack.pop()

    def _take(self, count: int) -> list[Kind]:
        taken = self._stack[len(self._stack) - count :] if count else []
        if len(taken) < count:
            raise Unproven
        del self._stack[len(self._stack) - count :]
        return taken

    def _push(self, kind: Kind) -> None:
        self._stack.append(kind)

    def _constant(self, value: object) -> Kind:
        return NOTHING if value is None else OWN

    def _load_const(self, step: dis.Instruction) -> None:
        self._push(self._constant(step.argval))

    def _load_fast(self, step: dis.Instruction) -> None:
        self._push(self._locals[step.argval])

    _load_fast_check = _load_fast

    def _load_fast_load_fast(self, step: dis.Instruction) -> None:
        for name in step.argval:
            self._push(self._locals[name])

    def _store_fast(self, step: dis.Instruction) -> None:
        self._locals[step.argval] = self._pop()

    def _push_null(self, step: dis.Instruction) -> None:
        self._push(NULL)

    def _copy(self, step: dis.Instruction) -> None:
        self._push(self._stack[-int(step.arg or 0)])

    def _swap(self, step: dis.Instruction) -> None:
        other = -int(step.arg or 0)
        self._stack[-1], self._stack[other] = self._stack[other], self._stack[-1]

    def _pop_top(self, step: dis.Instruction) -> None:
        self._pop()
