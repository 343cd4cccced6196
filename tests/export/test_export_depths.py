"""Exported models where their graphs could go wrong: sizes, lengths, rows, padding, numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.exported_models import exported, small, wrapped
from support.models import build, folder_of, picture, stock_inputs, turn

from keepsight.core.decoding.state import Lane, Shape
from keepsight.errors import UnsupportedInput, UnsupportedModel
from keepsight.export.graphs.exporter import export
from keepsight.export.graphs.towers import tower_of
from keepsight.models.families import family_of

KINDS = (
    "qwen3_vl",
    "qwen3_5",
    "qwen2_vl",
    pytest.param("qwen2_5_vl", marks=pytest.mark.slow),  # the next has its tower and its layers
    "sliding",
    "gemma3_sliding",
    "llava",
    "internvl",
)
PACKED = ("qwen3_vl", "qwen3_5", "qwen2_vl", "sliding")  # towers that take any size
NEAR = 1e-4  # of the scale
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "min_new_tokens": 10}


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape and bool(torch.isfinite(found).all())
    return float((found - wanted).abs().max() / wanted.abs().max())


# -- towers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PACKED)
def test_pictures_of_every_size(kind: str) -> None:
    """From one token to hundreds, with windows that are full, cut off and a row wide."""
    own, model = small(kind)[0], exported(kind)
    vision = own.config.vision_config
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    generator = torch.Generator().manual_seed(0)
    grids = [(2, 2), (2, 4), (4, 2), (2, 38), (6, 10), (16, 16), (18, 30), (34, 34), (8, 12)]
    pixels = [torch.randn(h * w, width, generator=generator) for h, w in grids]
    alone = []
    with torch.inference_mode():
        for grid, rows in zip(grids, pixels, strict=True):
            inputs = {"pixel_values": rows, "image_grid_thw": torch.tensor([[1, *grid]])}
            found, wanted = (m.get_image_features(**inputs) for m in (model, own))
            alone.append(torch.cat(list(found.pooler_output)))
            assert off(alone[-1], torch.cat(list(wanted.pooler_output))) < NEAR, grid
            for a, b in zip(
                *(getattr(x, "deepstack_features", []) for x in (found, wanted)), strict=True
            ):
                assert off(*(torch.cat(list(x)) for x in (a, b))) < NEAR, grid
        # All in one call, as stock `generate` gives them: each is what it is alone.
        every = torch.tensor([[1, *grid] for grid in grids])
        found = model.get_image_features(torch.cat(pixels), every)
    assert torch.equal(torch.cat(list(found.pooler_output)), torch.cat(alone))


@pytest.mark.parametrize("kind", PACKED)
def test_frames_of_a_video_go_through_one_by_one(kind: str) -> None:
    own, model = small(kind)[0], exported(kind)
    vision = own.config.vision_config
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(3 * 6 * 4, width, generator=torch.Generator().manual_seed(1))
    inputs = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[3, 6, 4]])}
    with torch.inference_mode():
        found, wanted = (m.get_video_features(**inputs) for m in (model, own))
    assert off(*(torch.cat(list(x.pooler_output)) for x in (found, wanted))) < NEAR


# -- decoders ------------------------------------------------------------------------------------

LENGTHS = (1, 2, 63, 64, 65, 1, 1, 3, 513, 7, 128, 1500)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_any_length(kind: str) -> None:
    """2,348 tokens cut anywhere, against one forward pass of them all."""
    own, model = small(kind)[0], exported(kind)
    count = sum(LENGTHS)
    ids = torch.randint(10, 500, (1, count), generator=torch.Generator().manual_seed(2))
    lane = Lane(model, Shape.of(model))
    with torch.inference_mode():
        wanted, at = own(input_ids=ids).logits, 0
        for length in LENGTHS:
            places = torch.arange(at, at + length)[None]
            if hasattr(own.base_model, "get_rope_index"):
                places = places.expand(4, 1, -1)
            found = model(
                input_ids=ids[:, at : at + length],
                position_ids=places,
                past_key_values=lane.cache,
                use_cache=True,
            ).logits
            assert off(found, wanted[:, at : at + length]) < NEAR, (at, length)
            at += length


@pytest.mark.parametrize("kind", KINDS)
def test_stock_generate_with_padded_rows(kind: str) -> None:
    """Upstream's own loop and caches over the graphs; padding sees nothing and is not seen."""
    inputs = padded(kind)
    wanted, found = (
        m.generate(**inputs, **GREEDY, return_dict_in_generate=True, output_logits=True)
        for m in (small(kind)[0], exported(kind))
    )
    assert torch.equal(found.sequences, wanted.sequences)
    assert max(off(a, b) for a, b in zip(found.logits, wanted.logits, strict=True)) < NEAR
    assert exported(kind)(**inputs).logits.isfinite().all()  # those of padding too
    beams = [
        m.generate(**inputs, num_beams=2, do_sample=False, max_new_tokens=4)
        for m in (small(kind)[0], exported(kind))
    ]
    assert torch.equal(*beams)


