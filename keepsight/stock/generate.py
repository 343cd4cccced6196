"""Tensors in, tensors out: `generate` with the signature of Transformers, and a memory.

The packed output of a processor is split into media, row by row. Masks, type ids and positions from
the caller are compared with those that follow from the prompt. If they differ they are refused by
name, because a path does not carry them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from keepsight.core.decoding.sampling import DEFAULT_GENERATE_TOKENS as _TOKENS
from keepsight.core.decoding.sampling import (
    Draws,
    known_options,
    option_of,
    pads_of,
    samples_of,
    seed_of,
)
from keepsight.core.runtime import Runtime
from keepsight.core.sequence import Sequence as Answer
from keepsight.errors import (
    InputError,
    KeepsightError,
    PlaceholderMismatch,
    UnknownOption,
    UnsupportedInput,
)
from keepsight.kinds import Answering, Inputs, Options, Record
from keepsight.media.features import Vision
from keepsight.media.medium import Medium
from keepsight.models.families import Family, Pixels
from keepsight.models.families.pixels import embedding_of
from keepsight.models.upstream import padding_of
from keepsight.prefix.prompt import Prompt, Range
from keepsight.report import Report, Usage
from keepsight.stock.embedded import ids_behind

if TYPE_CHECKING:
    from transformers.generation import BaseStreamer

_TYPES = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
_CHECKED = ("attention_mask", "position_ids", *_TYPES)
_REFUSED = {
    "mm_encoder_outputs": "pass images as packages, to chat() or ask()",
    "past_key_values": "Keepsight keeps its own",
    "cache": "Keepsight keeps its own",
}
_OF_OTHER_MEDIA = (
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
    "input_features",
    "feature_attention_mask",
)
_GRID = "image_grid_thw"
_OWN = ("streamer", "return_dict_in_generate")


@dataclass
class Generated:
    """What `generate` returns with `return_dict_in_generate=True`."""

    sequences: torch.Tensor
    usage: Usage
    report: Report  # of the first row
    reports: list[Report]
    logits: tuple[torch.Tensor, ...] | None = None
    scores: tuple[torch.Tensor, ...] | None = None


@dataclass
class GenerateRequest:
    """One call, checked and taken apart; nothing is computed yet."""

    ids: torch.Tensor  # one row per answer
    prompts: list[Prompt]
    options: Options  # decoding options, per row
    streamer: BaseStreamer | None
    as_dict: bool
    tenant: str
    embedded: bool = False  # the prompt came as embeddings: return new tokens only


def generate(
    runtime: Runtime, inputs: torch.Tensor | None, options: Options, tenant: str = ""
) -> torch.Tensor | Generated:
    """`model.generate` for a batch of prompts, computed together."""
    return run(runtime, request(runtime, inputs, options, tenant))


def request(
    runtime: Runtime, inputs: torch.Tensor | None, options: Options, tenant: str = ""
) -> GenerateRequest:
    """Check a call and name its media; refuse unsupported options by name."""
    embeddings = options.pop("inputs_embeds", None)
    tensors, options = _sort(runtime, inputs, options)
    check_dense({**tensors, "inputs_embeds": embeddings})
    if embeddings is not None:
        if "input_ids" in tensors:
            raise InputError(
                "input_ids and inputs_embeds are two forms of one prompt; give one of them"
            )
        tensors["input_ids"] = ids_behind(runtime.family, embeddings)
    streamer = options.pop("streamer", None)
    as_dict = options.pop("return_dict_in_generate", None)
    if as_dict is None:
        as_dict = option_of(runtime.model, options, "return_dict_in_generate")
    options["return_dict_in_generate"] = bool(as_dict)  # output_logits depends on it
    ids = _check_ids(runtime, tensors)
    mask = tensors.get("attention_mask")
    if mask is None and embeddings is None:
        mask = ids != pad if (pad := pads_of(runtime.model, options)) is not None else None
    rows = _check_mask(mask, ids)
    with runtime.lock:
        runtime.refresh(tenant)
        prompts = _prompts(runtime, runtime.vision_of(tenant), tensors, ids, rows)
    count = samples_of(runtime.model, options)
    if count > 1:  # per prompt; its first sample prefills it for the others
        ids, prompts = ids.repeat_interleave(count, 0), [p for p in prompts for _ in range(count)]
        options["num_return_sequences"] = 1
    if streamer is not None and len(ids) > 1:
        raise InputError("a streamer takes one prompt at a time, as in Transformers")
    return GenerateRequest(
        ids, prompts, options, streamer, bool(as_dict), tenant, embeddings is not None
    )


def run(runtime: Runtime, asked: GenerateRequest) -> torch.Tensor | Generated:
    """Compute the request."""
    ids, streamer = asked.ids, asked.streamer
    if streamer is not None and not asked.embedded:
        streamer.put(ids.cpu())
    answers, draws = [], Draws(len(asked.prompts))
    for row, prompt in enumerate(asked.prompts):
        options = {**asked.options, **runtime.grammar(asked.options, prompt)}
        if options.get("seed") is not None:
            same = sum(prompt is other for other in asked.prompts[:row])
            options["seed"] = seed_of(options["seed"], same)  # samples of one prompt must differ
        answers.append(Answer(prompt, asked.tenant, options, _TOKENS, draws, row))
    if streamer is not None:
        for piece in runtime.engine.answer(answers[0]):
            if piece.token is not None:
                streamer.put(torch.tensor([piece.token]))
        streamer.end()
    else:
        runtime.engine.run(answers)
    sequences = _join(ids[:, :0] if asked.embedded else ids, answers)
    return _as_dict(sequences, answers) if asked.as_dict else sequences


def _sort(runtime: Runtime, inputs: torch.Tensor | None, options: Options) -> tuple[Record, Record]:
    names = ("input_ids", *_CHECKED, *sorted(runtime.family.tensor_inputs))
    tensors = {name: options.pop(name) for name in names if name in options}
    if inputs is not None:
        tensors.setdefault("input_ids", inputs)
    for name, why in _REFUSED.items():
        if options.pop(name, None) is not None:
            raise UnsupportedInput(f"{name} is not taken: {why}")
    for name in set(_OF_OTHER_MEDIA) - set(names):
        if options.pop(name, None) is not None:
            raise UnsupportedInput(
                f"{name} is not supported for {runtime.model.config.model_type}; images come as "
                "pixel_values"
            )
    known = [*known_options(), *_OWN, *names, "tenant"]
    own = [name for name in Answering.__annotations__ if name in known]
    UnknownOption.refuse(options, known, "generate", [*own, *_OWN, *names])
    return {name: value for name, value in tensors.items() if value is not None}, options


def check_dense(given: Inputs) -> None:
    """Refuse tensors whose values cannot be read one by one."""
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_nested:
            what = "has no values: it is on the meta device" if tensor.is_meta else "is not dense"
            raise InputError(f"{name} {what}; expected an ordinary tensor")


def _check_ids(runtime: Runtime, tensors: Inputs) -> torch.Tensor:
    ids = tensors.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
        raise InputError("input_ids must be a tensor of int64, as a processor returns it")
    if ids.dim() != 2 or not ids.numel():
        raise InputError(f"input_ids has shape {tuple(ids.shape)}, expected (batch, tokens)")
    size = embedding_of(runtime.model).num_embeddings
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        raise InputError(f"input_ids has values outside of 0 to {size - 1}")
    for name in runtime.family.tensor_inputs & tensors.keys():
        if not isinstance(tensors[name], torch.Tensor):
            raise InputError(f"{name} must be a tensor, not a {type(tensors[name]).__name__}")
    pixels, grid = tensors.get("pixel_values"), tensors.get("image_grid_thw")
    if pixels is not None and not pixels.is_floating_point():
        raise InputError(f"pixel_values is {pixels.dtype}, expected a floating dtype")
    if grid is not None and (grid.dim() != 2 or grid.shape[1] != 3 or grid.is_floating_point()):
        raise InputError(f"image_grid_thw has shape {tuple(grid.shape)}, expected (images, 3)")
    return ids


def _check_mask(mask: object, ids: torch.Tensor) -> np.ndarray:
    """Strip left padding; a hole or right padding would silently change positions."""
    if mask is None:
        return np.ones(tuple(ids.shape), dtype=bool)
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        raise InputError(f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}")
    rows: np.ndarray = mask.cpu().numpy().astype(bool)
    if (np.diff(rows.astype(np.int8), axis=1) < 0).any() or not rows[:, -1].all():
        raise UnsupportedInput(
            "attention_mask, or padding in input_ids without one, has zeros behind ones; only left "
            "padding is supported (set tokenizer.padding_side = 'left')"
        )
    return rows


def _prompts(
    runtime: Runtime, vision: Vision, tensors: Inputs, ids: torch.Tensor, mask: np.ndarray
) -> list[Prompt]:
    family = runtime.family
    all_ids = ids.cpu().numpy().astype(np.int64)
    rows = [row[keep] for row, keep in zip(all_ids, mask, strict=True)]
    _check_placeholders(family, tensors, np.concatenate(rows))
    waiting: dict[str, list[Medium]] = {kind: [] for kind in family.placeholders}
    for pixels in split_media(runtime, tensors, rows):
        waiting[pixels.modality].append(vision.name_pixels(pixels))
    prompts, used = [], dict.fromkeys(waiting, 0)
    for i, row in enumerate(rows):
        placed: list[tuple[tuple[Range, ...], Medium]] = []
        for kind, media in waiting.items():
            ranges = _place(family, row, kind, media[used[kind] :], used[kind])
            placed += zip(ranges, media[used[kind] :], strict=False)
            used[kind] += len(ranges)
        placed.sort(key=lambda pair: pair[0])
        media_here = tuple(medium for _, medium in placed)
        prompts.append(Prompt(row, media_here, tuple(ranges for ranges, _ in placed)))
        _check_claims(runtime, tensors, prompts[i], mask[i], i)
    for kind, media in waiting.items():
        if used[kind] != len(media):
            raise PlaceholderMismatch(f"{len(media)} {kind}s for placeholders of {used[kind]}")
    return prompts


def split_media(runtime: Runtime, tensors: Inputs, rows: list[np.ndarray]) -> list[Pixels]:
    """Split the tensors of a processor into media; refuse tensors that no processor makes."""
    try:
        return runtime.family.split(tensors, rows)
    except KeepsightError:
        raise
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
        shapes = {n: tuple(tensors[n].shape) for n in runtime.family.tensor_inputs & tensors.keys()}
        raise InputError(
            f"these tensors are not what this model's processor makes ({error}): {shapes}"
        ) from error


def _place(
    family: Family, row: np.ndarray, kind: str, media: list[Medium], number: int
) -> tuple[tuple[Range, ...], ...]:
    """The ranges of this row's media of one kind, in order."""
    spots = family.spots(row, kind)
    placed: list[tuple[Range, ...]] = []
    while len(spots):
        if len(placed) == len(media):
            raise PlaceholderMismatch(f"there are more {kind} placeholders than {kind}s")
        count = media[len(placed)].tokens
        parts = np.split(spots[:count], np.flatnonzero(np.diff(spots[:count]) != 1) + 1)
        found = tuple((int(part[0]), int(part[-1]) + 1) for part in parts)  # without gaps
        one_run = family.mrope and _GRID in family.tensor_inputs and kind == "image"
        if len(spots) < count or (one_run and len(found) > 1):
            raise PlaceholderMismatch(
                f"{kind} {number + len(placed)} has {count} tokens, but its placeholders are "
                f"not one run of {count} in input_ids"
            )
        placed.append(found)
        spots = spots[count:]
    return tuple(placed)


