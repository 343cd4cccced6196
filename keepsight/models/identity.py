"""What a live model is: its tensors, its configuration, and its modules.

Tensors are hashed once. All else that a forward pass reads of the modules (class, plain settings,
hooks, replaced methods, adapters) is compared with the model that Transformers makes of the same
configuration; each difference is a row. Tensors and rows together name the model, in every process.

A hook, a replaced method or another object that only lives here has no name elsewhere. A model with
one is private: its memory stays in this process.

Before each call `Watch` tells whether anything changed. It compares objects that are held, plain
values, and the place, the version and a few values of each tensor. What is hidden deeper, such as
what a hook reads, is the user's to announce (`vlm.refresh()`).
"""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import logging
import operator
import re
import secrets
import sys
import sysconfig
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel

from keepsight import digests
from keepsight.errors import KeepsightError, ModelError, UnreadableWeights
from keepsight.kinds import Processor, Record
from keepsight.models import upstream
from keepsight.models.families import Family
from keepsight.models.families.tower_absent import (
    AbsentTower,
    AbsentWeight,
    TowerSource,
    absent_parts,
)
from keepsight.models.partial_processor import NotLoaded

Plain = str | tuple["Plain", ...]
Row = tuple[str, Plain]  # the path of a module, and how it differs
Owner = str | None  # the path of a module whose tensors are hashed again, or none

OUR_HOOK = "keepsight.blindfold"  # our forward pre-hook that only watches
# Parts of a configuration that name its origin and change no result.
_ORIGIN = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map"}
    | {"_post_init_done", "dtype", "torch_dtype"}
)
_BASE = frozenset(vars(torch.nn.Module()))  # attributes of every module, compared one by one
# Notes on modules that change no forward pass: of Transformers and PEFT,
_NOTES = frozenset({
    "_hf_peft_config_loaded", "_is_hf_initialized", "_output_capturing_hooks_installed",
    "_use_kernels", "_weight_conversions", "hf_device_map", "hf_quantizer", "is_loaded_in_4bit",
    "is_loaded_in_8bit", "is_quantized", "model_tags", "name_or_path", "peft_config",
    "quantization_method", "warnings_issued",
    "generation_config",  # read on every call by the sampling code
    "rope_deltas",  # left by the last caller; positions are passed explicitly
    "generate",  # the caller of a live model
    # how a checkpoint is loaded, saved and spread over devices,
    "_ep_plan", "_fsdp_plan", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict",
    "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_save", "_no_split_modules", "_pp_plan", "_skip_keys_device_placement",
    "_tp_plan", "all_tied_weights_keys",
    # and what `generate` leaves for its own next call.
    "_cached_continuous_batching_manager", "_compiled_call", "_last_compile_config",
    "_previous_max_cache_length", "_cached_decode_position_ids", "_prefill_len",
})  # fmt: skip
_ELSEWHERE = frozenset({"_compiled_call_impl"})  # seen by `compiled.py`
_PLACED = frozenset({"_hf_hook", "_old_forward", "forward"})  # set by accelerate on a module
# Methods that move a model; accelerate makes them warn for a model spread over devices.
_MOVES = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
_NOISE = ("drop", "jitter", "noise")
_TENSORS = ("_parameters", "_buffers")
_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}
_USUAL = (torch.Tensor, torch.nn.Parameter)
_VALUES = (bool, int, float, complex, str, bytes, type(None), type(...))
_BY_NAME = (torch.dtype, torch.layout, torch.memory_format, np.dtype, np.generic, re.Pattern)
_WITHOUT_VALUE = (  # where a model lies is part of the environment
    torch.device, logging.Logger, type(threading.Lock()), type(threading.RLock()),
    weakref.ReferenceType,
)  # fmt: skip
_SAMPLES = 8  # values of each tensor on the CPU that are compared
# Perhaps installed to be edited; the versions of the first three are part of the environment.
_LIBRARIES = ("torch", "transformers", "keepsight", "peft", "accelerate", "torchao", "optimum")
_FUNCTIONS = (FunctionType, MethodType, functools.partial, type(None))
_MISSING = object()
_DESCRIBED = operator.attrgetter("_version", "shape", "dtype")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# -- whether anything changed ----------------------------------------------------------------------


def _same(one: object, other: object) -> bool:
    """Whether two values are one object, or plain and equal."""
    kind = type(one)
    return one is other or (kind is type(other) and kind in _VALUES and repr(one) == repr(other))


