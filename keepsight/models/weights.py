"""Fingerprints of weights, and a check on each call that they still hold.

A fingerprint covers every value of every weight, once, and every other difference of the live model
from its configuration: adapters and their scales, hooks, replaced modules, settings, replaced code.
The dtypes of the weights are part of the environment. After that a call only checks whether
anything changed (`watch.py`). Unchanged weights are not read again, and a model that returns to an
earlier state has its earlier fingerprint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from transformers import PreTrainedModel

from keepsight import digests
from keepsight.errors import UnreadableWeights
from keepsight.models.families import Family
from keepsight.models.families.tower_absent import (
    AbsentTower,
    AbsentWeight,
    TowerSource,
    absent_parts,
)
from keepsight.models.fingerprint.describe import Describer
from keepsight.models.fingerprint.difference import Difference, Row
from keepsight.models.fingerprint.evidence import failed_proofs
from keepsight.models.fingerprint.patches import LibraryCode
from keepsight.models.fingerprint.stock import stock_parts
from keepsight.models.fingerprint.undescribed import ObjectNumbers
from keepsight.models.fingerprint.watch import Owner, Stamp, Watch

_USUAL = (torch.Tensor, torch.nn.Parameter)


class Weights:
    """The fingerprints of one live model, recomputed after changes."""

    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        self._model, self._family = model, family
        self._private = ObjectNumbers()
        self._code = LibraryCode(self._private)
        self._watch: Watch | None = None
        self._restless: set[int] = set()
        self._digests = _Digests()
        self._source: TowerSource | None = None
        self.all = self.vision = self.config = self.code = ""
        self.settings = ""  # settings of the tower
        self.tensors = self.vision_tensors = ""  # the values of the weights alone
        self.dtype = self.vision_dtype = ""
        self.is_private = self.vision_is_private = False  # whether other processes must not use it
        self.changes = 0  # how often tensors were seen changed, also if they were changed back
        self.rows: list[Row] = []  # differences from its configuration
        self.on_forget: Callable[[Iterable[torch.Tensor]], None] = _nothing

    def refresh(self, remembered: dict[str, str] | None = None) -> bool:
        """Check for changes and recompute what changed. True if something was described again.

        `remembered` are digests known to belong to the loaded files.
        """
        moved: set[Owner] = {""}  # pending changes are unknown
        if self._watch is not None:
            moved = self._watch.moved() | self._restless
            if not moved and not self._code.moved():
                return False
            self.changes += bool(self._watch.moved_tensors - self._restless)
        if settle(self._model) and self._watch is not None:
            moved |= self._watch.moved()
        self._watch = None  # until everything is described
        self._describe(moved, remembered)
        return True

    @property
    def state(self) -> tuple[str, ...]:
        """Everything that distinguishes one state of the model from another."""
        return (self.all, self.vision, self.config, self.code)

    def record(self) -> dict[str, str]:
        """The digests, in the form that `refresh` accepts."""
        names = ("all", "vision", "tensors", "vision_tensors", "dtype", "vision_dtype")
        return {name: getattr(self, name) for name in names}

    # -- describing ------------------------------------------------------------------------------

    def _describe(self, moved: set[Owner], remembered: dict[str, str] | None) -> None:
        self._forget(moved)
        model, watch = self._model, Watch()
        self._source = next((part.source for part in absent_parts(model)), None)
        named = list(self._named())
        _check_readable(named)
        for name, tensor in named:
            watch.tensor(tensor, name.rpartition(".")[0])
        places = {id(part): path for path, part in model.named_modules()}
        describer = Describer(watch, places, self._digests.of, self._private)
        config = describer.value(model.config, None)
        difference = Difference(model, stock_parts(model, config), describer, watch)
        rows = [*difference.rows, *self._unusual(named, describer)]
        rows += self._replaced_code(repr((config, rows)))
        beliefs = [*difference.beliefs, *self._code.beliefs]
        seen = failed_proofs(beliefs, lambda: [watch, *self._code.watches])
        rows += [(b.path, (*b.label, describer.value(b.thing, b.path))) for b in seen]
        self.config = digests.digest("config", repr(config))
        self.settings = self._family.vision_settings()
        self.code = self._code.digest
        self._fingerprint(remembered, rows, named)
        self._note_dtypes(remembered or {}, difference.derived)
        watch.seal()
        self._digests.keep(watch)
        self._restless = describer.restless
        if watch.unchanged():  # unchanged while it was read
            self._watch = watch

    def _forget(self, moved: set[Owner]) -> None:
        """Read changed parts again, with all weights below them: a changed module may have changed
        weights that no counter shows."""
        for owner in moved:
            if isinstance(owner, int):
                self._private.changes[owner] += 1
        paths = [owner for owner in moved if isinstance(owner, str)]
        forgotten = [tensor for name, tensor in self._named() if _below(name, paths)]
        self._digests.forget(forgotten)
        self.on_forget(forgotten)

    def _fingerprint(
        self,
        remembered: dict[str, str] | None,
        rows: list[Row],
        named: list[tuple[str, torch.Tensor]],
    ) -> None:
        text = self._text_paths()
        seen = [(path, row) for path, row in rows if not _below(path, text)]
        if self._code.differs:
            seen.append(("*", self._code.differs))
        self.rows = rows
        self._name_tensors(remembered or {}, named)
        exported = self._exported()
        self.all, self.vision = self.tensors, self.vision_tensors
        if rows or not exported:
            self.all = digests.digest("model", self.tensors, _written(rows))
        if seen or not exported:
            self.vision = digests.digest("vision", self.vision_tensors, _written(seen))
        self.is_private = self._private.name in _written(rows)
        self.vision_is_private = self._private.name in _written(seen)

    def _name_tensors(
        self, remembered: dict[str, str], named: list[tuple[str, torch.Tensor]]
    ) -> None:
        if exported := self._exported():
            self.tensors, self.vision_tensors = exported["all"], exported["vision"]
            return
        if {"tensors", "vision_tensors"} <= remembered.keys():
            self.tensors, self.vision_tensors = remembered["tensors"], remembered["vision_tensors"]
            return
        absent = [(name, digest) for name, digest, _ in self._absent()]
        by_name = {name: self._digests.of(tensor) for name, tensor in named}
        vision = [(name, by_name[name]) for name, _ in self._vision()]
        self.tensors = digests.fingerprint_of([*by_name.items(), *absent])
        self.vision_tensors = digests.fingerprint_of([*vision, *absent])

    def _exported(self) -> dict[str, str]:
        """The fingerprints of weights that are not PyTorch's: in graphs, or in MLX."""
        return getattr(getattr(self._model, "exported", None), "weights", None) or {}

    def _unusual(
        self, named: list[tuple[str, torch.Tensor]], describer: Describer
    ) -> Iterator[Row]:
        """What weights of special classes hold besides their values."""
        for name, tensor in named:
            if type(tensor) not in _USUAL:
                path = name.rpartition(".")[0]
                parts = (describer.value(type(tensor), path), describer.value(vars(tensor), path))
                yield path, ("weight", name, *parts)

    def _replaced_code(self, written: str) -> Iterator[Row]:
        """Replaced library code of classes, each under a module that runs it."""
        text = self._text_paths()
        parts = list(self._model.named_modules())
        parts.sort(key=lambda part: _below(part[0], text))  # of several, one with vision
        kinds = (p.stands_for if isinstance(p, AbsentTower) else type(p) for _, p in parts)
        self._code.refresh(frozenset(kinds), written)
        for kind, rows in self._code.replaced.items():
            found = (path for path, part in parts if kind is not None and isinstance(part, kind))
            path = next(found, "*")
            yield from ((path, row) for row in rows)

    def _note_dtypes(self, remembered: dict[str, str], derived: list[tuple[str, str]]) -> None:
        """Record the dtypes of the weights. Those of an absent tower are in its files."""
        if self._source is not None and {"dtype", "vision_dtype"} <= remembered.keys():
            self.dtype, self.vision_dtype = remembered["dtype"], remembered["vision_dtype"]
            return
        absent = [(name, dtype) for name, _, dtype in self._absent() if dtype]
        text = self._text_paths()
        seen = [(name, dtype) for name, dtype in derived if not _below(name, text)]
        self.dtype = _dtype(self._named(), absent, derived)
        self.vision_dtype = _dtype(self._vision(), absent, seen)

    # -- what exists ------------------------------------------------------------------------------

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


def _nothing(tensors: Iterable[torch.Tensor]) -> None:
    """The default action for weights that may have changed."""


class _Digests:
    """The digests of weights, each valid until its weight changes."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, Stamp | None, str]] = {}

    def of(self, tensor: torch.Tensor) -> str:
        """The digest of a weight's values."""
        known = self._known.get(id(tensor))
        if known is not None and (known[1] is None or known[1].holds(tensor)):
            return known[2]
        found = _digest(tensor)
        self._known[id(tensor)] = (tensor, None, found)
        return found

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have these weights read again."""
        for tensor in tensors:
            self._known.pop(id(tensor), None)

    def keep(self, watch: Watch) -> None:
        """Keep the digests of tensors that a watch holds, and drop the rest."""
        held = ((tensor, stamp) for tensor, stamp in watch.stamps() if id(tensor) in self._known)
        self._known = {id(t): (t, stamp, self._known[id(t)][2]) for t, stamp in held}


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
    derived: list[tuple[str, str]],
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
