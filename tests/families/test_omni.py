"""The Omni thinkers: the shipped suite for their images, and sound as a medium like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import build, picture, suite_of

import keepsight as ks
from keepsight.errors import ImageError, InputError, PlaceholderMismatch, UnsupportedModel

KINDS = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")


TestQwen25Omni = suite_of(KINDS[0])
TestQwen3OmniMoe = suite_of(KINDS[1])


def sound(seed: int, seconds: float = 1.0) -> np.ndarray:
    """A few notes: every seed another tune."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(16_000 * seconds)) / 16_000
    waves = [np.sin(2 * np.pi * f * time) * (time > s) for f, s in rng.uniform(0, 1, (4, 2)) * 2000]
    noise = rng.normal(0, 0.05, len(time))
    return (np.sum(waves, axis=0) / 4 + noise).astype(np.float32)


def turn(text: str, *media: Any, role: str = "user") -> dict[str, Any]:
    parts: list[Any] = [
        {"type": "audio", "audio": m}
        if isinstance(m, np.ndarray)
        else {"type": "image", "image": m}
        for m in media
    ]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}


def stock_inputs(processor: Any, messages: list[Any]) -> dict[str, torch.Tensor]:
    parts = [part for message in messages for part in message["content"]]
    images = [part["image"] for part in parts if part["type"] == "image"]
    clips = [part["audio"] for part in parts if part["type"] == "audio"]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[text], images=images or None, audio=clips or None, return_tensors="pt")
    return dict(inputs)


def conversation(kind: str = KINDS[0]) -> list[list[Any]]:
    """Qwen3-Omni's processor pads to the longest of a call before it looks at frequencies, so the
    end of a clip comes out otherwise beside a longer one; messages prepare each clip alone."""
    a, b = sound(1), sound(2, 1.7 if kind == KINDS[0] else 1.0)
    first = [turn("What do you hear in this clip?", a)]
    second = [*first, turn("A tune.", role="assistant"), turn("And what else is there?")]
    mixed = [*second, turn("Noise.", role="assistant"), turn("Does it fit?", picture(1), b)]
    swapped = [turn("What do you hear in this clip?", sound(3))]
    return [first, second, mixed, swapped, second]


def ask(owner: Any, inputs: dict[str, Any]) -> Any:
    return owner.generate(
        **inputs,
        max_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_sound_is_remembered(kind: str) -> None:
    model, processor = build(kind)
    with ks.wrap(model, processor) as vlm:
        for number, messages in enumerate(conversation(kind)):
            inputs = stock_inputs(processor, messages)
            stock, warm = ask(model, inputs), ask(vlm, inputs)
            for wanted, found in zip(stock.logits, warm.logits, strict=True):
                assert float((wanted - found).abs().max()) < 1e-4 * float(wanted.abs().max())
            with ks.wrap(model, processor) as fresh:
                assert torch.equal(ask(fresh, inputs).logits[0], warm.logits[0])
            assert vlm.render(messages).ids.tolist() == inputs["input_ids"][0].tolist()
            reply = vlm.chat(messages, max_new_tokens=2, do_sample=False)
            assert reply.usage.cached_tokens == reply.usage.prompt_tokens
            if number in (1, 2):
                assert warm.usage.cached_tokens > 0
            if number == 2:
                assert warm.usage.images == 3 and warm.usage.images_encoded == 2
                assert "audio" in str(warm.report) and "image" in str(warm.report)


@pytest.mark.parametrize("kind", KINDS)
def test_sound_matters_and_is_a_package(kind: str, tmp_path: Any) -> None:
    model, processor = build(kind)
    one, other = (ask(model, stock_inputs(processor, conversation()[i])).logits[0] for i in (0, 3))
    assert float((one - other).abs().max()) > 1e-2 * float(one.abs().max())
    with ks.wrap(model, processor) as vlm:
        pack = vlm.encode({"type": "audio", "audio": sound(1)})
        assert pack.modality == "audio"
        again = ks.Package.load(pack.save(tmp_path / "tune.sight"))
        assert torch.equal(again.tensors["features"], pack.tensors["features"])
        reply = vlm.chat(
            [{"role": "user", "content": [{"type": "audio", "audio": again}, "What is it?"]}],
            max_new_tokens=2,
        )
        assert reply.usage.images_encoded == 0
        inputs = vlm.inputs(conversation()[0])
        off = ask(model, inputs).logits[0] - one
        assert float(off.abs().max()) < 1e-4 * float(one.abs().max())


def test_a_saved_session_holds_the_sound_in_its_messages(tmp_path: Path) -> None:
    model, processor = build(KINDS[0])
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}
    with ks.wrap(model, processor) as vlm:
        chat = vlm.session()
        chat.messages = [*conversation()[0], {"role": "assistant", "content": "A tune."}]
        chat.save(tmp_path / "talk.keep")
        wanted = chat.ask("So?", **options)
    with ks.wrap(model, processor) as vlm:
        found = vlm.resume(tmp_path / "talk.keep").ask("So?", **options)
    assert found.tokens == wanted.tokens and found.usage.images_encoded == 0


