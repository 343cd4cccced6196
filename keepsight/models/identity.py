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
import sys
import sysconfig
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel

from keepsight.errors import KeepsightError, ModelError, UnreadableWeights
from keepsight.kinds import Processor
from keepsight.models import nameless, upstream
from keepsight.models.families import Family
from keepsight.models.families.tower_absent import AbsentTower, absent_parts
from keepsight.models.partial_processor import NotLoaded
from keepsight.models.silence import without_notes
from keepsight.system import digests

Plain = str | tuple["Plain", ...]
Row = tuple[str, Plain]  # the path of a module, and something about it
Owner = str | None  # the path of a module whose tensors are hashed again, or none
Named = list[tuple[str, torch.Tensor]]
Changed = tuple[set[Owner], bool]  # owners of changes, and whether tensors are among them

OUR_HOOK = "keepsight.blindfold"  # our forward pre-hook that only watches
# Parts of a configuration that name its origin and change no result.
_ORIGIN = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map"}
    | {"_post_init_done", "dtype", "torch_dtype"}
)
# Attributes of modules that change no forward pass: positions are passed explicitly, settings of
# sampling are read on every call, and checkpoints of gradients act in training mode only; the rest
# are notes of Transformers and PEFT on how a model was loaded, placed and saved, and what
# `generate` leaves for its own next call.
_NOTES = frozenset({
    "rope_deltas", "generation_config", "generate", "_hf_peft_config_loaded", "_is_hf_initialized",
    "_output_capturing_hooks_installed", "_use_kernels", "_weight_conversions", "hf_device_map",
    "hf_quantizer", "is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized", "model_tags",
    "name_or_path", "peft_config", "quantization_method", "warnings_issued", "_ep_plan",
    "_fsdp_plan", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict",
    "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_save", "_no_split_modules", "_pp_plan", "_skip_keys_device_placement",
    "_tp_plan", "all_tied_weights_keys", "_cached_continuous_batching_manager", "_compiled_call",
    "_last_compile_config", "_previous_max_cache_length", "_cached_decode_position_ids",
    "_prefill_len", "gradient_checkpointing", "_gradient_checkpointing_func",
    "_require_grads_hook", "_require_grads_hooks",
})  # fmt: skip
# Attributes of every module, which are compared one by one; the last is seen by `environment.py`.
_OF_EACH = frozenset(vars(torch.nn.Module())) | {"_compiled_call_impl"}
_PLACED = frozenset({"_hf_hook", "_old_forward", "forward"})  # set by accelerate on a module
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# Parts of names of settings that act in training mode only; in the last, layers forget their cache.
_RANDOM = ("drop", "jitter", "noise", "gradient_checkpointing")
_USUAL = (torch.Tensor, torch.nn.Parameter)
_VALUES = (bool, int, float, complex, str, bytes, type(None), type(...))
_BY_TEXT = (enum.Enum, torch.dtype, torch.layout, torch.memory_format, np.dtype, np.generic)
_WITHOUT_VALUE = (  # where a model lies is part of the environment
    torch.device, logging.Logger, type(threading.Lock()), type(threading.RLock()),
    weakref.ReferenceType,
)  # fmt: skip
_ITEMS = (list, set, deque)
_FUNCTIONS = (FunctionType, MethodType, functools.partial, type(None))
# Perhaps installed to be edited; the versions of the first three are part of the environment.
_LIBRARIES = ("torch", "transformers", "keepsight", "peft", "accelerate", "torchao", "optimum")
_SAMPLES = 8  # values of each tensor on the CPU that are compared


# -- whether anything changed ----------------------------------------------------------------------


@dataclass
class _Held:
    """A dict, a list, or an object by its class and attributes, and what it had."""

    thing: Any
    owner: Owner
    ignored: frozenset[str]
    then: dict[Any, object]


