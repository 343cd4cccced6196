"""What tests ask of answers: logits, a memory that has seen nothing, and stock Transformers."""

from __future__ import annotations

from typing import Any

import torch

import keepsight as ks
from support.models import picture, stock_inputs, turn


class Catch:
    """A logits processor that keeps what it sees: of each step the tokens before it, and scores."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.rows: list[torch.Tensor] = []

    @property
    def seen(self) -> torch.Tensor | None:
        """The first scores."""
        return self.rows[0] if self.rows else None

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.tokens.append(ids[0].tolist())
        self.rows.append(scores.clone())
        return scores


def logits(vlm: Any, messages: list[Any], max_new_tokens: int = 2, **options: Any) -> torch.Tensor:
    """The logits behind the prompt, through the public call."""
    catch = Catch()
    vlm.chat(messages, max_new_tokens=max_new_tokens, logits_processor=[catch], **options)
    return catch.rows[0]


def cold(vlm: Any, messages: list[Any]) -> torch.Tensor:
    """The same in a memory that has seen nothing."""
    with ks.wrap(vlm.model, vlm.processor) as fresh:
        return logits(fresh, messages)


def assert_like_stock(vlm: Any, messages: list[Any]) -> None:
    """Float32: same greedy tokens unless two logits tie, logits within 1e-4 of their scale."""
    inputs = stock_inputs(vlm.processor, messages)
    length = inputs["input_ids"].shape[1]
    stock = vlm.model.generate(
        **inputs,
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ours = vlm.chat(messages, max_new_tokens=6, do_sample=False)
    first = logits(vlm, messages)
    scale = float(stock.logits[0].abs().max())
    assert float((first - stock.logits[0]).abs().max()) < 1e-4 * scale
    for step, token in enumerate(stock.sequences[0, length:].tolist()):
        if ours.tokens[step] != token:
            best = stock.logits[step][0].topk(2).values
            assert float(best[0] - best[1]) < 2e-4 * scale
            break


def conversation() -> list[list[Any]]:
    """Prompts that grow, branch, swap and edit; each shares something with one before."""
    a, b, c = picture(1), picture(2), picture(3, 160, 96)
    first = [turn("What do you see in this picture here?", a)]
    second = [*first, turn("A pattern.", role="assistant"), turn("And the colour?")]
    third = [*second, turn("Red.", role="assistant"), turn("Compare it with this one.", b, c)]
    swapped = [turn("What do you see in this picture here?", b)]
    text_first = [turn("You are looking at an album of pictures."), turn("This one?", a)]
    edited = [*first, turn("A different pattern.", role="assistant"), turn("And the colour?")]
    return [first, second, third, swapped, text_first, edited, second, third]
