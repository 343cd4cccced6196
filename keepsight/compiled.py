"""Which modules of a live model `torch.compile` has taken over.

What the compiler makes of a module depends on its options and on the shapes that it met before, so
no name for it holds in another process, and compiling again gives another one. In place
(`module.compile()`) only one attribute of the module changes, which is looked for on each call.
"""

from __future__ import annotations

from typing import Any

import torch

from keepsight.switches import called

_IN_PLACE = "_compiled_call_impl"  # where `Module.compile` puts what it made


class Compiled:
    """The compiled modules of one model, by their paths."""

    def __init__(self, model: torch.nn.Module, answers: bool = True) -> None:
        self._model, self._answers = model, answers
        self._names: list[str] = []
        self._homes: list[dict[str, Any]] = []  # what each module holds, by attribute
        self._wrapped: dict[str, str] = {}
        self._decoder: str | None = None

    def gather(self) -> None:
        """Collect what `look` goes over; called when modules were exchanged."""
        model: Any = self._model
        modules = list(model.named_modules())
        decoder = model.get_decoder() if self._answers else None
        self._names = [name for name, _ in modules]
        self._homes = [vars(module) for _, module in modules]
        self._decoder = next((name for name, module in modules if module is decoder), None)
        self._wrapped = {
            name: called(module) for name, module in modules if hasattr(module, "dynamo_ctx")
        }

    def look(self) -> dict[str, str]:
        """What stands in for each compiled module now."""
        found = dict(self._wrapped)
        for i in [i for i, home in enumerate(self._homes) if _IN_PLACE in home]:
            if self._homes[i][_IN_PLACE] is not None:
                found[self._names[i]] = called(self._homes[i][_IN_PLACE])
        return found

    def beside_the_decoder(self, found: dict[str, str]) -> dict[str, str]:
        """Those that features can depend on: neither in the decoder nor around it.

        Features are asked of a method, so what was compiled around the tower is passed by.
        """
        if self._decoder is None:
            return found
        end = f"{self._decoder}."
        both = {name: (f"{name}." if name else "") for name in found}
        return {
            name: made
            for name, made in found.items()
            if not both[name].startswith(end) and not end.startswith(both[name])
        }