def test_bad_sound_is_refused_by_name() -> None:
    model, processor = build(KINDS[0])
    good = conversation()[0]
    with ks.wrap(model, processor) as vlm:
        wanted = vlm.chat(good, max_new_tokens=2).tokens
        for clip, error in (
            ({"array": sound(1), "sampling_rate": 8000}, InputError),
            (np.zeros((2, 100), np.float32), ImageError),
            (np.full(1000, np.nan, np.float32), ImageError),
            (np.zeros(0, np.float32), ImageError),
        ):
            content = [{"type": "audio", "audio": clip}, {"type": "text", "text": "?"}]
            with pytest.raises(error):
                vlm.chat([{"role": "user", "content": content}])
        inputs = stock_inputs(processor, good)
        short = inputs["feature_attention_mask"].clone()
        short[:, 40:] = 0
        for change, refusal in (
            ({"feature_attention_mask": None}, InputError),
            ({"feature_attention_mask": short}, PlaceholderMismatch),
            ({"input_features": None, "feature_attention_mask": None}, PlaceholderMismatch),
        ):
            with pytest.raises(refusal):
                vlm.generate(**{**inputs, **change})
        assert vlm.chat(good, max_new_tokens=2).tokens == wanted


def video_prompt(model: Any, count: int) -> dict[str, torch.Tensor]:
    """Some words, a video of three steps in time, more words; and so on."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    width = 3 * 2 * config.vision_config.patch_size**2
    ids: list[int] = []
    for _ in range(count):
        words = torch.randint(20, 500, (24,), generator=generator).tolist()
        film = [config.video_token_id] * 12
        ids += [*words, config.vision_start_token_id, *film, config.vision_end_token_id, *words]
    return {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "pixel_values_videos": torch.randn(96, width, generator=generator.manual_seed(1))[
            : 48 * count
        ],
        "video_grid_thw": torch.tensor([[3, 4, 4]] * count),
        "video_second_per_grid": torch.tensor([1.0, 0.5][:count]),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_videos_as_tensors(kind: str) -> None:
    model, _ = build(kind)
    with ks.wrap(model, None) as vlm:
        for count in (1, 2):
            inputs = video_prompt(model, count)
            stock, ours = ask(model, inputs), ask(vlm, inputs)
            for wanted, found in zip(stock.logits, ours.logits, strict=True):
                assert float((wanted - found).abs().max()) < 1e-4 * float(wanted.abs().max())
        assert ours.usage.cached_tokens > 0 and ours.usage.images_encoded == 1
        del inputs["video_second_per_grid"]
        with pytest.raises(InputError, match="video_second_per_grid"):
            vlm.generate(**inputs)


def test_the_whole_omni_model_is_sent_to_its_thinker() -> None:
    model, processor = build(KINDS[0])
    model.thinker = torch.nn.Identity()
    try:
        with pytest.raises(UnsupportedModel, match="thinker"):
            ks.wrap(model, processor)
    finally:
        del model.thinker
