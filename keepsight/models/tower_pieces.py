"""Runs a tower on one large picture in less memory than one pass takes: equal bits.

While a large picture is encoded, the modules of the tower have a `forward` of ours, which other
threads bypass. Given many rows, it runs the module's own code piece by piece (`piecewise.py`),
outermost modules first: a whole layer if possible, otherwise its parts. What can be split is tried
on noise of the same form, when a picture first meets such a module. If pieces do not give the bits
of one pass, the module runs unsplit. Trials are not remembered for the next picture, because the
model may change. The split depends on the picture alone, never on free memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from keepsight.models import piecewise
from keepsight.models.families.tower_absent import tower_parts
from keepsight.models.lazy_rows import LazyRows
from keepsight.models.piecewise import AttentionCalls, CannotCut, Forward, RowCall, in_pieces, same

if TYPE_CHECKING:
    from keepsight.models.families import Family, Pixels

BOUND = 8192  # most patches that go through a module at once
LARGE = 1 << 25  # numbers of a picture's pixels above which memory matters more than time
_FORWARD = "forward"
_PLAIN = (bool, int, float, str)

_lock = threading.Lock()
# `.tried`: this thread's trials for the current large picture; `.parts`: how its modules ran
_here = threading.local()


@dataclass
class TowerParts:
    """Classes of tower modules that ran a large picture in pieces, and those that ran it whole."""

    cut: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    seen: int = 0  # calls noted, to find the innermost module that ran whole

    def note(self, module: torch.nn.Module, cut: bool) -> None:
        """Note a call of a module with more rows than it would get in pieces."""
        self.seen += 1
        (self.cut if cut else self.whole).add(type(module).__name__)

    def add(self, other: TowerParts) -> None:
        """Add the modules of another picture."""
        self.cut |= other.cut
        self.whole |= other.whole

    def to_dict(self) -> dict[str, list[str]]:
        """Plain data for people and JSON."""
        return {"cut": sorted(self.cut), "whole": sorted(self.whole)}

    def __str__(self) -> str:
        whole = f"; {', '.join(sorted(self.whole))} ran it whole" if self.whole else ""
        return f"the tower ran {', '.join(sorted(self.cut))} in pieces{whole}"


class PieceForward:
    """Replaces `forward` of one module while any thread encodes a large picture."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.users = module, 0
        self.before = vars(module).get(_FORWARD)
        # followed by `inspect` too
        self.__wrapped__ = self.before or MethodType(type(module).forward, module)

    def __call__(self, *args: object, **options: object) -> object:
        """Run in pieces if this thread encodes a large picture and the module can be split."""
        forward: Forward = self.__wrapped__
        if _found_here() is None or torch.is_grad_enabled():
            return forward(*args, **options)
        if type(self.module) is torch.nn.Embedding:
            return _looked_up(forward, args, options)
        call = RowCall.of(args, options)
        if call is None or call.count * call.each <= BOUND:
            return forward(*args, **options)
        parts: TowerParts = _here.parts
        looks = _row_relation(self.module, forward, call)
        if looks is not None:
            with contextlib.suppress(CannotCut):  # the trial was too small to show this
                found = in_pieces(forward, call, looks, piecewise.PIECE)
                parts.note(self.module, cut=True)
                return found
        before = parts.seen
        found = forward(*args, **options)
        if parts.seen == before:  # nothing inside was noted
            parts.note(self.module, cut=False)
        return found


def _found_here() -> dict[object, bool | None] | None:
    """The trials for the large picture that this thread encodes; None if it encodes none."""
    found: dict[object, bool | None] | None = vars(_here).get("tried")
    return found


@contextlib.contextmanager
def tower_in_pieces(family: Family, pixels: Pixels) -> Iterator[TowerParts]:
    """Encode this picture here, in pieces if it is large; yields how its modules ran."""
    modules = _modules(family, pixels)
    before, parts = (_found_here(), vars(_here).get("parts")), TowerParts()
    put: list[PieceForward] = []
    try:
        for module in modules:
            put.append(_install(module))
        _here.tried, _here.parts = {} if put else None, parts
        yield parts
    finally:
        _here.tried, _here.parts = before
        for forward in put:
            _uninstall(forward)


def _modules(family: Family, pixels: Pixels) -> list[torch.nn.Module]:
    """The modules of the tower that may be split, if the picture is large."""
    if all(tensor.numel() <= LARGE for tensor in pixels.tensors.values()):
        return []
    if not isinstance(family.model, torch.nn.Module) or torch.is_autocast_enabled("cpu"):
        return []
    parts = {id(p): p for part in tower_parts(family).values() for p in part.modules()}
    if any(is_compiled(part) for part in parts.values()):
        return []
    return [part for part in parts.values() if not _is_plain(part)]


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is compiled: compiled code bypasses a replaced forward."""
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "dynamo_ctx"):
        return True
    return module._compiled_call_impl is not None


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether torch's own layer, which holds little besides input and output."""
    if type(module) is torch.nn.Embedding:
        return False
    own = type(module).__module__.startswith("torch.nn.")
    return own and (not module._modules or isinstance(module, torch.nn.ModuleList))


