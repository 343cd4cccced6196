"""What Transformers' versions name differently: the cache of a forward pass, and tower outputs.

Up to 5.23 a forward pass takes its cache as `past_key_values` and returns it under that name; since
5.24 the name is `cache`. Code that comes with a checkpoint may have either.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace

import torch
from transformers import Cache
from transformers.modeling_outputs import MoeModelOutputWithPast

from keepsight.kinds import Inputs

OLD, NEW = "past_key_values", "cache"
SINCE_5_24 = NEW in MoeModelOutputWithPast.__dataclass_fields__
RETURNED = NEW if SINCE_5_24 else OLD  # the name in the outputs of Transformers' own models


def with_cache(model: torch.nn.Module, cache: Cache) -> Inputs:
    """The cache as a named argument of this model's forward pass."""
    return {_name_in(type(model).forward): cache}


@functools.lru_cache(64)
def _name_in(forward: Callable[..., object]) -> str:
    """The name that a forward pass has for it. Transformers' own comes first: code with both may
    mean something else by the other. It also stands where everything is passed on (PEFT)."""
    taken = inspect.signature(forward).parameters
    return next((name for name in (RETURNED, NEW, OLD) if name in taken), RETURNED)


class EncoderOutput(SimpleNamespace):
    """Features in the form of a tower's output, as Transformers reads them: by attribute, and by
    name where it prefills in chunks."""

    def __getitem__(self, name: str) -> object:
        return vars(self)[name]

    def get(self, name: str) -> object:
        """What was set under a name; None for levels of a tower that has none."""
        return vars(self).get(name) or None

    def to_tuple(self) -> tuple[object, ...]:
        """What is there, in the order in which it was set."""
        return tuple(value for value in vars(self).values() if value is not None)
