"""Names Python code that is part of a model: library functions by place, user functions by code.

A library's function is named by its place and the library's version. A user's function is named by
its bytecode, its constants and everything it reads besides its arguments, if that is plain. If it
has state, only the object itself can name it.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

from keepsight import digests
from keepsight.kinds import Record

# An editable install lies outside of the library folders.
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "torchao", "optimum", "keepsight")
_VERSIONED = ("torch", "transformers", "keepsight")  # their versions are recorded elsewhere


@functools.cache
def _roots() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    for name in _LIBRARIES:
        found = importlib.util.find_spec(name)
        paths.update(found.submodule_search_locations or () if found is not None else ())
    return (*sorted({str(path) + os.sep for path in paths if path}), "<frozen ")


@functools.cache
def is_library_file(path: str) -> bool:
    """Whether code of this file came with an installed library."""
    return path.startswith(_roots()) or os.path.realpath(path).startswith(_roots())


def is_library(function: FunctionType) -> bool:
    """Whether a function came with an installed library."""
    return is_library_file(function.__code__.co_filename)


def is_library_module(module: ModuleType) -> bool:
    """Whether a module came with an installed library, or with the interpreter."""
    return sys.modules.get(module.__name__) is module and _is_library_path(module)


def _is_library_path(module: ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    return path is None or is_library_file(path)


def is_library_type(kind: type) -> bool:
    """Whether a class came with an installed library."""
    module = sys.modules.get(kind.__module__)
    return module is not None and _is_library_path(module) and kind.__module__ != "__main__"


def layers(function: object) -> Iterator[FunctionType]:
    """A function and the functions that it wraps."""
    seen: set[int] = set()
    while isinstance(function, FunctionType) and id(function) not in seen:
        seen.add(id(function))
        yield function
        function = getattr(function, "__wrapped__", None)


def in_place(function: object, kind: type, name: str) -> bool:
    """Whether a function is in the class in which its library defined it."""
    wrapped = list(layers(function))
    if not wrapped:
        return not isinstance(function, FunctionType)
    code, home = wrapped[-1].__code__, sys.modules.get(kind.__module__)
    names = (name, "_wrapped_call_impl") if name == "__call__" else (name,)
    return (
        all(map(is_library, wrapped))
        and code.co_filename == getattr(home, "__file__", None)
        and code.co_qualname in [f"{kind.__qualname__}.{one}" for one in names]
    )


def version_of(module: str) -> str:
    """A library's version, if no other record has it."""
    top = module.partition(".")[0]
    if top in _VERSIONED or top in sys.stdlib_module_names:
        return ""
    return str(getattr(sys.modules.get(top), "__version__", ""))


def place_of(thing: object) -> tuple[str, ...]:
    """Where a library defines something: module, name, and the version if needed."""
    module = str(getattr(thing, "__module__", None) or "")
    name = str(getattr(thing, "__qualname__", None) or getattr(thing, "__name__", ""))
    if isinstance(thing, FunctionType):
        name = thing.__code__.co_qualname
        module = str(thing.__globals__.get("__name__", module))
    return (module, name, *filter(None, [version_of(module)]))


@functools.lru_cache(4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Every name of a global or an attribute in a function, including nested functions."""
    inner = (names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(4096)
def strings_in(code: CodeType) -> frozenset[str]:
    """Every string literal in a function, including nested functions."""
    inner = (strings_in(part) for part in code.co_consts if isinstance(part, CodeType))
    own = (part for part in code.co_consts if isinstance(part, str))
    groups = (part for part in code.co_consts if isinstance(part, tuple | frozenset))
    grouped = (part for group in groups for part in group if isinstance(part, str))
    return frozenset(own).union(grouped, *inner)


@functools.lru_cache(4096)
def writes_outside(code: CodeType) -> bool:
    """Whether a function sets names outside of itself."""
    free = set(code.co_freevars)
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return True
        if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in free:
            return True
    return any(writes_outside(part) for part in code.co_consts if isinstance(part, CodeType))


@functools.lru_cache(4096)
def may_catch(code: CodeType) -> bool:
    """Whether a function, or a nested one, has an exception handler."""
    if getattr(code, "co_exceptiontable", b"any"):
        return True
    return any(may_catch(part) for part in code.co_consts if isinstance(part, CodeType))


def code_digest(code: CodeType) -> str:
    """The digest of code, independent of its file."""
    constants = [_constant(part) for part in code.co_consts]
    counts = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
    names = [code.co_names, code.co_freevars, code.co_cellvars, code.co_varnames]
    python = list(sys.version_info[:2])  # bytecode is specific to a Python version
    return digests.digest("code", code.co_code, constants, *map(list, names), counts, python)


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"tuple {[_constant(part) for part in value]}"
    return f"{type(value).__name__} {value!r}"


def globals_read(function: FunctionType) -> Record:
    """The globals that a function may read, by name."""
    home = function.__globals__
    return {name: home[name] for name in sorted(names_in(function.__code__)) if name in home}


def is_builtin(value: object) -> bool:
    """Whether a value is a C function without an object bound to it."""
    own = getattr(value, "__self__", None)
    return isinstance(value, BuiltinFunctionType) and (own is None or isinstance(own, ModuleType))
