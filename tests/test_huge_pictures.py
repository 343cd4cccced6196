"""One huge picture goes through the tower in pieces: the same bits, and fewer rows at a time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import build, picture

import keepsight as ks
from keepsight.models import piecewise, tower_pieces
from keepsight.models.families import Family, Pixels
from keepsight.models.lazy_rows import LazyRows
from keepsight.models.piecewise import RowCall, ranges
from keepsight.models.tower_pieces import PieceForward, tower_in_pieces

PACKED = ("qwen3_vl", "qwen2_5_vl", "glm4v")
HIGH, WIDE = 52, 62  # patches; 3,224 of them
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower_pieces, "BOUND", 3000)
    monkeypatch.setattr(tower_pieces, "LARGE", 1 << 14)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[bool | None]:
    """What trials found."""
    results: list[bool | None] = []
    tried = tower_pieces._try
    monkeypatch.setattr(
        tower_pieces, "_try", lambda *given: results.append(tried(*given)) or results[-1]
    )
    return results


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """The most rows that a call of each kind of module saw in one go."""
    seen: dict[str, int] = {}

    def note(module: Any, args: Any) -> None:
        if args and isinstance(args[0], torch.Tensor):
            name = type(module).__name__
            seen[name] = max(seen.get(name, 0), args[0].shape[:-1].numel())

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    yield seen
    handle.remove()


def packed(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Family, Pixels]:
    model, _ = build(kind, dtype)
    vision = model.config.vision_config
    width = 3 * getattr(vision, "temporal_patch_size", 2) * vision.patch_size**2
    noise = torch.randn(HIGH * WIDE, width, generator=torch.Generator().manual_seed(1))
    grid = torch.tensor([[1, HIGH, WIDE]])
    with ks.wrap(model, None) as vlm:
        family = vlm.runtime.family
    return family, Pixels({"pixel_values": noise.to(dtype), "image_grid_thw": grid}, {}, ())


@torch.no_grad()
def both(family: Family, pixels: Pixels) -> tuple[dict[str, Any], dict[str, Any]]:
    whole = family.encode(pixels)[0]
    with tower_in_pieces(family, pixels):
        return whole, family.encode(pixels)[0]


def assert_same(whole: dict[str, Any], pieces: dict[str, Any]) -> None:
    assert whole.keys() == pieces.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, pieces[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", PACKED)
def test_the_bits_of_one_pass(kind: str, dtype: torch.dtype) -> None:
    assert_same(*both(*packed(kind, dtype)))


def test_the_bits_of_one_pass_in_several_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert_same(*both(*packed("qwen3_vl")))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", PACKED)
def test_no_layer_sees_the_whole_picture(kind: str, most: dict[str, int]) -> None:
    family, pixels = packed(kind)
    with torch.no_grad():
        family.encode(pixels)
        whole = dict(most)
        most.clear()
        with tower_in_pieces(family, pixels):
            family.encode(pixels)
    inside = {name for name in most if name.endswith(("VisionMLP", "VisionMlp", "Attention"))}
    assert inside and all(whole[name] == HIGH * WIDE for name in inside)
    # A trial on noise sees the most: two pieces and a half, or the next end of a window.
    assert all(most[name] < 2.6 * piecewise.LEAST for name in inside), most


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["internvl", "idefics3", "llava_next"])
def test_tiles_go_some_at_a_time(
    kind: str,
    dtype: torch.dtype,
    most: dict[str, int],
    found: list[bool | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tower_pieces, "BOUND", 30)
    monkeypatch.setattr(tower_pieces, "LARGE", 1)
    monkeypatch.setattr(piecewise, "PIECE", 8)
    monkeypatch.setattr(piecewise, "LEAST", 8)
    model, processor = build(kind, dtype)
    with ks.wrap(model, processor) as vlm, torch.no_grad():
        family, looked = vlm.runtime.family, []
        encode = family.encode
        monkeypatch.setattr(family, "encode", lambda p: looked.append(p) or encode(p))
        pieces = vlm.encode(picture(3, width=200, height=120)).tensors
        assert_same(encode(looked[0])[0], pieces)
    assert any(one is not None for one in found)


def test_attention_that_goes_another_way_runs_as_ever(found: list[bool | None]) -> None:
    model = copy.deepcopy(build("qwen3_vl")[0])
    model.set_attn_implementation({"vision_config": "eager"})
    _, pixels = packed("qwen3_vl")
    assert_same(*both(Family(model), pixels))
    assert None in found and False in found and True not in found


class Mixing(torch.nn.Module):
    """Rows that look at each other, or not: a setting that no fingerprint of a call can know."""

    def __init__(self) -> None:
        super().__init__()
        self.how = [False]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0) if self.how[0] else x * 2


def test_a_model_that_changes_between_two_pictures_is_tried_again() -> None:
    model = copy.deepcopy(build("qwen3_vl")[0])
    _, pixels = packed("qwen3_vl")
    mixing = Mixing()
    for block in model.model.visual.blocks:
        block.mlp.act_fn = mixing
    before = both(Family(model), pixels)
    assert_same(*before)
    mixing.how[0] = True
    after = both(Family(model), pixels)
    assert_same(*after)
    assert not torch.equal(before[0]["features"], after[0]["features"])


def test_what_a_trial_was_too_small_to_show_is_run_as_ever(monkeypatch: Any) -> None:
    """Keys are gathered from layers whose rows do not look at each other: that does not go."""
    monkeypatch.setattr(tower_pieces, "_row_relation", lambda *given: True)
    assert_same(*both(*packed("qwen3_vl")))


def test_a_hook_inside_sees_whole_calls() -> None:
    family, pixels = packed("qwen3_vl")
    block = family.core.visual.blocks[0]
    seen: list[int] = []
    hook = block.mlp.register_forward_hook(lambda m, args, out: seen.append(len(out)))
    try:
        assert_same(*both(family, pixels))
    finally:
        hook.remove()
    assert seen == [HIGH * WIDE] * 2


def test_nothing_is_left_behind_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    family, pixels = packed("qwen3_vl")

    def left() -> list[str]:
        return [name for name, part in family.model.named_modules() if "forward" in vars(part)]

    with tower_in_pieces(family, pixels), tower_in_pieces(family, pixels):
        assert left()
    assert not left()
    with pytest.raises(ZeroDivisionError), tower_in_pieces(family, pixels):
        raise ZeroDivisionError
    assert not left() and tower_pieces._found_here() is None
    block = family.core.visual.blocks[0]
    own = block.forward
    block.forward = own  # as tools that move weights do
    try:
        with tower_in_pieces(family, pixels):
            assert isinstance(block.forward, PieceForward)
            assert copy.deepcopy(block).forward.module is not block
        assert vars(block)["forward"] is own
    finally:
        del block.forward


def test_other_threads_run_the_module_as_it_is(most: dict[str, int]) -> None:
    family, pixels = packed("qwen3_vl")
    out: list[dict[str, Any]] = []

    def stock() -> None:
        with torch.no_grad():
            out.append(family.encode(pixels)[0])

    with tower_in_pieces(family, pixels):
        thread = threading.Thread(target=stock)
        thread.start()
        thread.join()
    assert most["Qwen3VLVisionMLP"] == HIGH * WIDE
    assert_same(both(family, pixels)[0], out[0])


def test_it_is_no_part_of_what_the_model_is() -> None:
    model, processor = build("qwen3_vl")
    _, pixels = packed("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        vlm.encode(picture(1))
        named = vlm.runtime.refresh()
        with tower_in_pieces(vlm.runtime.family, pixels):
            assert vlm.runtime.refresh() == named
            with ks.wrap(model, processor) as second:
                assert second.encode(picture(1)).weights == vlm.encode(picture(1)).weights
        assert vlm.runtime.refresh() == named


@pytest.mark.parametrize("budget", [0, 1 << 12])
def test_a_picture_larger_than_its_budget(budget: int) -> None:
    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor) as free:
        wanted = free.encode(picture(3, width=200, height=120))
    with ks.wrap(model, processor, vision_budget=budget) as vlm:
        for _ in range(2):
            assert_same(wanted.tensors, vlm.encode(picture(3, width=200, height=120)).tensors)
        reply = vlm.ask(picture(3, width=200, height=120), "What is it?", max_new_tokens=2)
        assert reply.usage.images == 1
        stats = vlm.runtime.caches.stats(None)
        assert stats["packages"] == 0 and stats["pixel_bytes"] == 0


def test_rows_of_an_embedding_wait_for_their_sum() -> None:
    table, ids = torch.randn(50, 8), torch.randint(0, 50, (4000, 4))
    weights = torch.rand(4000, 4)
    made: list[int] = []

    def make(a: int, b: int) -> torch.Tensor:
        made.append(b - a)
        return table[ids[a:b]]

    def lazy() -> LazyRows:
        return LazyRows.of(torch.Size((4000, 4, 8)), torch.float32, make)

    weighed = lazy() * weights[:, :, None]
    assert isinstance(weighed, LazyRows) and not made
    assert torch.equal(weighed.sum(1), (table[ids] * weights[:, :, None]).sum(1))
    assert max(made) < 600
    for use in (lambda t: t + 1, lambda t: t.sum(2), lambda t: torch.cat([t, t]), lambda t: t[3:9]):
        assert torch.equal(use(lazy()), use(table[ids]))


def test_ranges_are_never_too_short() -> None:
    for count in (1, 1024, 2047, 2048, 5000, 65536):
        parts = list(ranges(count, 1024, 1024))
        assert parts[0][0] == 0 and parts[-1][1] == count
        assert all(a[1] == b[0] for a, b in pairwise(parts))
        assert all(b - a >= min(count, 1024) and a % 256 == 0 for a, b in parts)


def test_calls_whose_rows_cannot_be_told() -> None:
    assert RowCall.of((), {}) is None
    assert RowCall.of((torch.arange(5),), {}) is None
    assert RowCall.of((torch.rand(1, 3, 8, 8),), {}) is None
    call = RowCall.of((torch.rand(6, 6), torch.tensor([0, 2, 6])), {"mask": torch.rand(6, 6)})
    assert call is not None and call.bounds == (0, 2, 6)
    with pytest.raises(piecewise.CannotCut, match="as many columns"):
        call.part(0, 2)


def test_stats_and_reports_say_what_ran_in_pieces() -> None:
    """Of a picture of many patches; a small one, and features that are known, have no note."""
    family, pixels = packed("qwen3_vl")
    grid = torch.tensor([[1, HIGH, WIDE]])

    def answer(vlm: ks.VLM, text: int) -> list[str]:
        ids = torch.tensor([[3, *[6] * (HIGH * WIDE // 4), 4, text]])
        tensors = {**pixels.tensors, "image_grid_thw": grid, "input_ids": ids}
        how: dict[str, Any] = {"max_new_tokens": 1, "return_dict_in_generate": True}
        notes: list[str] = vlm.generate(**tensors, **how).report.notes
        return notes

    with ks.wrap(family.model, build("qwen3_vl")[1]) as vlm:
        assert not vlm.ask(picture(1), "What?", max_new_tokens=1).report.notes
        before = vlm.stats()["features"]
        assert before["in_pieces"] == 0 and before["tower_parts"] == {"cut": [], "whole": []}
        (note,) = answer(vlm, 9)
        parts = [f"Qwen3VLVision{name}" for name in ("Block", "PatchEmbed", "PatchMerger")]
        whole = "Qwen3VLVisionRotaryEmbedding ran it whole"
        assert note == f"medium 0: the tower ran {', '.join(parts)} in pieces; {whole}"
        after = vlm.stats()["features"]
        assert after["in_pieces"] == 1 and after["encoded"] == 2
        assert after["tower_parts"]["cut"] == parts
        assert not answer(vlm, 10) and vlm.stats()["features"]["in_pieces"] == 1
