"""Law 5: objects, classes and modules in the place of a library's functions are part of a model.

Each is put there before the model is wrapped, and changes in itself afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers.models.qwen3_vl.modeling_qwen3_vl as home
from changes import attention
from models import build, picture, turn
from test_exact import cold, logits
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import keepsight as ks
from keepsight import digests

MESSAGES = [turn("Please look at this picture very carefully and tell what it is.", picture(1))]
PLACES = {
    "torch's": (torch.nn.functional, "silu"),
    "a function of C": (torch, "rsqrt"),
    "a modeling file's": (home, "rotate_half"),
    "the tower's": (home, "apply_rotary_pos_emb_vision"),
    "attention": (home, "eager_attention_forward"),
}


@pytest.fixture
def parts() -> Iterator[tuple[Any, Any]]:
    """A model of its own, since these tests change it."""
    build.cache_clear()
    yield build("qwen3_vl")
    build.cache_clear()


def scaled(found: Any, amount: float) -> Any:
    first, *rest = found if isinstance(found, tuple) else (found,)
    return (first * amount, *rest) if isinstance(found, tuple) else first * amount


class Scaled:
    """An object that is called in the place of a function."""

    def __init__(self, function: Any, amount: float) -> None:
        self.function, self.amount = function, amount

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return scaled(self.function(*arguments, **options), self.amount)


class Slotted:
    """A hook without a dict."""

    __slots__ = ("amount",)

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def __call__(self, module: Any, args: Any, out: Any) -> Any:
        return out * self.amount


class Secretive(Slotted):
    """One that raises when it is looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("nobody may look at me")

    def __call__(self, module: Any, args: Any, out: Any) -> Any:
        return out * object.__getattribute__(self, "amount")


class Given:
    """What gives a method to a class, and is none."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def __get__(self, thing: Any, kind: Any) -> Any:
        return lambda x: torch.relu(x) * self.amount


class Catching(torch.nn.Module):
    """A part of a user's own that goes on after an error."""

    def __init__(self, inner: torch.nn.Module, error: type[Exception]) -> None:
        super().__init__()
        self.inner, self.error = inner, error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            found: torch.Tensor = self.inner(x)
        except self.error:
            found = x * 0.5
        return found


