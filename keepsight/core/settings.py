"""The caller's settings, checked before anything is loaded or computed.

Sizes are bytes, as a number or as in "2GiB"; times are seconds, or as in "7d".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from transformers import PreTrainedModel, ProcessorMixin

from keepsight.errors import InputError, ModelError, UnknownOption, UnsupportedModel
from keepsight.kinds import Options, Processor, Record, Wrapping
from keepsight.models import upstream
from keepsight.store import Store, open_store
from keepsight.store.writer import ROOM
from keepsight.system.places import path_text
from keepsight.system.units import parse_bytes, parse_seconds
from keepsight.system.words import check_codec

_LONGEST_NAME = 1024
LEAST_WAITING = 64 << 20  # bytes that may always wait to be written


@dataclass(frozen=True)
class RuntimeSettings:
    """The options of a VLM that its memory uses."""

    cache_budget: int | str | None = None  # prefixes on the model's device
    host_budget: int | str | None = None  # prefixes evicted from there, in the host's memory
    vision_budget: int | str = "2GiB"  # features and pixels, in memory
    tenant_quota: int | str | None = None  # of each of these, for one tenant
    ttl: int | float | str | None = None  # seconds, or as in "7d"
    accept_features: str = "same"
    feature_codec: str = "exact"  # how a store encodes packages
    pack: bool | str = "auto"  # packed weights; "auto": only of models that `load` loaded
    drafts: bool = True  # guess tokens from earlier text, if that changes no bit
    image_options: tuple[tuple[str, object], ...] = ()

    def on(self, device: torch.device) -> RuntimeSettings:
        """With the usual budget of a device: 2 GiB, or a third of what an accelerator has free."""
        if self.cache_budget is not None:
            return self
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        return replace(self, cache_budget=max(2 << 30, free // 3))

    def check(self) -> None:
        """Refuse impossible values by name."""
        check_codec(self.feature_codec)
        if self.ttl is not None:
            parse_seconds(self.ttl)
        if self.pack not in (True, False, "auto"):
            raise InputError(f"pack={self.pack!r}; expected True, False or 'auto'")
        if not isinstance(self.drafts, bool):
            raise InputError(f"drafts={self.drafts!r}; expected True or False")
        if self.accept_features not in ("same", "any"):
            raise InputError(
                f"accept_features={self.accept_features!r}; expected 'same' (only features made "
                "as this model would make them) or 'any'"
            )


def tenant_name(tenant: object) -> str:
    """Check the name of a tenant; None is the default tenant."""
    if tenant is None:
        return ""
    if not isinstance(tenant, str) or not 0 < len(tenant) <= _LONGEST_NAME:
        raise InputError(
            f"tenant={str(tenant)[:80]!r}; expected a text of 1 to {_LONGEST_NAME} characters"
        )
    return tenant


def chosen_store(
    store: str | os.PathLike[str] | None,
    budget: int | str | None,
    remote: str | None,
    quota: int | str | None,
    memory: Sequence[int | str] = ("1GiB",),
) -> Store | None:
    """The store given, or else the one named in the environment, or none. `memory`: the budgets of
    what is remembered in memory."""
    near = (store if store is not None else os.environ.get("KEEPSIGHT_STORE")) or None
    far = (remote if remote is not None else os.environ.get("KEEPSIGHT_REMOTE")) or None
    if near is None and far is None:
        if budget is not None:
            raise InputError(f"store_budget={budget!r} without a store; name one with store=")
        return None
    bytes_of = [None if b is None else parse_bytes(b) for b in (budget, quota)]
    # Data waiting to be written takes no more memory than remembered data may.
    room = min(max(sum(map(parse_bytes, memory)), LEAST_WAITING), ROOM)
    where = None if near is None else path_text(near, "store")
    is_folder = where is not None and "://" not in where
    return open_store(where, bytes_of[0], far, bytes_of[1] if is_folder else None, room)


def refuse_stretching_rope(model: PreTrainedModel) -> None:
    """Refuse rope whose frequencies change with the length of the whole prompt."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    layers = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in [rope, *layers]:
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind in ("dynamic", "longrope") and not _stretched_once(model):
            raise UnsupportedModel(
                f"rope type {kind!r} changes its frequencies with the length of the prompt, so "
                "a remembered prefix would be wrong for a longer one; load the model with "
                f"rope_parameters={{'rope_type': 'default', ...}} or use it without Keepsight"
            )


def _stretched_once(model: PreTrainedModel) -> bool:
    """Whether frequencies are fixed although the config says `dynamic` (Hunyuan's `alpha`)."""
    kinds = {getattr(module, "rope_type", None) for module in model.modules()}
    return "ntk_alpha" in kinds and not kinds & {"dynamic", "longrope"}


def image_options(processor: Processor | None, given: Options) -> Record:
    """Options of the image processor: those the composite processor passes, and the caller's."""
    if processor is None:
        return given
    image_processor = processor.image_processor
    known = set(getattr(getattr(image_processor, "valid_kwargs", None), "__annotations__", given))
    known |= set(vars(image_processor))
    UnknownOption.refuse(given, known, "image_options")
    if not isinstance(processor, ProcessorMixin):  # a bare image processor
        return given
    merged = upstream.merged_options(processor, given)
    options = dict(merged["images_kwargs"])
    options.pop("return_tensors", None)
    return options


WRAP_DEFAULTS = {one.name: one.default for one in fields(RuntimeSettings)}


def check_options(options: Iterable[str], where: str, more: Sequence[str] = ()) -> None:
    """Refuse an option that neither `load` nor `wrap` has; `more` are named by the call itself."""
    UnknownOption.refuse(options, [*more, *Wrapping.__annotations__], where)


def check_processor(processor: object, answers: bool) -> None:
    """Refuse a processor without the parts needed to name images and render prompts."""
    wanted = ("image_processor", "tokenizer") if answers else ("image_processor",)
    missing = [name for name in wanted if not hasattr(processor, name)]
    if processor is not None and missing:
        raise ModelError(
            f"the processor is a {type(processor).__name__} without {' and '.join(missing)}; pass "
            "the checkpoint's own (transformers.AutoProcessor.from_pretrained), or None to use "
            "tensors only"
        )