class _Tensor(NamedTuple):
    tensor: torch.Tensor
    owner: Owner
    place: tuple[object, ...]
    sample: np.ndarray[Any, Any]  # a live view of a few values
    values: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor, owner: Owner) -> _Tensor:
        sample = _sample(tensor)
        return cls(tensor, owner, _place(tensor), sample, sample.tobytes())

    def is_same(self) -> bool:
        """Whether it lies where it lay, with these values; a view is only read in its place."""
        return self.place == _place(self.tensor) and self.values == self.sample.tobytes()


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where the values of a tensor lie, how they are read, and how often they were written."""
    described = (tensor.shape, tensor.dtype)
    try:
        return tensor.data_ptr(), tensor._version, tensor.stride(), *described
    except (RuntimeError, NotImplementedError):
        version = None if tensor.is_inference() else tensor._version
    try:
        return tensor.data_ptr(), version, *described
    except (RuntimeError, NotImplementedError):
        return version, *described  # it wraps others, which are held themselves


def _sample(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    simple = type(tensor) in _USUAL and tensor.layout is torch.strided and not tensor.is_quantized
    if not simple or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return np.empty(0, np.uint8)
    values: np.ndarray[Any, Any] = tensor.detach().reshape(-1, 1).view(torch.uint8).numpy()
    return values[:: max(1, len(values) // _SAMPLES)]


def _items(thing: Any) -> dict[Any, object]:
    """What a thing has, by name; a list by position."""
    if isinstance(thing, dict):
        return dict(dict.items(thing))  # a subclass may make values when asked for them
    if isinstance(thing, _ITEMS):
        return dict(enumerate(thing))
    return {**vars(thing), "__class__": type(thing)}


def _same(one: object, other: object) -> bool:
    """Whether two values are one object, or plain and equal."""
    kind = type(one)
    return one is other or (kind is type(other) and kind in _VALUES and repr(one) == repr(other))


class Watch:
    """Everything that was read of a model, as it was then, and whether it is so still."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._methods: list[tuple[type, str, object]] = []
        self.tensors: dict[int, _Tensor] = {}

    def hold(self, thing: Any, owner: Owner, ignored: frozenset[str] = frozenset()) -> None:
        """Hold a dict or a list by its items, another object by its class and attributes."""
        if id(thing) not in self._held:
            self._held[id(thing)] = _Held(thing, owner, ignored, _items(thing))

    def method(self, kind: type, name: str) -> None:
        """Hold what a class defines under a name."""
        self._methods.append((kind, name, vars(kind)[name]))

    def tensor(self, tensor: torch.Tensor, owner: Owner) -> None:
        """Hold a tensor by its place, its version and a few of its values."""
        if id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = _Tensor.of(tensor, owner)

    def seal(self) -> None:
        """Arrange what is held, to compare thousands of things in few calls."""
        things = [held.thing for held in self._held.values()]
        self._lists = [thing for thing in things if isinstance(thing, _ITEMS)]
        self._dicts = [thing for thing in things if isinstance(thing, dict)]
        self._objects = [thing for thing in things if not isinstance(thing, (dict, *_ITEMS))]
        self._flat = self._flattened()

    def _flattened(self) -> tuple[list[object], list[object]]:
        """What is compared by value of all that is held (sizes, names), and what by identity."""
        homes: list[Any] = [*map(vars, self._objects), *self._dicts]
        values = chain.from_iterable([*map(dict.values, homes), *self._lists])
        sizes = map(len, [*homes, *self._lists])
        return [*sizes, *chain(*homes)], [*map(type, self._objects), *values]

    def moved(self) -> Changed:
        """The owners of what changed since it was held, and whether that is a tensor."""
        found = set[Owner]()
        if any(vars(kind).get(name) is not method for kind, name, method in self._methods):
            found.add(None)
        if not self._is_flat_same():
            changed = set().union(*map(self._changed, self._held.values()))
            if not changed:  # values that are equal, or ignored
                for held in self._held.values():
                    held.then = _items(held.thing)
                self._flat = self._flattened()
            found |= changed
        tensors = {held.owner for held in self.tensors.values() if not held.is_same()}
        return found | tensors, bool(tensors)

    def _is_flat_same(self) -> bool:
        try:
            named, things = self._flattened()
        except RuntimeError:  # another thread changes one of them
            return False
        return named == self._flat[0] and all(map(operator.is_, things, self._flat[1]))

    def _changed(self, held: _Held) -> set[Owner]:
        """The owner of a change; none of the weights if only functions or the mode changed."""
        then, now = (
            {name: value for name, value in items.items() if name not in held.ignored}
            for items in (held.then, _items(held.thing))
        )
        nothing = object()
        names = {**then, **now}
        other = [n for n in names if not _same(then.get(n, nothing), now.get(n, nothing))]
        if not other and list(then) == list(now):
            return set()
        values = [home.get(name) for name in other if name != "training" for home in (then, now)]
        quiet = other and all(isinstance(value, _FUNCTIONS) for value in values)
        return {None if quiet else held.owner}


