"""Law 10: no input can break the engine. Each bad one gets its named error, and the next works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import build, picture, stock_inputs, turn

import keepsight as ks
from keepsight.errors import (
    Closed,
    ImageError,
    InputError,
    KeepsightError,
    MessagesError,
    PlaceholderMismatch,
    UnsupportedInput,
)


def test_message_shapes(dense: Any) -> None:
    image = picture(1)
    shapes: list[list[Any]] = [
        [{"role": "user", "content": [{"type": "image", "image": image}, "Describe it."]}],
        [{"role": "user", "content": [image, {"type": "text", "text": "Describe it."}]}],
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": image}},
                    {"type": "input_text", "text": "Describe it."},
                ],
            }
        ],
        [{"role": "user", "content": [{"image": image}, {"text": "Describe it."}]}],
    ]
    found = {tuple(dense.chat(messages, max_new_tokens=6).tokens) for messages in shapes}
    assert len(found) == 1


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], MessagesError),
        ("hello", MessagesError),
        ([{"content": "hello"}], MessagesError),
        ([{"role": "user", "content": "half \ud800"}], InputError),
        ([{"role": "user", "content": 3}], MessagesError),
        ([{"role": "user", "content": [{"type": "smell"}]}], MessagesError),
        ([{"role": "user", "content": [{"type": "image"}]}], ImageError),
        ([{"role": "user", "content": [{"type": "text", "text": 4}]}], MessagesError),
        ([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], UnsupportedInput),
        ([{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}], UnsupportedInput),
    ],
)
def test_bad_messages(demo_parts: Any, messages: Any, error: type[Exception]) -> None:
    model, processor = demo_parts["demo"]
    with ks.wrap(model, processor) as vlm:
        with pytest.raises(error):
            vlm.chat(messages)
        assert vlm.chat([turn("Hello!")], max_new_tokens=2).tokens


def test_one_bad_picture_of_several_is_told(dense: Any) -> None:
    damaged = b"\x89PNG\r\n\x1a\n" + bytes(40)
    with pytest.raises(ImageError, match="^image 2 of 3: "):
        dense.ask([picture(1), damaged, picture(2)], "Which?")
    with pytest.raises(ImageError, match="^(?!image)"):
        dense.ask(damaged, "Which?")
    assert dense.ask(picture(1), "Which?", max_new_tokens=2).usage.images == 1


def test_bad_tensors() -> None:
    model, processor = build("qwen3_vl")
    inputs = stock_inputs(processor, [turn("Two.", picture(1), picture(2, 160, 96))])
    with ks.wrap(model, processor) as vlm:
        good = vlm.generate(**inputs, max_new_tokens=3, do_sample=False)

        def refused(error: type[Exception], **changed: Any) -> None:
            merged = {**inputs, **changed}
            with pytest.raises(error):
                vlm.generate(**{k: v for k, v in merged.items() if v is not None})

        refused(PlaceholderMismatch, pixel_values=None, image_grid_thw=None)
        refused(InputError, image_grid_thw=None)
        refused(PlaceholderMismatch, image_grid_thw=inputs["image_grid_thw"][:1])
        refused(PlaceholderMismatch, pixel_values=inputs["pixel_values"][:-4])
        refused(InputError, pixel_values=inputs["pixel_values"].long())
        refused(KeepsightError, pixel_values=inputs["pixel_values"][:, :7])
        refused(InputError, input_ids=inputs["input_ids"].float())
        refused(InputError, input_ids=inputs["input_ids"][0])
        refused(InputError, input_ids=inputs["input_ids"] + 5000)
        refused(InputError, input_ids=inputs["input_ids"][:, :0])
        less = inputs["input_ids"].clone()
        less[less == 6] = 20
        refused(PlaceholderMismatch, input_ids=less, mm_token_type_ids=None)
        one_less = inputs["input_ids"].clone()
        one_less[0, int((one_less[0] == 6).nonzero()[0])] = 20
        refused(PlaceholderMismatch, input_ids=one_less, mm_token_type_ids=None)
        refused(UnsupportedInput, mm_token_type_ids=torch.zeros_like(inputs["input_ids"]))
        hole = inputs["attention_mask"].clone()
        hole[0, 5] = 0
        refused(UnsupportedInput, attention_mask=hole)
        refused(InputError, attention_mask=hole[:, :-1])
        positions = torch.arange(inputs["input_ids"].shape[1])[None]
        refused(UnsupportedInput, position_ids=positions)
        refused(InputError, pixel_values_videos=inputs["pixel_values"])
        for name, tensor in inputs.items():
            refused(InputError, **{name: tensor.to_sparse()})
            refused(InputError, **{name: tensor.to("meta")})
        for seed in (2**70, -(2**70), "one", 1.5):
            refused(InputError, do_sample=True, seed=seed)
        refused(InputError, stop="half \ud800")
        assert torch.equal(vlm.generate(**inputs, max_new_tokens=3, do_sample=False), good)
        vlm.runtime.tree.check()


def test_more_images_than_the_template_writes(dense: Any) -> None:
    with ks.wrap(dense.model, dense.processor, chat_template="{{ 'no pictures here' }}") as vlm:
        with pytest.raises(PlaceholderMismatch, match="0 image placeholders for 1"):
            vlm.ask(picture(1), "What?")
    with ks.wrap(dense.model, dense.processor, chat_template="{{ raise_exception('no!') }}") as vlm:
        with pytest.raises(MessagesError, match="no!"):
            vlm.ask(picture(1), "What?")


def test_a_token_that_the_model_does_not_know() -> None:
    model, processor = build("qwen3_vl")
    processor.tokenizer.add_tokens([f"zebra{i}" for i in range(600)])
    with ks.wrap(model, processor) as vlm:
        for call in (vlm.chat, vlm.prepare, vlm.inputs, lambda chat: vlm.score(chat, ["a"])):
            with pytest.raises(InputError, match="resize_token_embeddings"):
                call([turn("zebra599", picture(1))])
        assert vlm.chat([turn("Hello!")], max_new_tokens=2).tokens


def test_without_a_processor() -> None:
    model, processor = build("qwen3_vl")
    inputs = stock_inputs(processor, [turn("One.", picture(1))])
    with ks.wrap(model) as vlm:
        stock = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        assert torch.equal(vlm.generate(**inputs, max_new_tokens=4, do_sample=False), stock)
        with pytest.raises(InputError, match="without a processor"):
            vlm.chat([turn("Hello!")])


def test_closed(dense: Any) -> None:
    with ks.wrap(dense.model, dense.processor) as vlm:
        session = vlm.session()
    for call in (
        lambda: vlm.chat([turn("Hello!")]),
        lambda: session.ask("Hello!"),
        lambda: vlm.encode(picture(1)),
        lambda: vlm.generate(torch.ones(1, 3, dtype=torch.long)),
    ):
        with pytest.raises(Closed):
            call()
    vlm.close()


def test_an_unusable_store_is_one_warning(
    demo_parts: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    model, processor = demo_parts["demo"]
    with ks.wrap(model, processor, store=blocked) as vlm:
        for _ in range(2):
            assert vlm.ask(picture(1), "Describe it.", max_new_tokens=2).tokens
        with pytest.raises(KeepsightError):
            vlm.flush()
    warnings = [r for r in caplog.records if "going on without" in r.message]
    assert len(warnings) == 1


def test_photographs_go_through(dense: Any) -> None:
    """Whatever the tiny model says about it, a photograph of any size gets an answer."""
    for size in ((4000, 3000), (640, 1136), (33, 47), (1, 1), (3000, 100)):
        assert dense.ask(picture(5, *size), "What is in this picture?", max_new_tokens=4).tokens
