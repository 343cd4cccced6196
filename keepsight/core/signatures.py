"""Shows to `help` and completion what `**options` stands for.

Type checkers read the annotation, `Unpack` of a TypedDict in kinds.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def shows(options: type, **defaults: object) -> Callable[[F], F]:
    """Put the keys of a TypedDict into a function's signature, before its own `**options`."""

    def shown(call: F) -> F:
        signature = inspect.signature(call)
        *given, rest = signature.parameters.values()
        named = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name),
                annotation=getattr(kind, "__forward_arg__", kind),
            )
            for name, kind in options.__annotations__.items()
            if name not in signature.parameters
        ]
        vars(call)["__signature__"] = signature.replace(parameters=[*given, *named, rest])
        return call

    return shown
