"""How a processor's packed output is taken apart again, for the families that look at parts.

The suite holds each family to stock answers; here the ways of packing are tried that its
conversations do not have: other settings of a processor, text between pictures, tensors that lie.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.models import build, picture, stock_inputs, turn

import keepsight as ks
from keepsight.errors import ImageError, InputError, KeepsightError, PlaceholderMismatch
from keepsight.models.families import Pixels, family_of

KINDS = (
    "llava_next",
    "llava_onevision",
    "mistral3",
    "llava_pixtral",
    "idefics3",
    "smolvlm",
    "lfm2_vl",
    "minicpmv4_6",
    "minicpmv4_6_fine",
)
SQUARE, WIDE, TALL = picture(1), picture(2, 160, 96), picture(3, 96, 160)
SHARED = {"input_ids", "attention_mask", "mm_token_type_ids"}
Tensors = dict[str, torch.Tensor]


def _media(inputs: Tensors) -> Tensors:
    return {name: tensor for name, tensor in inputs.items() if name not in SHARED}


def _split(kind: str, inputs: Tensors) -> list[Pixels]:
    family = family_of(build(kind)[0])
    rows = zip(inputs["input_ids"].numpy(), inputs["attention_mask"].numpy(), strict=True)
    ids = [row[mask.astype(bool)].astype(np.int64) for row, mask in rows]
    return family.split_tensors(_media(inputs), ids)


def _tokens(pixels: Pixels) -> int:
    return sum(part for part in pixels.layout if isinstance(part, int))


def _relative_deviation(stock: Any, ours: Any) -> float:
    """The largest difference of the first logits, by their scale."""
    difference = (stock.logits[0] - ours.logits[0]).abs().max() / stock.logits[0].abs().max()
    return float(difference)


def _both(kind: str, inputs: Tensors, **options: Any) -> float:
    """How far an empty memory is from stock, on the same tensors."""
    model, processor = build(kind)
    more = {"max_new_tokens": 2, "do_sample": False, "output_logits": True}
    more = {**more, "return_dict_in_generate": True}
    stock = model.generate(**inputs, **more)
    with ks.wrap(model, processor) as vlm:
        return _relative_deviation(stock, vlm.generate(**inputs, **more, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_has_one_key_however_it_comes(kind: str) -> None:
    """Alone, by messages, and between neighbours of other shapes."""
    model, processor = build(kind)
    family = family_of(model)
    pictures = [SQUARE, WIDE, TALL, SQUARE]
    chat = [turn("First,", *pictures[:2]), turn("then", pictures[2]), turn("again", pictures[3])]
    split = _split(kind, stock_inputs(processor, chat))
    alone = [_split(kind, stock_inputs(processor, [turn("Look", one)])) for one in pictures]
    named = [family.preprocess(processor, one, {}) for one in pictures]
    keys = [pixels.key for pixels in named]
    assert [pixels.key for pixels in split] == keys
    assert [pixels.key for (pixels,) in alone] == keys
    assert [_tokens(pixels) for pixels in split] == [_tokens(pixels) for pixels in named]
    assert len(set(keys)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_taken_apart_can_be_joined(kind: str) -> None:
    """As the processor packed it; and `verify` holds answers against stock that way."""
    model, processor = build(kind)
    chat = [turn("Two of them:", WIDE, SQUARE)]
    inputs = stock_inputs(processor, chat)
    joined = family_of(model).join_pixels(_split(kind, inputs))
    assert joined.keys() == _media(inputs).keys()
    if kind != "lfm2_vl":  # padded there to a fixed number of patches, here to the most there are
        assert all(torch.equal(joined[name], inputs[name]) for name in joined)
    with ks.wrap(model, processor) as vlm:
        seen = vlm.verify(chat, stock=True)
    assert seen.equal
    assert seen.stock_max_difference < 1e-4 * seen.stock_scale


def test_several_pictures_shown_whole() -> None:
    """LLaVA-OneVision, told that pictures belong together: no tiles, another key, no neighbours."""
    _, processor = build("llava_onevision")
    text = processor.apply_chat_template(
        [turn("These:", SQUARE, WIDE, TALL)], add_generation_prompt=True, tokenize=False
    )
    inputs = dict(processor(text=[text], images=[[SQUARE, WIDE, TALL]], return_tensors="pt"))
    assert inputs["batch_num_images"].tolist() == [3]
    assert _both("llava_onevision", inputs) < 1e-4
    whole = _split("llava_onevision", inputs)
    assert [_tokens(pixels) for pixels in whole] == [17, 17, 17]
    text = text.replace("<image>", "", 1)
    fewer = dict(processor(text=[text], images=[[SQUARE, WIDE]], return_tensors="pt"))
    assert [p.key for p in _split("llava_onevision", fewer)] == [p.key for p in whole[:2]]
    tiled = _split("llava_onevision", stock_inputs(processor, [turn("One", SQUARE)]))
    assert tiled[0].key != whole[0].key
    joined = family_of(build("llava_onevision")[0]).join_pixels(whole)
    assert torch.equal(joined["batch_num_images"], inputs["batch_num_images"])


@pytest.mark.parametrize(
    ("kind", "option", "tokens"),
    [
        ("idefics3", "do_image_splitting", [4, 4, 4]),  # each picture is one tile, and one medium
        ("lfm2_vl", "use_image_special_tokens", None),  # each tile is a medium
        ("minicpmv4_6", "use_image_id", [52, 47, 52]),  # what opens an image tells it from a slice
    ],
)
def test_pictures_packed_without_what_the_processor_adds(
    kind: str, option: str, tokens: list[int] | None
) -> None:
    _, processor = build(kind)
    images = [SQUARE, WIDE, SQUARE]
    text = processor.apply_chat_template(
        [turn("These:", *images)], add_generation_prompt=True, tokenize=False
    )
    inputs = dict(processor(text=[text], images=images, return_tensors="pt", **{option: False}))
    split = _split(kind, inputs)
    if tokens is None:
        assert len(split) == len(inputs["pixel_values"])
    else:
        assert [_tokens(pixels) for pixels in split] == tokens
        assert split[0].key == split[2].key
    assert _both(kind, inputs) < 1e-4


def test_padding_of_patches_is_nobodys() -> None:
    """LFM2-VL padded to more patches than its processor does: the same pictures."""
    _, processor = build("lfm2_vl")
    inputs = stock_inputs(processor, [turn("These:", SQUARE, WIDE)])
    more = dict(inputs)
    for name in ("pixel_values", "pixel_attention_mask"):
        blank = torch.zeros_like(inputs[name])
        more[name] = torch.cat([inputs[name], blank], 1)
    keys = [[pixels.key for pixels in _split("lfm2_vl", given)] for given in (inputs, more)]
    assert keys[0] == keys[1]


def test_a_tile_of_zeros_is_refused() -> None:
    """Idefics 3 takes it for padding and would shift every row behind it."""
    model, processor = build("idefics3")
    inputs = stock_inputs(processor, [turn("Look", SQUARE)])
    inputs["pixel_values"][0, 3] = 0
    with ks.wrap(model, processor) as vlm, pytest.raises(ImageError, match="36 rows for 40"):
        vlm.generate(**inputs, max_new_tokens=1)


LIES: dict[str, list[tuple[str, Any]]] = {
    "llava_next": [
        ("pixel_values", lambda t: t[:, :1]),
        ("pixel_values", lambda t: t[0]),
        ("image_sizes", lambda t: t[:1]),
        ("image_sizes", lambda t: t * 0),
        ("image_sizes", lambda t: t.float()),
        ("image_sizes", lambda t: t.flip(1)),
        ("image_sizes", lambda t: None),
    ],
    "llava_onevision": [
        ("batch_num_images", lambda t: t[:1]),
        ("batch_num_images", lambda t: torch.tensor([2])),
        ("batch_num_images", lambda t: t - 2),
    ],
    "mistral3": [
        ("image_sizes", lambda t: t + 16),
        ("image_sizes", lambda t: t - 8),
        ("image_sizes", lambda t: -t),
        ("image_sizes", lambda t: t[:1]),
        ("image_sizes", lambda t: None),
        ("pixel_values", lambda t: t[:, 0]),
    ],
    "idefics3": [
        ("pixel_values", lambda t: t[:, :-1]),
        ("pixel_values", lambda t: t[0]),
        ("pixel_values", lambda t: torch.cat([t, t], 1)),
        ("pixel_attention_mask", lambda t: t[:, :-1]),
    ],
    "lfm2_vl": [
        ("pixel_values", lambda t: t[:-1]),
        ("pixel_attention_mask", lambda t: t * 0),
        ("spatial_shapes", lambda t: t * 0),
        ("spatial_shapes", lambda t: t + 1),
        ("spatial_shapes", lambda t: t.flip(0)),
        ("spatial_shapes", lambda t: None),
    ],
    "minicpmv4_6": [
        ("pixel_values", lambda t: t[..., :-4]),
        ("pixel_values", lambda t: t[0]),
        ("target_sizes", lambda t: t[:-1]),
        ("target_sizes", lambda t: t * 0),
        ("target_sizes", lambda t: t + 1),
        ("target_sizes", lambda t: t[:, :1]),
        ("target_sizes", lambda t: None),
    ],
}


@pytest.mark.parametrize("kind", LIES)
def test_tensors_that_lie(kind: str) -> None:
    """A named error for each, nothing remembered of it, and the next request is served."""
    model, processor = build(kind)
    inputs = stock_inputs(processor, [turn("Look", SQUARE, WIDE)])
    with ks.wrap(model, processor) as vlm:
        for number, (name, lie) in enumerate(LIES[kind]):
            lying = {**inputs, name: lie(inputs[name])}
            lying = {key: value for key, value in lying.items() if value is not None}
            with pytest.raises(KeepsightError) as caught:
                vlm.generate(**lying, max_new_tokens=1)
            assert isinstance(caught.value, InputError), (number, name)
        vlm.generate(**inputs, max_new_tokens=1)
        vlm.runtime.tree.check()


@pytest.mark.parametrize("kind", KINDS)
def test_placeholders_that_lie(kind: str) -> None:
    """One too few, and a picture too many."""
    model, processor = build(kind)
    inputs = stock_inputs(processor, [turn("Look", SQUARE, WIDE)])
    one = stock_inputs(processor, [turn("Look", SQUARE)])
    token = family_of(model).image_token_id
    spot = int(np.flatnonzero(inputs["input_ids"][0].numpy() == token)[3])
    keep = torch.arange(inputs["input_ids"].shape[1]) != spot
    fewer = {**inputs, **{n: inputs[n][:, keep] for n in ("input_ids", "attention_mask")}}
    more = {**inputs, **{n: one[n] for n in ("input_ids", "attention_mask")}}
    with ks.wrap(model, processor) as vlm:
        for lying in (fewer, more):
            with pytest.raises(PlaceholderMismatch):
                vlm.generate(**lying, max_new_tokens=1)
