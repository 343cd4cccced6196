"""Processors without the parts that cannot be loaded here.

Without torchvision Transformers cannot build its composite processors, even for images only,
because their video processor is a required argument. Here a placeholder takes its place and keeps
the checkpoint's settings of that part. So saving it gives a folder that loads whole where
torchvision is installed, and using the part gives an error that says what to do
(tests/models/test_upstream_traps.py tells when this is no longer needed).
"""

from __future__ import annotations

import functools
import json
from typing import Any, NoReturn

import transformers
from transformers import AutoImageProcessor, AutoTokenizer, ProcessorMixin

from keepsight.errors import MissingExtra
from keepsight.kinds import Processor, Record
from keepsight.models import upstream


class NotLoaded:
    """A placeholder for a part of a processor. `config` is the checkpoint's settings for it."""

    model_input_names: tuple[str, ...] = ()
    num_frames = fps = None  # read by some processors when they are built
    slice_mode, downsample_mode = False, "16x"
    _auto_class = None  # Transformers asks each part whether its code is saved too

    def __init__(self, name: str = "video processor", config: Record | None = None) -> None:
        self.name, self.config = name, config

    def __call__(self, *arguments: object, **options: object) -> NoReturn:
        """Raise an error that says what is missing."""
        raise MissingExtra(
            f"this processor was loaded without its {self.name}, which needs "
            f"{'torchvision' if 'video' in self.name else 'files that the checkpoint lacks'}; "
            "install or add it, and load the processor again"
        )

    fetch_videos = preprocess = __call__

    def __repr__(self) -> str:
        return f"NotLoaded({self.name!r})"


def partial_processor(path: str, options: Record) -> Processor:
    """Processor of a checkpoint, with placeholders for parts that only videos and sound need."""
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    parts = {"tokenizer": tokenizer}
    parts["image_processor"] = AutoImageProcessor.from_pretrained(path, backend="pil", **options)
    own = _read(path, "processor_config.json", options) or {}
    pictures = _read(path, "preprocessor_config.json", options) or {}
    name = own.pop("processor_class", None) or pictures.get("processor_class")
    if name is None:  # the class that Transformers uses then
        config = transformers.AutoConfig.from_pretrained(path, **options)
        name = getattr(transformers.PROCESSOR_MAPPING.get(type(config), None), "__name__", None)
    base: Any = getattr(transformers, str(name), None)
    if base is None:
        raise ValueError(f"no processor class {name!r} in Transformers {transformers.__version__}")
    if "video_processor" in base.get_attributes():
        video = own.get("video_processor") or _read(path, "video_preprocessor_config.json", options)
        parts["video_processor"] = NotLoaded(config=video or pictures or None)
    if "feature_extractor" in base.get_attributes():
        try:
            extractor = transformers.AutoFeatureExtractor.from_pretrained(path, **options)
        except (OSError, ValueError, ImportError, KeyError):
            extractor = NotLoaded("feature extractor", own.get("feature_extractor"))
        parts["feature_extractor"] = extractor
    template = getattr(tokenizer, "chat_template", None) or own.get("chat_template")
    own = {k: v for k, v in own.items() if k not in ("auto_map", "chat_template", *parts)}
    made: Processor = lenient(base)(**parts, chat_template=template, **own)
    return made


@functools.cache
def lenient(base: Any) -> type[ProcessorMixin]:
    """A subclass of a processor that accepts placeholders for its parts and saves their
    settings."""

    def check(self: ProcessorMixin, attribute: str, argument: object) -> type:
        if not isinstance(argument, NotLoaded):
            found: type = base.check_argument_for_proper_class(self, attribute, argument)
            return found
        return type(argument)

    def to_dict(self: ProcessorMixin) -> Record:
        record: Record = base.to_dict(self)
        for name in self.get_attributes():
            part = getattr(self, name, None)
            if isinstance(part, NotLoaded):
                record.pop(name, None)
                record |= {} if part.config is None else {name: part.config}
        return record

    def reduce(self: ProcessorMixin) -> tuple[object, ...]:
        return _restored, (base, dict(vars(self)))

    body = {"check_argument_for_proper_class": check, "to_dict": to_dict, "__reduce__": reduce}
    return type(base.__name__, (base,), {**body, "__module__": base.__module__})


def _restored(base: Any, state: Record) -> ProcessorMixin:
    """Rebuild a copy, for `copy` and for worker processes: the class is created, not imported."""
    made: ProcessorMixin = object.__new__(lenient(base))
    vars(made).update(state)
    return made


def _read(path: str, file: str, options: Record) -> Record | None:
    found = upstream.checkpoint_file(path, file, options)
    if found is None:
        return None
    with open(found, encoding="utf-8") as handle:
        record: Record = json.load(handle)
    return record
