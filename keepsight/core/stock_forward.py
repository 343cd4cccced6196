"""Plain forward passes of a live model while Keepsight is installed in it with `forwards=True`.

A forward pre-hook puts features in the place of the pixels that somebody's code hands to the model.
What this cannot serve (gradients, sound, tensors that do not fit) reaches the model untouched, and
the report of the call says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch

from keepsight.core.runtime import Runtime
from keepsight.errors import KeepsightError, PlaceholderMismatch, UnsupportedInput
from keepsight.formats.package import Package
from keepsight.kinds import Inputs, Options
from keepsight.media.medium import Medium
from keepsight.models.fingerprint.stock import OUR_HOOK
from keepsight.report import Report, Segment

Given = tuple[tuple[object, ...], Options]
_FLAG = "_forward_pre_hooks_with_kwargs"


class InstalledForward:
    """The hook on one model."""

    def __init__(self, runtime: Runtime, tenant: str, note: Callable[[Report], None]) -> None:
        self._runtime, self._tenant, self._note = runtime, tenant, note
        self._names = list(inspect.signature(type(runtime.model).forward).parameters)[1:]

    def put(self) -> None:
        """Put it on the model."""
        home = vars(self._runtime.model)
        home["_forward_pre_hooks"][OUR_HOOK] = self
        home[_FLAG][OUR_HOOK] = True

    def take_away(self) -> None:
        """Leave the model as it was."""
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
        """What the forward pass is called with instead, or None to leave it as it is."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return None
        given = {**dict(zip(self._names, args, strict=False)), **options}
        runtime = self._runtime
        if not self._pixels(given) or given.get("mm_encoder_outputs") is not None:
            return None
        if runtime.lock.held:  # Keepsight itself compares with stock, or handed a call over
            return None
        try:
            self._refuse(model, given)
            with runtime.lock:
                runtime.refresh(True, self._tenant)
                changed, report = self._with_features(given)
        except KeepsightError as error:
            self._note(Report(notes=[f"handed to the model's own forward: {error}"]))
            return None
        self._note(report)
        return (), changed

    def _pixels(self, given: Options) -> Inputs:
        """The tensors of media that a tower would look at."""
        names = self._runtime.family.tensor_inputs
        found = {name: given[name] for name in names if isinstance(given.get(name), torch.Tensor)}
        seen = any(tensor.is_floating_point() for tensor in found.values())
        return found if seen else {}

    def _refuse(self, model: torch.nn.Module, given: Options) -> None:
        if model.training or torch.is_grad_enabled():
            raise UnsupportedInput(
                "gradients are asked for, and remembered features have none; call the model in "
                "eval mode under torch.no_grad()"
            )
        if not isinstance(given.get("input_ids"), torch.Tensor):
            raise UnsupportedInput("without input_ids nothing says where the pictures stand")
        if not self._runtime.family.feeds_stock or "input_features" in self._pixels(given):
            kind = self._runtime.model.config.model_type
            raise UnsupportedInput(f"a plain forward of {kind} takes no features of these media")

    def _with_features(self, given: Options) -> tuple[Options, Report]:
        family, vision = self._runtime.family, self._runtime.vision_of(self._tenant)
        tensors, ids = self._pixels(given), cast("torch.Tensor", given["input_ids"])
        rows = _rows(ids, given.get("attention_mask"))
        media = [vision.name_pixels(pixels) for pixels in family.split(tensors, rows)]
        flat = np.concatenate(rows)
        spots = {kind: family.spots(flat, kind) for kind in family.placeholders}
        report = Report(prompt_tokens=len(flat))
        parts: list[tuple[Package, int, int]] = []
        for number, (medium, start, end) in enumerate(_placed(media, spots)):
            package, where = vision.package(medium)
            parts.append((package, 0, medium.tokens))
            about = (medium.modality, start, end, "computed", "plain forward")
            report.segments.append(Segment(*about, number, where, key=medium.key))
        kept = set(family.rope_grid([medium.grid for medium in media]))
        changed = {k: v for k, v in given.items() if k not in tensors or k in kept}
        return {**changed, **family.feature_inputs(parts, ids)}, report


def _rows(ids: torch.Tensor, mask: object) -> list[np.ndarray]:
    """The tokens of each row that are no padding."""
    all_ids = ids.cpu().numpy().astype(np.int64)
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        return list(all_ids)
    keep = mask.cpu().numpy().astype(bool)
    return [row[seen] for row, seen in zip(all_ids, keep, strict=True)]


def _placed(
    media: Sequence[Medium], spots: dict[str, np.ndarray]
) -> Iterator[tuple[Medium, int, int]]:
    """Each medium with its first and last place, checked before anything is encoded."""
    used = dict.fromkeys(spots, 0)
    placed = []
    for medium in media:
        start = used[medium.modality]
        here = spots[medium.modality][start : start + medium.tokens]
        used[medium.modality] += medium.tokens
        placed.append(
            (medium, int(here[0]) if len(here) else 0, int(here[-1]) + 1 if len(here) else 0)
        )
    for kind, places in spots.items():
        if len(places) != used[kind]:
            raise PlaceholderMismatch(
                f"{len(places)} {kind} placeholders for features of {used[kind]} tokens"
            )
    yield from placed


def _on_copies() -> Callable[..., None]:
    return _nothing


def _nothing(*_: object) -> None:
    """Stands on copies of a model: it changes nothing."""
