"""The suite for a model family: with any memory, answers equal stock Transformers run afresh.

Define `make_model`. Every comparison is with a fresh computation: stock `generate` from pixels, or
a second memory that has seen nothing. Controls that must differ prevent an empty pass: a model that
ignores its pictures fails here, as does a family that reuses less than it claims.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

import keepsight as ks
from keepsight.kinds import Grid, Inputs, Processor
from keepsight.models.renamed import RETURNED
from keepsight.stock.generate import Generated
from keepsight.vlm import VLM
from support.common import expect, gone, swapped_in
from support.prompts import Messages, answered, logits_of, noise, once, pictures_of, turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation import GenerateDecoderOnlyOutput

_MADE: dict[type, tuple[PreTrainedModel, Processor]] = {}
_EMPTIED: dict[tuple[type, object], VLM] = {}  # of one class at a time
# On an accelerator, and in another dtype: `KEEPSIGHT_TEST_ON=cuda:bfloat16`. Nothing usual sets it.
_DEVICE, _, _DTYPE = os.environ.get("KEEPSIGHT_TEST_ON", "cpu:float32").partition(":")
_WHOLE: Inputs = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


class FamilyTests:
    """What a family promises. Define `make_model`, and `inputs` if the processor is unusual.

    The model must be small, in eval mode and float32, with weights large enough that its logits
    depend on its pictures. The processor's chat template must know user and assistant.
    """

    reuse = "prefix"  # which part of a prompt serves another, as in `Family.reuse`
    size, other_size = (96, 96), (160, 96)
    tolerance = 1e-4  # of the logits' scale, against stock in float32
    tokens = 5
    long_words, long_run = 800, 256  # of a long prompt, and of its passes
    decodes_together = True  # as in `Family.decodes_together`
    attentions = ("sdpa", "eager")  # implementations that are tried
    positions_matter = True  # False if text positions do not enter the logits

    # -- to override -----------------------------------------------------------------------------

    def make_model(self) -> tuple[PreTrainedModel, Processor]:
        """Model and processor, with the same weights each time."""
        raise NotImplementedError

    def inputs(self, processor: Processor, messages: Messages) -> dict[str, torch.Tensor]:
        """The tensors that a user of stock Transformers would make of a conversation."""
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        images = pictures_of(messages)
        return dict(processor(text=[text], images=images or None, return_tensors="pt"))

    def batch(self, processor: Processor, chats: list[Messages]) -> dict[str, torch.Tensor]:
        """Several conversations, padded on the left."""
        render = processor.apply_chat_template
        texts = [render(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        images = [pictures_of(chat) for chat in chats]
        flat = [image for row in images for image in row]
        processor.tokenizer.padding_side = "left"
        nested = self.nests_images
        given = images if nested else flat
        return dict(processor(text=texts, images=given, padding=True, return_tensors="pt"))

    nests_images = False  # whether the processor wants one list of images per text
    takes_text_alone = True  # whether the processor takes a prompt without a picture

    # -- helpers ---------------------------------------------------------------------------------

    @property
    def parts(self) -> tuple[PreTrainedModel, Processor]:
        """Model and processor, made once per class."""
        suite = type(self)
        if suite not in _MADE:
            model, processor = self.make_model()
            _MADE[suite] = model.to(_DEVICE, getattr(torch, _DTYPE)), processor
        return _MADE[suite]

    def picture(self, seed: int, wide: bool = False) -> Image.Image:
        """Noise in blocks: every seed gives another picture."""
        return noise(seed, self.other_size if wide else self.size)

    def wrap(self, run: int | None = None, **options: Any) -> VLM:
        """An empty memory around the model, that reads at most `run` tokens in a pass."""
        vlm = ks.wrap(*self.parts, **options)
        if run is not None:
            vlm.runtime.engine.longest_pass = run
        return vlm

    def emptied(self, what: object = "memory", run: int | None = None) -> VLM:
        """As `wrap` gives, by one memory for all tests of a class that is emptied each time."""
        suite = type(self)
        for name in [name for name in _EMPTIED if name[0] is not suite]:
            _EMPTIED.pop(name).close()
        vlm = _EMPTIED.get((suite, what)) or self.wrap(run)
        vlm.clear()
        return _EMPTIED.setdefault((suite, what), vlm)

    def conversation(self) -> list[Messages]:
        """Prompts that continue, branch, swap and edit; each shares a part with an earlier one."""
        a, b, wide = self.picture(1), self.picture(2), self.picture(3, wide=True)
        first = [turn("What do you see in this picture here?", a)]
        second = [*first, answered("A pattern."), turn("And what about the colour of it?")]
        new_image = [*second, answered("Red."), turn("Compare it with these two.", b, wide)]
        equal_size = [*first, answered("A pattern."), turn("And in this one?", b)]
        swapped = [turn("What do you see in this picture here?", b)]
        text_first = [turn("You are looking at an album of pictures."), turn("This one?", a)]
        edited = [*first, answered("Another pattern."), turn("And what about the colour of it?")]
        return [first, second, new_image, equal_size, swapped, text_first, edited, second]

    def given(self, messages: Messages) -> dict[str, torch.Tensor]:
        """Tensors of a conversation as a user of stock Transformers would make them."""
        of = (type(self), "inputs")
        made = once(of, messages, lambda: self.inputs(self.parts[1], messages))
        return {name: copy.deepcopy(tensor).to(_DEVICE) for name, tensor in made.items()}

    def ask(self, vlm: VLM, messages: Messages, tokens: int = 1, **options: Any) -> Generated:
        """The public call on tensors, with all its results."""
        given = {**self.given(messages), **_WHOLE, **options}
        output: Generated = vlm.generate(**given, max_new_tokens=tokens)
        return output

    def logits(self, vlm: VLM, messages: Messages) -> torch.Tensor:
        """The logits after a prompt."""
        return logits_of(self.ask(vlm, messages))[0]

    def cold(self, messages: Messages, run: int | None = None) -> torch.Tensor:
        """The logits from a second memory, emptied before each prompt; computed once per prompt."""

        def logits() -> torch.Tensor:
            return self.logits(self.emptied(("cold", run), run), messages)

        return once((type(self), "cold", run), messages, logits)

    def stock(self, messages: Messages, tokens: int = 1) -> GenerateDecoderOnlyOutput:
        """Stock `generate` from pixels, without an earlier cache; computed once per prompt."""

        def generated() -> GenerateDecoderOnlyOutput:
            given = {**self.given(messages), **_WHOLE}
            output = self.parts[0].generate(**given, max_new_tokens=tokens)
            setattr(output, RETURNED, None)  # they are not used
            return output

        return once((type(self), "stock", tokens), messages, generated)

    def expect_as_stock(self, vlm: VLM, messages: Messages, what: str) -> Generated:
        """Same tokens unless two logits tie; logits within the tolerance of their scale."""
        stock, ours = self.stock(messages, self.tokens), self.ask(vlm, messages, self.tokens)
        for step, wanted in enumerate(stock.logits):
            scale = float(wanted.abs().max())
            off = float((wanted - logits_of(ours)[step]).abs().max()) / scale
            near = self.near(self.parts[0].dtype)
            expect(off < near, f"{what}, step {step}: logits off by {off:.2g} of scale")
            if int(wanted.argmax()) != int(logits_of(ours)[step].argmax()):
                break
        return ours

    def same(self, vlm: VLM, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether logits are equal as far as this memory promises: in bits, or to rounding."""
        if vlm.runtime.rule.kernels:
            return torch.equal(one, other)
        near = self.near(vlm.model.dtype)
        return bool((one - other).abs().max() <= near * other.abs().max())

    def near(self, dtype: torch.dtype) -> float:
        """The part of the logits' scale that is rounding."""
        return self.tolerance if dtype == torch.float32 else 5e-2

    def expect_differ(self, one: torch.Tensor, other: torch.Tensor, what: str) -> None:
        """Control: require a difference."""
        off = float((one - other).abs().max()) / float(one.abs().max())
        expect(off > 100 * self.tolerance, f"the control: {what} must show, it changed {off:.2g}")

    # -- the promises ----------------------------------------------------------------------------

    def test_answers_are_those_of_stock_and_warm_equals_cold(self) -> None:
        """Warm and cold, for every prompt of a conversation that continues, branches and swaps."""
        with self.wrap() as vlm:
            for number, messages in enumerate(self.conversation()):
                ours = self.expect_as_stock(vlm, messages, f"prompt {number}")
                same = self.same(vlm, logits_of(ours)[0], self.cold(messages))
                expect(same, f"prompt {number}: warm equals cold bit for bit")
                vlm.runtime.tree.check()

    def test_it_reuses_what_it_says(self) -> None:
        """Only uncached tokens go through the model; the report says what cannot be reused."""
        first, second, new_image, equal_size, *_ = self.conversation()
        vlm = self.emptied()
        cached = []
        for messages in (first, second, new_image, equal_size):
            before = vlm.stats()["engine"]["prefill_tokens"]
            usage = self.ask(vlm, messages).usage
            ran = vlm.stats()["engine"]["prefill_tokens"] - before
            expect(ran == usage.prompt_tokens - usage.cached_tokens, "all new tokens, once")
            cached.append(usage.cached_tokens)
        report = str(self.ask(vlm, [*new_image, answered("Yes."), turn("And?")]).report)
        whole = self.ask(vlm, first).usage
        expect(whole.cached_tokens == whole.prompt_tokens, "an identical prompt is reused whole")
        expect((cached[1] > 0) == (self.reuse != "whole prompt"), "a text turn goes on")
        goes_on = self.reuse == "prefix"
        expect((cached[2] > 0) == (cached[3] > 0) == goes_on, "a new picture goes on where it can")
        if self.reuse == "whole prompt":
            expect("not possible" in report, "the report says what cannot be reused")

    def test_interleaved_conversations_do_not_meet(self) -> None:
        """Two alternating conversations, on a model that other code left in any state."""
        model = self.parts[0]
        chats = [self.conversation()[:3], [self.conversation()[i] for i in (4, 5, 6)]]
        vlm = self.emptied()
        for steps in zip(*chats, strict=True):
            for messages in steps:
                wanted = self.cold(messages)
                for module in (model, model.base_model):
                    if hasattr(module, "rope_deltas"):
                        module.rope_deltas = torch.tensor([[999]])
                expect(self.same(vlm, self.logits(vlm, messages), wanted), "as if alone")

    def test_after_a_restart(self, tmp_path: Path) -> None:
        """A second memory over the same store: nothing is encoded, and the answer is the same."""
        second, new_image = self.conversation()[1:3]
        with self.wrap(store=tmp_path) as vlm:
            wanted = [self.logits(vlm, messages) for messages in (second, new_image)]
            vlm.flush()
        with self.wrap(store=tmp_path) as vlm:
            goes_on = [*second, answered("Red."), turn("Why is that so?")]
            usage = self.ask(vlm, goes_on).usage
            expect(usage.images_encoded == 0, "no picture is encoded again")
            expect((usage.cached_tokens > 0) == (self.reuse != "whole prompt"), "prefix from disk")
            for messages, logits in zip((second, new_image), wanted, strict=True):
                expect(torch.equal(self.logits(vlm, messages), logits), "the same after a restart")
            expect(self.same(vlm, self.logits(vlm, goes_on), self.cold(goes_on)), "and goes on so")

    def test_pictures_matter(self) -> None:
        """Control: another picture, two pictures exchanged, a remembered one replaced."""
        a, b, wide = self.picture(1), self.picture(2), self.picture(3, wide=True)
        question = "What do you see in this picture here?"
        vlm = self.emptied()
        one = self.logits(vlm, [turn(question, a)])
        self.expect_differ(one, self.logits(vlm, [turn(question, b)]), "another picture")
        both = self.logits(vlm, [turn(question, a, wide, b)])
        turned = self.logits(vlm, [turn(question, b, wide, a)])
        self.expect_differ(both, turned, "the order of the pictures")
        changed = a.copy()
        changed.putpixel((5, 5), (255, 0, 255))
        self.ask(vlm, [turn(question, a)])
        encoded = self.ask(vlm, [turn(question, changed)]).usage.images_encoded
        expect(encoded == 1, "a picture with one changed pixel is another picture")

    def test_positions_matter(self) -> None:
        """Control: shifted positions after the first picture give other logits."""
        if not self.positions_matter:
            return
        messages = self.conversation()[1]
        vlm = self.emptied()
        true, family = self.logits(vlm, messages), vlm.runtime.family
        right = family.positions

        def shifted(ids: np.ndarray, types: np.ndarray, grids: Sequence[Grid]) -> torch.Tensor:
            positions = right(ids, types, grids).clone()
            positions[..., len(ids) // 2 :] += 3
            return positions

        with swapped_in(family, "positions", shifted), self.wrap() as other:
            other.runtime = other.runtime.fresh(family)
            wrong = self.logits(other, messages)
        self.expect_differ(true, wrong, "a shifted position")

    def test_neighbours_change_nothing(self) -> None:
        """A picture gives the same features alone, beside a larger one and in another order."""
        small, wide = self.picture(1), self.picture(3, wide=True)
        with self.wrap() as vlm:
            for images in ((small,), (wide,), (small, wide), (wide, small), (small, small)):
                usage = self.ask(vlm, [turn(f"Look at these {len(images)}:", *images)]).usage
                expect(usage.images == len(images), "every picture is counted")
            expect(vlm.stats()["features"]["encoded"] == 2, "two pictures were encoded, ever")

    def test_the_tower_runs_once(self) -> None:
        """With the tower removed, known pictures still answer, in any new prompt."""
        a, b = self.picture(1), self.picture(2)
        messages = [turn("Something new in front of them.", b, a), turn("And now?")]
        vlm = self.emptied()
        self.ask(vlm, [turn("Look.", a, b)])
        with swapped_in(vlm.runtime.family, "encode", gone):
            self.expect_as_stock(vlm, messages, "features of known pictures")

    def test_cuts_anywhere_that_is_allowed(self) -> None:
        """Cuts inside runs of text, and in pictures whose tokens do not see ahead."""
        self.expect_as_stock_cut_every(23)

    def test_cuts_every_few_tokens(self) -> None:
        """The same, read seven tokens at a time."""
        self.expect_as_stock_cut_every(7)

    def expect_as_stock_cut_every(self, run: int) -> None:
        """Prompts that go on from others, read a few tokens at a time."""
        with self.wrap(run) as vlm:
            for number in (0, 2, 5, 2):
                messages = self.conversation()[number]
                self.expect_as_stock(vlm, messages, f"cut every {run}, prompt {number}")

    def test_any_cut_gives_the_same(self) -> None:
        """Reuse up to the last common token."""
        first, second, *_, edited, _ = self.conversation()
        with ks.wrap(*self.parts) as vlm, ks.wrap(*self.parts) as fresh:
            for messages in (first, second, edited):
                fresh.clear()
                equal = self.same(vlm, self.logits(vlm, messages), self.logits(fresh, messages))
                expect(equal, "warm equals cold, cut anywhere")
            vlm.runtime.check()

    def test_a_long_prompt(self) -> None:
        """Longer than a pass, and than a small model's window."""
        words = " ".join(str(number % 10) for number in range(self.long_words // 2))
        long = [turn(f"Numbers: {words}", self.picture(1))]
        goes_on = [*long, answered("Many."), turn("And this?", self.picture(2))]
        run = self.long_run
        with self.wrap(run) as vlm:
            for messages in (long, goes_on):
                ours = self.expect_as_stock(vlm, messages, "a long prompt")
                same = self.same(vlm, logits_of(ours)[0], self.cold(messages, run=run))
                expect(same and ours.usage.prompt_tokens > run, "warm equals cold")

    def test_rows_of_a_batch(self) -> None:
        """Left-padded rows equal each prompt alone, and all rows take each step together; a row of
        text alone stands among those with pictures."""
        _, second, new_image, *_ = self.conversation()
        chats = [second, [turn("Just this?", self.picture(2))], new_image]
        if self.takes_text_alone:
            chats.insert(1, [turn("No picture?")])
        inputs = self.batch(self.parts[1], chats)
        vlm = self.emptied()
        alone = [self.ask(vlm, chat, self.tokens) for chat in chats]
        before = vlm.stats()["engine"]["decode_steps"]
        given = {**inputs, **_WHOLE, "min_new_tokens": self.tokens}
        rows: Generated = vlm.generate(**given, max_new_tokens=self.tokens)
        steps = vlm.stats()["engine"]["decode_steps"] - before
        passes = (self.tokens - 1) * (1 if self.decodes_together else len(chats))
        expect(steps == passes, f"{passes} passes for all rows, not {steps}")
        for number, one in enumerate(alone):
            for wanted, found in zip(logits_of(one), logits_of(rows), strict=False):
                off = float((wanted - found[number]).abs().max() / wanted.abs().max())
                expect(off < self.tolerance, f"row {number} of a batch is off by {off:.2g}")
                if int(wanted.argmax()) != int(found[number].argmax()):
                    break

    def test_messages_are_rendered_as_the_processor_does(self) -> None:
        """The same ids as the processor's, and the same features through packages."""
        vlm = self.emptied()
        for number, messages in enumerate(self.conversation()):
            ids = self.given(messages)["input_ids"][0].tolist()
            expect(vlm.render(messages).ids.tolist() == ids, f"prompt {number}: same ids")
            by_messages = vlm.chat(messages, max_new_tokens=2, do_sample=False)
            cached = self.ask(vlm, messages).usage
            expect(cached.cached_tokens == len(ids), "messages and tensors meet in one path")
            expect(by_messages.usage.prompt_tokens == len(ids), "every token is counted")

    def test_stock_generate_from_packages(self) -> None:
        """`vlm.inputs` feeds stock `generate` with the tower removed, and gives equal bits."""
        model = self.parts[0]
        a, wide = self.picture(1), self.picture(3, wide=True)
        messages = [turn("What is in these?", a, wide)]
        vlm = self.emptied()
        packages = vlm.encode([a, wide])
        inputs = vlm.inputs(messages)
        stock = self.stock(messages)
        with swapped_in(vlm.runtime.family, "encode", gone):
            ours = self.ask_chat(vlm, [turn("What is in these?", *packages)])
        out = self.from_features(model, inputs)
        off = float((out - stock.logits[0]).abs().max() / out.abs().max())
        expect(off < self.tolerance, f"stock generate from packages is off by {off:.2g}")
        expect(ours == int(stock.logits[0].argmax()), "packages answer as pixels do")

    def ask_chat(self, vlm: VLM, messages: Messages) -> int:
        """The first token of an answer to messages."""
        return vlm.chat(messages, max_new_tokens=1, do_sample=False).tokens[0]

    def from_features(self, model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
        """Stock `generate` on features."""
        out = model.generate(**inputs, max_new_tokens=1, **_WHOLE)
        logits: torch.Tensor = out.logits[0]
        return logits

    def test_other_dtype(self) -> None:
        """Bfloat16: warm equals cold."""
        self.expect_warm_as_cold("bfloat16", self.attentions[:1])

    def test_other_attention(self) -> None:
        """Eager attention in float32, where it is not the model's own."""
        self.expect_warm_as_cold("float32", self.attentions[1:])

    def test_other_attention_in_other_dtype(self) -> None:
        """Both at once."""
        self.expect_warm_as_cold("bfloat16", self.attentions[1:])

    def expect_warm_as_cold(self, dtype: str, attentions: Sequence[str]) -> None:
        """Prompts that go on, of a copy of the model in another dtype or attention."""
        chosen = [self.conversation()[number] for number in (0, 2, 1)]
        for attention in attentions:
            model = copy.deepcopy(self.parts[0]).to(getattr(torch, dtype))
            model.set_attn_implementation(attention)
            with ks.wrap(model, self.parts[1]) as vlm:
                warm = [self.logits(vlm, messages) for messages in chosen]
                for messages, wanted in zip(chosen, warm, strict=True):
                    vlm.clear()
                    same = self.same(vlm, self.logits(vlm, messages), wanted)
                    expect(same, f"{dtype} {attention}: warm equals cold")
