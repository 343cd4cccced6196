"""The tensors that towers work out from grids: the same features with them, and made only once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import models
from support.tree_invariants import audit_cache
from transformers.exporters import utils as exporter

import keepsight as ks
from keepsight.errors import InputError, UnsupportedModel
from keepsight.models.families import Family, Pixels, family_of
from keepsight.models.families.tower_tensors import TowerTensors
from keepsight.models.renamed import SINCE_5_24

_PLAIN = {"cu_seqlens", "position_ids"}
_WINDOWS = {"window_index", "cu_window_seqlens"}
_TABLE = {"interp_indices", "interp_weights"}
_PLACES = {"position_ids"}
# What towers of these kinds take.
_ROWS: list[tuple[set[str], str]] = [
    (_PLAIN, "qwen2_vl glm4v glm4v_moe glm46v glm_ocr glmga ernie4_5_vl_moe lfm3_vl"),
    (_PLAIN, "video_llama_3 video_llama_3_merged"),
    (_PLAIN | _WINDOWS, "qwen2_5_vl sliding qwen2_5_omni_thinker hyperclovax_vision_v2 exaone4_5"),
    (_PLAIN | _TABLE, "qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker"),
    (_PLAIN | _TABLE, "paddleocr_vl cosmos3_omni cohere_compass"),
    (_PLAIN | _TABLE | {"frame_index", "temporal_merge_index"}, "kimi_k25"),
    (_PLACES | _WINDOWS, "minicpmv4_6 minicpmv4_6_fine minicpmv4_7 minicpm_ocr"),
    (_PLAIN | _WINDOWS | _TABLE | {"pixel_shuffle_index"}, "muse_glimmer"),
    ({"cu_seqlens"}, "cosmos3_edge hunyuan_vl"),
]
TAKES = {kind: takes for takes, kinds in _ROWS for kind in kinds.split()}
if SINCE_5_24:  # what Transformers computes for this tower is not what the tower computes
    TAKES["muse_glimmer"] = TAKES["muse_glimmer"] - _TABLE
# Mllama keeps its media beside the sequence, and has no such tensors at all.
NONE = [kind for kind in models.ALL if kind not in TAKES and kind != "mllama"]


def family(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Family, Any]:
    model, processor = models.build(kind, dtype)
    try:
        return family_of(model), processor
    except UnsupportedModel as error:
        pytest.skip(str(error))


def stock(own: Family, pixels: Any) -> dict[str, torch.Tensor]:
    """The features without any tensor handed in."""
    kept, own.tower_tensors = own.tower_tensors, TowerTensors(torch.nn.Module())
    try:
        return own.encode(pixels)[0]
    finally:
        own.tower_tensors = kept


def parts(given: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among some inputs; since 5.24 some come in tuples, with plain numbers."""
    values = (value if isinstance(value, tuple) else (value,) for value in given.values())
    return [one for some in values for one in some if isinstance(one, torch.Tensor)]


# -- features ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*TAKES, *NONE])
@torch.no_grad()
def test_features_equal_stock_bit_for_bit(kind: str) -> None:
    own, processor = family(kind)
    for size in ((96, 96), (160, 96), (96, 96)):
        pixels = own.preprocess(processor, models.picture(size[0], *size), {})
        given = own.tower_tensors.of(pixels.tensors)
        assert set(given) == TAKES.get(kind, set())
        before = [(value, value.clone()) for value in parts(given)]
        found, wanted = own.encode(pixels)[0], stock(own, pixels)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert all(torch.equal(*pair) for pair in before), "a tower changed what we keep"
    audit_cache(own.tower_tensors.prepared)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "kimi_k25", "minicpmv4_6"])
@torch.no_grad()
def test_in_half_precision_too(kind: str) -> None:
    """Interpolation weights stay float32 until the tower itself rounds them."""
    own, processor = family(kind, torch.bfloat16)
    pixels = own.preprocess(processor, models.picture(5, 160, 96), {})
    given = own.tower_tensors.of(pixels.tensors)
    floating = {value.dtype for value in parts(given) if value.is_floating_point()}
    assert floating == ({torch.float32} if TAKES[kind] >= _TABLE else set())
    found, wanted = own.encode(pixels)[0], stock(own, pixels)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
