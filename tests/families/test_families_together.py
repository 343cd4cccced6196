"""The shipped suite on families where tokens of media see each other."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from support import FamilyTests
from support.models import build, picture, stock_inputs, suite_of, turn
from support.prompts import answered

import keepsight as ks

TestGemma3 = suite_of("gemma3", nests_images=True)
TestGemma3Sliding = suite_of("gemma3_sliding", nests_images=True)


class TestGemma3Crops(FamilyTests):
    """As tensors each crop is an image of its own; in messages an image has several runs."""

    nests_images = True

    def make_model(self) -> tuple[Any, Any]:
        return build("gemma3_crops")

    def test_neighbours_change_nothing(self) -> None:
        chats = [[turn("Look at it.", picture(1, *size))] for size in (self.size, self.other_size)]
        chats.append(
            [turn("Look at both.", *(picture(1, *s) for s in (self.other_size, self.size)))]
        )
        with self.wrap() as vlm:
            replies = [vlm.chat(chat, max_new_tokens=2) for chat in chats]
            assert [reply.usage.images for reply in replies] == [1, 1, 2]
            assert vlm.stats()["features"]["encoded"] == 2

    def test_messages_are_rendered_as_the_processor_does(self) -> None:
        with self.wrap() as vlm:
            for messages in self.conversation():
                prompt, stock = vlm.render(messages), self.stock(messages, 3)
                ids = self.inputs(self.parts[1], messages)["input_ids"][0].tolist()
                assert prompt.ids.tolist() == ids
                wide = [m.tokens for m in prompt.media if m.tokens > 16]
                assert len(wide) == sum(len(ranges) == 3 for ranges in prompt.ranges)
                reply = vlm.chat(messages, max_new_tokens=3, do_sample=False)
                assert reply.tokens == stock.sequences[0, len(ids) :].tolist()[: len(reply.tokens)]


TestGemma4 = suite_of("gemma4", nests_images=True)
TestGemma4Vision = suite_of("gemma4_vision", nests_images=True)
TestGemma4Unified = suite_of("gemma4_unified", nests_images=True)


# Of its processor, when numpy asks whether it must copy a tensor.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
class TestPaliGemma(FamilyTests):
    reuse = "whole prompt"
    decodes_together = False
    takes_text_alone = False

    def make_model(self) -> tuple[Any, Any]:
        return build("paligemma")

    def test_a_lane_that_served_others(self) -> None:
        """Upstream asks the cache whether this is the first chunk; with eager masks it shows."""
        model, processor = copy.deepcopy(self.parts[0]), self.parts[1]
        model.set_attn_implementation("eager")
        with ks.wrap(model, processor) as vlm:
            for number in range(6):
                inputs = self.inputs(processor, [turn(f"Number {number}?", self.picture(number))])
                options = {"max_new_tokens": 1, "do_sample": False, "output_logits": True}
                options["return_dict_in_generate"] = True
                ours, stock = vlm.generate(**inputs, **options), model.generate(**inputs, **options)
                off = (ours.logits[0] - stock.logits[0]).abs().max()
                assert off < self.tolerance * stock.logits[0].abs().max()


class TestPaliGemma2(TestPaliGemma):
    attentions = ("eager",)  # all that Gemma 2 has

    def make_model(self) -> tuple[Any, Any]:
        return build("paligemma2")


class SameMedia(FamilyTests):
    """What both families do whose later media change what stands before them."""

    reuse = "same media"

    def test_words_before_and_after_pictures(self) -> None:
        """A text is remembered without pictures, and with others; lanes keep none of theirs."""
        words = [turn("Only words, and enough of them to be remembered.")]
        seen = [*words, answered("Yes."), turn("Now look.", self.picture(1), self.picture(2))]
        after = [*seen, answered("Noise."), turn("Why is that?")]
        other = [turn("Other words than before, all of them, and no picture.")]
        with self.wrap() as vlm:
            for number, messages in enumerate((words, seen, after, words, other, seen, after)):
                ours = self.expect_as_stock(vlm, messages, f"prompt {number}")
                assert self.same(vlm, ours.logits[0], self.cold(messages))


class TestMolmo2(SameMedia):
    def make_model(self) -> tuple[Any, Any]:
        return build("molmo2")

    def test_a_snapshot_ends_behind_the_frame(self) -> None:
        """The tokens that close an image are seen by all of its patches."""
        with self.wrap() as vlm:
            prompt = vlm.render(self.conversation()[2])
            first = next(prompt.ends(vlm.runtime.rule))
            assert prompt.ids[first - 1] == vlm.model.config.image_end_token_id
            assert first == max(ranges[-1][1] for ranges in prompt.ranges) + 2

    def test_tensors_without_their_numbers(self) -> None:
        inputs = self.inputs(self.parts[1], self.conversation()[0])
        del inputs["image_num_crops"]
        with (
            self.wrap() as vlm,
            pytest.raises(ks.errors.PlaceholderMismatch, match="image_num_crops"),
        ):
            vlm.generate(**inputs, max_new_tokens=1)


class TestMllama(SameMedia):
    decodes_together = False
    nests_images = True

    def make_model(self) -> tuple[Any, Any]:
        return build("mllama")

    def test_stock_generate_from_packages(self) -> None:
        """Stock feeds features again with each token; from packages only our own calls answer."""
        a, wide = self.picture(1), self.picture(3, wide=True)
        messages = [turn("What is in these?", a, wide)]
        stock = self.stock(messages)
        with self.wrap() as vlm:
            packages = vlm.encode([a, wide])
            with pytest.raises(ks.errors.UnsupportedInput, match="mllama"):
                vlm.inputs(messages)
            first = self.ask_chat(vlm, [turn("What is in these?", *packages)])
        assert first == int(stock.logits[0].argmax())

    def test_a_row_without_pictures(self) -> None:
        """It decodes beside one that has some, and sees none of them."""
        chats = [[turn("Only words.")], [turn("Just this?", self.picture(2))]]
        render = self.parts[1].apply_chat_template
        texts = [render(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        self.parts[1].tokenizer.padding_side = "left"
        images = [[], [self.picture(2)]]
        inputs = dict(self.parts[1](text=texts, images=images, padding=True, return_tensors="pt"))
        options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
        with self.wrap() as vlm:
            alone = [self.ask(vlm, chat, 4) for chat in chats]
            rows = vlm.generate(**inputs, **options, output_logits=True)
        for number, one in enumerate(alone):
            for wanted, found in zip(one.logits, rows.logits, strict=False):
                assert float((wanted - found[number]).abs().max()) < 1e-4 * float(
                    wanted.abs().max()
                )

    def test_a_mask_that_says_something_else(self) -> None:
        inputs = self.inputs(self.parts[1], self.conversation()[2])
        mask = inputs["cross_attention_mask"].clone()
        mask[0, -1, 0] = 1
        with self.wrap() as vlm, pytest.raises(ks.errors.UnsupportedInput, match="cross_attention"):
            vlm.generate(**{**inputs, "cross_attention_mask": mask}, max_new_tokens=1)

    def test_text_between_the_images_and_before_them(self) -> None:
        """Each text sees its own image; text before the first one looks evenly at everything."""
        a, b, wide = self.picture(1), self.picture(2), self.picture(3, wide=True)
        parts: list[Any] = ["An album.", a, b, "Those two.", wide, "And that one."]
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": part}
            for part in parts
        ]
        messages = [{"role": "user", "content": content}]
        with self.wrap() as vlm:
            for goes_on in (messages, [*messages, answered("I see."), turn("Well?")]):
                ours = self.expect_as_stock(vlm, goes_on, "text between images")
                assert self.same(vlm, ours.logits[0], self.cold(goes_on))
            assert self.ask(vlm, [*messages, answered("I see."), turn("So?")]).usage.cached_tokens


@pytest.mark.parametrize(
    "kind",
    [*("gemma3", "gemma3_crops", "gemma4", "gemma4_vision", "paligemma", "molmo2"), "mllama"],
)
def test_verify_against_stock(kind: str) -> None:
    """One forward of stock from joined pixels, as anyone may check on a model of their own."""
    with ks.wrap(*build(kind)) as vlm:
        question = turn("Compare them.", picture(1), picture(3, 160, 96), picture(2))
        found = vlm.verify([question, answered("Why?"), turn("Say it again.")], stock=True)
        assert found and found.stock_max_difference < 1e-4 * found.stock_scale
        assert (found.cached_tokens == 0) == (kind == "paligemma")


@pytest.mark.parametrize(
    ("kind", "name", "grid"),
    [("molmo2", "image_grids", [[2, 2, 4, 5]]), ("mllama", "num_tiles", [9])],
)
def test_a_package_whose_grid_lies(kind: str, name: str, grid: list[Any]) -> None:
    with ks.wrap(*build(kind)) as vlm:
        package = vlm.encode(picture(1))
        assert vlm.ask(package, "What is it?", max_new_tokens=1).usage.images_encoded == 0
        with pytest.raises(ks.errors.KeepsightError):
            vlm.ask(dataclasses.replace(package, grid={name: grid}), "What is it?")
        with pytest.raises(ks.errors.KeepsightError):
            vlm.ask(dataclasses.replace(package, grid={}), "What is it?")


def test_a_text_model_that_sees_both_ways_is_refused() -> None:
    model = build("gemma3")[0]
    model.config = copy.deepcopy(model.config)
    model.config.text_config.use_bidirectional_attention = True
    with pytest.raises(ks.errors.UnsupportedModel, match="in both directions"):
        ks.wrap(model, None)


def test_patches_without_their_places_are_refused() -> None:
    model, processor = build("gemma4_vision")
    inputs = stock_inputs(processor, [turn("Look.", picture(1))])
    del inputs["image_position_ids"]
    with ks.wrap(model, processor) as vlm, pytest.raises(ks.errors.PlaceholderMismatch):
        vlm.generate(**inputs, max_new_tokens=1)