def digest_of(tensor: torch.Tensor) -> str:
    """The digest of a weight's values, in any of the forms that weights have."""
    try:
        return _digest_of(tensor)
    except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
        raise UnreadableWeights(
            f"a weight of kind {type(tensor).__name__} cannot be read, so it cannot be "
            f"fingerprinted ({error}); load the model in another precision, or quantise it with "
            "another library"
        ) from error


def _digest_of(tensor: torch.Tensor) -> str:
    if tensor.is_quantized:
        values = (tensor.int_repr(), str(tensor.dtype), str(tensor.qscheme()))
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return digests.digest("quantised", *values, tensor.q_scale(), tensor.q_zero_point())
        scales = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
        return digests.digest("quantised", *values, *scales, tensor.q_per_channel_axis())
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        inner = [part for name in names for part in (name, _digest_of(getattr(tensor, name)))]
        return digests.digest("weight of parts", str(context), list(tensor.shape), *inner)
    return digests.weight_digest(tensor)


# -- describing values -----------------------------------------------------------------------------


class Describer:
    """One walk over values, which are described in words that are equal in every process."""

    def __init__(
        self, watch: Watch, places: Mapping[int, str], digest: Callable[[torch.Tensor], str]
    ) -> None:
        self.watch, self._places, self._digest = watch, places, digest
        self._known: dict[int, tuple[object, Plain]] = {}

    def value(self, value: object, owner: Owner) -> Plain:
        """The description of a value."""
        if type(value) in _VALUES:
            return (type(value).__name__, repr(value))
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
        return ("private", nameless.PROCESS, nameless.number_of(thing))

    def tensor(self, tensor: torch.Tensor, owner: Owner) -> Plain:
        """A tensor, described by its values."""
        self.watch.tensor(tensor, owner)
        return ("tensor", str(tensor.dtype), self._digest(tensor))

    def _describe(self, value: Any, owner: Owner) -> Plain:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value, owner)
        if isinstance(value, torch.nn.Module) and id(value) in self._places:
            return ("part", self._places[id(value)])
        if isinstance(value, type):
            return self.kind(value)
        if isinstance(value, _BY_TEXT):
            return (*place_of(kind), str(value))
        if isinstance(value, _WITHOUT_VALUE):
            return place_of(kind)
        if isinstance(value, (dict, *_ITEMS)):
            self.watch.hold(value, owner)
        if isinstance(value, dict):
            return (*place_of(kind), *self._pairs(dict.items(value), owner))
        if isinstance(value, (*_ITEMS, tuple, frozenset)):
            parts = [self.value(part, owner) for part in value]
            unordered = isinstance(value, set | frozenset)
            return (*place_of(kind), *(sorted(parts, key=repr) if unordered else parts))
        if isinstance(value, np.ndarray) and value.dtype != object:
            return (*place_of(kind), digests.digest("array", value))
        if callable(value) and not isinstance(value, torch.nn.Module):
            return self._callable(value, owner)
        if not hasattr(value, "__dict__") or isinstance(value, torch.ScriptObject):
            return self.private(value)
        ignored = _ORIGIN if isinstance(value, PreTrainedConfig) else frozenset()
        self.watch.hold(value, owner, ignored)
        own = [pair for pair in vars(value).items() if pair[0] not in ignored]
        return (*self.kind(kind), *self._pairs(own, owner), ())

    def _pairs(self, pairs: Iterable[tuple[Any, object]], owner: Owner) -> list[Plain]:
        found = [(self.value(name, owner), self.value(part, owner)) for name, part in pairs]
        return sorted(found, key=repr)

    def _callable(self, value: Any, owner: Owner) -> Plain:
        """A library's function by its place; any other belongs to this process."""
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return ("partial", *(self.value(part, owner) for part in parts))
        if isinstance(value, MethodType) and id(value.__self__) in self._places:
            return ("method", self._places[id(value.__self__)], self.value(value.__func__, owner))
        if isinstance(value, FunctionType) and is_library(place_of(value)[0]):
            inside = [self.value(cell.cell_contents, owner) for cell in value.__closure__ or ()]
            given = self.value(value.__defaults__, owner) if inside else ()
            return ("function", *place_of(value), *inside, given)
        return self.private(value)

    def kind(self, kind: type) -> Plain:
        """A class: a library's by its place, a user's by that and by the text of its file."""
        if is_library(kind.__module__):
            return place_of(kind)
        home = sys.modules.get(kind.__module__)
        try:
            if operator.attrgetter(kind.__qualname__)(home) is kind:
                bases = [base for base in kind.__bases__ if not is_library(base.__module__)]
                text = _file_digest(str(getattr(home, "__file__", None)))
                return ("class", *place_of(kind), text, *map(self.kind, bases))
        except (AttributeError, OSError):
            pass
        return self.private(kind)

    def replaced(self, kind: type, *names: str) -> Iterator[Plain]:
        """Which of these methods somebody put into a class or one of its bases."""
        for base in kind.__mro__:
            for name in names:
                value = vars(base).get(name)
                if base in (torch.nn.Module, object) or not callable(value):
                    continue
                self.watch.method(base, name)
                # Libraries decorate their own methods.
                inner = inspect.unwrap(value) if is_library(place_of(value)[0]) else value
                if place_of(inner)[:2] != (base.__module__, f"{base.__qualname__}.{name}"):
                    yield ("replaced", *place_of(base), name, self.value(value, None))


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