@torch.no_grad()
def test_videos_equal_stock_bit_for_bit(kind: str) -> None:
    own, processor = family(kind)
    patches = own.preprocess(processor, models.picture(1), {}).tensors["pixel_values"]
    grid = torch.tensor([[3, 4, 6]])
    video = {"pixel_values_videos": patches[:1] + torch.randn(72, patches.shape[1])}
    video["video_grid_thw"] = grid
    given = own.tower_tensors.of(video)
    assert set(given) == TAKES[kind]
    assert given["cu_seqlens"].tolist() == [0, 24, 48, 72]
    found, wanted = (
        own.core.get_video_features(**video, **more, return_dict=True) for more in (given, {})
    )
    assert torch.equal(found.pooler_output[0], wanted.pooler_output[0])


# -- made once -----------------------------------------------------------------------------------


def counted(function: Callable[..., Any], made: list[str]) -> Callable[..., Any]:
    """The function, noting each call that had to compute because nothing was handed in."""

    def noting(*args: Any, **options: Any) -> Any:
        given = [id(value) for value in (options.get("kwargs") or {}).values()]
        result = function(*args, **options)
        parts = (result, *result) if isinstance(result, tuple) else (result,)
        if not any(id(part) in given for part in parts):
            made.append(function.__name__)
        return result

    return noting


