"""How a live model differs from the model that Transformers makes of its configuration.

Everything that a forward pass reads of the modules is described and held here: classes, settings,
hooks, buffers missing in checkpoints, and modules in training mode. What equals Transformers' model
is left out; each difference becomes a row of the model's identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, MethodType

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from keepsight.errors import ModelError
from keepsight.kinds import Record
from keepsight.models import upstream
from keepsight.models.families.tower_absent import AbsentTower
from keepsight.models.fingerprint import functions
from keepsight.models.fingerprint.describe import Describer, Plain
from keepsight.models.fingerprint.evidence import HarmlessObject, Proof
from keepsight.models.fingerprint.observers import only_observes, passes_on
from keepsight.models.fingerprint.stock import (
    BASE,
    NOTES,
    OUR_HOOK,
    StockModule,
    reads_training,
    settings_of,
)
from keepsight.models.fingerprint.watch import QUIET, Watch

_HOMES = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")
_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}
# The argument that a hook may return without a change; none if it must wrap it.
_HANDED_BACK = {
    ("_forward_pre_hooks", ()): 1,
    ("_forward_hooks", ()): 2,
    ("_forward_hooks", ("_forward_hooks_with_kwargs",)): 3,
}
_GLOBAL_HOOKS = {
    "_global_forward_pre_hooks": (),
    "_global_forward_hooks": (
        "_global_forward_hooks_with_kwargs",
        "_global_forward_hooks_always_called",
    ),
}
_ELSEWHERE = frozenset({"_compiled_call_impl"})  # handled by `compiled.py`
_PLACED = frozenset({"_hf_hook", "_old_forward", "forward"})  # set by accelerate on a module
# Methods that move a model; accelerate makes them warn for a model spread over devices.
_MOVES = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
_NOISE = ("drop", "jitter", "noise")

Row = tuple[str, Plain]  # the path of a module, and how it differs


class Difference:
    """The rows of one model, and which of its weights were derived in another dtype."""

    def __init__(
        self,
        model: PreTrainedModel,
        stock: dict[str, StockModule],
        describer: Describer,
        watch: Watch,
    ) -> None:
        self._stock, self._describer, self._watch = stock, describer, watch
        self.derived: list[tuple[str, str]] = []  # buffers whose dtype is not Transformers'
        self.rows: list[Row] = []
        self.beliefs: list[HarmlessObject] = []  # left out of the rows because they change nothing
        self._exported = hasattr(model, "exported")
        for path, module in model.named_modules(remove_duplicate=False):
            self._hold(module, path)
            if not isinstance(module, AbsentTower):
                self.rows += [(path, row) for row in self._of(module, path)]
        self.rows += [("*", row) for row in self._global_hooks()]

    def _hold(self, module: torch.nn.Module, path: str) -> None:
        self._watch.thing(module, path, NOTES, quiet=frozenset({"training"}))
        for name in _HOMES:
            self._watch.home(vars(module)[name], path, frozenset({OUR_HOOK}))

    def _of(self, module: torch.nn.Module, path: str) -> Iterator[Plain]:
        part = self._stock.get(path)
        if part is None or part.kind is not type(module):
            yield ("kind", self._describer.value(type(module), path))
        ours = {name for name, value in vars(module).items() if _is_ours(value)}
        placed = _PLACED if _is_only_placed(module) else frozenset(self._idle(module, path))
        placed |= {name for name in _MOVES if _is_of_accelerate(vars(module).get(name))}
        own = settings_of(module, self._describer, path, BASE | NOTES | _ELSEWHERE | placed | ours)
        other = part.settings if part is not None else {}
        for name in sorted({**own, **other}):
            if own.get(name) != other.get(name):
                yield ("setting", name, own.get(name, "absent"))
        if module.training:
            yield from self._training(module, path)
        for home, flags in _HOOKS.items():
            yield from self._hooks(vars(module), home, flags, path)
        if not self._exported:  # exported graphs already contain the buffer
            yield from self._buffers(module, path, part.derived if part is not None else {})
        if (saved := _extra_state(module)) is not None:
            yield ("extra state", self._describer.value(saved(), path))

    # -- training --------------------------------------------------------------------------------

    def _training(self, module: torch.nn.Module, path: str) -> Iterator[Plain]:
        if _is_random(module):
            raise ModelError(
                f"{path} ({type(module).__name__}) is in training mode, though the model is "
                "not, so its results vary; call model.eval()"
            )
        if reads_training(type(module)):
            yield ("training", "True")

    # -- hooks -----------------------------------------------------------------------------------

    def _hooks(self, home: Record, name: str, flags: tuple[str, ...], path: str) -> Iterator[Plain]:
        for key, hook in home[name].items():
            how = tuple(flag for flag in flags if key in home[flag])
            if is_silent(key, hook):
                continue
            proof = only_observes(hook, _HANDED_BACK.get((name, how), -1))
            if proof is not None:
                self._believe(path, proof, ("hook", name, *how), hook)
            else:
                yield ("hook", name, self._describer.value(hook, path), how)

    def _believe(self, path: str, proof: Proof, label: tuple[str, ...], thing: object) -> None:
        proof.hold(self._watch, QUIET)
        self.beliefs.append(HarmlessObject(path, proof, label, thing))

    def _idle(self, module: torch.nn.Module, path: str) -> Iterator[str]:
        """Functions set on a module that only observe the class's own functions."""
        for name, own in vars(module).items():
            original = getattr(type(module), name, None) if callable(own) else None
            if not isinstance(original, FunctionType):
                continue
            if (proof := passes_on(own, MethodType(original, module))) is not None:
                self._believe(path, proof, ("setting", name), own)
                yield name

    def _global_hooks(self) -> Iterator[Plain]:
        home = vars(torch_module)
        for name, flags in _GLOBAL_HOOKS.items():
            self._watch.home(home[name], "*")
            yield from self._hooks(home, name, flags, "*")

    # -- buffers ---------------------------------------------------------------------------------

    def _buffers(
        self, module: torch.nn.Module, path: str, derived: dict[str, torch.Tensor]
    ) -> Iterator[Plain]:
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is None:
                if name in derived:
                    yield ("buffer", name, "absent")
                continue
            described = self._describer.tensor(buffer, path)
            stock = derived.get(name)
            if stock is not None and _reads_as(buffer, stock):
                if buffer.dtype != stock.dtype:
                    self.derived.append((f"{path}.{name}", str(buffer.dtype)))
                continue
            yield ("buffer", name, described)


