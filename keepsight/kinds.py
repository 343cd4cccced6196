"""Plain types that rooms share, each defined once. May import nothing.

They say what a value is for; contents are checked where they come in. The protocols name exactly
what Keepsight uses of objects that callers bring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict

if TYPE_CHECKING:
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
    tenant: str | None
    tools: list[Record] | None
    template_kwargs: Options | None
    exact: bool


class Asking(Answering, total=False):
    """The options of `ask`."""

    images: Any
    question: str | None
    videos: Any
    audio: Any


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
