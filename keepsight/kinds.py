"""Plain types that rooms share, each defined once. May import nothing.

They say what a value is for; contents are checked where they come in. The protocols name exactly
what Keepsight uses of objects that callers bring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict

if TYPE_CHECKING:
    import os

    import numpy as np
    import torch
    from PIL import Image
    from transformers import BatchFeature, CacheLayerMixin, PreTrainedTokenizerBase

# The data of a file's record, a request or a table: text keys, plain JSON values.
Record: TypeAlias = dict[str, Any]
# Keyword arguments passed on to the function that knows them; unknown ones are refused by name.
Options: TypeAlias = dict[str, Any]
# Keyword arguments of a forward pass: tensors, and Transformers' own records of them.
Inputs: TypeAlias = dict[str, Any]
# A chat message as in Transformers and OpenAI: a role, and a text or a list of parts.
Message: TypeAlias = dict[str, Any]
# Numbers in rows, rows of rows and so on, as `tensor.tolist()` gives them.
Numbers: TypeAlias = "Sequence[int | float | Numbers]"
# A processor's facts about a medium besides its pixels, such as `image_grid_thw`.
Grid: TypeAlias = dict[str, Numbers]
# A picture as an image processor takes it.
Decoded: TypeAlias = "Image.Image | np.ndarray"
# The frames of a video or the samples of a sound, and what a processor needs to know about them.
Clip: TypeAlias = "tuple[np.ndarray, Record]"
# The state of one layer, as in Transformers' caches.
CacheLayer: TypeAlias = "CacheLayerMixin"
# Where `from_pretrained` puts the parts of a model.
DeviceMap: TypeAlias = "str | int | torch.device | dict[str, str | int | torch.device] | None"
Dtype: TypeAlias = "str | torch.dtype | None"


class Answering(TypedDict, total=False):
    """The options of every call that answers, by their names in Transformers or the OpenAI API."""

    max_new_tokens: int | None
    do_sample: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: str | list[str] | None
    response_format: Any
    tenant: str | None
    tools: list[Record] | None
    template_kwargs: Options | None


class Generating(Answering, total=False):
    """The same, and what else `GenerationConfig` has that is honoured here."""

    bad_words_ids: Any
    begin_suppress_tokens: Any
    bos_token_id: Any
    encoder_no_repeat_ngram_size: int | None
    encoder_repetition_penalty: float | None
    eos_token_id: Any
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    exponential_decay_length_penalty: Any
    forced_bos_token_id: Any
    forced_eos_token_id: Any
    generation_config: Any
    logits_processor: Any
    max_length: int | None
    max_time: float | None
    max_tokens: int | None
    min_length: int | None
    min_new_tokens: int | None
    min_p: float | None
    no_repeat_ngram_size: int | None
    num_beams: int | None
    output_logits: bool | None
    output_scores: bool | None
    pad_token_id: Any
    prefix_allowed_tokens_fn: Any
    remove_invalid_values: bool | None
    renormalize_logits: bool | None
    repetition_penalty: float | None
    sequence_bias: Any
    skip_special_tokens: bool
    stop_strings: Any
    stopping_criteria: Any
    suppress_tokens: Any
    top_h: float | None
    typical_p: float | None
    watermarking_config: Any


class Asking(Answering, total=False):
    """The options of `ask`."""

    images: Any
    question: str | None
    videos: Any
    audio: Any


class AskOptions(Asking, Generating, total=False):
    """All options of `ask`."""

    text: str | None


class Preparing(TypedDict, total=False):
    """The options of calls that render messages and decode nothing."""

    tenant: str | None
    tools: list[Record] | None
    template_kwargs: Options | None


class Wrapping(TypedDict, total=False):
    """The options of `load` and `wrap`; docs/settings.md explains each."""

    store: str | os.PathLike[str] | None
    store_budget: int | str | None
    remote: str | None
    tenant: str | None
    tenant_quota: int | str | None
    cache_budget: int | str | None
    host_budget: int | str | None
    vision_budget: int | str
    ttl: int | float | str | None
    accept_features: str
    feature_codec: str
    chat_template: str | None
    image_options: Options | None
    pack: bool | str
    drafts: bool


class ImageProcessor(Protocol):
    """Makes tensors of pictures."""

    @property
    def size(self) -> Mapping[str, int]: ...

    def __call__(self, images: Sequence[object], **options: object) -> BatchFeature: ...

    def to_dict(self) -> Record: ...


class Processor(Protocol):
    """Makes a prompt's tensors of messages and pictures: a `ProcessorMixin`, or similar."""

    @property
    def image_processor(self) -> ImageProcessor: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def image_token(self) -> str: ...

    def replace_image_token(
        self, image_inputs: BatchFeature, image_idx: int, **options: object
    ) -> str: ...

    def apply_chat_template(
        self, conversation: Sequence[Message] | Sequence[Sequence[Message]], **options: object
    ) -> Any: ...

    def __call__(self, **inputs: object) -> BatchFeature: ...