@dataclass(slots=True)
class _Container:
    """A dict, the attributes of a class, or a list, with a copy of its items."""

    thing: Any
    owner: Owner
    ignored: frozenset[str]
    then: dict[Any, object] = field(init=False)

    def __post_init__(self) -> None:
        self.then = self.now()

    def now(self) -> dict[Any, object]:
        """Its items; those of a list by position."""
        if isinstance(self.thing, dict):
            return dict(dict.items(self.thing))  # a subclass may make values when asked for them
        return dict(self.thing if isinstance(self.thing, Mapping) else enumerate(self.thing))

    def changed(self) -> set[Owner]:
        """The owner of a change; none of the weights if only functions or modes changed."""
        then, now = self._named(self.then), self._named(self.now())
        names = {**then, **now}
        other = [n for n in names if not _same(then.get(n, _MISSING), now.get(n, _MISSING))]
        if not other and list(then) == list(now):
            return set()
        values = [home.get(name) for name in other if name != "training" for home in (then, now)]
        quiet = other and all(isinstance(value, _FUNCTIONS) for value in values)
        return {None if quiet else self.owner}

    def _named(self, items: dict[Any, object]) -> dict[Any, object]:
        return {name: value for name, value in items.items() if name not in self.ignored}


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    try:
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        address = 0  # a wrapper around others, which are held themselves
    strides = tensor.stride() if tensor.layout == torch.strided else None
    version = None if tensor.is_inference() else tensor._version
    return address, strides, version, tensor.shape, tensor.dtype