def padded(kind: str) -> dict[str, Any]:
    processor = small(kind)[1]
    chats = [[turn("What?", picture(1))], [turn("Tell me all that is here. " * 3, picture(2))]]
    render = processor.apply_chat_template
    texts = [render(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    images = [[picture(1)], [picture(2)]] if kind.startswith("gemma") else [picture(1), picture(2)]
    processor.tokenizer.padding_side = "left"
    return dict(processor(text=texts, images=images, padding=True, return_tensors="pt"))


def test_what_a_graph_cannot_do_is_refused_by_name() -> None:
    inputs = stock_inputs(small("qwen3_vl")[1], [turn("Look.", picture(1))])
    model = exported("qwen3_vl")
    with pytest.raises(UnsupportedInput, match="StaticLayer"):
        model.generate(**inputs, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(UnsupportedInput, match="output_hidden_states"):
        model.generate(
            **inputs, max_new_tokens=2, return_dict_in_generate=True, output_hidden_states=True
        )


# -- numbers -------------------------------------------------------------------------------------


def test_one_token_over_and_over() -> None:
    """All keys of a linear layer are one: the matrix of a block is as ill as it gets."""
    own, model = small("qwen3_5")[0], exported("qwen3_5")
    ids = torch.full((1, 3000), 77)
    with torch.inference_mode():
        assert off(model(input_ids=ids).logits, own(input_ids=ids).logits) < NEAR


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3_sliding"])
def test_sessions_save_and_resume(kind: str, tmp_path: Path) -> None:
    vlm, own = wrapped(kind)
    with vlm, own:
        chat = vlm.session()
        chat.ask("What is it?", images=[picture(7)], **GREEDY)
        chat.save(tmp_path / "talk.keep")
        wanted = chat.ask("And now?", images=[picture(8)], **GREEDY).tokens
        other = own.session()
        other.ask("What is it?", images=[picture(7)], **GREEDY)
        assert other.ask("And now?", images=[picture(8)], **GREEDY).tokens == wanted
    again, _ = wrapped(kind)
    with again:
        chat = again.resume(tmp_path / "talk.keep")
        reply = chat.ask("And now?", images=[picture(8)], **GREEDY)
        assert reply.tokens == wanted
        assert reply.usage.cached_tokens and reply.usage.images_encoded == 1


@pytest.mark.parametrize("first", ["exported", "own"])
def test_one_store_for_both_keeps_them_apart(first: str, tmp_path: Path) -> None:
    """Snapshots of one runtime are nothing to the other; packages are, where one asks for it."""
    messages = [turn("What do you see in it?", picture(9))]
    pair = wrapped("qwen3_vl", store=tmp_path)
    one, two = pair if first == "exported" else pair[::-1]
    with one:
        tokens = one.chat(messages, **GREEDY).tokens
        one.flush()
    with two:
        assert "made elsewhere" in str(two.explain(messages))
        reply = two.chat(messages, **GREEDY)
        assert reply.tokens == tokens
        assert reply.usage.cached_tokens == 0 and reply.usage.images_encoded == 1
    index = 1 if first == "exported" else 0
    with wrapped("qwen3_vl", store=tmp_path / "any", accept_features="any")[1 - index] as one:
        one.chat(messages, **GREEDY)
        one.flush()
    with wrapped("qwen3_vl", store=tmp_path / "any", accept_features="any")[index] as two:
        reply = two.chat(messages, **GREEDY)
        assert reply.tokens == tokens
        assert reply.usage.images_encoded == 0 and reply.usage.cached_tokens == 0
        assert "made elsewhere: " in str(reply.report) and "runtime" in str(reply.report)


@pytest.mark.parametrize("kind", KINDS)
def test_packages_are_interchanged_both_ways(kind: str) -> None:
    image = picture(10, 160, 96)
    vlm, own = wrapped(kind)
    with vlm, own:
        ours, theirs = vlm.encode(image), own.encode(image)
        assert ours.identity == theirs.identity and ours.feature_id != theirs.feature_id
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name, tensor in theirs.tensors.items():
            assert off(ours.tensors[name], tensor) < NEAR
        one = own.ask(ours, "What is in it?", **GREEDY)
        assert one.tokens == vlm.ask(theirs, "What is in it?", **GREEDY).tokens
        assert one.usage.images_encoded == 0
        assert one.tokens == own.ask(image, "What is in it?", **GREEDY).tokens


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["glm4v", "mistral3"])
def test_other_families_are_refused_before_anything_is_written(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=kind):
        export(str(folder_of(kind, tmp_path / "model")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_llava_that_takes_any_size_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="many sizes"):
        tower_of(family_of(build("llava_pixtral")[0]), build("llava_pixtral")[1])
