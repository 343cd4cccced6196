"""Kinds of unknown values, and which operations each allows.

A kind says where a value comes from. The type of an argument is unknown, so only operations are
allowed that no module, configuration, cache or container answers with a change.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections import deque
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from keepsight.models.fingerprint.evidence import CONTAINERS, Unproven, is_plain

NOTHING = "nothing"  # None
OWN = "own"  # a plain value that the function made
NULL = "null"  # the empty entry that calls push on the stack
SEEN = "seen"  # the caller's: inputs, outputs, and their contents
TENSOR = "tensor"  # made from a caller's value by a method that only tensors have
PART = "part"  # the module itself, or something in it
FRESH = "fresh"  # an iterator made for this function
CLASS = "class"  # the class of something
STRANGE = "strange"  # anything: it may be kept or dropped, but not used
TYPES = "types"  # classes usable in type checks
PASSED = "passed on"  # the original function's result for the same arguments


def _split(names: str) -> frozenset[str]:
    return frozenset(names.split())


# No module, configuration, cache or container has a method of these names that changes it.
TENSOR_ONLY = _split("detach clone contiguous numpy")
NUMBERS = _split("item tolist size dim numel nelement stride element_size data_ptr")
LOOKS = _split("get keys values items")
ON_TENSORS = TENSOR_ONLY | _split(
    """to type float double half bfloat16 cpu mean sum norm abs max min std var any all argmax
    argmin isnan isfinite reshape view flatten squeeze unsqueeze permute transpose"""
)
OF_PARTS = _split("parameters named_parameters modules named_modules children")
OPTIONS = _split("dim keepdim dtype device copy memory_format")
VALUES = _split("shape dtype device ndim training in_features out_features layer_idx")
ATTRIBUTES = _split("data weight bias last_hidden_state logits pooler_output config")
NAMES = _split("__name__ __qualname__ __module__")
WRITES, TAKES = _split("append appendleft add clear"), _split("pop popleft")
CONVERT = (float, int, str, bool, repr, abs, round)
ITERATE = (list, tuple, sum, max, min, any, all)
CLOCKS = (time.time, time.perf_counter, time.perf_counter_ns, time.monotonic)
_ERRORS = (AssertionError, RuntimeError, ValueError)
SAFE = frozenset(map(id, (*CONVERT, *ITERATE, *CLOCKS, *_ERRORS, len, isinstance, id, type, range)))
BUILT_IN = (bool, int, float, str, bytes, tuple, list, dict, set, torch.Tensor)
OWN_KINDS = (*CONTAINERS, deque)


@dataclass(frozen=True)
class KnownObject:
    """An object that belongs to the function."""

    number: int


Kind = str | KnownObject | tuple[Any, ...]


def is_models(thing: object) -> bool:
    """Whether a value may be part of a model."""
    return isinstance(thing, torch.nn.Module | torch.Tensor)


def is_rest(kind: Kind) -> bool:
    """Whether it is the tuple of all positional extra arguments."""
    return isinstance(kind, tuple) and kind[0] == "rest"


def check_attribute(own: object, name: str) -> None:
    """Require that an attribute is stored in the object, not computed by its class."""
    kind = type(own)
    plain: tuple[object, object] = (object.__getattribute__, object.__setattr__)
    if isinstance(own, type | ModuleType | FunctionType) or type(kind) is not type:
        raise Unproven
    if (kind.__getattribute__, kind.__setattr__) != plain:
        raise Unproven
    # A class default is a value; if it is not plain it may be a property.
    found = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
    if not all(map(is_plain, found)):
        raise Unproven


def check_known(code: CodeType) -> None:
    """Require bytecode of a tested version, and a function without generators or coroutines."""
    if sys.implementation.name != "cpython" or not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise Unproven
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise Unproven
    if code.co_cellvars or code.co_kwonlyargcount or code.co_exceptiontable:
        raise Unproven
