"""Watches the vision and audio towers of one live model: counts their runs, or forbids them.

A forward pre-hook on each outermost part of a tower sees every run, in every thread. The identity
ignores it by its name. It is removed when the last watcher has ended.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
    # Torch's own dicts of hooks, whose other keys are numbers.
    homes: list[tuple[str, Any]] = [(path, part._forward_pre_hooks) for path, part in parts.items()]
    with _lock:
        hooks = [home.setdefault(OUR_HOOK, TowerHook(path)) for path, home in homes]
        for hook in hooks:
            hook.watchers.append(on_run)
    try:
        yield parts
    finally:
        with _lock:
            for hook, (_, home) in zip(hooks, homes, strict=True):
                hook.watchers.remove(on_run)
                if not hook.watchers and home.get(OUR_HOOK) is hook:
                    del home[OUR_HOOK]


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
                "blindfold() could miss a run of the encoder; use a model that is not compiled"
            )