@pytest.mark.parametrize("place", PLACES)
def test_an_object_in_the_place_of_a_function(
    parts: tuple[Any, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = parts
    if place == "attention":
        model.set_attn_implementation("eager")
    owner, name = PLACES[place]
    usual = getattr(owner, name)
    with ks.wrap(model, processor) as vlm:
        named = vlm.runtime.weights.all
    monkeypatch.setattr(owner, name, Scaled(usual, 1.0))
    with ks.wrap(model, processor) as vlm:
        assert vlm.runtime.weights.all != named and vlm.runtime.weights.is_private
        first = logits(vlm, MESSAGES)
        assert torch.equal(logits(vlm, MESSAGES), first)
        getattr(owner, name).amount = 0.7
        changed = logits(vlm, MESSAGES)
        assert not torch.equal(changed, first) and torch.equal(changed, cold(vlm, MESSAGES))
        monkeypatch.setattr(owner, name, Scaled(usual, 1.3))
        assert not torch.equal(logits(vlm, MESSAGES), changed)
        assert torch.equal(logits(vlm, MESSAGES), cold(vlm, MESSAGES))


Change = Callable[[Any, pytest.MonkeyPatch], Callable[[], object]]
CHANGES: list[Change] = []


def change(function: Change) -> Change:
    """Enter what is put into a model, and gives what changes it then."""
    CHANGES.append(function)
    return function


@change
def a_hook_with_slots(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    hook = Slotted(0.5)
    attention(model).o_proj.register_forward_hook(hook)
    return lambda: setattr(hook, "amount", 2.0)


@change
def a_hook_that_raises_when_looked_at(
    model: Any, patch: pytest.MonkeyPatch
) -> Callable[[], object]:
    hook = Secretive(0.5)
    attention(model).o_proj.register_forward_hook(hook)
    return lambda: object.__setattr__(hook, "amount", 2.0)


@change
def a_method_of_a_tensor(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    factor = torch.full((64,), 0.5)
    attention(model).o_proj.forward = factor.mul
    return lambda: factor.mul_(3)


@change
def a_compiled_function(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    def compiled(text: str) -> Any:
        unit = torch.jit.CompilationUnit(f"def f(x: Tensor) -> Tensor:\n    return {text}\n")
        return unit.f

    patch.setattr(home, "rotate_half", compiled("x * 2"))
    return lambda: setattr(home, "rotate_half", compiled("x * 3"))


@change
def a_function_of_c_in_a_class(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    kind = type(model.get_decoder().layers[0].mlp.act_fn)
    patch.setattr(kind, "forward", torch.relu)
    return lambda: setattr(kind, "forward", torch.tanh)


@change
def a_descriptor(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    kind, given = type(model.get_decoder().layers[0].mlp.act_fn), Given(1.0)
    patch.setattr(kind, "forward", given)
    return lambda: setattr(given, "amount", 2.0)


@change
def a_method_of_all_tensors(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    usual = torch.Tensor.transpose
    patch.setattr(torch.Tensor, "transpose", lambda x, *a: usual(x, *a) * 1.1)
    return lambda: setattr(torch.Tensor, "transpose", lambda x, *a: usual(x, *a) * 1.2)


@change
def a_class(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    class Made:
        def __new__(cls, x: Any, *_: Any, **__: Any) -> Any:
            return x * 2

    patch.setattr(torch.nn.functional, "silu", Made)
    return lambda: setattr(Made, "__new__", lambda cls, x, *_, **__: x * 3)


@change
def an_object_for_a_module(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    fake: Any = Torch()
    patch.setattr(home, "torch", fake)
    return lambda: setattr(fake, "cat", lambda x, dim=0: torch.cat(x, dim=dim) * 2)


@change
def a_global_before_a_built_in(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    def put() -> None:  # the last level of deepstack is left out
        patch.setattr(home, "len", lambda x: len(x) - 1, raising=False)

    return put


@change
def an_error_that_is_caught(model: Any, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    def raises(module: Any, args: Any, out: Any) -> None:
        raise RuntimeError("no more")

    return _caught(model, RuntimeError, raises)


@change
def an_error_without_a_word_that_is_caught(
    model: Any, patch: pytest.MonkeyPatch
) -> Callable[[], object]:
    nothing: list[Any] = []

    def raises(module: Any, args: Any, out: Any) -> None:
        nothing[3]

    return _caught(model, IndexError, raises)


def _caught(model: Any, error: type[Exception], hook: Any) -> Callable[[], object]:
    mlp = model.get_decoder().layers[0].mlp
    mlp.act_fn = Catching(mlp.act_fn, error)
    return lambda: mlp.act_fn.inner.register_forward_hook(hook)


@pytest.mark.parametrize("put", CHANGES, ids=lambda put: put.__name__)
def test_what_is_put_there_may_change(
    parts: tuple[Any, Any], put: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = parts
    alter = put(model, monkeypatch)
    with ks.wrap(model, processor) as vlm:
        first = logits(vlm, MESSAGES)
        alter()
        changed = logits(vlm, MESSAGES)
        assert not torch.equal(changed, first)
        assert torch.equal(changed, cold(vlm, MESSAGES))


def test_what_libraries_register_and_no_model_asks_for_is_no_part_of_it(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that imported more than another one must find what that one remembered."""
    table = ALL_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(table, "of another library", digests.weight_digest)
    monkeypatch.setattr(torch.Tensor, "to_a_new_device", torch.functional.norm, raising=False)
    with ks.wrap(*parts) as vlm:
        known, weights = vlm.runtime.refresh(), vlm.runtime.weights
        state, vision = weights.state, weights.vision
        monkeypatch.undo()
        assert vlm.runtime.refresh() == known
        assert (weights.state, weights.vision) == (state, vision)
        monkeypatch.setitem(table, "of another library", digests.weight_digest)
        parts[0].config.text_config._attn_implementation = "of another library"
        vlm.runtime.weights.refresh()
        asked = weights.code
        monkeypatch.setitem(table, "of another library", digests.digest)
        vlm.runtime.weights.refresh()
        assert weights.code not in (asked, state[-1])
