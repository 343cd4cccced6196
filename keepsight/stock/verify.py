"""Compares cold with warm on the user's own model and pictures, and with stock Transformers.

Anyone can check the claim with it: one prompt is prefilled from nothing and from what is
remembered, and the logits are compared bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from keepsight.core.answer import read
from keepsight.core.call import Call
from keepsight.core.runtime import Runtime
from keepsight.core.sequence import Sequence as Reading
from keepsight.core.tolerance import tolerance_of
from keepsight.errors import KeepsightError
from keepsight.kinds import Decoded, Grid, Message, Record
from keepsight.media.sources import open_source
from keepsight.models.blindfold import watched
from keepsight.prefix.prompt import Prompt
from keepsight.prompt.messages import user_message
from keepsight.stock.inputs import stock_inputs


@dataclass
class Verification:
    """The result of `verify`."""

    equal: bool  # warm and cold logits, bit for bit
    max_difference: float
    prompt_tokens: int
    cached_tokens: int
    tolerance: float = 0.0  # of logits, where equality is to rounding
    stock_max_difference: float | None = None
    stock_scale: float | None = None
    stock_same_tokens: bool | None = None
    stock: str = "stock Transformers"  # the stock code it was compared with
    stock_tolerance: float | None = None  # the greatest difference that is rounding in this dtype
    dtype: str = ""
    exactness: str = "bits"  # what is promised for this model here: "bits" or "rounding"
    rounding_because: str = ""  # why not bits

    def to_dict(self) -> Record:
        """Plain data for JSON."""
        return dict(vars(self))

    @property
    def stock_agrees(self) -> bool:
        """Whether the next token is stock's and the logits are within rounding, if it was asked."""
        off, most = self.stock_max_difference or 0.0, self.stock_tolerance
        return self.stock_same_tokens is not False and (most is None or off <= most)

    @property
    def rounding(self) -> str:
        """How far the logits were from stock's, in words."""
        return (
            f"{self.dtype}: rounding against {self.stock} at most"
            f" {self.stock_max_difference:.2g} on logits up to {self.stock_scale:.3g}, tolerance"
            f" {self.stock_tolerance:.2g}"
        )

    def __bool__(self) -> bool:
        return self.holds and self.stock_agrees

    @property
    def holds(self) -> bool:
        """Whether warm equals cold as far as is promised."""
        return self.equal if self.exactness == "bits" else self.max_difference <= self.tolerance

    def __str__(self) -> str:
        lines = [
            f"warm equals cold bit for bit: {'yes' if self.equal else 'NO'}"
            f" (max difference {self.max_difference:.3g}; {self.cached_tokens} of"
            f" {self.prompt_tokens} tokens reused)",
            f"promised: equal to rounding, {self.tolerance:.3g} here ({self.rounding_because})"
            if self.exactness == "rounding"
            else "promised: equal bits; a token's state depends on those before it alone",
        ]
        if self.stock_max_difference is not None:
            same = "yes" if self.stock_same_tokens else "NO"
            lines.append(f"against {self.stock}: same next token: {same}; {self.rounding}")
        return "\n".join(lines)


@dataclass
class Check:
    """One check of a user's own model."""

    what: str
    ok: bool
    difference: float
    note: str = ""