def _check_placeholders(family: Family, tensors: Inputs, flat: np.ndarray) -> None:
    for kind, token in family.placeholders.items():
        count = int((flat == token).sum())
        if count and not family.tensor_inputs & tensors.keys():
            raise PlaceholderMismatch(
                f"input_ids has {count} {kind} placeholders, but there is no pixel_values"
            )
    video = family.video_token_id
    if video not in (None, *family.placeholders.values()) and (flat == video).any():
        raise UnsupportedInput(
            f"input_ids has video placeholders; video is not supported for "
            f"{family.model.config.model_type}"
        )
    gridded = family.mrope and _GRID in family.tensor_inputs
    if gridded and "pixel_values" in tensors and _GRID not in tensors:
        raise InputError(f"pixel_values came without {_GRID}")


def _check_claims(
    runtime: Runtime, tensors: Inputs, prompt: Prompt, keep: np.ndarray, row: int
) -> None:
    """Require that type ids and positions follow from the prompt."""
    family = runtime.family
    own = {"mm_token_type_ids": torch.from_numpy(prompt.types.astype(np.int64))[None]}
    own |= family.prompt_inputs(prompt.ids, prompt.types, prompt.grids)
    for name in _TYPES:
        given = tensors.get(name)
        if given is None:
            continue
        if name not in own:
            raise UnsupportedInput(f"{name} is not an input of {runtime.model.config.model_type}")
        if not torch.equal(given[row].cpu()[torch.from_numpy(keep)].long(), own[name][0].long()):
            raise UnsupportedInput(f"{name} disagree with the places of the images")
    positions = tensors.get("position_ids")
    if positions is not None:
        wanted = family.positions(prompt.ids, prompt.types, prompt.grids)[..., 0, :]
        mine = positions[..., row, :].cpu()[..., torch.from_numpy(keep)]
        if mine.dim() == 2 and wanted.dim() == 2 and mine.shape[0] == 3:
            wanted = wanted[1:]
        if mine.shape != wanted.shape or not torch.equal(mine.to(wanted.dtype), wanted):
            raise UnsupportedInput("position_ids differ from those of this prompt; leave them out")


