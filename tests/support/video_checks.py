"""Videos through the real video processors; run by `test_video_files.py` in a pytest of its own.

Upstream's video processors need torchvision. The one that installs beside a CPU torch imports only
after two of its operators are declared, and then changes which image processors Transformers picks:
so it is kept out of every other test.
"""

from __future__ import annotations

import copy
import io
import tempfile
import threading
import time
from dataclasses import replace
from typing import Any

import av
import numpy as np
import pytest
import torch
import transformers

import keepsight as ks
from keepsight.errors import ImageError, InputError
from keepsight.media.video_files import VideoFile, chooser
from keepsight.models import loading
from keepsight.models.partial_processor import partial_processor
from support.model_parts import TEMPLATE
from support.models import build, picture

# What the templates write for an image and for a video.
VIDEO_WORDS = {
    "qwen2": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|vision_start|><|video_pad|><|vision_end|>",
    ),
    "qwen3": ("<|vision_start|><|image_pad|><|vision_end|>", "<|video_pad|>"),
    "glm4v": (
        "<|begin_of_image|><|image|><|end_of_image|>",
        "<|begin_of_video|><|video|><|end_of_video|>",
    ),
}
VIDEO_WORDS["glm46"] = VIDEO_WORDS["glm4v"]
# Each video processor; the others are of models that have one of these.
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2_vl", "qwen3_5")]
EACH = pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "glm4v", "glm46v", *SLOW])
SOME = pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "glm46v"])
GLM_SIZE = {"shortest_edge": 2 * 16 * 28 * 28, "longest_edge": 12 * 64 * 28 * 28}
SIZE = {"shortest_edge": 32 * 32 * 8, "longest_edge": 128 * 128 * 64}


def frames(seed: int, count: int = 6) -> np.ndarray:
    return np.stack([np.asarray(picture(seed * 100 + i)) for i in range(count)])


def mp4(shown: np.ndarray, rate: int) -> bytes:
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width = stream.height = 96
        for one in shown:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(one, format="rgb24")))
        container.mux(stream.encode())
    return data.getvalue()


def parts(kind: str) -> tuple[Any, Any]:
    """A model and its processor with a real video processor."""
    model, processor = build(kind)
    processor = copy.copy(processor)
    patch = model.config.vision_config.patch_size
    name, size = {"qwen2": ("Qwen2VL", SIZE), "qwen3": ("Qwen3VL", SIZE)}.get(
        kind[:5], ("Glm4v" if kind == "glm4v" else "Glm46V", GLM_SIZE)
    )
    options: dict[str, Any] = {"patch_size": patch, "size": size, "do_sample_frames": False}
    processor.video_processor = getattr(transformers, f"{name}VideoProcessor")(**options)
    image, video = VIDEO_WORDS[kind[:5]]
    processor.chat_template = TEMPLATE.replace("IMAGE", image).replace(
        "{%- elif part.type == 'text' -%}",
        "{%- elif part.type == 'video' -%}{{- '" + video + "' -}}{%- elif part.type == 'text' -%}",
    )
    return model, processor


def turn(text: str, *media: Any, role: str = "user") -> dict[str, Any]:
    kinds = ["video" if isinstance(m, dict) else "image" for m in media]
    content: list[Any] = [{"type": k, k: m} for k, m in zip(kinds, media, strict=True)]
    return {"role": role, "content": [*content, {"type": "text", "text": text}]}


def stock_inputs(processor: Any, messages: list[Any]) -> dict[str, Any]:
    content = [part for message in messages for part in message["content"]]
    images = [part["image"] for part in content if part["type"] == "image"]
    videos = [part["video"] for part in content if part["type"] == "video"]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    about = [
        {
            "total_num_frames": len(v["frames"]),
            "fps": v["fps"],
            "frames_indices": list(range(len(v["frames"]))),
        }
        for v in videos
    ]
    return dict(
        processor(
            text=[text],
            images=images or None,
            videos=[v["frames"] for v in videos] or None,
            video_metadata=about or None,
            return_tensors="pt",
        )
    )


