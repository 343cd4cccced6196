"""The shipped suite on families that cut an image into tiles, and what is special about each."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from support import FamilyTests
from support.models import build, suite_of
from support.prompts import answered, turn
from transformers.models.llama4.modeling_llama4 import Llama4VisionRotaryEmbedding

import keepsight as ks
from keepsight.errors import InputError, PlaceholderMismatch, UnsupportedInput, UnsupportedModel
from keepsight.models.families import family_of


class TestAyaVision(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("aya_vision")

    def test_an_image_ends_where_its_frame_is_closed(self) -> None:
        """A prompt that ends inside a frame does not say so, and every tile stands alone."""
        model, processor = self.parts
        chat = [turn("These two?", self.picture(3, wide=True), self.picture(4, wide=True))]
        inputs = self.inputs(processor, chat)
        spots = (inputs["input_ids"][0] == model.config.image_token_id).nonzero()
        short = dict(inputs, input_ids=inputs["input_ids"][:, : int(spots[-1]) + 1])
        del short["attention_mask"]
        with self.wrap() as vlm:
            usage = self.ask(vlm, chat).usage
            options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
            ours = vlm.generate(**short, **options)
            stock = model.generate(**short, **options)
        assert usage.images == 2
        assert ours.usage.images == len(inputs["pixel_values"]) == 6
        off = float((ours.logits[0] - stock.logits[0]).abs().max())
        assert off < self.tolerance * float(stock.logits[0].abs().max())

    def test_runs_that_are_no_tiles_are_refused(self) -> None:
        model, processor = self.parts
        inputs = self.inputs(processor, [turn("One?", self.picture(1), self.picture(2))])
        ids = inputs["input_ids"]
        spot = int((ids[0] == model.config.image_token_id).nonzero()[0])
        moved = torch.cat([ids[:, :spot], ids[:, spot + 1 :], ids[:, spot : spot + 1]], dim=1)
        with self.wrap() as vlm, pytest.raises(PlaceholderMismatch, match="tiles of 16"):
            vlm.generate(**dict(inputs, input_ids=moved))


TestCohere2Vision = suite_of("cohere2_vision")
TestGotOcr2 = suite_of("got_ocr2", takes_text_alone=False)
TestDeepseekVL = suite_of("deepseek_vl")


class TestOvis2(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("ovis2")

    def test_frame_tokens_count_in_chunks_without_tiles(self) -> None:
        """The control: the last frame token of an image is in the chunk behind its tiles."""
        chat = [turn("What do you see?", self.picture(1)), answered("Dots."), turn("More?")]
        with self.wrap(7) as vlm:
            family = vlm.runtime.family
            true, right = self.logits(vlm, chat), family.feature_inputs
            family.feature_inputs = lambda parts, ids: right(parts, ids) if parts else {}
            with self.wrap() as other:
                other.runtime = other.runtime.fresh(family)
                other.runtime.engine.longest_pass = 7
                wrong = self.logits(other, chat)
        self.expect_differ(true, wrong, "the embedding of a frame token")

    def test_frame_tokens_without_an_image_are_refused(self) -> None:
        """Stock gives them their own embeddings there, and other ones once an image follows."""
        model, processor = self.parts
        ids = processor.tokenizer("A frame: <IMG_START>", return_tensors="pt")["input_ids"]
        assert int(ids[0, -1]) == model.config.visual_indicator_token_ids[0]
        with self.wrap() as vlm, pytest.raises(UnsupportedInput, match="but no image"):
            vlm.generate(ids, max_new_tokens=1)

    def test_random_features_are_refused(self) -> None:
        model = copy.copy(self.parts[0])
        model.config = copy.deepcopy(model.config)
        model.config.vision_config.tokenize_function = "gumbel_argmax"
        with pytest.raises(UnsupportedModel, match="at random"):
            family_of(model)


@pytest.mark.filterwarnings("ignore:Casting complex values")
class TestLlama4(FamilyTests):
    decodes_together = False  # the temperature of its attention counts padding

    def make_model(self) -> tuple[Any, Any]:
        """With complex rotary factors, as loading leaves them; `model.to` makes them real."""
        model, processor = build("llama4")
        rotary = Llama4VisionRotaryEmbedding(model.config.vision_config)
        model.vision_model.rotary_embedding = rotary
        return model, processor

    def test_features_are_as_wide_as_the_tower(self) -> None:
        with self.wrap() as vlm:
            package = vlm.encode(self.picture(3, wide=True))
            assert package.tensors["features"].shape == (3, 16, 48)
            wide = {"features": torch.zeros(3, 16, 64)}
            other = dataclasses.replace(package, tensors=wide)
            with pytest.raises(ks.errors.WrongIdentity, match="width of the features"):
                vlm.ask(other, "What is it?", max_new_tokens=1)


class TestStep3p7(FamilyTests):
    def make_model(self) -> tuple[Any, Any]:
        return build("step3p7")

    @pytest.mark.parametrize("counts", [[4], [5, 0], [4, 4], [-1, 5]])
    def test_counts_that_do_not_fit_are_refused(self, counts: list[int]) -> None:
        chat = [turn("Both?", self.picture(3, wide=True), self.picture(1))]
        inputs = self.inputs(self.parts[1], chat)
        assert inputs["num_local_patches"].tolist() == [4, 0]
        inputs["num_local_patches"] = torch.tensor(counts)
        with self.wrap() as vlm, pytest.raises(InputError, match="num_local_patches"):
            vlm.generate(**inputs, max_new_tokens=1)

    def test_local_views_matter(self) -> None:
        """The control: a medium without its local views is another medium."""
        chat = [turn("What is it?", self.picture(3, wide=True))]
        inputs = self.inputs(self.parts[1], chat)
        noise = torch.randn(inputs["pixel_values_local"].shape)
        options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
        with self.wrap() as vlm:
            one = vlm.generate(**inputs, **options).logits[0]
            other = vlm.generate(**dict(inputs, pixel_values_local=noise), **options).logits[0]
        self.expect_differ(one, other, "another local view")