def _install(module: torch.nn.Module) -> PieceForward:
    with _lock:
        found = vars(module).get(_FORWARD)
        forward = found if isinstance(found, PieceForward) else PieceForward(module)
        forward.users += 1
        vars(module)[_FORWARD] = forward
        return forward


def _uninstall(forward: PieceForward) -> None:
    with _lock:
        forward.users -= 1
        home = vars(forward.module)
        if forward.users or home.get(_FORWARD) is not forward:
            return
        if forward.before is None:
            del home[_FORWARD]
        else:
            home[_FORWARD] = forward.before


def _looked_up(forward: Forward, args: tuple[object, ...], options: Mapping[str, object]) -> object:
    """Delay the lookup of several embedding rows per patch until they are needed."""
    ids = args[0] if len(args) == 1 and not options else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(ids) <= BOUND:
        return forward(*args, **options)
    if not hasattr(torch.Tensor, "_make_wrapper_subclass"):
        return forward(ids)

    def rows(a: int, b: int) -> torch.Tensor:
        return torch.as_tensor(forward(ids[a:b]))

    one = rows(0, 1)
    if one.dim() != 3 or one.device.type != "cpu":
        return forward(ids)
    return LazyRows.of(torch.Size((len(ids), *one.shape[1:])), one.dtype, rows)


# -- trials ---------------------------------------------------------------------------------------


def _row_relation(module: torch.nn.Module, forward: Forward, call: RowCall) -> bool | None:
    """Whether the rows of such a call attend to each other; None if it cannot be split."""
    if _is_watched(module) or isinstance(module, PreTrainedModel):  # these return more than rows
        return None
    tried, kind = _found_here(), _kind(module, call)
    if tried is None:
        return None
    if kind not in tried:
        tried[kind] = _try(forward, call)
    return tried[kind]


def _is_watched(module: torch.nn.Module) -> bool:
    """Whether a hook inside would see pieces where it expects the whole."""
    inner = (part for part in module.modules() if part is not module)
    return any(part._forward_hooks or part._forward_pre_hooks for part in inner)


def _kind(module: torch.nn.Module, call: RowCall) -> object:
    """Everything a trial depends on: the code, the settings, and the form of weights and input."""
    parts = tuple(_part(name, part) for name, part in module.named_modules())
    weights = tuple((n, tuple(p.shape), p.dtype) for n, p in module.named_parameters())
    windows = len(call.bounds) > 2
    form = tuple((name, _form(value, call)) for name, value in _named(call))
    return parts, weights, form, call.axis, call.each, windows, torch.get_num_threads()


def _part(name: str, part: torch.nn.Module) -> object:
    own = vars(part)
    settings = tuple(
        (key, value)
        for key, value in own.items()
        if isinstance(value, _PLAIN) and not key.startswith("_") and key != "layer_idx"
    )
    config = own.get("config")
    forward = own.get(_FORWARD)
    given = forward.before if isinstance(forward, PieceForward) else forward
    attention = getattr(config, "_attn_implementation", None)
    return name, type(part), type(part).forward, id(given) if given else 0, settings, attention


def _named(call: RowCall) -> Iterator[tuple[object, object]]:
    yield from enumerate(call.args)
    yield from call.options.items()


def _form(value: object, call: RowCall) -> object:
    """The form of an argument, independent of the picture's size."""
    if isinstance(value, torch.Tensor):
        length = "bounds" if value.dim() == 1 else -1
        sizes = tuple(length if size == call.count else size for size in value.shape)
        return (sizes if value.is_floating_point() else value.dim(), value.dtype)
    if type(value) in (tuple, list):
        return tuple(_form(part, call) for part in value)  # type: ignore[attr-defined]
    return (type(value), value) if isinstance(value, piecewise.PLAIN) else type(value)


def _try(forward: Forward, call: RowCall) -> bool | None:
    """Compare pieces with one pass, on noise."""
    try:
        trial = call.part(0, _trial_rows(call)).random()
        with AttentionCalls() as counting:
            whole = trial.to(forward)
        looks = counting.looks > 0
        pieces = in_pieces(forward, trial, looks, piecewise.LEAST)
        alike = same(whole, pieces) and not _is_shared(whole, trial.x)
    except (CannotCut, RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return None
    return looks if alike else None


def _trial_rows(call: RowCall) -> int:
    """Enough rows for two pieces of different lengths, or as many tiles."""
    if call.each > 1:
        return min(call.count, 2 * -(-piecewise.LEAST // call.each) + 1)
    enough = 2 * piecewise.LEAST + piecewise.LEAST * 17 // 32
    if len(call.bounds) > 2:
        return next(b for b in call.bounds if b >= min(enough, call.count))
    return min(call.count, enough)


def _is_shared(output: object, x: torch.Tensor) -> bool:
    """Whether a module returns its input unchanged; splitting it saves nothing."""
    first = output[0] if isinstance(output, tuple) else output
    return isinstance(first, torch.Tensor) and first.data_ptr() == x.data_ptr()