@dataclass
class Certificate:
    """The checks of a user's own model."""

    checks: list[Check]
    rounding: str  # how far the logits were from stock's, in words

    def __bool__(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        held = sum(check.ok for check in self.checks)
        return f"{held} of {len(self.checks)} hold; {self.rounding}"

    def to_dict(self) -> Record:
        """Plain data for JSON."""
        checks = [dict(vars(check)) for check in self.checks]
        return {"ok": bool(self), "verdict": self.verdict, "checks": checks}


def certify(
    runtime: Runtime, images: Sequence[object], question: str, tenant: str = ""
) -> Certificate:
    """Check a checkpoint as `FamilyTests` of our tests does: prompts continued with text and
    with a new picture, warm, cold and stock, and controls that must differ."""
    first = [user_message(question, images[0])]
    goes_on = [*first, _said("It is."), user_message("And what else can be seen?")]
    last = user_message("Compare it with this.", list(images[1:]))
    compared = [*goes_on, _said("Nothing."), last]
    prompts = {"a first prompt": first, "a text turn behind it": goes_on}
    if images[1:]:
        prompts["new pictures behind that"] = compared
    found = {name: verify(runtime, talk, True, tenant) for name, talk in prompts.items()}
    checks = [check for name, one in found.items() for check in _checked(name, one)]
    before = runtime.stats()["features"]["encoded"]
    verify(runtime, [user_message("Something new in front.", list(images))], False, tenant)
    again = runtime.stats()["features"]["encoded"] - before
    checks.append(Check("known pictures are not encoded again", again == 0, float(again)))
    checks += _tower(runtime, compared if images[1:] else first, tenant)
    checks += _controls(runtime, first, images[0], question, tenant)
    worst = max(found.values(), key=lambda one: one.stock_max_difference or 0.0)
    return Certificate(checks, worst.rounding)


def _checked(name: str, found: Verification) -> list[Check]:
    reused = f"{found.cached_tokens} of {found.prompt_tokens} tokens reused"
    off_warm = found.max_difference
    off, scale = found.stock_max_difference or 0.0, f"on logits up to {found.stock_scale or 0:.3g}"
    return [
        Check(f"{name}: warm equals cold ({found.exactness})", found.holds, off_warm, reused),
        Check(f"{name}: next token as {found.stock}", found.stock_agrees, off, scale),
    ]


def _tower(runtime: Runtime, messages: list[Message], tenant: str) -> list[Check]:
    """Count tower runs for unknown and for known pictures, and compare the bytes of their features
    and pixels."""
    calls: list[str] = []
    fresh = runtime.fresh()
    with watched(runtime.family, calls.append):
        _fresh_logits(fresh, messages, tenant)
        cold = len(calls)
        prompt = runtime.render(messages, _call(tenant))
        _last_logits(runtime, prompt, tenant)
        warm = len(calls) - cold
    fresh_prompt = fresh.render(messages, _call(tenant))
    vision = runtime.vision_of(tenant)
    features = sum(vision.package(medium)[0].nbytes for medium in prompt.media)
    made = [medium.recall() for medium in fresh_prompt.media if callable(medium.recall)]
    pixels = sum(t.nbytes for one in made for t in one.tensors.values())
    note = f"{cold} runs of its parts for new pictures, {warm} for known ones"
    beside = f"{pixels:,} bytes of pixels, {features:,} bytes of features"
    return [
        Check("the encoder does not run for known pictures", warm == 0, float(warm), note),
        Check("pixels beside features", features > 0, 0.0, beside),
    ]


def _controls(
    runtime: Runtime, first: list[Message], image: object, question: str, tenant: str
) -> list[Check]:
    """Controls that must differ: without them equal results could come from ignoring the input."""
    right = _fresh_logits(runtime.fresh(), first, tenant)
    turned = [user_message(question, _upside_down(image))]
    other = float((right - _fresh_logits(runtime.fresh(), turned, tenant)).abs().max())
    family = copy.copy(runtime.family)
    true = runtime.family.positions

    def shifted(ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]) -> torch.Tensor:
        positions = true(ids, types, grids).clone()
        positions[..., len(ids) // 2 :] += 3
        return positions

    family.positions = shifted  # type: ignore[method-assign]
    moved = float((right - _fresh_logits(runtime.fresh(family), first, tenant)).abs().max())
    must = "must not be 0"
    return [
        Check("control: another picture changes the logits", other > 0, other, must),
        Check("control: shifted positions change the logits", moved > 0, moved, must),
    ]


def _fresh_logits(fresh: Runtime, messages: list[Message], tenant: str) -> torch.Tensor:
    fresh.refresh(tenant=tenant)
    return _last_logits(fresh, fresh.render(messages, _call(tenant)), tenant)[0].float()


def _call(tenant: str) -> Call:
    return Call(tenant, {}, {})


def _upside_down(image: object) -> Decoded:
    """The picture with inverted colours, turned upside down."""
    source = open_source(image)
    decoded = source.decode()
    pixels = np.asarray(decoded.convert("RGB") if isinstance(decoded, Image.Image) else decoded)
    return Image.fromarray(255 - pixels[::-1]) if pixels.shape[-1] == 3 else 255 - pixels


def _said(text: str) -> Message:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def verify(
    runtime: Runtime, messages: list[Message], stock: bool, tenant: str = ""
) -> Verification:
    """Prefill cold with nothing remembered, then warm, and compare."""
    cold = _fresh_logits(runtime.fresh(), messages, tenant)
    runtime.refresh(tenant=tenant)
    prompt = runtime.render(messages, _call(tenant))
    _last_logits(runtime, prompt, tenant)  # everything is remembered from here on
    warm, cached = _last_logits(runtime, prompt, tenant)
    found = Verification(
        equal=torch.equal(cold, warm.float()),
        max_difference=float((cold - warm.float()).abs().max()),
        prompt_tokens=len(prompt),
        cached_tokens=cached,
        tolerance=tolerance_of(runtime.model) * float(cold.abs().max()),
        exactness="bits" if runtime.rule.kernels else "rounding",
        rounding_because=runtime.finding.why,
        dtype=str(runtime.model.dtype).removeprefix("torch."),
    )
    if stock:
        _against_stock(runtime, prompt, warm, found, tenant)
    return found


def _last_logits(runtime: Runtime, prompt: Prompt, tenant: str) -> tuple[torch.Tensor, int]:
    """The logits after the prompt, computed now: never those of the whole prompt as remembered."""
    seq = read(runtime, Reading(prompt, tenant, reads_again=True))
    if seq.logits is None:
        raise KeepsightError("a prompt was read and gave no logits")
    return seq.logits.clone(), seq.match.length


@torch.no_grad()
def _against_stock(
    runtime: Runtime, prompt: Prompt, warm: torch.Tensor, found: Verification, tenant: str
) -> None:
    """One plain forward pass of the whole prompt from pixels, as Transformers alone would do it."""
    model = runtime.model
    if hasattr(model, "exported"):  # no PyTorch weights to compare with
        found.stock = "one pass of the same graphs"
    pixels = [medium.recall() for medium in prompt.media if callable(medium.recall)]
    from_pixels = len(pixels) == len(prompt.media)  # a package has no pixels to return to
    inputs = stock_inputs(runtime, prompt, not from_pixels, tenant)
    if from_pixels:
        joined = runtime.family.join_pixels(pixels)
        for name, tensor in joined.items():  # in the model's dtype: not every tower casts its own
            floating = tensor.is_floating_point()
            inputs[name] = tensor.to(model.device, model.dtype if floating else tensor.dtype)
    output = model(**inputs, use_cache=False, logits_to_keep=1)
    logits = output.logits[:, -1]
    found.stock_max_difference = float((logits.float() - warm.float()).abs().max())
    found.stock_scale = float(logits.abs().max())
    found.stock_tolerance = tolerance_of(model) * found.stock_scale
    found.stock_same_tokens = int(logits.argmax()) == int(warm.argmax())
    if not found.stock_same_tokens:
        # Two logits within rounding of each other may swap; that is a tie, not an error.
        a, b = int(logits.argmax()), int(warm.argmax())
        gap = float((logits[0, a] - logits[0, b]).abs())
        found.stock_same_tokens = gap <= 2 * found.stock_max_difference
