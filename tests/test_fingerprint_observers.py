"""Law 5: a hook is believed to change nothing only where its bytecode shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from changes import attention
from models import build, picture, turn
from test_exact import cold, logits
from transformers import DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import ModelOutput

import keepsight as ks
from keepsight.models.fingerprint import kinds
from keepsight.models.fingerprint.observers import only_observes, passes_on

MESSAGES = [turn("Please look at this picture very carefully and tell what it is.", picture(1))]
LOOKS: list[Callable[..., Any]] = []
ACTS: list[Callable[..., Any]] = []
seen: list[Any] = []
counts = {"calls": 0, "tokens": 0}
calls = 0
reference = torch.ones(3)


def looks(hook: Callable[..., Any]) -> Callable[..., Any]:
    LOOKS.append(hook)
    return hook


def acts(hook: Callable[..., Any]) -> Callable[..., Any]:
    ACTS.append(hook)
    return hook


class Recorder:
    """An object of a user's with a plain state."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, list[Any]()

    def __call__(self, module: Any, args: Any, out: Any) -> None:
        self.calls += 1
        self.seen.append(out.detach().float().cpu())

    def look(self, module: Any, args: Any, out: Any) -> None:
        self.calls += 1


class Sly:
    """An object whose every operator is code of a user's."""

    def __init__(self) -> None:
        self.plain = 1

    @property
    def shape(self) -> Any:
        return reference.mul_(2)

    def other(self, *_: Any) -> Any:
        return reference.mul_(2)

    __add__ = __radd__ = __eq__ = __lt__ = __contains__ = __getitem__ = other  # type: ignore[assignment]
    __bool__ = __len__ = __repr__ = __neg__ = __iter__ = __float__ = __format__ = other  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class Slow(Sly):
    def __setattr__(self, name: str, value: Any) -> None:
        reference.mul_(2)


class Number(int):
    def __add__(self, other: Any) -> Any:
        return other.mul_(2)


sly, slow, recorder, holder = Sly(), object.__new__(Slow), Recorder(), [Sly()]
number, config = Number(3), PreTrainedConfig()
settings = GenerationConfig()


# -- those that only look --------------------------------------------------------------------------


@looks
def counts_in_a_dict(m: Any, args: Any, out: Any) -> None:
    counts["calls"] += 1
    if counts.get("calls") == 5 and time.time() > 3:
        seen.append(type(m).__name__)


@looks
def counts_in_a_global(m: Any, args: Any, out: Any) -> None:
    global calls
    calls += 1


@looks
def counts_in_an_object(m: Any, args: Any, out: Any) -> None:
    recorder.calls += 1
    recorder.calls = recorder.calls + out.shape[0]


@looks
def keeps_a_copy(m: Any, args: Any, out: Any) -> Any:
    if isinstance(out, tuple):
        out = out[0]
    elif isinstance(out, (list, dict)):
        return None
    seen.append(out.detach().to(torch.float32, copy=True).cpu().numpy())


@looks
def measures(m: Any, args: Any, out: Any) -> None:
    (x,) = args
    seen.append(f"{m.__class__.__name__} {x.shape} {(out - x).detach().abs().max(dim=0)}")
    seen.append((out.detach().float().mean().item(), m.weight.detach().norm().item()))


@looks
def hands_back(m: Any, args: Any, out: Any) -> Any:
    return out


LOOKS += [recorder, recorder.look]


# -- those that change something -------------------------------------------------------------------


@acts
def halves_the_module(m: Any, args: Any, out: Any) -> None:
    m.half()


@acts
def moves_what_hangs_in_the_module(m: Any, args: Any, out: Any) -> None:
    m.config.to("cpu")


@acts
def converts_what_it_is_handed(m: Any, args: Any, out: Any) -> None:
    args[0].float()


@acts
def asks_a_submodule(m: Any, args: Any, out: Any) -> None:
    m.norm(out)


@acts
def writes_into_an_alias(m: Any, args: Any, out: Any) -> None:
    x = out.detach()
    x += 1


