"""One huge picture goes through the tower some rows at a time: the features of stock to rounding,
in less memory, and their provenance says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.common import in_threads
from support.models import ALL, build, in_both, picture

import keepsight as ks
from keepsight.models import huge
from keepsight.models.families import Family, Pixels, family_of

ROWS = 64
SIDES = (400, 320)
# Every listed type whose towers pack patches on a grid.
PACKED = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v"),
    *("glm4v_moe", "glm46v", "glm_ocr", "glmga", "ernie4_5_vl_moe", "paddleocr_vl", "kimi_k25"),
    *("video_llama_3", "video_llama_3_merged", "exaone4_5", "lfm3_vl", "cohere_compass"),
    *("cosmos3_edge", "cosmos3_omni", "hunyuan_vl", "muse_glimmer", "hyperclovax_vision_v2"),
    *("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge, "ROWS", ROWS)
    monkeypatch.setattr(huge, "PATCHES", 150)


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


def both(kind: str, dtype: torch.dtype) -> tuple[ks.Package, ks.Package]:
    """Features in one pass, and by rows."""
    model, processor = build(kind, dtype)
    shown = picture(3, *SIDES)
    with ks.wrap(model, processor) as vlm:
        by_rows = vlm.encode(shown)
    with pytest.MonkeyPatch.context() as patch, ks.wrap(model, processor) as vlm:
        patch.setattr(huge, "PATCHES", 1 << 20)
        return vlm.encode(shown), by_rows


def assert_close(whole: ks.Package, pieces: ks.Package, tolerance: float) -> None:
    assert whole.tensors.keys() == pieces.tensors.keys()
    for name, tensor in whole.tensors.items():
        off = (tensor - pieces.tensors[name]).abs().max() / tensor.abs().max()
        assert off < tolerance, (name, off)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("kind", "dtype"), in_both(PACKED, ("qwen2_5_vl", "qwen3_vl", "glm4v", "kimi_k25"))
)
def test_the_features_of_one_pass(kind: str, dtype: torch.dtype) -> None:
    whole, by_rows = both(kind, dtype)
    assert_close(whole, by_rows, 1e-4 if dtype == torch.float32 else 0.05)
    if max(whole.grid["image_grid_thw"][0]) > 8:  # VideoLLaMA 3 without merging sees it small
        assert by_rows.provenance == {**whole.provenance, "rows": ROWS}
        assert by_rows.feature_id != whole.feature_id and by_rows.identity == whole.identity


def test_every_listed_tower_of_patches_on_a_grid_is_tried_here() -> None:
    assert {kind for kind in ALL if huge.can_go_by_rows(family_of(build(kind)[0]))} - {
        *PACKED,
        *("sliding", "minicpmv4_6", "minicpmv4_6_fine", "minicpmv4_7", "minicpm_ocr"),  # no grid
    } == set()


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "glm4v"])
def test_no_layer_sees_the_whole_picture(kind: str, most: dict[str, int]) -> None:
    whole, _ = both(kind, torch.float32)
    (_, high, wide) = whole.grid["image_grid_thw"][0]
    inside = {name for name in most if name.endswith(("VisionMLP", "VisionMlp", "Attention"))}
    inside -= {name for name in inside if "Text" in name}
    assert inside and all(most[name] == high * wide for name in inside)
    most.clear()
    model, processor = build(kind)
    with ks.wrap(model, processor) as vlm:
        vlm.encode(picture(3, *SIDES))
    assert all(ROWS <= most[name] < 2 * ROWS for name in inside), most


def test_what_attends_or_runs_in_another_way_runs_whole(most: dict[str, int]) -> None:
    model, processor = build("qwen3_vl")
    block = model.model.visual.blocks[0]

    def provenance() -> dict[str, Any]:
        with ks.wrap(model, processor) as vlm:
            return vlm.encode(picture(3, *SIDES)).provenance

    assert "rows" in provenance()
    seen: list[int] = []
    hook = block.mlp.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    try:
        assert "rows" not in provenance() and seen == [224]
    finally:
        hook.remove()
    model.set_attn_implementation({"vision_config": "eager"})
    try:
        assert "rows" not in provenance()
    finally:
        model.set_attn_implementation({"vision_config": "sdpa"})


def packed() -> tuple[Family, Pixels]:
    model, _ = build("qwen3_vl")
    width = 3 * 2 * model.config.vision_config.patch_size**2
    noise = torch.randn(12 * 20, width, generator=torch.Generator().manual_seed(1))
    return family_of(model), Pixels(
        {"pixel_values": noise, "image_grid_thw": torch.tensor([[1, 12, 20]])}, {}, ()
    )


def test_nothing_is_left_behind_also_after_an_error() -> None:
    family, _ = packed()

    def left() -> list[str]:
        return [name for name, part in family.model.named_modules() if "forward" in vars(part)]

    with huge.by_rows(family):
        assert left()
    assert not left()
    with pytest.raises(ZeroDivisionError), huge.by_rows(family):
        raise ZeroDivisionError
    assert not left()
    block = family.core.visual.blocks[0]
    own = block.forward
    block.forward = own  # as tools that move weights do
    try:
        with huge.by_rows(family):
            assert block.forward is not own
        assert vars(block)["forward"] is own
    finally:
        del block.forward


def test_it_is_no_part_of_what_the_model_is() -> None:
    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor) as vlm:
        vlm.encode(picture(1))
        named = vlm.runtime.refresh()
        with huge.by_rows(vlm.runtime.family):
            assert vlm.runtime.refresh() == named
            with ks.wrap(model, processor) as second:
                assert second.encode(picture(1)).weights == vlm.encode(picture(1)).weights
        assert vlm.runtime.refresh() == named


@pytest.mark.parametrize("budget", [0, 1 << 12])
def test_a_picture_larger_than_its_budget(budget: int) -> None:
    model, processor = build("qwen3_vl")
    with ks.wrap(model, processor) as free:
        wanted = free.encode(picture(3, *SIDES))
    with ks.wrap(model, processor, vision_budget=budget) as vlm:
        for _ in range(2):
            found = vlm.encode(picture(3, *SIDES))
            assert torch.equal(wanted.tensors["features"], found.tensors["features"])
        reply = vlm.ask(picture(3, *SIDES), "What is it?", max_new_tokens=2)
        assert reply.usage.images == 1
        stats = vlm.runtime.caches.stats(None)
        assert stats["packages"] == 0 and stats["pixel_bytes"] == 0


def test_stats_and_reports_say_what_ran_by_rows(vlm: Any) -> None:
    """A small picture, and features that are known, have no note."""
    assert not vlm.ask(picture(1, 96, 96), "What?", max_new_tokens=1).report.notes
    assert vlm.stats()["features"]["by_rows"] == 0
    reply = vlm.ask(picture(3, *SIDES), "What?", max_new_tokens=1)
    assert reply.report.notes == [f"medium 0: the encoder's layers ran {ROWS} rows at a time"]
    found = vlm.stats()["features"]
    assert found["by_rows"] == 1 and found["encoded"] == 2
    again = vlm.ask(picture(3, *SIDES), "And now?", max_new_tokens=1)
    assert not again.report.notes and vlm.stats()["features"]["by_rows"] == 1


def test_a_film_counts_by_what_goes_through_in_one_pass() -> None:
    film = {"video_grid_thw": [[4, 10, 10]]}
    assert huge.is_huge(film) and not huge.is_huge(film, by_step=True)
    assert not huge.is_huge({"image_grid_thw": [[1, 10, 15]]})
    assert not huge.is_huge({"image_grid_thw": ["ten", [1, 2]], "image_sizes": [[900, 900]]})


def test_other_threads_run_the_module_as_it_is(most: dict[str, int]) -> None:
    family, pixels = packed()
    out: list[torch.Tensor] = []

    def stock() -> None:
        with torch.no_grad():
            out.append(family.encode(pixels)[0]["features"])

    with huge.by_rows(family):
        in_threads(stock)
    assert most["Qwen3VLVisionMLP"] == 240
    with torch.no_grad():
        assert torch.equal(family.encode(pixels)[0]["features"], out[0])
