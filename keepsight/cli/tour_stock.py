"""Plain Transformers on the same model: the baseline of the demo, and what people try.

Nothing of Keepsight is used here: files are opened, the processor is called and `generate` runs, as
in any tutorial. `attempts` are the obvious ways to add a picture to a conversation with kept
`past_key_values`; each one really runs, and its outcome is shown.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from PIL import Image

from keepsight.kinds import Inputs, Message, Processor
from keepsight.models.renamed import RETURNED, with_cache

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

TOKENS = 96  # more tokens than any answer of the demo models
_MEDIA = ("pixel_values", "image_grid_thw")
_CLOSE = 1e-3  # logits this close are the same computation in another order


@dataclass
class StockReply:
    """One answer of stock `generate`."""

    text: str
    logits: torch.Tensor  # of the first token of the answer
    cache: Cache  # past_key_values
    ids: torch.Tensor  # prompt and answer; the cache holds all but the last


class Outcome(NamedTuple):
    """The outcome of one attempt, next to the answer computed afresh."""

    who: str
    text: str  # the answer, or the exception
    verdict: str
    right: bool


class StockSession:
    """`model.generate` and a processor; the caller passes the cache."""

    def __init__(self, model: PreTrainedModel, processor: Processor) -> None:
        self.model, self.processor = model, processor

    def inputs(self, messages: Sequence[Message]) -> dict[str, torch.Tensor]:
        """The processor's output for a whole conversation, whose pictures are paths."""
        parts = [part for message in messages for part in message["content"]]
        paths = [part["image"] for part in parts if part["type"] == "image"]
        pictures = [Image.open(path).convert("RGB") for path in paths]
        text = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return dict(self.processor(text=[text], images=pictures or None, return_tensors="pt"))

    def first_token_ms(self, messages: Sequence[Message]) -> float:
        """Milliseconds from the messages to the first token, everything computed."""
        start = time.perf_counter()
        self.model.generate(**self.inputs(messages), max_new_tokens=1, do_sample=False)
        return 1e3 * (time.perf_counter() - start)

    def answer(self, inputs: dict[str, torch.Tensor], **options: object) -> StockReply:
        """The whole answer to one prompt."""
        output = self.model.generate(
            **inputs,
            **{"max_new_tokens": TOKENS, "do_sample": False} | options,
            return_dict_in_generate=True,
            output_logits=True,
        )
        text = self.text(output.sequences[0, inputs["input_ids"].shape[1] :])
        return StockReply(text, output.logits[0], output[RETURNED], output.sequences[0, :-1])

    def text(self, ids: torch.Tensor) -> str:
        """The text of some tokens."""
        said: str = self.processor.tokenizer.decode(ids, skip_special_tokens=True)
        return said.strip()

    def attempts(self, first: list[Message], second: list[Message]) -> Iterator[Outcome]:
        """Answer `second` with the cache that `first` left, in every obvious way."""
        begun = self.inputs(first)
        kept = self.answer(begun)
        whole = self.inputs(second)
        fresh = self.answer(whole)
        new = self.inputs(second[-1:])  # the processor's output for the new turn alone
        media = {name: new[name] for name in _MEDIA}
        length = len(kept.ids)
        suffix = {name: t[:, length:] for name, t in whole.items() if name not in _MEDIA} | media
        for attempt, inputs in (
            ("the whole conversation, both pictures", whole),
            ("the whole conversation, pixels of the new picture only", whole | media),
            ("only the new tokens, with their own mask", suffix),
            (
                "only the new tokens, with the mask of all",
                suffix | {"attention_mask": whole["attention_mask"]},
            ),
        ):
            self.answer(begun, max_new_tokens=1)  # the model keeps the positions of its last call
            yield self._try(attempt, inputs, kept, whole, fresh)

    def interrupted(
        self, first: list[Message], second: list[Message], between: list[Message]
    ) -> Outcome:
        """A question about a picture in the cache, after another conversation ran."""
        kept = self.answer(self.inputs(first))
        whole = self.inputs(second)
        fresh = self.answer(whole)
        self.answer(self.inputs(between), max_new_tokens=1)
        text_only = {name: t for name, t in whole.items() if name not in _MEDIA}
        return self._try("the whole conversation, no pixels", text_only, kept, whole, fresh)

    def _try(
        self, attempt: str, inputs: Inputs, kept: StockReply, whole: Inputs, fresh: StockReply
    ) -> Outcome:
        who = f"stock with past_key_values and {attempt}"
        if not torch.equal(whole["input_ids"][0, : len(kept.ids)], kept.ids):
            # An answer read back may be tokenized differently; that would be no fair attempt.
            why = "not tried: the prompt does not begin with the cache"
            return Outcome(who, "", why, False)
        try:
            heard = self.answer(inputs, **with_cache(self.model, copy.deepcopy(kept.cache)))
        except Exception as error:  # any exception of Transformers is the outcome
            said = f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(": ")
            return Outcome(who, said, "crashes", False)
        return Outcome(who, heard.text, *judge(heard.text, heard.logits, fresh))


def judge(text: str, logits: torch.Tensor, fresh: StockReply) -> tuple[str, bool]:
    """Compare an answer with the one computed afresh, in words and logits."""
    gap = float((logits.float() - fresh.logits.float()).abs().max())
    if text != fresh.text:
        return f"wrong: other words (logits off by {gap:.2g})", False
    if gap > _CLOSE:
        return f"wrong: same words, but logits off by {gap:.2g}", False
    return f"right (logits within {gap:.0e})", True


def question(text: str, pictures: Sequence[Path] = ()) -> Message:
    """One user turn, in a form that stock Transformers and Keepsight both take."""
    parts: list[Message] = [{"type": "image", "image": str(path)} for path in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def answer(text: str) -> Message:
    """One turn of the model."""
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}