# -- how a live model differs from the one that Transformers makes ---------------------------------


def _rows(model: Any, describer: Describer) -> Iterator[Row]:
    """Everything about the modules that a forward pass reads, and that is held; no tensors."""
    watch = describer.watch
    methods: dict[type, list[Plain]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own, kind = vars(module), getattr(module, "stands_for", type(module))
        watch.hold(module, path, _NOTES)
        for name in ("_parameters", "_buffers", "_modules"):
            watch.hold(own[name], path)
        if kind not in methods:
            methods[kind] = list(describer.replaced(kind, "forward"))
        yield from ((path, row) for row in methods[kind])
        yield path, ("kind", describer.kind(kind))
        yield path, ("children", *module._modules)
        left_out = _OF_EACH | _NOTES | (_PLACED if _is_only_placed(module) else frozenset())
        for name, value in own.items():
            if name not in left_out and not _is_ours(value):
                yield path, ("setting", name, describer.value(value, path))
        if module.training and not type(module).__module__.startswith("torch.nn."):
            yield path, ("training", "True")
        for name in _HOOKS:
            yield from _hooks(own[name], path, name, describer)
    for name in _HOOKS:
        on_all: Any = vars(torch_module)[f"_global{name}"]
        yield from _hooks(on_all, "*", f"of all modules {name}", describer)


def _hooks(home: Mapping[Any, object], path: str, name: str, describer: Describer) -> Iterator[Row]:
    """A row for each hook that is neither ours nor one by which libraries only record."""
    describer.watch.hold(home, None, frozenset({OUR_HOOK}))
    for key, hook in home.items():
        function = hook.__func__ if isinstance(hook, MethodType) else hook
        module, last, *_ = place_of(function)
        known = (module, last.rpartition(".")[2]) in upstream.SILENT_HOOKS
        if key != OUR_HOOK and not (known and isinstance(function, FunctionType)):
            yield path, ("hook", name, describer.private(hook))


_Stock = tuple[frozenset[Row], dict[str, torch.Tensor]]  # rows, and derived buffers by name
_stock: dict[tuple[type, str], _Stock] = {}


def _stock_of(model: PreTrainedModel, config: Plain) -> _Stock:
    """What Transformers makes of a configuration. Nothing if it makes no such model."""
    key = (type(model), repr(config))
    if key not in _stock:
        if len(_stock) > 3:
            _stock.clear()
        _stock[key] = _build(model)
    return _stock[key]


def _build(model: PreTrainedModel) -> _Stock:
    try:
        with torch.random.fork_rng(devices=[]), without_notes():
            with torch.device("meta"):
                twin: Any = type(model)(copy.deepcopy(model.config)).eval()
            derived = _derived(twin)
    except Exception as error:  # a model's code may raise anything: then everything is described
        logging.getLogger(__name__).info("no model to compare with: %s", error)
        return frozenset(), {}
    places = {id(part): path for path, part in twin.named_modules()}
    describer = Describer(Watch(), places, lambda t: f"unread {tuple(t.shape)}")
    rows = _rows(twin, describer)  # a replaced method or a hook is nothing that Transformers makes
    return frozenset(row for row in rows if row[1][0] not in ("replaced", "hook")), derived


def _derived(twin: Any) -> dict[str, torch.Tensor]:
    """The values of buffers missing in checkpoints, filled by Transformers' own code."""
    homes = {path: part for path, part in twin.named_modules() if isinstance(part, PreTrainedModel)}
    for path, part in twin.named_modules():
        names = [n for n in part._non_persistent_buffers_set if part._buffers.get(n) is not None]
        for name in names:
            part._buffers[name] = torch.zeros_like(part._buffers[name], device="cpu")
        if names:
            nearest = max((home for home in homes if _below(path, [home])), key=len)
            homes[nearest]._init_weights(part)
    return {name: buffer for name, buffer in _buffers(twin) if buffer is not None}


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The buffers that are not saved, by name."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name in sorted(module._non_persistent_buffers_set):
            yield f"{path}.{name}", module._buffers.get(name)


def _differences(
    model: PreTrainedModel, config: Plain, describer: Describer
) -> tuple[list[Row], list[Row]]:
    """The rows by which a model differs, and the derived buffers in another dtype."""
    stock, derived = _stock_of(model, config)
    rows = set(_rows(model, describer)) ^ stock
    absent = [path for path, part in model.named_modules() if isinstance(part, AbsentTower)]
    found = [row for row in rows if not _below(row[0], absent)]
    casts: list[Row] = []
    if hasattr(model, "exported"):  # the graphs contain the buffers
        return found, []
    for name, buffer in _buffers(model):
        path, usual = name.rpartition(".")[0], derived.get(name)
        if buffer is None:
            if usual is not None and not _below(path, absent):
                found.append((path, ("buffer", name, "absent")))
            continue
        described, kind = describer.tensor(buffer, path), buffer.dtype
        same = usual is not None and usual.shape == buffer.shape
        if usual is None or not same or not torch.equal(buffer.detach().cpu(), usual.to(kind)):
            found.append((path, ("buffer", name, described)))
        elif kind != usual.dtype:
            casts.append((name, str(kind)))
    return found, casts


def _refuse_random(model: PreTrainedModel) -> None:
    """Refuse modules in training mode whose results vary."""
    for path, module in model.named_modules():
        if not module.training:
            continue
        varies = any(
            isinstance(value, int | float) and value > 0 and any(word in name for word in _RANDOM)
            for name, value in vars(module).items()
        )
        if isinstance(module, upstream.Dropout):
            varies = module.p > 0
        elif isinstance(module, upstream.RunningNorm):
            varies = module.track_running_stats
        if varies or isinstance(module, torch.nn.RReLU):
            raise ModelError(
                f"{path} ({type(module).__name__}) is in training mode, though the model is not, "
                "so its results vary; call model.eval()"
            )


def _is_ours(value: object) -> bool:
    """Whether we set a value (a graph in place of a module, named elsewhere), or accelerate did,
    whose functions warn who moves a model spread over devices."""
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__")).startswith(("keepsight.", "accelerate."))
    return type(value).__module__.startswith("keepsight.")


def _is_only_placed(module: torch.nn.Module) -> bool:
    """Whether accelerate only moves the inputs of a module to its device."""
    hook, old = (vars(module).get(name) for name in ("_hf_hook", "_old_forward"))
    hooks: Any = getattr(hook, "hooks", (hook,))
    if any(type(one).__name__ != "AlignDevicesHook" or one.offload for one in hooks):
        return False
    return isinstance(old, MethodType) and old.__func__ is type(module).forward


# -- the identity ----------------------------------------------------------------------------------


class Identity:
    """What one live model is, found again after changes."""

    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        self._model, self._family = model, family
        self._digests: dict[int, tuple[_Tensor, str]] = {}  # each valid until its tensor changes
        self._watch: Watch | None = None
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
        self._describe(moved, remembered or {})
        return True

    def announce(self) -> None:
        """Read everything again. If nothing shows a change it is one that only its author knows:
        the model is private from now on, with a memory of its own."""
        before = self.state
        self._describe({""}, {})
        if self.state == before:
            self._announced += 1
            self._describe(set(), {})

    @property
    def state(self) -> tuple[str, ...]:
        """Everything that distinguishes one state of the model from another."""
        return (self.all, self.vision, self.config, self.code)

    def record(self) -> dict[str, str]:
        """The digests, in the form that `refresh` accepts."""
        names = ("all", "vision", "tensors", "vision_tensors", "dtype", "vision_dtype")
        return {name: getattr(self, name) for name in names}

    def _describe(self, moved: set[Owner], remembered: dict[str, str]) -> None:
        self._watch = None  # until everything is described
        watch, model = Watch(), self._model
        named = [
            *model.named_parameters(remove_duplicate=False),
            *_persistent(model, model.named_buffers(remove_duplicate=False)),
        ]
        # A changed module may have changed its tensors, and those below, in a way nothing shows.
        paths = [path for path in moved if path is not None]
        forgotten = [tensor for name, tensor in named if _below(name, paths)]
        for tensor in forgotten:
            self._digests.pop(id(tensor), None)
        self.on_forget(forgotten)
        if any(tensor.is_meta for _, tensor in named):
            raise UnreadableWeights(
                "some weights are on the meta device (offloaded, or never loaded): they cannot "
                "be fingerprinted, so nothing could be remembered safely. Load the model whole."
            )
        for name, tensor in named:
            watch.tensor(tensor, name.rpartition(".")[0])
        _refuse_random(model)
        places = {id(part): path for path, part in model.named_modules()}
        describer = Describer(watch, places, self._digest)
        config = describer.value(model.config, None)
        rows, casts = _differences(model, config, describer)
        rows += _unusual(named, describer)
        if self._announced:
            rows.append(("*", ("hook", "announced", nameless.PROCESS, str(self._announced))))
        self.config = digests.digest("config", repr(config))
        # Hooks are around what a module computes: kernels need no new trial for them.
        self.code = digests.digest("code", _written([r for r in rows if r[1][0] != "hook"]))
        self.settings = self._family.vision_settings()
        self._name(remembered, named, rows, casts)
        watch.seal()
        self._digests = {key: self._digests[key] for key in watch.tensors.keys() & self._digests}
        if not watch.moved()[0]:  # unchanged while it was read
            self._watch = watch

    def _digest(self, tensor: torch.Tensor) -> str:
        known = self._digests.get(id(tensor))
        if known is None or not known[0].is_same():
            known = self._digests[id(tensor)] = (_Tensor.of(tensor, None), digest_of(tensor))
        return known[1]

    def _name(
        self, remembered: dict[str, str], named: Named, rows: list[Row], casts: list[Row]
    ) -> None:
        found = self._names(remembered, "", named, rows, casts)
        self.tensors, self.all, self.is_private, self.dtype = found
        text = {id(module) for module in self._family.text_modules()}
        paths = [path for path, module in self._model.named_modules() if id(module) in text]
        vision = [*_persistent(self._model, self._family.vision_weights())]
        seen, other = ([row for row in of if not _below(row[0], paths)] for of in (rows, casts))
        found = self._names(remembered, "vision_", vision, seen, other)
        self.vision_tensors, self.vision, self.vision_is_private, self.vision_dtype = found

    def _names(
        self,
        remembered: dict[str, str],
        part: str,
        named: Named,
        rows: list[Row],
        casts: list[Row],
    ) -> tuple[str, str, bool, str]:
        """The digest of some weights, their name with the rows, whether it is private, and their
        dtype: the one that all share, or a digest of the dtypes by name."""
        absent = [weight for part in absent_parts(self._model) for weight in part.weights]
        # The names of weights that are not PyTorch's: in graphs, or in MLX.
        exported = getattr(getattr(self._model, "exported", None), "weights", None) or {}
        tensors = exported.get(part.rstrip("_") or "all") or remembered.get(f"{part}tensors")
        if tensors is None:
            own = [(path, self._digest(tensor)) for path, tensor in named]
            tensors = digests.fingerprint_of([*own, *((path, found) for path, found, _ in absent)])
        name, written = tensors, _written(rows)
        if rows or not exported:
            name = digests.digest(part.rstrip("_") or "model", tensors, written)
        dtypes = [(path, kind) for path, tensor in named if (kind := dtype_of(tensor))]
        dtypes += [(path, kind) for path, _, kind in absent if kind]
        dtype = dtypes[0][1] if dtypes else ""
        if casts or {kind for _, kind in dtypes} != {dtype}:
            dtype = digests.digest("dtypes", sorted(dtypes), *([sorted(casts)] if casts else []))
        return tensors, name, nameless.PROCESS in written, dtype


def dtype_of(tensor: torch.Tensor) -> str:
    """The dtype of a weight; empty if its values are no floating numbers."""
    return str(tensor.dtype) if tensor.is_floating_point() else ""


def _unusual(named: Named, describer: Describer) -> Iterator[Row]:
    """What weights of special classes hold besides their values."""
    for name, tensor in named:
        if type(tensor) not in _USUAL:
            path = name.rpartition(".")[0]
            parts = (describer.kind(type(tensor)), describer.value(vars(tensor), path))
            yield path, ("weight", name, *parts)


def _below(name: str, paths: list[str]) -> bool:
    """Whether a name equals one of these paths or lies below one."""
    return any(name == path or not path or name.startswith(f"{path}.") for path in paths)


def _written(rows: list[Row]) -> str:
    return repr(sorted(rows, key=repr))


def _persistent(
    model: PreTrainedModel, named: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Leave out derived buffers: rope tables change with the prompt length."""
    derived = {id(buffer) for _, buffer in _buffers(model)}
    return ((name, tensor) for name, tensor in named if id(tensor) not in derived)


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
        self._processor = processor
        self._watch: Watch | None = None
        self._digest, self._announced = "", 0

    def announce(self) -> None:
        """Take it for another one from now on: its code changed in a way that nothing shows."""
        self._watch, self._announced = None, self._announced + 1

    def look(self) -> str:
        """The digest of what users put into it; empty if that is nothing."""
        if self._processor is not None and (self._watch is None or self._watch.moved()[0]):
            self._watch = Watch()
            rows = list(self._rows(Describer(self._watch, {}, digests.weight_digest)))
            self._watch.seal()
            self._digest = digests.digest("processor code", repr(rows)) if rows else ""
        return self._digest

    def _rows(self, describer: Describer) -> Iterator[Plain]:
        names = ("image_processor", "video_processor", "feature_extractor")
        own = [vars(self._processor).get(name) for name in names]
        if self._announced:
            yield (nameless.PROCESS, str(self._announced))
        for number, part in enumerate([self._processor, *(p for p in own if p is not None)]):
            describer.watch.hold(part, None)
            if not is_library(type(part).__module__):
                yield (str(number), describer.kind(type(part)))
            for row in describer.replaced(type(part), "preprocess", "_preprocess", "__call__"):
                if nameless.PROCESS in repr(row):
                    yield row
            for name, value in vars(part).items():
                # Tokenizers and processors are callable too, and checked separately.
                is_part = hasattr(value, "save_pretrained") or isinstance(value, NotLoaded)
                if callable(value) and not is_part:
                    yield (str(number), name, describer.private(value))
