"""Recognises hooks that only observe: they count or record, and change nothing.

People hang such functions into a model to measure it, and its answers stay the same. This is proven
on every branch of their bytecode, and believed only while everything the proof read stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from keepsight.models.fingerprint.bytecode import Interpretation
from keepsight.models.fingerprint.evidence import Proof, Unproven
from keepsight.models.fingerprint.kinds import NOTHING, PASSED, Kind, is_models

_MOCKED = ("_mock_side_effect", "_mock_delegate", "_mock_return_value", "_mock_wraps")


def only_observes(hook: object, handed_back: int) -> Proof | None:
    """Prove that a hook returns only its argument or nothing, and changes nothing.

    `handed_back` is the index of the argument that a hook may return unchanged.
    """
    try:
        return _proof(hook, None, {NOTHING, ("argument", handed_back)})
    except Exception:  # a user's object may raise anything
        return None


def passes_on(function: object, original: Callable[..., object]) -> Proof | None:
    """Prove that a function calls the original with its own arguments and returns its result."""
    try:
        return _idle_mock(function, original) or _proof(function, original, {PASSED})
    except Exception:  # a user's object may raise anything
        return None


def _proof(function: object, original: object, allowed: set[Kind]) -> Proof | None:
    """The proof that a function returns only what is allowed, if there is one."""
    bound: list[object] = []
    called: object = None
    if isinstance(function, MethodType):
        bound, function = [function.__self__], function.__func__
    elif not isinstance(function, FunctionType | type):
        bound, called = [function], function
        function = vars(type(called)).get("__call__")
    if not isinstance(function, FunctionType) or any(is_models(thing) for thing in bound):
        return None
    try:
        run = Interpretation(function, bound, original)
        if called is not None:
            run.proof.thing(called)
        return run.proof if run.outcomes() <= allowed else None
    except (Unproven, AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None


def _idle_mock(function: Any, original: Any) -> Proof | None:
    """Prove that a mock of the standard library acts like the original."""
    kinds = type(function).__mro__[:-1]  # without `object`
    if len(kinds) < 2 or any(kind.__module__ != "unittest.mock" for kind in kinds):
        return None
    own, proof = vars(function), Proof(None)
    effect, given, wraps = own.get(_MOCKED[0]), own.get(_MOCKED[2]), own.get(_MOCKED[3])
    for name in _MOCKED:
        proof.absent(own, name)
    proof.thing(function)
    if isinstance(effect, BaseException) or (
        isinstance(effect, type) and issubclass(effect, BaseException)
    ):
        return proof  # it returns nothing
    idle = effect is None and own.get("_mock_delegate") is None
    default = type(given).__name__ == "_SentinelObject" and given.name == "DEFAULT"
    same = isinstance(wraps, FunctionType | MethodType) and wraps == original
    return proof if idle and default and same else None