@acts
def writes_through_numpy(m: Any, args: Any, out: Any) -> None:
    out.detach().numpy()[0] = 1


@acts
def names_where_to_write(m: Any, args: Any, out: Any) -> None:
    out.detach().sum(dim=0, out=args[0])


@acts
def gives_where_to_write(m: Any, args: Any, out: Any) -> None:
    out.detach().numpy().sum(0, None, args[0].detach().numpy())


@acts
def prints_into_something(m: Any, args: Any, out: Any) -> None:
    print(out, file=sly)


@acts
def adds(m: Any, args: Any, out: Any) -> None:
    sly + out


@acts
def adds_a_number(m: Any, args: Any, out: Any) -> None:
    number + out


@acts
def compares(m: Any, args: Any, out: Any) -> None:
    sly == out  # noqa: B015


@acts
def searches(m: Any, args: Any, out: Any) -> None:
    out in sly  # noqa: B015


@acts
def picks(m: Any, args: Any, out: Any) -> None:
    sly[out]


@acts
def asks_whether(m: Any, args: Any, out: Any) -> None:
    if sly:
        seen.append(1)


@acts
def measures_length(m: Any, args: Any, out: Any) -> None:
    len(sly)


@acts
def formats(m: Any, args: Any, out: Any) -> None:
    seen.append(f"{sly}")


@acts
def reads_a_property(m: Any, args: Any, out: Any) -> None:
    seen.append(sly.shape)


@acts
def sets_with_code(m: Any, args: Any, out: Any) -> None:
    slow.plain = 2


@acts
def sets_a_configuration(m: Any, args: Any, out: Any) -> None:
    config.vision_feature_layer = 2


@acts
def sets_generation(m: Any, args: Any, out: Any) -> None:
    settings.num_beams = 2


@acts
def sets_a_switch(m: Any, args: Any, out: Any) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


@acts
def asks_what_lies_in_a_list(m: Any, args: Any, out: Any) -> None:
    holder[0].get("x")


@acts
def asks_what_lies_in_a_tuple(m: Any, args: Any, out: Any) -> None:
    (sly, out)[0].get("x")


@acts
def uses_up_an_iterator(m: Any, args: Any, out: Any) -> None:
    seen.append(list(args[0]))


@acts
def extends_with_an_iterator(m: Any, args: Any, out: Any) -> None:
    seen.extend(out)


@acts
def writes_into_what_it_kept(m: Any, args: Any, out: Any) -> None:
    counts["calls"] = out
    counts["calls"] += 1


@acts
def gives_its_own(*args: Any, a: Any = 0, b: Any = 1, c: Any = 2) -> Any:
    return c


@pytest.mark.parametrize("hook", LOOKS, ids=lambda hook: getattr(hook, "__name__", "object"))
def test_it_only_looks(hook: Any) -> None:
    assert only_observes(hook, 2)


@pytest.mark.parametrize("hook", ACTS, ids=lambda hook: hook.__name__)
def test_it_is_not_believed(hook: Any) -> None:
    assert not only_observes(hook, 2)


def original(x: Any, scale: float = 1.0) -> Any:
    return x * scale


def passing(*args: Any, **options: Any) -> Any:
    counts["calls"] += 1
    return original(*args, **options)


def twice(*args: Any, **options: Any) -> Any:
    original(*args, **options)
    return original(*args, **options)


def swallowing(*args: Any, scale: float = 1.0, **options: Any) -> Any:
    return original(*args, **options)


def misnaming(scale: Any, *args: Any, **options: Any) -> Any:
    return original(scale, *args, **options)


def with_a_default(x: Any = 3, *args: Any, **options: Any) -> Any:
    return original(x, *args, **options)


def test_only_one_call_with_all_arguments_passes_on() -> None:
    assert passes_on(passing, original)
    for other in (twice, swallowing, misnaming, with_a_default):
        assert not passes_on(other, original)


