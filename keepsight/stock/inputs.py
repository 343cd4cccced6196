"""Inputs of stock Transformers with features in place of pixels, in the form of its encoder's
output.

The tensors are new on each call, because stock `generate` changes those it gets. It repeats the
features of each prompt for its beams: it counts rows of features until they fill the prompt's
placeholders. So each picture must be separate, as in the encoder's output, and a list of levels
must not be empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from keepsight.core.runtime import Runtime
from keepsight.errors import PlaceholderMismatch, UnsupportedInput
from keepsight.formats.package import Package
from keepsight.kinds import Inputs, Options, Record
from keepsight.media.medium import Medium
from keepsight.models.families import Family
from keepsight.models.families.pixels import Part
from keepsight.prefix.prompt import Prompt
from keepsight.report import Report, Segment
from keepsight.stock.generate import check_dense, split_media


def pixels_in(family: Family, given: Options) -> Inputs:
    """The media tensors that a tower would read."""
    found = {n: given[n] for n in family.tensor_inputs if isinstance(given.get(n), torch.Tensor)}
    seen = any(tensor.is_floating_point() for tensor in found.values())
    return found if seen else {}


def stock_inputs(
    runtime: Runtime, prompt: Prompt, features: bool = True, tenant: str = ""
) -> Record:
    """The keyword arguments of a stock forward pass over a whole prompt."""
    family, vision = runtime.family, runtime.vision_of(tenant)
    device = runtime.model.device
    ids = torch.from_numpy(prompt.ids)[None].to(device)
    inputs: Inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    more = family.prompt_inputs(prompt.ids, prompt.types, prompt.grids)
    inputs |= {name: tensor.to(device) for name, tensor in more.items()}
    if prompt.media and features:
        # Copies: the caller may change his inputs in place.
        parts = [(vision.package(m)[0].copied(), 0, m.tokens) for m in prompt.media]
        inputs |= _repeatable(family, parts, ids)
    return inputs


def with_features(
    runtime: Runtime, tenant: str, given: Options, stage: str, repeated: bool = False
) -> tuple[Options, Report]:
    """The arguments of a call with features in place of pixels, and the origin of each.

    `repeated` says that stock code may repeat them for several answers.
    """
    family, ids, mask = runtime.family, given.get("input_ids"), given.get("attention_mask")
    tensors = pixels_in(family, given)
    if not isinstance(ids, torch.Tensor):
        raise UnsupportedInput("without input_ids the places of the pictures are unknown")
    if not family.feeds_stock or "input_features" in tensors:
        kind = family.model.config.model_type
        raise UnsupportedInput(f"stock code of {kind} takes no features for these media")
    check_dense(given)
    runtime.refresh(tenant)
    vision, rows = runtime.vision_of(tenant), list(ids.cpu().numpy().astype(np.int64))
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:  # without padding
        keep = mask.cpu().numpy().astype(bool)
        rows = [row[seen] for row, seen in zip(rows, keep, strict=True)]
    media = [vision.name_pixels(pixels) for pixels in split_media(runtime, tensors, rows)]
    flat = np.concatenate(rows)
    spots = {kind: family.spots(flat, kind) for kind in family.placeholders}
    report = Report(prompt_tokens=len(flat))
    parts: list[tuple[Package, int, int]] = []
    for number, (medium, start, end) in enumerate(_placed(media, spots)):
        package, where = vision.package(medium)
        if note := vision.note(number, package, where):
            report.notes.append(note)
        parts.append((package, 0, medium.tokens))
        report.segments.append(
            Segment(medium.modality, start, end, "computed", stage, number, where, key=medium.key)
        )
    kept = set(family.rope_grid([medium.grid for medium in media]))
    changed = {k: v for k, v in given.items() if k not in tensors or k in kept}
    features = _repeatable if repeated else Family.feature_inputs
    return {**changed, **features(family, parts, ids)}, report


def _repeatable(family: Family, parts: Sequence[Part], ids: torch.Tensor) -> Record:
    """Whole media as inputs of stock code, which may repeat them for several answers."""
    inputs = family.feature_inputs(parts, ids)
    outputs = inputs.get("mm_encoder_outputs")
    for kind, output in (outputs or {}).items():
        own = [package for package, _, _ in parts if package.modality == kind]
        packed = getattr(output, "pooler_output", None)
        if isinstance(packed, torch.Tensor) and own:
            # Split by picture or by tile, as the tower does, if all have one shape.
            shapes = {tuple(package.tensors["features"].shape[1:]) for package in own}
            if len(shapes) == 1 and len(min(shapes)) > 1:
                output.pooler_output = packed.reshape(-1, *shapes.pop())
            elif len(ids) > 1:
                raise UnsupportedInput(
                    "pictures of several sizes in several prompts form one tensor"
                )
        if not getattr(output, "deepstack_features", None):
            output.deepstack_features = None
    return inputs


def _placed(media: Sequence[Medium], spots: dict[str, np.ndarray]) -> list[tuple[Medium, int, int]]:
    """Each medium with its first and last place, checked before anything is encoded."""
    used = dict.fromkeys(spots, 0)
    placed = []
    for medium in media:
        start = used[medium.modality]
        here = spots[medium.modality][start : start + medium.tokens]
        used[medium.modality] += medium.tokens
        ends = (int(here[0]), int(here[-1]) + 1) if len(here) else (0, 0)
        placed.append((medium, *ends))
    for kind, places in spots.items():
        if len(places) != used[kind]:
            raise PlaceholderMismatch(
                f"input_ids has {len(places)} {kind} placeholders, its {kind}s have {used[kind]} "
                "tokens"
            )
    return placed