def ask(owner: Any, inputs: dict[str, Any]) -> Any:
    return owner.generate(
        **inputs,
        max_new_tokens=3,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


@EACH
def test_messages_are_answered_as_by_stock(kind: str) -> None:
    """Messages give stock's ids and stock's logits; features are made once."""
    model, processor = parts(kind)
    a, b = ({"frames": frames(s), "fps": 2.0} for s in (1, 2))
    first = [turn("What happens in this video?", a)]
    more = (b,) if kind.startswith("glm") else (picture(5), b)  # stock GLM cannot take both
    second = [*first, turn("Nothing.", role="assistant"), turn("And here?", *more)]
    other_speed = [turn("What happens in this video?", {**a, "fps": 4.0})]
    with ks.wrap(model, processor) as vlm:
        for messages in (first, second, other_speed):
            inputs = stock_inputs(processor, messages)
            assert vlm.render(messages).ids.tolist() == inputs["input_ids"][0].tolist(), kind
            inputs = {n: v for n, v in inputs.items() if isinstance(v, torch.Tensor | list)}
            stock = ask(model, inputs).logits
            seconds = inputs.pop("second_per_grid_ts", None)
            if seconds is not None:
                inputs["second_per_grid_ts"] = torch.tensor(seconds)
            ours = ask(vlm, inputs)
            for wanted, found in zip(stock, ours.logits, strict=True):
                assert float((wanted - found).abs().max()) < 1e-4 * float(wanted.abs().max()), kind
            reply = vlm.chat(messages, max_new_tokens=1, do_sample=False)
            assert reply.usage.cached_tokens == reply.usage.prompt_tokens, kind
            assert reply.tokens[0] == int(stock[0].argmax()), kind
            found = vlm.verify(messages, stock=True)
            assert found.equal and found.stock_same_tokens, kind
        pack = vlm.encode({"type": "video", "video": a})
        assert pack.modality == "video"


def about(film: Any) -> list[Any]:
    content = [{"type": "video", "video": film}, {"type": "text", "text": "What happens?"}]
    return [{"role": "user", "content": content}]


def chat(vlm: Any, film: Any) -> Any:
    return vlm.chat(about(film), max_new_tokens=3)


@SOME
def test_a_film_that_grows(kind: str) -> None:
    """A film that grows is prefilled from its first new step on; its package is the same film."""
    model, processor = parts(kind)
    film = frames(1, 10)
    short, long = ({"frames": film[:count], "fps": 2.0} for count in (6, 10))
    with ks.wrap(model, processor) as vlm:
        chat(vlm, short)
        grown, size = chat(vlm, long), vlm.encode({"type": "video", "video": short}).tokens
        assert grown.usage.cached_tokens > size, (kind, grown.usage)
        with ks.wrap(model, processor) as fresh:
            assert chat(fresh, long).tokens == grown.tokens, kind
        package = vlm.encode({"type": "video", "video": long})
        again = chat(vlm, package)
        assert again.usage.cached_tokens == again.usage.prompt_tokens, kind
        forged = replace(package, about={**package.about, "steps": ["f" * 64] * 5})
        before = int((vlm.render(about(long)).types == 2).argmax())
        assert chat(vlm, forged).usage.cached_tokens <= before, kind


def test_a_file() -> None:
    """A video file is decoded with its own rate, and named by its frames."""
    model, processor = parts("qwen3_vl")
    data = mp4(frames(1), 5)
    with ks.wrap(model, processor) as vlm:
        messages = [turn("What is it?", {"frames": frames(1), "fps": 5.0})]
        messages[0]["content"][0]["video"] = data
        reply = vlm.chat(messages, max_new_tokens=2)
        assert "video" in str(reply.report)
        assert vlm.chat(messages, max_new_tokens=2).usage.images_encoded == 0
        messages[0]["content"][0]["video"] = data[:200]
        with pytest.raises(ImageError, match="cannot be decoded"):
            vlm.chat(messages)


@SOME
def test_frames_of_a_file_are_chosen(kind: str) -> None:
    """Of a file only the frames that the processor would choose are held; the same features."""
    model, processor = parts(kind)
    processor.video_processor.do_sample_frames = True
    processor.video_processor.fps = 2
    data = mp4(frames(1, 40), 10)
    film = VideoFile(data)
    every, about = film.decode()
    chosen = film.decode(chooser(processor))[0]
    assert len(every) == 40 and len(chosen) < (20 if kind.startswith("qwen") else 41), kind
    with ks.wrap(model, processor) as vlm:
        whole = vlm.encode({"type": "video", "video": {"frames": every, "fps": about["fps"]}})
        file = vlm.encode({"type": "video", "video": data})
        assert (file.key, file.grid) == (whole.key, whole.grid), kind
        assert file.layout == whole.layout, kind


def test_a_film_that_is_watched() -> None:
    """Frames are read and prefilled while a question may come at any time."""
    model, processor = parts("qwen2_5_vl")
    film, gate = frames(1, 12), threading.Event()

    def camera() -> Any:
        yield from film[:6]
        gate.wait(60)
        yield from film[6:]
        raise OSError("unplugged")

    with ks.wrap(model, processor) as vlm:
        session = vlm.session(system="Look closely.")
        with session.watch(camera(), fps=2.0) as watch:
            assert watch.wait(frames=6, timeout=60) == 6 and not watch.ended
            first = watch.ask("What is there?", max_new_tokens=3)
            gate.set()
            assert watch.wait(timeout=60) == 12 and watch.ended
            reply = watch.ask("And now?", max_new_tokens=3)
        assert "unplugged" in str(watch.error) and "ended early" in str(reply.report.notes)
        known = vlm.encode({"type": "video", "video": {"frames": film[:6], "fps": 2.0}}).tokens
        assert reply.usage.cached_tokens > known, reply.usage
        roles = [message["role"] for message in session.messages]
        assert roles == ["system", *["user", "assistant"] * 2]
        with ks.wrap(model, processor) as fresh:
            again = fresh.chat(session.messages[:-1], max_new_tokens=3)
            assert again.tokens == reply.tokens and first.tokens
        thanks = session.ask("Thank you.", videos={"frames": film[:4]}, max_new_tokens=2)
        assert thanks.usage.images == 2
        with vlm.session().watch(iter(film), fps=2.0, budget=8) as window:
            window.wait(timeout=60)
            assert window.seen == 12 and 6 <= window.frames <= 8
            assert window.ask("What?", max_new_tokens=2).tokens
        changed = [film[0], film[1][:48]]
        with vlm.session().watch(changed) as wrong:
            wrong.wait(timeout=60)
            assert "one size" in str(wrong.error) and wrong.frames == 1
        with vlm.session().watch([]) as nothing, pytest.raises(ImageError, match="no frame was"):
            nothing.ask("What?")
        with pytest.raises(InputError, match="cannot watch"):
            vlm.session().watch(b"bytes")
        with vlm.session().watch("no-such.mp4") as missing:
            missing.wait(timeout=60)
            with pytest.raises(ImageError, match="no-such.mp4 cannot be watched"):
                missing.ask("What?")


def test_films_in_a_conversation() -> None:
    """A film stands where it was first asked about, and takes no place of another medium."""
    model, processor = parts("qwen3_vl")
    film = frames(1, 6)

    def media(session: Any) -> list[str]:
        told = [part for message in session.messages for part in message["content"]]
        return [part["type"] for part in told if part["type"] != "text"]

    with ks.wrap(model, processor) as vlm:
        session = vlm.session()
        with session.watch(iter(film)) as one, session.watch(film[::-1].copy()) as other:
            one.wait(timeout=60), other.wait(timeout=60)
            session.ask("Which?", images=picture(4), max_new_tokens=2)
            assert one.ask("What is there?", max_new_tokens=2).usage.images == 2
            asked = session.messages[2]["content"]
            assert [part["type"] for part in asked] == ["video", "text"]
            assert asked[1]["text"] == "What is there?"
            other.ask("And there?", max_new_tokens=2)
            one.ask("And now?", max_new_tokens=2)
            assert media(session) == ["image", "video", "video"]
            session.edit(1, "What else?", max_new_tokens=2)  # keeps the film of its turn
            assert media(session) == ["image", "video"]
            one.ask("And now?", max_new_tokens=2)
            assert media(session) == ["image", "video"]
            session.edit(1, "What else?", videos=[], max_new_tokens=2)
            assert media(session) == ["image"]
            one.ask("And now?", max_new_tokens=2)
            assert media(session) == ["image", "video"]


def test_what_is_watched_by_mistake() -> None:
    """What cannot be watched is refused in words, and a source that ends says why."""
    model, processor = parts("qwen3_vl")
    film = frames(1, 4)

    def leaves() -> Any:
        yield from film
        raise SystemExit(3)

    with ks.wrap(model, processor) as vlm:
        session = vlm.session()
        for wrong in (None, object(), True):
            with pytest.raises(InputError, match="cannot watch"):
                session.watch(wrong)
        with pytest.raises(InputError, match=r"make iter\(function, None\)"):
            session.watch(lambda: film[0])
        for fps in ("2", None, True, float("nan"), 0):
            with pytest.raises(InputError, match="expected a positive number"):
                session.watch(film, fps=fps)
        for budget in ("8", 8.5, True, 7, None):
            with pytest.raises(InputError, match="frames; expected at least 8"):
                session.watch(film, budget=budget)
        with session.watch(leaves(), fps=np.float32(2), budget=np.int64(8)) as watch:
            watch.wait(timeout=60)
            assert "SystemExit(3)" in str(watch.ask("What?", max_new_tokens=1).report.notes)
        with session.watch(film[..., 0]) as gray:
            gray.wait(timeout=60)
            assert "of shape (96, 96) is no frame" in str(gray.error)
        with pytest.raises(ImageError, match=r"a clip of 1 frames \(\(1, 96, 96, 3\)\)"):
            vlm.encode({"type": "video", "video": film[:1]})


def test_a_film_that_nobody_watches() -> None:
    ended, film = threading.Event(), frames(1, 2)

    def camera() -> Any:
        try:
            while True:
                yield film[0]
                time.sleep(0.01)
        finally:
            ended.set()

    with ks.wrap(*parts("qwen3_vl")) as vlm:
        watch = vlm.session().watch(camera(), budget=8)
        assert watch.wait(frames=4, timeout=60) >= 4
        started = [one for one in threading.enumerate() if one.name.startswith("keepsight-")]
        del watch
        assert ended.wait(60)
        for thread in started:
            thread.join(60)
            assert not thread.is_alive()


def test_what_was_saved_without_torchvision() -> None:
    """What was saved where torchvision was missing loads whole where it is not."""
    path = loading.model_path("demo")
    with tempfile.TemporaryDirectory() as folder:
        partial_processor(path, {}).save_pretrained(folder)
        saved = transformers.AutoProcessor.from_pretrained(folder)
    stock = transformers.AutoProcessor.from_pretrained(path)
    assert type(saved) is type(stock) and saved.to_dict() == stock.to_dict()
    clip = frames(1)
    for one, other in zip(
        *(p.video_processor([clip]).values() for p in (saved, stock)), strict=True
    ):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
