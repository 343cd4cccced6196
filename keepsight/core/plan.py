"""The bytes that a model and its memory take, from its configuration alone, without reading
weights.

The model is built without memory for its weights and runs over two tokens, so that a real lane is
counted. A blank picture goes through the model's own processor.
"""

from __future__ import annotations

from dataclasses import dataclass

import PIL.Image
import torch
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, PreTrainedModel

from keepsight.core.decoding.state import Lane, Shape
from keepsight.errors import ModelError
from keepsight.media.caches import MediaCaches
from keepsight.media.naming import Namer
from keepsight.media.sources import open_source
from keepsight.models import loading
from keepsight.models.families import Family, family_of
from keepsight.models.families.tower_absent import tower_parts
from keepsight.models.reachable import check_hub
from keepsight.models.renamed import with_cache

DTYPES = {"float32": 4, "bfloat16": 2}
_LEVELS = "deepstack_visual_indexes"
_NOTHING = 1 << 20  # bytes of the package cache for one picture


@dataclass(frozen=True)
class Plan:
    """Counts of numbers, not bytes: a number takes four bytes in float32 and two in bfloat16."""

    model_type: str
    parameters: int
    tower_parameters: int
    token_numbers: int  # keys and values of one token
    state_numbers: int  # states of fixed size per snapshot
    feature_numbers: int  # features of one picture token
    picture_tokens: int

    def weights(self, dtype: str) -> int:
        return self.parameters * DTYPES[dtype]

    def token(self, dtype: str) -> int:
        """Bytes per remembered token."""
        return self.token_numbers * DTYPES[dtype]

    def snapshot(self, dtype: str) -> int:
        """Bytes per snapshot beyond those of its tokens, at least. If any cut is exact, a snapshot
        also holds the layer inputs since the last chunk start."""
        return self.state_numbers * DTYPES[dtype]

    def features(self, dtype: str) -> int:
        return self.picture_tokens * self.feature_numbers * DTYPES[dtype]

    def prefix(self, dtype: str) -> int:
        """Bytes that a picture's tokens take in a remembered prompt."""
        return self.picture_tokens * self.token(dtype)


def plan(name: str, size: tuple[int, int], revision: str | None = None) -> Plan:
    """The plan of a checkpoint, for pictures of a given width and height."""
    path = loading.model_path(name)
    check_hub(path, revision)
    loading.check_sees(path, revision)
    model = _without_weights(path, revision)
    family = family_of(model)
    tokens, states = _remembered(model)
    tower = {id(t): t.numel() for p in tower_parts(family).values() for t in p.parameters()}
    levels = getattr(getattr(model.config, "vision_config", None), _LEVELS, None) or ()
    return Plan(
        model.config.model_type,
        sum(weight.numel() for weight in model.parameters()),
        sum(tower.values()),
        tokens,
        states,
        family.feature_width() * (1 + len(levels)),
        _tokens_of_picture(family, path, size, revision),
    )


def _without_weights(path: str, revision: str | None) -> PreTrainedModel:
    with loading.named_refusal(path):
        config = AutoConfig.from_pretrained(path, revision=revision)
        kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        kind = kind[0] if isinstance(kind, tuple | list) else kind
        with torch.device("meta"):
            return loading.thinking(kind(config)).eval()


@torch.no_grad()
def _remembered(model: PreTrainedModel) -> tuple[int, int]:
    """How many numbers a token leaves in a lane, and how many a snapshot adds."""
    lane = Lane(model, Shape.of(model))
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        model(input_ids=ids, use_cache=True, **with_cache(model, lane.cache))
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise ModelError(
            f"models of type {model.config.model_type} cannot be planned without their weights: "
            f"{error}"
        ) from error
    lane.length = 2
    kv, fixed = lane.capture(0, 2)
    return sum(t.numel() for t in kv.values()) // 2, sum(t.numel() for t in fixed.values())


def _tokens_of_picture(
    family: Family, path: str, size: tuple[int, int], revision: str | None
) -> int:
    processor = loading.load_processor(path, revision)
    namer = Namer(family, processor, {}, None, MediaCaches.of(_NOTHING))
    source = open_source(PIL.Image.new("RGB", size))
    layout = namer.run_processor(source.decode(), source).layout
    return sum(part for part in layout if isinstance(part, int))