def _sample(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A live view of a few values of a tensor on the CPU."""
    simple = type(tensor) in _USUAL and tensor.layout == torch.strided and not tensor.is_quantized
    if not simple or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return np.empty(0, np.uint8)
    kind = _INTEGERS.get(tensor.element_size(), torch.uint8)
    flat: np.ndarray[Any, Any] = tensor.detach().reshape(-1).view(kind).numpy()
    return flat[:: max(1, len(flat) // _SAMPLES)]


class Watch:
    """Everything that was read of a model, as it was then, and whether it is so still."""

    def __init__(self) -> None:
        self._objects: dict[int, tuple[Any, type, Any, Owner]] = {}
        self._containers: dict[int, _Container] = {}
        self._tensors: dict[int, tuple[torch.Tensor, tuple[object, ...], Owner]] = {}
        self.kept: list[object] = []  # so that nothing else takes its address

    def container(self, thing: Any, owner: Owner, ignored: frozenset[str] = frozenset()) -> None:
        """Hold the items of a dict or a list."""
        if id(thing) not in self._containers:
            self._containers[id(thing)] = _Container(thing, owner, ignored)

    def holder(self, thing: Any, owner: Owner, ignored: frozenset[str] = frozenset()) -> None:
        """Hold an object by its class and its attributes."""
        self._objects[id(thing)] = thing, type(thing), vars(thing), owner
        self.container(vars(thing), owner, ignored)

    def kind(self, kind: type) -> None:
        """Hold the attributes of a class."""
        if id(kind) not in self._containers:  # its view is made anew each time
            self._containers[id(kind)] = _Container(vars(kind), None, frozenset())
            self.kept.append(kind)

    def tensor(self, tensor: torch.Tensor, owner: Owner) -> None:
        """Hold a tensor by its place, its version and a few of its values."""
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = tensor, _stamp(tensor), owner

    def seal(self) -> None:
        """Arrange what is held, to compare thousands of things in few calls."""
        self._things = [thing for thing, *_ in self._objects.values()]
        self._kinds = [kind for _, kind, *_ in self._objects.values()]
        self._homes = [home for _, _, home, _ in self._objects.values()]
        self._all = [*self._containers.values()]
        own = {id(home) for home in self._homes}
        dicts = [one for one in self._all if isinstance(one.thing, Mapping) and one.then]
        # A new attribute comes last, so of the many names of objects the last ones tell.
        self._ending = [one for one in dicts if id(one.thing) in own]
        self._named = [one for one in dicts if id(one.thing) not in own]
        self._views = [_view(one.thing) for one in self._all]
        self._flatten()
        tensors = [*self._tensors.values()]
        self._odd = [one for one in tensors if _is_odd(one[0])]
        self._plain = [tensor for tensor, *_ in tensors if not _is_odd(tensor)]
        samples = [_sample(tensor) for tensor in self._plain]
        kinds = {view.dtype for view in samples}
        self._samples = [[view for view in samples if view.dtype == kind] for kind in kinds]
        self._places, self._values = self._places_now(), self._values_now()

    def _flatten(self) -> None:
        self._sizes = [len(one.then) for one in self._all]
        self._items = [item for one in self._all for item in one.then.values()]
        self._names = [name for one in self._named for name in one.then]
        self._ends = [next(reversed(one.then)) for one in self._ending]

    def _places_now(self) -> list[tuple[object, ...]]:
        kind, tensors = torch.Tensor, self._plain
        addresses, strides = map(kind.data_ptr, tensors), map(kind.stride, tensors)
        return list(zip(addresses, strides, map(_DESCRIBED, tensors), strict=True))

    def _values_now(self) -> list[bytes]:
        return [np.concatenate(views).tobytes() for views in self._samples]

    def moved(self) -> tuple[set[Owner], bool]:
        """The owners of what changed since it was held, and whether that is a tensor."""
        found = set[Owner]()
        if self._other_objects():
            for thing, kind, home, owner in self._objects.values():
                if type(thing) is not kind or vars(thing) is not home:
                    found.add(owner)
        if self._other_items():
            found |= {owner for one in self._all for owner in one.changed()}
            if not found:  # values that are equal, or ignored
                for one in self._all:
                    one.then = one.now()
                self._flatten()
        # The views lie in the old places: read them only if all tensors are there still.
        same = self._places_now() == self._places and self._values_now() == self._values
        asked = self._odd if same else self._tensors.values()
        tensors = {owner for tensor, then, owner in asked if _stamp(tensor) != then}
        return found | tensors, bool(tensors)

    def _other_objects(self) -> bool:
        same = all(map(operator.is_, map(vars, self._things), self._homes))
        return not same or list(map(type, self._things)) != self._kinds

    def _other_items(self) -> bool:
        try:
            return (
                list(map(len, self._views)) != self._sizes
                or not all(map(operator.is_, chain.from_iterable(self._views), self._items))
                or [name for one in self._named for name in one.thing] != self._names
                or [next(reversed(one.thing)) for one in self._ending] != self._ends
            )
        except RuntimeError:  # another thread changes one of them
            return True


def _view(thing: Any) -> Any:
    """A live view of the items of a container."""
    if isinstance(thing, dict):
        return dict.values(thing)
    return thing.values() if isinstance(thing, Mapping) else thing


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether a tensor lacks a version or a place of its own."""
    return type(tensor) not in _USUAL or tensor.is_inference() or tensor.layout != torch.strided


def _stamp(tensor: torch.Tensor) -> tuple[object, ...]:
    return _place(tensor), _sample(tensor).tobytes()


class _Digests:
    """The digests of tensors, each valid until its tensor changes."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, tuple[object, ...], str]] = {}
        self._used: set[int] = set()

    def of(self, tensor: torch.Tensor) -> str:
        """The digest of a tensor's values."""
        self._used.add(id(tensor))
        stamp, known = _stamp(tensor), self._known.get(id(tensor))
        if known is not None and known[0] is tensor and known[1] == stamp:
            return known[2]
        found = _digest(tensor)
        self._known[id(tensor)] = (tensor, stamp, found)
        return found

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have these tensors read again."""
        for tensor in tensors:
            self._known.pop(id(tensor), None)

    def drop_unused(self) -> None:
        """Let go of tensors that no model has any more."""
        self._known = {key: self._known[key] for key in self._used & self._known.keys()}
        self._used = set()


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_quantized:
        values = (tensor.int_repr(), str(tensor.dtype), str(tensor.qscheme()))
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return digests.digest("quantised", *values, tensor.q_scale(), tensor.q_zero_point())
        scales = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
        return digests.digest("quantised", *values, *scales, tensor.q_per_channel_axis())
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        inner = [part for name in names for part in (name, _digest(getattr(tensor, name)))]
        return digests.digest("weight of parts", str(context), list(tensor.shape), *inner)
    try:
        return digests.weight_digest(tensor)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise UnreadableWeights(
            f"a weight of kind {type(tensor).__name__} cannot be read, so it cannot be "
            f"fingerprinted ({error}); load the model in another precision"
        ) from error


# -- describing values -----------------------------------------------------------------------------


class _Private:
    """Numbers for objects that only this process knows, each constant while its object lives."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(16)
        self._numbers: dict[int, tuple[object, int]] = {}
        self._count = 0

    def row(self, thing: object) -> Plain:
        """The words for an object."""
        known = self._numbers.get(id(thing))
        if known is None or _referent(known[0]) is not thing:
            self._count += 1
            try:
                known = weakref.ref(thing), self._count
            except TypeError:
                known = thing, self._count  # held, because its end cannot be noticed
            self._numbers[id(thing)] = known
        return ("private", self.name, str(known[1]))


def _referent(thing: object) -> object:
    return thing() if isinstance(thing, weakref.ReferenceType) else thing


class Describer:
    """One walk over values, which are described in words that are equal in every process."""

    def __init__(
        self,
        watch: Watch,
        places: Mapping[int, str],
        digest: Callable[[torch.Tensor], str],
        private: _Private,
    ) -> None:
        self._watch, self._places, self._digest, self._private = watch, places, digest, private
        self._known: dict[int, tuple[object, Plain]] = {}

    def value(self, value: object, owner: Owner) -> Plain:
        """The description of a value."""
        kind = type(value)
        if kind in _VALUES:
            return (kind.__name__, repr(value))
        if id(value) not in self._known:
            self._known[id(value)] = (value, ("again",))  # it contains itself
            try:
                found = self._describe(value, owner)
            except KeepsightError:
                raise
            except Exception:  # a user's object may raise anything
                found = self.private(value)
            self._known[id(value)] = (value, found)
        return self._known[id(value)][1]

    def private(self, thing: object) -> Plain:
        """A description that no other process has."""
        if isinstance(thing, MethodType):  # made anew each time that it is asked for
            return ("method", self.private(thing.__self__), self.private(thing.__func__))
        self._watch.kept.append(thing)
        return self._private.row(thing)

    def tensor(self, tensor: torch.Tensor, owner: Owner) -> Plain:
        """A tensor, described by its values."""
        self._watch.tensor(tensor, owner)
        return ("tensor", str(tensor.dtype), self._digest(tensor))

    def _describe(self, value: Any, owner: Owner) -> Plain:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value, owner)
        if isinstance(value, torch.nn.Module) and id(value) in self._places:
            return ("part", self._places[id(value)])
        if isinstance(value, type):
            return self.kind(value)
        if isinstance(value, enum.Enum):
            return (*place_of(kind), value.name)
        if isinstance(value, _BY_NAME):
            return (*place_of(kind), str(value))
        if isinstance(value, _WITHOUT_VALUE):
            return place_of(kind)
        if isinstance(value, ModuleType):
            return ("module", value.__name__)
        if isinstance(value, dict):
            self._watch.container(value, owner)
            return (*place_of(kind), *self._items(dict.items(value), owner))
        if isinstance(value, list | tuple | set | frozenset | deque):
            if not isinstance(value, tuple | frozenset):
                self._watch.container(value, owner)
            parts = [self.value(part, owner) for part in value]
            unordered = isinstance(value, set | frozenset)
            return (*place_of(kind), *(sorted(parts, key=repr) if unordered else parts))
        if isinstance(value, np.ndarray) and value.dtype != object:
            return (*place_of(kind), digests.digest("array", value))
        if isinstance(value, torch.ScriptObject):  # weights in a kernel's packed form
            return (*place_of(kind), self.value(value.__getstate__(), owner))
        if callable(value) and not isinstance(value, torch.nn.Module):
            return self._callable(value, owner)
        if not hasattr(value, "__dict__"):
            return self.private(value)
        ignored = _ORIGIN if isinstance(value, PreTrainedConfig) else frozenset()
        self._watch.holder(value, owner, ignored)
        own = [pair for pair in vars(value).items() if pair[0] not in ignored]
        return (*self.kind(kind), *self._items(own, owner), ())

    def _items(self, pairs: Iterable[tuple[Any, object]], owner: Owner) -> list[Plain]:
        found = [(self.value(name, owner), self.value(part, owner)) for name, part in pairs]
        return sorted(found, key=repr)

    def _callable(self, value: Any, owner: Owner) -> Plain:
        """A library's function by its place; anything else belongs to this process."""
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return ("partial", *(self.value(part, owner) for part in parts))
        if isinstance(value, MethodType) and id(value.__self__) in self._places:
            own = self.value(value.__func__, owner)
            return ("method", self._places[id(value.__self__)], own)
        if isinstance(value, FunctionType) and is_library(place_of(value)[0]):
            inside = [self.value(cell.cell_contents, owner) for cell in value.__closure__ or ()]
            given = self.value(value.__defaults__, owner) if inside else ()
            return ("function", *place_of(value), *inside, given)
        whose = getattr(value, "__self__", None)
        if isinstance(value, _OF_C) and (whose is None or isinstance(whose, ModuleType)):
            return ("builtin", *place_of(value))
        return self.private(value)

    def kind(self, kind: type) -> Plain:
        """A class: a library's by its place, a user's by that and by the text of its file."""
        if is_library(kind.__module__):
            return place_of(kind)
        found: Any = sys.modules.get(kind.__module__)
        file = getattr(found, "__file__", None)
        for name in kind.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is not kind or file is None:
            return self.private(kind)
        bases = (base for base in kind.__bases__ if not is_library(base.__module__))
        return ("class", *place_of(kind), _file_digest(file), *map(self.kind, bases))

    def replaced(self, kind: type, telling: tuple[str, ...] = ("forward",)) -> Iterator[Plain]:
        """The functions of a class that its module did not put there; asked of those of its bases
        that define one of the `telling` names."""
        for base in kind.__mro__:
            if base in (torch.nn.Module, object) or not any(name in vars(base) for name in telling):
                continue
            self._watch.kind(base)
            for name, value in list(vars(base).items()):
                if (name == "__call__" or not name.startswith("__")) and _is_put(base, name, value):
                    yield ("replaced", *place_of(base), name, self.value(value, None))