def _reads_as(buffer: torch.Tensor, stock: torch.Tensor) -> bool:
    """Whether a buffer equals the values that Transformers derives, in the buffer's own dtype."""
    if buffer.shape != stock.shape:
        return False
    cast = stock.to(buffer.dtype)
    return torch.equal(buffer.detach().cpu(), cast)


def _is_random(module: torch.nn.Module) -> bool:
    """Whether a module in training mode gives varying results."""
    if isinstance(module, upstream.DROPOUT.needed()):
        return bool(module.p > 0)
    if isinstance(module, upstream.NORM.needed()):
        return bool(module.track_running_stats)
    if isinstance(module, torch.nn.RReLU):
        return True
    if not reads_training(type(module)):
        return False
    if not functions.is_library_type(type(module)):
        return True
    return any(
        isinstance(value, int | float) and value > 0 and any(word in name for word in _NOISE)
        for name, value in vars(module).items()
    )


def _is_ours(value: object) -> bool:
    """Whether we set a value: a graph in place of a module, which is named elsewhere."""
    named = value if type(value) is FunctionType else type(value)
    return str(named.__module__).startswith("keepsight.")


def is_silent(key: object, hook: object) -> bool:
    """Whether a hook changes nothing: it is ours, or only observes."""
    if key == OUR_HOOK:
        return True
    function = hook.__func__ if type(hook) is MethodType else hook
    if type(function) is not FunctionType or not functions.is_library(function):
        return False
    module, name = functions.place_of(function)[:2]
    return (module, name.rpartition(".")[2]) in upstream.SILENT_HOOKS


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


def _extra_state(module: torch.nn.Module) -> Callable[[], object] | None:
    """The extra state that a module saves besides weights and buffers, if its class defines it."""
    if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
        return module.get_extra_state
    return None
