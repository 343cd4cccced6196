"""Decision models (`XxxForDecision`): a vision-language model whose head scores options, not words.

Transformers wraps the model without its language head. Here the same modules are put into the class
that reads and remembers, with the scores in place of the logits. Such a model decides, and writes
nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    DecisionConfig,
    PreTrainedModel,
)

from keepsight.errors import UnsupportedModel

_TYPE = "jev"  # the one kind of decision model that Transformers has
_BESIDE = ("decision_config.json", "judge_config.json")  # of a head next to a model's weights


@dataclass(frozen=True)
class DecisionHead:
    """How a head's scores are read."""

    config: DecisionConfig
    offsets: dict[str, int]  # of the first option of each type of question
    softcap: float | None

    def options(self, row: torch.Tensor, kind: str, count: int) -> torch.Tensor:
        """The scores of the options of one question."""
        scores = row if self.softcap is None else self.softcap * torch.tanh(row / self.softcap)
        first = self.offsets[kind]
        return scores[first : first + count]


class _Scores(torch.nn.Linear):
    """A head in a dtype of its own."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The scores of hidden states."""
        return super().forward(hidden.to(self.weight.dtype))


def has_head(path: str, revision: str | None) -> bool:
    """Whether a checkpoint is a decision model, or has a decision head beside its weights."""
    if any((Path(path) / name).is_file() for name in _BESIDE):
        return True
    file = Path(path) / "config.json"
    if file.is_file():
        try:
            return bool(json.loads(file.read_text(encoding="utf-8")).get("model_type") == _TYPE)
        except (ValueError, AttributeError):
            return False
    try:
        return bool(AutoConfig.from_pretrained(path, revision=revision).model_type == _TYPE)
    except Exception:  # loading itself refuses it by name
        return False


def without_head(model: PreTrainedModel) -> tuple[PreTrainedModel, DecisionHead | None]:
    """A decision model as one that reads, with its head; any other model as it is."""
    if getattr(model.config, "model_type", None) != _TYPE:
        return model, None
    reads: Any = model
    inner, proj = reads.model, reads.proj
    kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(inner.config), None)
    if kind is None:
        raise UnsupportedModel(
            f"this decision model reads with {type(inner).__name__}, which has no vision encoder; "
            "name a decision model that sees"
        )
    with torch.device("meta"):
        made = kind(inner.config)
    if not (isinstance(getattr(made, "model", None), type(inner)) and hasattr(made, "lm_head")):
        raise UnsupportedModel(f"no decision head is known for {kind.__name__}")
    if proj.weight.dtype != inner.dtype:
        cast = _Scores(1, 1, bias=proj.bias is not None, device="meta")
        cast.weight, cast.bias = proj.weight, proj.bias
        proj = cast
    made.model, made.lm_head = inner, proj
    made.train(model.training)
    offsets = dict(model.config.offsets)
    return made, DecisionHead(model.decision_config, offsets, model.config.softcap)
