"""What is known of values that are not at hand: kinds, and what may be asked of each.

A kind says where a value is from. Of what a caller hands over it is not known what it is, so only
that is done with it which no module, configuration, cache or container answers by a change.
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

NOTHING, OWN, NULL = "nothing", "own", "null"  # None; new and plain; a gap on the stack
SEEN = "seen"  # the caller's: inputs and outputs, and what is in them
TENSOR = "tensor"  # made of what is the caller's by a method that only tensors have
PART = "part"  # the module that is looked at, or what hangs in it
FRESH = "fresh"  # an iterator made for this function
CLASS = "class"  # the class of something
STRANGE = "strange"  # anything: it may be kept or dropped, and nothing is asked of it
TYPES = "types"  # classes that may be asked for
PASSED = "passed on"  # what the original function gave for the very arguments


def _split(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Of these names no module, configuration, cache or container has a method that changes it.
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
    """An object that the function brings along."""

    number: int


Kind = str | KnownObject | tuple[Any, ...]


def is_models(thing: object) -> bool:
    """Whether a value may be part of a model."""
    return isinstance(thing, torch.nn.Module | torch.Tensor)


def is_rest(kind: Kind) -> bool:
    """Whether it is the tuple of all arguments that have no name."""
    return isinstance(kind, tuple) and kind[0] == "rest"


def check_attribute(own: object, name: str) -> None:
    """Whether an attribute of an object is what lies in it, and nothing of its class's making."""
    kind = type(own)
    plain: tuple[object, object] = (object.__getattribute__, object.__setattr__)
    if isinstance(own, type | ModuleType | FunctionType) or type(kind) is not type:
        raise Unproven
    if (kind.__getattribute__, kind.__setattr__) != plain:
        raise Unproven
    # A default in the class is a value; one that is not plain may be a property.
    found = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
    if not all(map(is_plain, found)):
        raise Unproven


def check_known(code: CodeType) -> None:
    """Only bytecode of versions that were tried, and functions that run from end to end."""
    if sys.implementation.name != "cpython" or not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise Unproven
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise Unproven
    if code.co_cellvars or code.co_kwonlyargcount or code.co_exceptiontable:
        raise Unproven