def test_other_versions_of_python_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ((3, 10, 0), (3, 14, 0)):
        monkeypatch.setattr(kinds.sys, "version_info", version)
        assert not only_observes(hands_back, 2)


def test_no_method_that_is_believed_changes_something_else_than_a_tensor() -> None:
    others = (torch.nn.Module, PreTrainedModel, PreTrainedConfig, DynamicCache, DynamicLayer)
    for name in (*kinds.TENSOR_ONLY, *kinds.NUMBERS, *kinds.LOOKS, *kinds.OF_PARTS):
        assert name in kinds.OF_PARTS or not any(hasattr(kind, name) for kind in others), name
    for kind in (ModelOutput, dict, list, tuple, set):
        shared = {*dir(kind)} & (kinds.TENSOR_ONLY | kinds.NUMBERS | kinds.LOOKS | kinds.OF_PARTS)
        assert shared <= {"get", "keys", "values", "items"}


# -- in a model ------------------------------------------------------------------------------------


@pytest.fixture
def vlm() -> Iterator[Any]:
    build.cache_clear()
    with ks.wrap(*build("qwen3_vl")) as vlm:
        yield vlm
    build.cache_clear()


def namespace(vlm: Any) -> str:
    return str(vlm.runtime.refresh())


def test_what_a_proof_read_is_noticed_when_it_changes(vlm: Any) -> None:
    """The hook stays the same object; what it calls by a name does not."""
    named, notes, layer = namespace(vlm), [0], attention(vlm.model).o_proj
    helper: Any = len

    def hook(module: Any, args: Any, out: Any) -> None:
        notes[0] = helper(args)

    def change(new: Any) -> None:
        nonlocal helper
        helper = new

    layer.register_forward_hook(hook)
    assert namespace(vlm) == named
    first = logits(vlm, MESSAGES)
    change(lambda args: args[0].mul_(2) and 0)
    assert namespace(vlm) != named
    change(len)
    assert namespace(vlm) == named
    hook.__code__ = (lambda m, a, out: out * 2 if notes and helper else 1).__code__
    assert namespace(vlm) != named
    assert not torch.equal(logits(vlm, MESSAGES), first)
    assert torch.equal(logits(vlm, MESSAGES), cold(vlm, MESSAGES))


def test_a_class_of_a_recorder_may_change(vlm: Any) -> None:
    class Own(Recorder):
        pass

    own, named = Own(), namespace(vlm)
    attention(vlm.model).o_proj.register_forward_hook(own.look)
    assert namespace(vlm) == named
    Own.calls = property(lambda self: 1, lambda self, value: None)  # type: ignore[assignment]
    assert namespace(vlm) != named


def test_a_hook_that_writes_what_the_model_reads_is_not_believed(vlm: Any) -> None:
    """It is set before the layer runs and set back behind it, so nothing is changed afterwards."""
    layer = attention(vlm.model)
    home, usual = vars(layer), layer.scaling
    first, named = logits(vlm, MESSAGES), namespace(vlm)

    def before(module: Any, args: Any) -> None:
        home["scaling"] = 3.5

    def after(module: Any, args: Any, out: Any) -> None:
        home["scaling"] = usual

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)
    assert only_observes(before, 1) and only_observes(after, 2)
    assert namespace(vlm) != named
    changed = logits(vlm, MESSAGES)
    assert not torch.equal(changed, first) and torch.equal(changed, cold(vlm, MESSAGES))


def test_a_hook_that_counts_in_what_another_fills_is_not_believed(vlm: Any) -> None:
    shared, named = {"last": 0}, namespace(vlm)

    def keeps(module: Any, args: Any, out: Any) -> None:
        shared["last"] = out

    def counts_up(module: Any, args: Any, out: Any) -> None:
        shared["last"] += 1

    attention(vlm.model).q_proj.register_forward_hook(counts_up)
    assert namespace(vlm) == named
    attention(vlm.model).q_proj.register_forward_hook(keeps, prepend=True)
    assert namespace(vlm) != named
