"""Serves plain forward passes of a live model after `install(forwards=True)`.

A forward pre-hook replaces the pixels of any call of the model by features. Calls that cannot be
served (gradients, sound, tensors that do not fit) reach the model unchanged, and their report says
why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from keepsight.core.runtime import Runtime
from keepsight.errors import KeepsightError, UnsupportedInput
from keepsight.kinds import Options
from keepsight.models.identity import OUR_HOOK
from keepsight.report import Report
from keepsight.stock.inputs import pixels_in, with_features

Given = tuple[tuple[object, ...], Options]
_FLAG = "_forward_pre_hooks_with_kwargs"


class InstalledForward:
    """The hook on one model."""

    def __init__(self, runtime: Runtime, tenant: str, note: Callable[[Report], None]) -> None:
        self._runtime, self._tenant, self._note = runtime, tenant, note
        self._names = list(inspect.signature(type(runtime.model).forward).parameters)[1:]

    def put(self) -> None:
        """Install the hook."""
        home = vars(self._runtime.model)
        home["_forward_pre_hooks"][OUR_HOOK] = self
        home[_FLAG][OUR_HOOK] = True

    def take_away(self) -> None:
        """Remove the hook."""
        home = vars(self._runtime.model)
        if home["_forward_pre_hooks"].get(OUR_HOOK) is self:
            del home["_forward_pre_hooks"][OUR_HOOK], home[_FLAG][OUR_HOOK]

    def __deepcopy__(self, memo: object) -> object:
        return _nothing

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _on_copies, ()

    def __call__(
        self, model: torch.nn.Module, args: tuple[object, ...], options: Options
    ) -> object:
        """The new arguments of the forward pass, or None to keep them."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return None
        given = {**dict(zip(self._names, args, strict=False)), **options}
        runtime = self._runtime
        if not pixels_in(runtime.family, given) or given.get("mm_encoder_outputs") is not None:
            return None
        if runtime.lock.held:  # Keepsight itself calls stock code, or passed a call on
            return None
        try:
            if model.training or torch.is_grad_enabled():
                raise UnsupportedInput(
                    "gradients are requested, and remembered features have none; call the "
                    "model in eval mode under torch.no_grad()"
                )
            with runtime.lock:
                changed, report = with_features(runtime, self._tenant, given, "plain forward")
        except KeepsightError as error:
            self._note(Report(notes=[f"handed to the model's own forward: {error}"]))
            return None
        self._note(report)
        return (), changed


def _on_copies() -> Callable[..., None]:
    return _nothing


def _nothing(*_: object) -> None:
    """The hook on copies of a model; it changes nothing."""