_OF_C = (BuiltinFunctionType, type(str.join), type(object.__init__), type(vars(dict)["fromkeys"]))


def _is_put(kind: type, name: str, value: object) -> bool:
    """Whether an attribute of a class is a function from elsewhere."""
    for inner in ("__func__", "fget", "func"):  # of a static method, a property, a cached property
        value = getattr(value, inner, value)
    if not isinstance(value, FunctionType):
        known = isinstance(value, type) or type(value) in _VALUES
        return not known and (callable(value) or hasattr(type(value), "__get__"))
    module, place = place_of(inspect.unwrap(value))[:2]
    wrapper = place_of(value)[0]
    in_place = (module, place) == (kind.__module__, f"{kind.__qualname__}.{name}")
    given = is_library(module) and "." not in place  # by a library's decorator
    return not (in_place or given) or not (wrapper == module or is_library(wrapper))


@functools.cache
def is_library(module: str) -> bool:
    """Whether a module came with Python or with an installed library."""
    top = module.partition(".")[0]
    if top in ("__main__", "unittest"):  # stand-ins of tests are a user's
        return False
    if top in _LIBRARIES or top in sys.stdlib_module_names:
        return True
    path = str(getattr(sys.modules.get(module), "__file__", None))
    return path.startswith(tuple(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def place_of(thing: object) -> tuple[str, ...]:
    """Where something is defined: module, name, and the library's version if it is not known."""
    module = str(getattr(thing, "__module__", None) or "")
    name = str(getattr(thing, "__qualname__", None) or getattr(thing, "__name__", ""))
    if isinstance(thing, FunctionType):
        name, module = thing.__code__.co_qualname, str(thing.__globals__.get("__name__", module))
    top = module.partition(".")[0]
    if top in _LIBRARIES[:3] or top in sys.stdlib_module_names:
        return (module, name)  # their versions are part of the environment
    version = str(getattr(sys.modules.get(top), "__version__", ""))
    return (module, name, *filter(None, [version]))


@functools.cache
def _file_digest(path: str) -> str:
    with open(path, "rb") as file:
        return digests.digest("code", file.read())


# -- the model that Transformers makes -------------------------------------------------------------


@dataclass(frozen=True)
class _StockModule:
    """A module as Transformers builds it: its class, its settings and its derived buffers."""

    kind: type
    settings: dict[str, Plain]
    derived: dict[str, torch.Tensor]


_stock: OrderedDict[tuple[type, str], dict[str, _StockModule]] = OrderedDict()


def _settings_of(
    module: torch.nn.Module, describer: Describer, owner: Owner, ignored: frozenset[str]
) -> dict[str, Plain]:
    """The settings of a module, by name."""
    own = {name: value for name, value in vars(module).items() if name not in ignored}
    found = {name: describer.value(value, owner) for name, value in own.items()}
    return {**found, "children": ("children", *module._modules)}


def _stock_of(model: PreTrainedModel, config: Plain) -> dict[str, _StockModule]:
    """Every module that Transformers makes of a configuration, by path. Empty if it makes none."""
    key = (type(model), repr(config))
    if key not in _stock:
        _stock[key] = _build(model)
        if len(_stock) > 4:
            _stock.popitem(last=False)
    return _stock[key]


def _build(model: PreTrainedModel) -> dict[str, _StockModule]:
    try:
        with torch.random.fork_rng(devices=[]), _quiet():
            with torch.device("meta"):
                twin: Any = type(model)(copy.deepcopy(model.config))
            derived = dict(_derived(twin))
    except Exception as error:  # a model's code may raise anything: then everything is described
        logging.getLogger(__name__).info("no model to compare with: %s", error)
        return {}
    places = {id(part): path for path, part in twin.named_modules()}
    describer = Describer(Watch(), places, lambda t: f"unread {tuple(t.shape)}", _Private())
    return {
        path: _StockModule(
            type(part),
            _settings_of(part, describer, None, _BASE | _NOTES),
            derived.get(path, {}),
        )
        for path, part in twin.named_modules(remove_duplicate=False)
    }


def _derived(twin: Any) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """The values of buffers missing in checkpoints, filled by Transformers' own code."""
    homes = {path: part for path, part in twin.named_modules() if isinstance(part, PreTrainedModel)}
    for path, part in twin.named_modules():
        names = [n for n in part._non_persistent_buffers_set if part._buffers.get(n) is not None]
        if not names:
            continue
        for name in names:
            part._buffers[name] = torch.zeros_like(part._buffers[name], device="cpu")
        above = [home for home in homes if path == home or path.startswith(home and f"{home}.")]
        homes[max(above, key=len)]._init_weights(part)
        yield path, {name: part._buffers[name] for name in names}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings that were already shown when the model was made."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


# -- how a live model differs from it --------------------------------------------------------------


class _Differences:
    """The rows of one model. Everything that is read of its modules is held."""

    def __init__(
        self,
        model: PreTrainedModel,
        stock: dict[str, _StockModule],
        describer: Describer,
        watch: Watch,
    ) -> None:
        self._stock, self._describer, self._watch = stock, describer, watch
        self._exported = hasattr(model, "exported")
        self.derived: list[Row] = []  # buffers whose dtype is not Transformers'
        self.code: dict[type, list[Plain]] = {}  # replaced methods of classes
        self.rows: list[Row] = []
        for path, module in model.named_modules(remove_duplicate=False):
            self._hold(module, path)
            self.rows += [(path, row) for row in self._of(module, path)]
        home = vars(torch_module)
        for name, flags in _HOOKS.items():
            every = f"_global{name}"
            watch.container(home[every], None)
            on_all = {n: home.get(f"_global{n}", {}) for n in flags} | {name: home[every]}
            self.rows += [("*", ("of all modules", *row)) for row in self._hooks(on_all, name, "*")]

    def _hold(self, module: torch.nn.Module, path: str) -> None:
        own = vars(module)
        self._watch.holder(module, path, _NOTES)
        for name in (*_TENSORS, "_modules"):
            self._watch.container(own[name], path)
        for name in _HOOKS:
            self._watch.container(own[name], None, frozenset({OUR_HOOK}))

    def _of(self, module: torch.nn.Module, path: str) -> Iterator[Plain]:
        kind = module.stands_for if isinstance(module, AbsentTower) else type(module)
        if kind not in self.code:
            self.code[kind] = [*self._describer.replaced(kind)]
        yield from self.code[kind]
        if isinstance(module, AbsentTower):
            return
        part, own = self._stock.get(path), vars(module)
        if part is None or part.kind is not kind:
            yield ("kind", self._describer.kind(kind))
        ignored = {name for name, value in own.items() if _is_ours(value)}
        ignored |= {name for name in _MOVES if _is_of_accelerate(own.get(name))}
        if _is_only_placed(module):
            ignored |= _PLACED
        ignored |= _BASE | _NOTES | _ELSEWHERE
        mine = _settings_of(module, self._describer, path, frozenset(ignored))
        other = part.settings if part is not None else {}
        for name in sorted({**mine, **other}):
            if mine.get(name) != other.get(name):
                yield ("setting", name, mine.get(name, "absent"))
        if module.training:
            yield from self._training(module, path)
        for home in _HOOKS:
            yield from self._hooks(own, home, path)
        if not self._exported:  # exported graphs already contain the buffer
            yield from self._buffers(module, path, part.derived if part is not None else {})
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield ("extra state", self._describer.value(module.get_extra_state(), path))

    def _hooks(self, homes: Record, name: str, path: str) -> Iterator[Plain]:
        for key, hook in homes[name].items():
            if not _is_known(key, hook):
                how = tuple(flag for flag in _HOOKS[name] if key in homes[flag])
                yield ("hook", name, self._describer.private(hook), how)

    def _training(self, module: torch.nn.Module, path: str) -> Iterator[Plain]:
        if _is_random(module):
            raise ModelError(
                f"{path} ({type(module).__name__}) is in training mode, though the model is "
                "not, so its results vary; call model.eval()"
            )
        if _reads_training(type(module)):
            yield ("training", "True")

    def _buffers(
        self, module: torch.nn.Module, path: str, derived: dict[str, torch.Tensor]
    ) -> Iterator[Plain]:
        for name in sorted(module._non_persistent_buffers_set):
            buffer, stock = module._buffers.get(name), derived.get(name)
            if buffer is None:
                if stock is not None:
                    yield ("buffer", name, "absent")
                continue
            described = self._describer.tensor(buffer, path)
            if stock is None or not _reads_as(buffer, stock):
                yield ("buffer", name, described)
            elif buffer.dtype != stock.dtype:
                self.derived.append((f"{path}.{name}", str(buffer.dtype)))


def _reads_as(buffer: torch.Tensor, stock: torch.Tensor) -> bool:
    """Whether a buffer equals the values that Transformers derives, in the buffer's own dtype."""
    same = buffer.shape == stock.shape
    return same and torch.equal(buffer.detach().cpu(), stock.to(buffer.dtype))


def _is_random(module: torch.nn.Module) -> bool:
    """Whether a module in training mode gives varying results."""
    if isinstance(module, upstream.DROPOUT.needed()):
        return bool(module.p > 0)
    if isinstance(module, upstream.NORM.needed()):
        return bool(module.track_running_stats)
    if isinstance(module, torch.nn.RReLU):
        return True
    if not _reads_training(type(module)):
        return False
    return not is_library(type(module).__module__) or any(
        isinstance(value, int | float) and value > 0 and any(word in name for word in _NOISE)
        for name, value in vars(module).items()
    )


def _reads_training(kind: type) -> bool:
    """Whether the methods of a module's class read the training mode."""
    bases = kind.__mro__[: kind.__mro__.index(torch.nn.Module)]
    functions = (inspect.unwrap(f) for b in bases for f in vars(b).values() if callable(f))
    return any("training" in f.__code__.co_names for f in functions if isinstance(f, FunctionType))


def _is_known(key: object, hook: object) -> bool:
    """Whether a hook is ours, or one of those by which libraries only record."""
    function = hook.__func__ if isinstance(hook, MethodType) else hook
    if not isinstance(function, FunctionType):
        return key == OUR_HOOK
    module, name, *_ = place_of(function)
    return key == OUR_HOOK or (module, name.rpartition(".")[2]) in upstream.SILENT_HOOKS


def _is_ours(value: object) -> bool:
    """Whether we set a value: a graph in place of a module, which is named elsewhere."""
    named = value if type(value) is FunctionType else type(value)
    return str(named.__module__).startswith("keepsight.")


def _is_of_accelerate(value: object) -> bool:
    return isinstance(value, FunctionType) and value.__globals__.get("__name__", "").startswith(
        "accelerate."
    )


def _is_only_placed(module: torch.nn.Module) -> bool:
    """Whether accelerate only moves the inputs of a module to its device."""
    own = vars(module)
    hook, old = own.get("_hf_hook"), own.get("_old_forward")
    if hook is None or not type(hook).__module__.startswith("accelerate."):
        return False
    hooks = getattr(hook, "hooks", (hook,))
    if any(type(one).__name__ != "AlignDevicesHook" or one.offload for one in hooks):
        return False
    return isinstance(old, MethodType) and old.__func__ is type(module).forward


# -- the identity ----------------------------------------------------------------------------------


class Identity:
    """What one live model is, found again after changes."""

    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        self._model, self._family = model, family
        self._private, self._digests = _Private(), _Digests()
        self._watch: Watch | None = None
        self._source: TowerSource | None = None
        self._announced = 0  # changes that nothing shows
        self.all = self.vision = self.config = self.code = ""
        self.settings = ""  # settings of the tower
        self.tensors = self.vision_tensors = ""  # the values of the weights alone
        self.dtype = self.vision_dtype = ""
        self.is_private = self.vision_is_private = False  # whether other processes must not use it
        self.changes = 0  # how often tensors were seen changed, also if they were changed back
        self.on_forget: Callable[[Iterable[torch.Tensor]], None] = lambda tensors: None

    def refresh(self, remembered: dict[str, str] | None = None) -> bool:
        """Check for changes and read what changed. True if the model was described again.

        `remembered` are digests known to belong to the loaded files.
        """
        moved: set[Owner] = {""}  # what changed while it was read is unknown
        if self._watch is not None:
            moved, tensors = self._watch.moved()
            if not moved:
                return False
            self.changes += tensors
        if settle(self._model) and self._watch is not None:
            moved |= self._watch.moved()[0]
        self._describe(moved, remembered)
        return True

    def announce(self) -> None:
        """Read everything again. If nothing shows a change it is one that only its author knows:
        the model is private from now on, with a memory of its own."""
        before = self.state
        self._describe({""}, None)
        if self.state == before:
            self._announced += 1
            self._describe(set(), None)

    @property
    def state(self) -> tuple[str, ...]:
        """Everything that distinguishes one state of the model from another."""
        return (self.all, self.vision, self.config, self.code)

    def record(self) -> dict[str, str]:
        """The digests, in the form that `refresh` accepts."""
        names = ("all", "vision", "tensors", "vision_tensors", "dtype", "vision_dtype")
        return {name: getattr(self, name) for name in names}

    def _describe(self, moved: set[Owner], remembered: dict[str, str] | None) -> None:
        self._watch = None  # until everything is described
        watch, remembered = Watch(), remembered or {}
        self._forget([path for path in moved if path is not None])
        self._source = next((part.source for part in absent_parts(self._model)), None)
        named = list(self._named())
        _check_readable(named)
        for name, tensor in named:
            watch.tensor(tensor, name.rpartition(".")[0])
        places = {id(part): path for path, part in self._model.named_modules()}
        describer = Describer(watch, places, self._digests.of, self._private)
        config = describer.value(self._model.config, None)
        found = _Differences(self._model, _stock_of(self._model, config), describer, watch)
        rows = [*found.rows, *_unusual(named, describer)]
        if self._announced:
            rows.append(("*", ("announced", self._private.name, str(self._announced))))
        self.config = digests.digest("config", repr(config))
        self.code = digests.digest(
            "code", repr([row for rows in found.code.values() for row in rows])
        )
        self.settings = self._family.vision_settings()
        self._name(remembered, rows, named)
        self._note_dtypes(remembered, found.derived)
        watch.seal()
        self._digests.drop_unused()
        if not watch.moved()[0]:  # unchanged while it was read
            self._watch = watch

    def _forget(self, paths: list[str]) -> None:
        """Have the tensors of changed modules and those below them read again: a changed module may
        have changed them in a way that nothing shows."""
        forgotten = [tensor for name, tensor in self._named() if _below(name, paths)]
        self._digests.forget(forgotten)
        self.on_forget(forgotten)

    def _name(
        self, remembered: dict[str, str], rows: list[Row], named: list[tuple[str, torch.Tensor]]
    ) -> None:
        text = self._text_paths()
        seen = [(path, row) for path, row in rows if not _below(path, text)]
        # The names of weights that are not PyTorch's: in graphs, or in MLX.
        exported = getattr(getattr(self._model, "exported", None), "weights", None) or {}
        if exported:
            self.tensors, self.vision_tensors = exported["all"], exported["vision"]
        elif {"tensors", "vision_tensors"} <= remembered.keys():
            self.tensors, self.vision_tensors = remembered["tensors"], remembered["vision_tensors"]
        else:
            absent = [(name, digest) for name, digest, _ in self._absent()]
            by_name = {name: self._digests.of(tensor) for name, tensor in named}
            vision = [(name, by_name[name]) for name, _ in self._vision()]
            self.tensors = digests.fingerprint_of([*by_name.items(), *absent])
            self.vision_tensors = digests.fingerprint_of([*vision, *absent])
        self.all, self.vision = self.tensors, self.vision_tensors
        if rows or not exported:
            self.all = digests.digest("model", self.tensors, _written(rows))
        if seen or not exported:
            self.vision = digests.digest("vision", self.vision_tensors, _written(seen))
        self.is_private = self._private.name in _written(rows)
        self.vision_is_private = self._private.name in _written(seen)

    def _note_dtypes(self, remembered: dict[str, str], derived: list[Row]) -> None:
        """Record the dtypes of the weights. Those of an absent tower are in its files."""
        if self._source is not None and {"dtype", "vision_dtype"} <= remembered.keys():
            self.dtype, self.vision_dtype = remembered["dtype"], remembered["vision_dtype"]
            return
        absent = [(name, dtype) for name, _, dtype in self._absent() if dtype]
        text = self._text_paths()
        seen = [(name, dtype) for name, dtype in derived if not _below(name, text)]
        self.dtype = _dtype(self._named(), absent, derived)
        self.vision_dtype = _dtype(self._vision(), absent, seen)

    def _vision(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from _persistent(self._model, self._family.vision_weights())

    def _absent(self) -> list[AbsentWeight]:
        """The weights of a tower that was left out, by name."""
        return [] if self._source is None else self._source.weights()

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters(remove_duplicate=False)
        yield from _persistent(self._model, self._model.named_buffers(remove_duplicate=False))

    def _text_paths(self) -> list[str]:
        """The paths of the text-only modules."""
        text = {id(module) for module in self._family.text_modules()}
        return [path for path, module in self._model.named_modules() if id(module) in text]


def _unusual(named: list[tuple[str, torch.Tensor]], describer: Describer) -> Iterator[Row]:
    """What weights of special classes hold besides their values."""
    for name, tensor in named:
        if type(tensor) not in _USUAL:
            path = name.rpartition(".")[0]
            parts = (describer.kind(type(tensor)), describer.value(vars(tensor), path))
            yield path, ("weight", name, *parts)


def _check_readable(named: list[tuple[str, torch.Tensor]]) -> None:
    if any(tensor.is_meta for _, tensor in named):
        raise UnreadableWeights(
            "some weights are on the meta device (offloaded, or never loaded): they cannot "
            "be fingerprinted, so nothing could be remembered safely. Load the model whole."
        )


def _below(name: str, paths: list[str]) -> bool:
    """Whether a name equals one of these paths or lies below one."""
    return any(name == path or not path or name.startswith(f"{path}.") for path in paths)


def _written(rows: list[Row]) -> str:
    return repr(sorted(rows, key=repr))


def _dtype(
    named: Iterator[tuple[str, torch.Tensor]],
    absent: list[tuple[str, str]],
    derived: list[Row],
) -> str:
    """The dtype that all floating weights share, or a digest of the dtypes by name."""
    here = ((name, str(t.dtype)) for name, t in named if t.is_floating_point())
    held = sorted([*here, *absent])
    dtypes = {dtype for _, dtype in held}
    if len(dtypes) == 1 and not derived:
        return dtypes.pop()
    return digests.digest("dtypes", held, *([sorted(derived)] if derived else []))


def _persistent(
    model: PreTrainedModel, named: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Leave out derived buffers: rope tables change with the prompt length."""
    derived = {
        id(module._buffers[name])
        for module in model.modules()
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    }
    for name, tensor in named:
        if id(tensor) not in derived:
            yield name, tensor


def settle(model: torch.nn.Module) -> bool:
    """Unmerge PEFT adapters that are switched off; return whether there were any. PEFT would do so
    in the next pass, which would make digests read before it wrong."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return False
    layers = [m for m in model.modules() if isinstance(m, tuners.BaseTunerLayer)]
    waiting = [layer for layer in layers if layer.disable_adapters and layer.merged]
    for layer in waiting:
        layer.unmerge()
    return bool(waiting)


# -- processors ------------------------------------------------------------------------------------


class ProcessorCode:
    """How a live processor's code differs from its library's: it decides what enters a tower."""

    def __init__(self, processor: Processor | None) -> None:
        self._processor, self._private = processor, _Private()
        self._watch: Watch | None = None
        self._digest, self._announced = "", 0

    def announce(self) -> None:
        """Take it for another one from now on: its code changed in a way that nothing shows."""
        self._watch, self._announced = None, self._announced + 1

    def look(self) -> str:
        """The digest of what users put into it; empty if that is nothing."""
        if self._processor is not None and (self._watch is None or self._watch.moved()[0]):
            self._watch = Watch()
            self._digest = self._described(self._watch, vars(self._processor))
        return self._digest

    def _described(self, watch: Watch, own: Record) -> str:
        names = ("image_processor", "video_processor", "feature_extractor")
        parts = [self._processor, *(own[name] for name in names if own.get(name) is not None)]
        describer = Describer(watch, {}, digests.weight_digest, self._private)
        rows: list[Plain] = []
        if self._announced:
            rows.append((self._private.name, str(self._announced)))
        for number, part in enumerate(parts):
            watch.holder(part, None)
            kind = type(part)
            if not is_library(kind.__module__):
                rows.append((str(number), describer.kind(kind)))
            found = describer.replaced(kind, ("preprocess", "_preprocess", "__call__"))
            rows += [row for row in found if self._private.name in repr(row)]
            rows += [
                (str(number), name, describer.private(value))
                for name, value in vars(part).items()
                if callable(value) and not _is_processor(value)
            ]
        watch.seal()
        return digests.digest("processor code", repr(rows)) if rows else ""


def _is_processor(value: object) -> bool:
    """Whether it is a tokenizer or a processor; these are callable too, but checked separately."""
    return hasattr(value, "save_pretrained") or isinstance(value, NotLoaded)
