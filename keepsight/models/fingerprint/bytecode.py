"""Interprets a function's bytecode once over kinds of values instead of values.

Nothing is executed. Objects that belong to the function are known; of its arguments only their
origin is known. Any instruction not listed as harmless ends the analysis: it could run user code,
write into an argument or use up an iterator.
"""

from __future__ import annotations

import builtins
import dis
import inspect
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from keepsight.models.fingerprint.evidence import Unproven
from keepsight.models.fingerprint.functions import is_library_type
from keepsight.models.fingerprint.kinds import (
    ATTRIBUTES,
    BUILT_IN,
    CLASS,
    FRESH,
    NAMES,
    NOTHING,
    NULL,
    OPTIONS,
    OWN,
    OWN_KINDS,
    PART,
    PASSED,
    SAFE,
    SEEN,
    STRANGE,
    TAKES,
    TYPES,
    VALUES,
    WRITES,
    Kind,
    KnownObject,
    check_attribute,
    check_known,
    is_models,
)
from keepsight.models.fingerprint.values import Values

_MOST_STEPS = 2000


_State = tuple[int, tuple[Kind, ...], tuple[tuple[str, Kind], ...]]
_CALLED = "(the original was called)"  # stored among the local names, per path


class Interpretation(Values):
    """One function, interpreted over kinds of values."""

    def __init__(self, function: FunctionType, bound: list[object], original: Any) -> None:
        code = function.__code__
        check_known(code)
        super().__init__(function, hooked=original is None)
        self._function, self._original = function, original
        self._steps = [s for s in dis.get_instructions(code) if s.opname != "CACHE"]
        self._at = {step.offset: number for number, step in enumerate(self._steps)}
        self._cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        self._start = self._arguments(code, bound)
        self._found: set[Kind] = set()

    def _arguments(self, code: CodeType, bound: list[object]) -> dict[str, Kind]:
        count, names = code.co_argcount, list(code.co_varnames)
        found: dict[str, Kind] = {}
        for number, name in enumerate(names[:count]):
            own = number < len(bound)
            found[name] = self._known(bound[number]) if own else ("argument", number - len(bound))
        if code.co_flags & inspect.CO_VARARGS:
            found[names[count]] = ("rest", count - len(bound))
            count += 1
        if code.co_flags & inspect.CO_VARKEYWORDS:
            found[names[count]] = ("options",)
        return found

    def outcomes(self) -> set[Kind]:
        """Every kind of value that it can return."""
        left: list[_State] = [(0, (), tuple(sorted(self._start.items())))]
        seen: set[_State] = set()
        while left:
            state = left.pop()
            if state in seen:
                continue
            seen.add(state)
            if len(seen) > _MOST_STEPS:
                raise Unproven
            number, stack, names = state
            self._stack, self._locals = list(stack), dict(names)
            for following in self._do(self._steps[number], number):
                variables = tuple(sorted(self._locals.items(), key=lambda item: item[0]))
                left.append((following, tuple(self._stack), variables))
        if not self.proof.keeps.keys().isdisjoint(self.proof.numbers):
            raise Unproven  # it may write into an argument that it stored
        return self._found

    def _do(self, step: dis.Instruction, number: int) -> list[int]:
        """Interpret one instruction; return the numbers of those that may follow."""
        name = step.opname
        if name in ("RETURN_VALUE", "RETURN_CONST"):
            value = self._pop() if name == "RETURN_VALUE" else self._constant(step.argval)
            self._found.add(value)
            return []
        if name == "RAISE_VARARGS":
            return []
        if name.startswith("POP_JUMP"):
            asked = self._pop()
            if not name.endswith("NONE"):
                self._ask(asked, containers=True)
            return [self._at[step.argval], number + 1]
        if name in ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"):
            return [self._at[step.argval]]
        if name in _SKIPPED:
            return [number + 1]
        action = getattr(self, f"_{name.lower()}", None)
        if action is None:
            raise Unproven
        if name in ("CALL", "CALL_KW"):
            action(step, self._names_given(number))
        else:
            action(step)
        return [number + 1]

    def _names_given(self, number: int) -> tuple[str, ...]:
        """The names of a call's keyword arguments."""
        calling = self._steps[number].opname
        before = number - 1
        while self._steps[before].opname in ("PRECALL", "EXTENDED_ARG"):
            before -= 1
        step = self._steps[before]
        if calling == "CALL_KW" and step.opname != "LOAD_CONST":
            raise Unproven
        if calling == "CALL_KW" or step.opname == "KW_NAMES":
            names: tuple[str, ...] = (
                step.argval
                if isinstance(step.argval, tuple)
                else self._function.__code__.co_consts[int(step.arg or 0)]
            )
            return names
        return ()

    # -- instructions that push ------------------------------------------------------------------

    def _load_deref(self, step: dis.Instruction) -> None:
        self._push(self._known(self.proof.read(self._cells[step.argval], step.argval)))

    def _store_deref(self, step: dis.Instruction) -> None:
        self._bind(self._cells[step.argval], step.argval)

    def _store_global(self, step: dis.Instruction) -> None:
        self._bind(self._function.__globals__, step.argval)

    def _bind(self, home: object, name: str) -> None:
        if not self._is_own(self._pop()):
            raise Unproven
        self.proof.write(home, name)

    def _load_global(self, step: dis.Instruction) -> None:
        home, name = self._function.__globals__, step.argval
        if self._function.__builtins__ is not vars(builtins):  # type: ignore[attr-defined]
            raise Unproven
        if name not in home:
            self.proof.absent(home, name)
            home = vars(builtins)
        value = self._known(self.proof.read(home, name))
        gaps = "NULL" in step.argrepr  # below the value up to 3.12, above it since
        first = step.argrepr.startswith("NULL")
        self._stack += ([NULL, value] if first else [value, NULL]) if gaps else [value]

    def _load_attr(self, step: dis.Instruction) -> None:
        if "NULL" in step.argrepr:
            self._load_method(step)
            return
        thing, name = self._pop(), step.argval
        own = self._own(thing)
        if own is not None and not is_models(own):
            self._push(self._known(self._lies_in(own, name)))
        elif thing == CLASS and name in NAMES:
            self._push(OWN)
        elif name == "__class__" and own is None:
            self._push(CLASS)
        elif own is None and thing in (OWN, STRANGE, CLASS, FRESH, NOTHING):
            raise Unproven
        elif name in VALUES:
            self._push(OWN)
        elif name in ATTRIBUTES:
            self._push(PART if own is not None or self._is_part(thing) else SEEN)
        else:
            raise Unproven

    def _load_method(self, step: dis.Instruction) -> None:
        name, thing = step.argval, self._pop()
        own = self._own(thing)
        if type(own) is ModuleType:
            self._push(self._known(self.proof.read(vars(own), name)))
        elif type(own) in OWN_KINDS and name in WRITES | TAKES | {"get"}:
            self._push(("own method", name, thing))
        elif thing == OWN or type(own) in (str, bytes):
            self._push(("method", OWN))
        elif own is None:
            self._push(("method", self._made(thing, name)))
        else:
            raise Unproven
        self._push(NULL)

    # -- instructions that compute ---------------------------------------------------------------

    def _binary_op(self, step: dis.Instruction) -> None:
        left, right = self._take(2)
        if step.argrepr.endswith("=") and not self._is_own(left):
            raise Unproven  # it may write into an argument
        self._ask(left)
        self._ask(right)
        self._push(self._mixed([left, right]))

    def _compare_op(self, step: dis.Instruction) -> None:
        for kind in self._take(2):
            self._ask(kind)
        self._push(SEEN)

    def _is_op(self, step: dis.Instruction) -> None:
        self._take(2)
        self._push(OWN)

    def _binary_subscr(self, step: dis.Instruction) -> None:
        home, name = self._take(2)
        own: object = self._own(home)
        if not self._is_own(name) and name != SEEN:
            raise Unproven
        if type(own) in (list, dict):
            self._push(OWN if self._is_own(name) and self.proof.number_in(own) else STRANGE)
        elif home == ("rest", 0):
            self._push(PART)
        else:
            self._ask(home)
            self._push(OWN if self._is_own(home) else SEEN)

    def _store_subscr(self, step: dis.Instruction) -> None:
        value, home, name = self._take(3)
        own = self._own(home)
        if type(own) not in (list, dict) or not self._is_own(name):
            raise Unproven
        self._written(own, [value])

    def _store_attr(self, step: dis.Instruction) -> None:
        value, thing = self._take(2)
        own = self._own(thing)
        if own is None or not self._is_own(value):
            raise Unproven
        if is_library_type(type(own)):
            raise Unproven  # such as a library's setting
        if is_models(own) or isinstance(own, PreTrainedConfig | GenerationConfig):
            raise Unproven
        check_attribute(own, step.argval)
        self.proof.thing(own)
        self.proof.write(vars(own), step.argval)

    def _unary(self, step: dis.Instruction) -> None:
        kind = self._pop()
        self._ask(kind, containers=step.opname != "UNARY_NEGATIVE")
        self._push(self._mixed([kind]) if step.opname == "UNARY_NEGATIVE" else OWN)

    _unary_not = _unary_negative = _to_bool = _unary

    def _gather(self, step: dis.Instruction) -> None:
        kinds = self._take(int(step.arg or 0))
        known = [self._own(kind) for kind in kinds]
        types = bool(kinds) and all(any(one is kind for kind in BUILT_IN) for one in known)
        self._push(TYPES if types else self._mixed(kinds))

    _build_tuple = _gather

    def _build_slice(self, step: dis.Instruction) -> None:
        self._take(int(step.arg or 0))
        self._push(SEEN)

    def _build_string(self, step: dis.Instruction) -> None:
        self._take(int(step.arg or 0))
        self._push(OWN)

    def _build_list(self, step: dis.Instruction) -> None:
        self._push(("list", *self._take(int(step.arg or 0))))

    def _list_extend(self, step: dis.Instruction) -> None:
        rest, made = self._pop(), self._pop()
        if not isinstance(made, tuple) or made[0] != "list":
            raise Unproven
        if not isinstance(rest, tuple) or rest[0] != "rest":
            raise Unproven  # an iterator would be used up
        self._push((*made, ("all of", rest)))

    def _call_intrinsic_1(self, step: dis.Instruction) -> None:
        if "LIST_TO_TUPLE" not in step.argrepr:
            raise Unproven

    def _list_to_tuple(self, step: dis.Instruction) -> None:
        return

    def _build_map(self, step: dis.Instruction) -> None:
        if step.arg:
            raise Unproven
        self._push(("no options",))

    def _dict_merge(self, step: dis.Instruction) -> None:
        more, made = self._pop(), self._pop()
        if made != ("no options",):
            raise Unproven
        self._push(more)

    def _format_value(self, step: dis.Instruction) -> None:
        for kind in self._take(2 if int(step.arg or 0) & 4 else 1):
            self._ask(kind)
        self._push(OWN)

    def _format_simple(self, step: dis.Instruction) -> None:
        self._ask(self._pop())
        self._push(OWN)

    def _unpack_sequence(self, step: dis.Instruction) -> None:
        kind = self._pop()
        if not self._is_tuple(kind):
            raise Unproven  # an iterator would be used up
        made = PART if kind == ("rest", 0) else OWN if kind == OWN else SEEN
        for _ in range(int(step.arg or 0)):
            self._push(made)

    # -- calls -------------------------------------------------------------------------------------

    def _call(self, step: dis.Instruction, names: tuple[str, ...]) -> None:
        given = self._take(int(step.arg or 0))
        (called,) = [kind for kind in self._take(2) if kind != NULL]
        self._push(self._result(called, given, names))

    def _call_kw(self, step: dis.Instruction, names: tuple[str, ...]) -> None:
        self._pop()
        self._call(step, names)

    def _result(self, called: Kind, given: list[Kind], names: tuple[str, ...]) -> Kind:
        if isinstance(called, tuple) and called[0] == "method":
            # An argument that is not plain may be one to write into.
            if not set(names) <= OPTIONS or not all(map(self._is_own, given)):
                raise Unproven
            made: Kind = called[1]
            return made
        if names:  # a function passed by keyword would be called
            raise Unproven
        if isinstance(called, tuple) and called[0] == "own method":
            return self._own_method(called[1], self._own(called[2]), given)
        thing = self._own(called)
        if not isinstance(called, KnownObject) or id(thing) not in SAFE:
            raise Unproven
        return self._built_in(thing, given)

    def _call_function_ex(self, step: dis.Instruction) -> None:
        options: Kind = self._pop() if int(step.arg or 0) & 1 else ("no options",)
        given = self._pop()
        (called,) = [kind for kind in self._take(2) if kind != NULL]
        own = self._own(called)
        if self._original is None or type(own) is not type(self._original):
            raise Unproven
        if own != self._original or options != ("options",) or _CALLED in self._locals:
            raise Unproven
        first = () if not isinstance(given, tuple) or given[0] != "list" else given[1:]
        whole = [("argument", number) for number in range(len(first) - 1)]
        rest = ("rest", len(whole))
        if given != rest and tuple(first) != (*whole, ("all of", rest)):
            raise Unproven
        if whole and not self._same_names(len(whole)):
            raise Unproven
        self._locals[_CALLED] = OWN
        self._push(PASSED)

    def _same_names(self, count: int) -> bool:
        """Whether the first arguments mean the same when passed by name."""
        function = getattr(self._original, "__func__", self._original)
        theirs = function.__code__.co_varnames[isinstance(self._original, MethodType) :][:count]
        ours = [
            name
            for name, kind in self._start.items()
            if isinstance(kind, tuple) and kind[0] == "argument"
        ]
        return ours == [*theirs] and not self._function.__defaults__


_SKIPPED = frozenset({"RESUME", "NOP", "PRECALL", "COPY_FREE_VARS", "EXTENDED_ARG", "KW_NAMES"})
