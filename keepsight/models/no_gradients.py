"""How the engine runs a model: without gradients, and without what gradients would need later.

Torch's inference mode is the leaner of the two ways. Some weights cannot be read in it: tensors of
a class of their own that unpack themselves there (quanto's four bits, "Cannot set version_counter
for inference tensor"). A model that has such weights runs under `no_grad`, always: tensors that
were made in inference mode cannot be written to outside of it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
_plainly: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class HasModel(Protocol):
    """Whoever runs a model."""

    _model: torch.nn.Module


S = TypeVar("S", bound=HasModel)


def run_plainly(model: torch.nn.Module) -> None:
    """Run a model under `no_grad` from now on."""
    _plainly.add(model)


def quiet(model: torch.nn.Module) -> AbstractContextManager[object]:
    """Whatever this model can run in."""
    return torch.no_grad() if model in _plainly else torch.inference_mode()


def quietly(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Run a method in what the model of its object can run in."""

    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with quiet(self._model):
            return method(self, *args, **kwargs)

    return functools.update_wrapper(run, method)
