"""Watches the vision and audio towers of one live model: counts their runs, or forbids them.

A forward pre-hook on each outermost part of a tower sees every run, in every thread. The
fingerprint knows the hook by its name and ignores it. The hook is removed when the last watcher has
ended.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

from keepsight.errors import ModelError, TowerRan
from keepsight.models.families import Family
from keepsight.models.families.tower_absent import tower_parts
from keepsight.models.identity import OUR_HOOK

OnRun = Callable[[str], None]  # gets the path of the part that is about to run
_lock = threading.Lock()
_folded: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()


class TowerHook:
    """The hook on one part of a tower, shared by all its watchers."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.watchers: list[OnRun] = []

    def __call__(self, module: torch.nn.Module, arguments: object) -> None:
        for watcher in list(self.watchers):
            watcher(self.path)


@contextmanager
def watched(family: Family, on_run: OnRun) -> Iterator[dict[str, torch.nn.Module]]:
    """Call `on_run` before each run of a part of the towers; yields the parts by path."""
    parts = tower_parts(family)
    with ExitStack() as undo:
        for path, part in parts.items():
            hook = _hooked(path, part, on_run)
            undo.callback(_unhooked, hook, part, on_run)
        yield parts


def _hooked(path: str, part: torch.nn.Module, on_run: OnRun) -> TowerHook:
    with _lock:
        hook = _hooks_of(part).setdefault(OUR_HOOK, TowerHook(path))
        hook.watchers.append(on_run)
        return hook


def _unhooked(hook: TowerHook, part: torch.nn.Module, on_run: OnRun) -> None:
    with _lock:
        hook.watchers.remove(on_run)
        if not hook.watchers and _hooks_of(part).get(OUR_HOOK) is hook:
            del _hooks_of(part)[OUR_HOOK]


def _hooks_of(part: torch.nn.Module) -> dict[str, TowerHook]:
    """Torch's own dict of hooks; its other keys are numbers."""
    hooks: dict[str, TowerHook] = vars(part)["_forward_pre_hooks"]
    return hooks


@contextmanager
def blindfold(family: Family) -> Iterator[None]:
    """While this is active, any run of a tower of this model raises an error, in every thread."""
    model = family.model
    _refuse_compiled(model)

    def refuse(path: str) -> None:
        raise TowerRan(path)

    with watched(family, refuse):
        with _lock:
            _folded[model] = _folded.get(model, 0) + 1
        try:
            yield
        finally:
            with _lock:
                _folded[model] -= 1
                if not _folded[model]:
                    del _folded[model]


def refuse_blindfolded(model: PreTrainedModel, key: str) -> None:
    """Refuse to encode the medium with this key, before its pixels are prepared."""
    if model in _folded:
        raise TowerRan(f"of {model.config.model_type}", f" for the medium {key[:16]}…")


def _refuse_compiled(model: PreTrainedModel) -> None:
    """Refuse compiled models: code that torch compiled earlier ignores new hooks."""
    for path, module in model.named_modules():
        if hasattr(module, "dynamo_ctx") or module._compiled_call_impl is not None:
            raise ModelError(
                f"{path or 'the model'} is compiled, and compiled code ignores hooks, so "
                "blindfold() could miss a run of the tower; use a model that is not compiled"
            )