def _join(ids: torch.Tensor, answers: list[Answer]) -> torch.Tensor:
    """Prompts and answers in one rectangle; shorter answers are padded as Transformers pads
    them."""
    longest = max(len(one.generated) for one in answers)
    first = answers[0].sampler
    fill = padding_of(first.config) if first is not None else 0
    rows = [one.generated + [fill] * (longest - len(one.generated)) for one in answers]
    return torch.cat([ids, torch.tensor(rows, dtype=ids.dtype, device=ids.device)], dim=1)


def _as_dict(sequences: torch.Tensor, answers: list[Answer]) -> Generated:
    reports = [one.report() for one in answers]
    counts = [vars(one.usage()) for one in answers]
    total = Usage(**{name: sum(one[name] for one in counts) for name in counts[0]})
    samplers = [one.sampler for one in answers if one.sampler is not None]
    logits, scores = _stack([s.logits for s in samplers]), _stack([s.scores for s in samplers])
    return Generated(sequences, total, reports[0], reports, logits, scores)


def _stack(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...] | None:
    """One tensor per step, a row for each prompt; zeros for rows that have ended, where stock
    goes on with the logits after their padding."""
    longest = max((len(row) for row in rows), default=0)
    if not longest:
        return None
    blank = torch.zeros_like(rows[0][0] if rows[0] else next(r[0] for r in rows if r))
    return tuple(
        torch.cat([row[i] if i < len(row) else blank for row in rows]) for i in range(longest)
    )
