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
from typing import Any, TypeVar, cast

import torch

Method = TypeVar("Method", bound=Callable[..., Any])
_plainly: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def run_plainly(model: torch.nn.Module) -> None:
    """Run a model under `no_grad` from now on."""
    _plainly.add(model)


def quiet(model: torch.nn.Module) -> AbstractContextManager[object]:
    """The gradient-free mode that this model can run in."""
    return torch.no_grad() if model in _plainly else torch.inference_mode()


def quietly(method: Method) -> Method:
    """Run a method in the gradient-free mode of its object's `_model`."""

    @functools.wraps(method)
    def run(self: Any, *args: object, **kwargs: object) -> object:
        with quiet(self._model):
            return method(self, *args, **kwargs)

    return cast("Method", run)
