"""A tower that was left out: its placeholders, and which modules of a model are the tower.

A model that gets all features from packages needs no tower. Its modules are replaced by
placeholders that keep plain settings which others read (a merge size, a patch size) and no weights.
Everything outside of the decoder and the output head that shares no weight with them belongs to the
tower, including the projector, because features are made after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from keepsight.errors import UnsupportedInput
from keepsight.models.families.pixels import all_tensors

if TYPE_CHECKING:
    from keepsight.models.families.base import Family

LEFT_OUT = (
    "the tower was left out (vision=False), so new images cannot be encoded; give packages or "
    "a store that has them, or load the model whole"
)


AbsentWeight = tuple[str, str, str]  # name in the whole model, digest, floating dtype


class AbsentTower(torch.nn.Module):
    """Replaces a module of the tower; it has its settings and refuses to run."""

    stands_for: type  # class of the replaced module

    def __init__(self, part: torch.nn.Module, weights: Sequence[AbsentWeight] = ()) -> None:
        super().__init__()
        self.weights = weights  # of the part and all below it
        for name, value in vars(part).items():
            if not name.startswith("_") and not isinstance(value, torch.Tensor):
                self.__dict__[name] = value
        self.__dict__["stands_for"] = type(part)
        for name, child in part.named_children():
            self.add_module(name, AbsentTower(child))

    @property
    def dtype(self) -> torch.dtype:
        """Read by Transformers before it passes pixels."""
        raise UnsupportedInput(LEFT_OUT)

    def forward(self, *arguments: object, **options: object) -> NoReturn:
        """Refuse, and say what to do instead."""
        raise UnsupportedInput(LEFT_OUT)


def tower_parts(family: Family) -> dict[str, torch.nn.Module]:
    """The largest modules that make features and hold no weight of the language model."""
    model = family.model
    text = {id(t) for module in family.text_modules() for _, t in all_tensors(module)}
    language = {id(module) for module in family.text_modules()}

    def walk(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
        for name, child in module.named_children():
            if id(child) in language or name in family.beside_the_tower:
                continue
            tensors = [tensor for _, tensor in all_tensors(child)]
            if any(id(tensor) in text for tensor in tensors):
                yield from walk(f"{prefix}{name}.", child)
            elif tensors:
                yield prefix + name, child

    return dict(walk("", model))


def absent_parts(model: torch.nn.Module) -> list[AbsentTower]:
    """The placeholders of a tower that was left out; none in a whole model."""
    return [module for module in model.modules() if isinstance(module, AbsentTower)]
