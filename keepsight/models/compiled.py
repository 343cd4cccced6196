"""Which modules of a live model `torch.compile` has replaced.

Compiled code depends on options and on the shapes seen before, so no name for it is valid in
another process, and compiling again gives another name. `module.compile()` changes only one
attribute of the module, which is noticed like any other change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepsight.models.switches import called

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IN_PLACE = "_compiled_call_impl"  # where `Module.compile` stores its result


class Compiled:
    """The compiled modules of one model, by path."""

    def __init__(self, model: PreTrainedModel, answers: bool = True) -> None:
        self._model, self._answers = model, answers
        self._found: dict[str, str] = {}
        self._decoder: str | None = None

    def gather(self) -> None:
        """Check every module; called when any of them changed."""
        model = self._model
        modules = list(model.named_modules())
        decoder = model.get_decoder() if self._answers else None
        self._decoder = next((name for name, module in modules if module is decoder), None)
        self._found = {
            name: called(module) for name, module in modules if hasattr(module, "dynamo_ctx")
        }
        for name, module in modules:
            if vars(module).get(_IN_PLACE) is not None:
                self._found[name] = called(vars(module)[_IN_PLACE])

    def look(self) -> dict[str, str]:
        """The compiled function of each compiled module."""
        return self._found

    def beside_the_decoder(self, found: dict[str, str]) -> dict[str, str]:
        """The compiled modules that features may depend on: neither in the decoder nor around it.

        Features come from a method, which bypasses a compiled wrapper around the tower.
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
