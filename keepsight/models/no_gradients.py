"""Chooses how the engine runs a model without gradients: inference mode or `no_grad`.

Inference mode is leaner. Some weights cannot be read in it: tensor classes that unpack themselves
(quanto's four bits, "Cannot set version_counter for inference tensor"). A model with such weights
always runs under `no_grad`, because tensors made in inference mode cannot be written outside of it.
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
    """An object that runs a model."""

    _model: torch.nn.Module


S = TypeVar("S", bound=HasModel)


def run_plainly(model: torch.nn.Module) -> None:
    """Run a model under `no_grad` from now on."""
    _plainly.add(model)


def quiet(model: torch.nn.Module) -> AbstractContextManager[object]:
    """The gradient-free mode that this model can run in."""
    return torch.no_grad() if model in _plainly else torch.inference_mode()


def quietly(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Run a method in the gradient-free mode of its object's model."""

    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with quiet(self._model):
            return method(self, *args, **kwargs)

    return functools.update_wrapper(run, method)
