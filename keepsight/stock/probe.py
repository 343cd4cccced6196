"""Probes an unlisted model type: finds the most reuse that is exact, or refuses the model.

The model answers a few small prompts about noise: once as stock Transformers does from pixels, and
once in pieces, cut at every few tokens and after every picture. Sizes, shapes and numbers of
pictures differ, so that a processor pads and crops. Every mask is tried with zeros, and a
conversation is given as messages too. The most reuse with equal logits is chosen; controls check
that pictures matter. A model that fails every kind of reuse, or cannot be tried, is refused with
the reason.

A few short prompts are limited evidence. `keepsight verify` and `FamilyTests` (`tests/support`)
give more.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from keepsight.core.runtime import Runtime
from keepsight.core.sequence import Sequence as Answer
from keepsight.core.settings import RuntimeSettings
from keepsight.core.tolerance import NEAR
from keepsight.errors import KeepsightError, UnsupportedModel
from keepsight.kinds import Inputs, Processor, Record
from keepsight.media.medium import Medium
from keepsight.models.families import Family
from keepsight.models.identity import Identity
from keepsight.prefix.prompt import Prompt
from keepsight.prompt.render import Renderer
from keepsight.stock.generate import Generated, generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# (cuts inside a medium are wrong, which reuse), the most reuse first.
_CHANCES = (
    (False, "prefix"),
    (True, "prefix"),
    (True, "same media"),
    (True, "whole prompt"),
)
_RUN = 7  # tokens between cuts: some cuts fall into every picture
_TOKENS = 3
_OPTIONS: Record = {
    "max_new_tokens": _TOKENS,
    "min_new_tokens": _TOKENS,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}
_FIRST, _REPLACED = "one picture", "another picture"
_ODD = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
_INSIDES = (AttributeError, TypeError, LookupError, AssertionError)
_SENTENCES = (KeepsightError, ValueError, RuntimeError, ImportError, NotImplementedError)


@dataclass(frozen=True)
class _Case:
    """One prompt or batch as the processor gives it, and the result of stock Transformers."""

    name: str
    inputs: Inputs
    stock: tuple[torch.Tensor, ...]


def settle(
    model: PreTrainedModel, family: Family, processor: Processor | None, weights: Identity
) -> None:
    """Find what this family may reuse and set it on the instance, or refuse the model."""
    kind = model.config.model_type
    if processor is None:
        raise UnsupportedModel(
            f"model type {kind!r} is not one that tests have shown exact, and it cannot be "
            "tried without a processor; wrap it with its processor"
        )
    try:
        cases = list(_cases(model, processor))
    except Exception as error:  # a foreign model or processor may raise anything
        raise UnsupportedModel(
            f"model type {kind!r} is not one that tests have shown exact, and it could not be "
            f"tried: {error if isinstance(error, _CannotTry) else in_words(error)}; use it with "
            "Transformers alone"
        ) from error
    _refuse_blind(kind, cases)
    seen: dict[str, list[str]] = {}
    for whole, reuse in _CHANCES:
        family.sees_whole_media, family.reuse = whole, reuse
        wrong = _first_difference(model, family, processor, weights, cases)
        if not wrong:
            _check_messages(model, family, processor, weights)
            return
        seen[wrong] = [*seen.get(wrong, []), f"{reuse}{', whole pictures' if whole else ''}"]
    tried = "; ".join(f"{', '.join(ways)}: {wrong}" for wrong, ways in seen.items())
    if len(seen) == 1:
        tried = next(iter(seen))
    raise UnsupportedModel(
        f"model type {kind!r} could not be shown exact: its logits differ from stock Transformers "
        f"by more than {_near(model):g} of their scale ({tried}); use it with Transformers alone"
    )


# -- the test prompts ----------------------------------------------------------------------------


def _cases(model: PreTrainedModel, processor: Processor) -> Iterator[_Case]:
    """First what every model must answer, then what some processors or models refuse."""
    for case in _plain_cases(model, processor):
        yield case
        for masked, varied in _varied(case.inputs):
            with contextlib.suppress(Exception):  # what stock refuses need not be tried
                yield _Case(f"{case.name}, {masked} with zeros", varied, _stock(model, varied))
    for name, make in _more(processor, _in_prompt(processor)):
        with contextlib.suppress(Exception):
            inputs = make()
            yield _Case(name, inputs, _stock(model, inputs))


class _CannotTry(Exception):
    """Why a model could not be tried, in words for its user."""


@contextlib.contextmanager
def _asking(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a foreign model or processor may raise anything
        raise _CannotTry(f"{what} ({in_words(error)})") from error


def _in_prompt(processor: Processor) -> str:
    """Text for a picture in a prompt: the image token, framed as the chat template frames it."""
    token = getattr(processor, "image_token", None)
    if not isinstance(token, str) or not token:
        raise _CannotTry(
            f"its {type(processor).__name__} names no image token, so pictures have no place of "
            "their own in a prompt"
        )
    image, before, after = _noise(1, (96, 96)), "Before.", "After."
    with contextlib.suppress(Exception):  # most processors take the token alone
        processor(text=[token], images=[image], return_tensors="pt")
        return token
    texts = [{"type": "text", "text": words} for words in (before, after)]
    message = {"role": "user", "content": [texts[0], {"type": "image"}, texts[1]]}
    with contextlib.suppress(Exception):  # without a template only the token is known
        text = processor.apply_chat_template([message], tokenize=False)
        framed: str = text.partition(before)[2].partition(after)[0]
        return framed.strip() or token
    return token


def _plain_cases(model: PreTrainedModel, processor: Processor) -> Iterator[_Case]:
    """What every model must answer."""
    for name, text, images in _prompts(_in_prompt(processor)):
        with _asking("its processor did not prepare a text with pictures"):
            inputs = dict(processor(text=[text], images=images, return_tensors="pt"))
        with _asking("stock Transformers did not answer a prompt with pictures either"):
            stock = _stock(model, inputs)
        yield _Case(name, inputs, stock)


def _prompts(token: str) -> Iterator[tuple[str, str, list[Image.Image]]]:
    """One picture; text after it; a second picture; another first picture; three of all shapes."""
    a, b, c = _noise(1, (96, 96)), _noise(2, (160, 96)), _noise(3, (96, 96))
    first = f"Look at this: {token} What do you see in it, and where?"
    longer = f"{first} It is a pattern."
    yield _FIRST, first, [a]
    yield "a longer text", f"{longer} And what colour is it?", [a]
    yield "a second picture", f"{longer} {token} Compare it with this one.", [a, b]
    yield _REPLACED, first, [c]
    tall, large = _noise(4, (60, 150)), _noise(5, (420, 260))
    three = f"{longer} {token} A tall one. And {token} is large."
    yield "pictures of other shapes", three, [a, tall, large]


def _more(processor: Processor, token: str) -> Iterator[tuple[str, Callable[[], Record]]]:
    """Pictures side by side, no picture, and prompts with different numbers of pictures
    together."""
    a, b, c = _noise(1, (96, 96)), _noise(6, (60, 150)), _noise(7, (160, 96))
    both = f"Here: {token}{token} Which of them is larger?"
    texts = [f"Look at this: {token} What do you see in it?", both]

    def together(images: Sequence[object]) -> Record:
        side, processor.tokenizer.padding_side = processor.tokenizer.padding_side, "left"
        try:
            return dict(processor(text=texts, images=images, padding=True, return_tensors="pt"))
        finally:
            processor.tokenizer.padding_side = side

    one = partial(processor, return_tensors="pt")
    yield "pictures side by side", lambda: dict(one(text=[both], images=[b, c]))
    yield "no picture", lambda: dict(one(text=["What is a pattern, and where is one?"]))
    yield "two prompts together", lambda: together([a, b, c])
    yield "two prompts together, nested", lambda: together([[a], [b, c]])


def _varied(inputs: Inputs) -> Iterator[tuple[str, Record]]:
    """The same inputs with zeros in a corner of one mask, as if the processor had padded there."""
    ids = inputs["input_ids"]
    for name, tensor in inputs.items():
        if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or tensor.dim() < 2:
            continue
        of_text = tensor.shape[: ids.dim()] == ids.shape
        if of_text or not bool(((tensor == 0) | (tensor == 1)).all()):
            continue
        varied = tensor.clone()
        varied[..., tensor.shape[-1] * 5 // 8 :] = 0
        if not torch.equal(varied, tensor):
            yield name, {**inputs, name: varied}


def _noise(seed: int, size: tuple[int, int]) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.NEAREST)


def _stock(model: PreTrainedModel, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    given = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            dtype = model.dtype if value.is_floating_point() else value.dtype
            given[name] = value.to(model.device, dtype)
    logits: tuple[torch.Tensor, ...] = model.generate(**given, **_OPTIONS).logits
    return logits


def _refuse_blind(kind: str, cases: list[_Case]) -> None:
    """Control: if another picture changes nothing, equal logits would prove nothing."""
    by_name = {case.name: case.stock[0].float() for case in cases}
    one, other = by_name[_FIRST], by_name[_REPLACED]
    if float((one - other).abs().max()) < 1e-2 * float(one.abs().max()):
        raise UnsupportedModel(
            f"model type {kind!r} cannot be tried: its answers hardly depend on its pictures"
        )


# -- the comparison ------------------------------------------------------------------------------


def _near(model: PreTrainedModel) -> float:
    return NEAR.get(model.dtype, 1e-4)


def _runtime(
    model: PreTrainedModel, family: Family, processor: Processor, weights: Identity
) -> Runtime:
    """An empty runtime that cuts prompts at every few tokens."""
    runtime = Runtime(model, family, processor, weights, RuntimeSettings(), None)
    runtime.engine.longest_pass = _RUN
    return runtime


def _first_difference(
    model: PreTrainedModel,
    family: Family,
    processor: Processor,
    weights: Identity,
    cases: list[_Case],
) -> str:
    """The first difference over all cases, each run on top of those before; empty if none."""
    runtime = _runtime(model, family, processor, weights)
    for case in cases:
        try:
            found = generate(runtime, None, {**case.inputs, **_OPTIONS})
        except (KeepsightError, *_ODD) as error:
            return f"{case.name}: {in_words(error)}"
        ours = (found.logits or ()) if isinstance(found, Generated) else ()
        if wrong := _difference(model, case.stock, ours):
            return f"{case.name}: {wrong}"
    return ""


def in_words(error: Exception) -> str:
    """An error in words for the user: its own text if it was written for users. An internal error
    names only internals, so it becomes the cause of the refusal and is logged."""
    of_a_bug = isinstance(error.__cause__, _INSIDES)  # our error about one of theirs
    if isinstance(error, _SENTENCES) and str(error).strip() and not of_a_bug:
        return str(error).strip().splitlines()[0]
    logger.info("the trial met an error inside the model or its processor", exc_info=error)
    return "an error inside its code in Transformers; the log has it, at the level INFO"


def _difference(
    model: PreTrainedModel, stock: Sequence[torch.Tensor], ours: Sequence[torch.Tensor]
) -> str:
    """How the logits of all steps differ, per row until its tokens part; empty if they do not."""
    if len(ours) != len(stock):
        return f"{len(ours)} of {len(stock)} tokens were generated"
    for row in range(len(stock[0])):
        for theirs, mine in zip(stock, ours, strict=True):
            wanted, found = theirs[row].float(), mine[row].float()
            off = float((wanted - found).abs().max() / wanted.abs().max())
            if not off < _near(model):
                return f"off by {off:.2g}"
            if int(wanted.argmax()) != int(found.argmax()):
                break
    return ""


def _check_messages(
    model: PreTrainedModel, family: Family, processor: Processor, weights: Identity
) -> None:
    """Messages must give the processor's ids, and equal logits. Tensors need no template."""
    if not getattr(processor, "chat_template", None):
        return
    images = [_noise(1, (96, 96)), _noise(2, (160, 96)), _noise(4, (60, 150))]
    parts = [{"type": "image", "image": image} for image in images]
    words = {"type": "text", "text": "Which is red?"}
    messages = [{"role": "user", "content": [*parts[:2], words]}]
    messages.append({"role": "assistant", "content": [{"type": "text", "text": "None is."}]})
    messages.append({"role": "user", "content": [*parts[2:], words]})
    wrong = "its prompts are not rendered as its processor does it"
    try:
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = dict(processor(text=[text], images=images, return_tensors="pt"))
        runtime = _runtime(model, family, processor, weights)
        renderer = Renderer(family, processor)
        prompt = renderer.render(messages, _namer(runtime))
        if prompt.ids.tolist() == inputs["input_ids"][0].tolist():
            wrong = _difference(model, _stock(model, inputs), _answer(runtime, prompt))
    except (KeepsightError, *_ODD) as error:
        wrong = f"{wrong} ({in_words(error)})"
    if wrong:
        raise UnsupportedModel(
            f"model type {model.config.model_type!r} could not be shown exact: {wrong}"
        )


def _namer(runtime: Runtime) -> Callable[[object, str], Medium]:
    """Names pictures as a call with messages does."""
    runtime.refresh()
    return runtime.vision.name


def _answer(runtime: Runtime, prompt: Prompt) -> tuple[torch.Tensor, ...]:
    """The logits of each step of an answer to a prompt."""
    answer = Answer(prompt, "", dict(_OPTIONS), _TOKENS)
    runtime.engine.run([answer])
    return tuple(answer.sampler.logits) if answer.sampler is not None else ()