def watch(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> list[str]:
    """Every function that makes such tensors, in upstream's exporter and in the tower's code."""
    made: list[str] = []
    for module in {exporter, *modules}:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith(("get_vision_", "get_valid", "get_pool", "get_audio_", "chunk_and")):
                monkeypatch.setattr(module, name, counted(function, made))
    return made


@pytest.mark.parametrize("kind", TAKES)
@torch.no_grad()
def test_made_once_for_each_grid(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if SINCE_5_24 and kind == "muse_glimmer":
        pytest.skip("this tower computes a table by itself")
    own, processor = family(kind)
    tower = next(iter(own.tower_tensors._towers.values()))  # the one that sees
    made = watch(monkeypatch, sys.modules[type(tower.module).__module__])
    sizes = ((96, 96), (96, 96), (160, 96), (96, 96), (160, 96))
    images = [
        own.preprocess(processor, models.picture(seed, *size), {})
        for seed, size in enumerate(sizes)
    ]
    counts = []
    for pixels in images:
        own.encode(pixels)
        counts.append(len(made))
    first = counts[0]
    assert first and len(set(made)) * 2 == len(made)
    assert counts == [first, first, 2 * first, 2 * first, 2 * first]
    stock(own, images[0])
    assert len(made) > 2 * first, "the watch sees what stock computes"


class _Deaf(torch.nn.Module):
    def forward(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        return pixels


class _Model(torch.nn.Module):
    """A model that passes nothing on to its tower."""

    def __init__(self, tower: torch.nn.Module) -> None:
        super().__init__()
        self.visual = tower

    def get_image_features(self, pixel_values: Any, image_grid_thw: Any) -> Any:
        return self.visual(pixel_values, image_grid_thw)


class _Open(_Model):
    def get_image_features(self, pixel_values: Any, image_grid_thw: Any, **kwargs: Any) -> Any:
        return self.visual(pixel_values, image_grid_thw, **kwargs)


def test_nothing_is_given_where_nothing_is_taken() -> None:
    (tower,) = family("qwen3_vl")[0].tower_tensors._towers.values()
    grid = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    assert TowerTensors(_Open(tower.module)).of(grid)
    assert not TowerTensors(_Model(tower.module)).of(grid)
    assert not TowerTensors(_Open(_Deaf())).of(grid)
    assert not TowerTensors(_Open(tower.module)).of({"pixel_values": torch.ones(1)})


# -- sound ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_family_hears_the_same(kind: str, dtype: torch.dtype) -> None:
    own, _ = family(kind, dtype)
    bins = own.core.audio_tower.config.num_mel_bins
    for frames in (170, 33, 170):
        generator = torch.Generator().manual_seed(frames)
        sound = {"input_features": torch.randn(1, bins, frames, generator=generator)}
        sound["feature_attention_mask"] = torch.ones(1, frames, dtype=torch.long)
        pixels = Pixels(sound, {}, (), "audio")
        assert set(own.tower_tensors.of(sound)) > {"padded_feature", "cu_seqlens"}
        assert torch.equal(own.encode(pixels)[0]["features"], stock(own, pixels)["features"])


# -- in the open ---------------------------------------------------------------------------------


def pixels_of(own: Family, processor: Any, grid: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """Noise on a grid, in the form that the family's processor gives."""
    tensors = dict(own.preprocess(processor, models.picture(1), {}).tensors)
    shape, patches = list(tensors["pixel_values"].shape), grid[0] * grid[1] * grid[2]
    if "target_sizes" in tensors:
        tensors["target_sizes"] = torch.tensor([grid[1:]], dtype=torch.int32)
        shape[-1] = shape[-2] * patches
    else:
        tensors["image_grid_thw"] = torch.tensor([grid])
        shape[0] = patches
    generator = torch.Generator().manual_seed(patches)
    tensors["pixel_values"] = torch.randn(shape, generator=generator)
    return tensors


@torch.no_grad()
def test_anybody_may_ask_for_them() -> None:
    model, processor = models.build("qwen3_vl")
    own = family_of(model)
    grids = [[1, 4, 8], [1, 8, 8]]
    given = ks.tower_tensors(model, grids)
    assert set(given) == TAKES["qwen3_vl"] and given["position_ids"].shape == (96, 2)
    pixels = torch.cat([pixels_of(own, processor, (1, h, w))["pixel_values"] for _, h, w in grids])
    call = {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
    found, wanted = (own.encoder(**call, **more, return_dict=True) for more in (given, {}))
    assert all(map(torch.equal, found.pooler_output, wanted.pooler_output))
    by_name = ks.tower_tensors(model, {"video_grid_thw": torch.tensor([[2, 4, 8]])}, "cpu")
    assert by_name["cu_seqlens"].tolist() == [0, 32, 64]
    for kind in ("llava", "mllama"):
        assert ks.tower_tensors(models.build(kind)[0], grids) == {}
    listed = {"image_grid_thw": grids}  # a processor gives tensors
    for wrong in ([1, 4, 8], [[1, 4]], [[1.0, 4.0, 8.0]], [[1, 0, 8]], "abc", [], listed):
        with pytest.raises(InputError, match="grid"):
            ks.tower_tensors(model, wrong)  # type: ignore[arg-type]


def test_what_is_kept_is_bounded() -> None:
    own, _ = family("qwen3_vl")
    grids = [{"image_grid_thw": torch.tensor([[1, 2 * n, 8]])} for n in range(1, 20)]
    full = TowerTensors(own.core)
    one = full.of(grids[9])
    size = full.prepared.nbytes
    assert size == sum(value.nbytes for value in one.values())
    small = TowerTensors(own.core, budget=3 * size)
    for sizes in grids:
        assert set(small.of(sizes)) == TAKES["qwen3_vl"]
    assert 0 < len(small.prepared) < len(grids)
    none = TowerTensors(own.core, budget=1)
    assert none.of(grids[3]) and not len(none.prepared)


def test_kept_apart_by_dtype_and_attention() -> None:
    own, _ = family("qwen2_vl")
    towers = TowerTensors(own.core)
    (tower,) = towers._towers.values()
    grid = torch.tensor([[1, 4, 4]])
    towers.of({"image_grid_thw": grid})
    towers.of({"image_grid_thw": grid.int()})
    assert len(towers.prepared) == 2
    before = tower.module.config._attn_implementation
    try:
        tower.module.config._attn_implementation = "flash_attention_2"
        assert towers.of({"image_grid_thw": grid})["max_seqlen"] == 16
    finally:
        tower.module.config._attn_implementation = before
    assert "max_seqlen" not in towers.of({"image_grid_thw": grid})
