"""Processors that were loaded without torchvision: saved, copied, and asked for what they lack."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import folder_of, picture, turn

import keepsight as ks
from keepsight.errors import MissingExtra
from keepsight.models import loading
from keepsight.models.partial_processor import NotLoaded, partial_processor

KINDS = ["demo", "internvl", "qwen2_5_omni_thinker"]
CLIP = np.zeros((4, 64, 64, 3), dtype=np.uint8)


@pytest.fixture(params=KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A processor that upstream cannot build without torchvision."""
    kind = request.param
    if kind in loading.DEMO:
        return partial_processor(loading.model_path(kind), {})
    folder = folder_of(kind, tmp_path / kind)
    if "omni" in kind:  # a part of a model, for which no processor is the usual one
        (folder / "processor_config.json").write_text('{"processor_class": "Qwen2_5OmniProcessor"}')
    return partial_processor(str(folder), {})


def same(one: Any, other: Any) -> bool:
    """Whether two processors make the same of a picture and a question."""
    found = []
    for processor in (one, other):
        text = processor.apply_chat_template([turn("Look.", picture(1))], tokenize=False)
        found.append(dict(processor(text=[text], images=[picture(1)], return_tensors="pt")))
    names = found[0].keys() | found[1].keys()
    return all(torch.equal(found[0][name], found[1][name]) for name in names)


def test_what_is_saved_loads_again(loaded: Any, tmp_path: Path) -> None:
    loaded.save_pretrained(tmp_path / "saved")
    again = partial_processor(str(tmp_path / "saved"), {})
    assert type(again).__mro__[1:] == type(loaded).__mro__[1:] and same(loaded, again)
    again.save_pretrained(tmp_path / "more")
    one, other = (tmp_path / name / "processor_config.json" for name in ("saved", "more"))
    assert one.read_text() == other.read_text()


def test_what_the_checkpoint_says_of_videos_is_saved(tmp_path: Path) -> None:
    loaded = partial_processor(loading.model_path("demo"), {})
    loaded.save_pretrained(tmp_path)
    assert isinstance(loaded.video_processor, NotLoaded)
    config = partial_processor(str(tmp_path), {}).video_processor.config
    assert config == loaded.video_processor.config
    assert config["video_processor_type"] == "Qwen3VLVideoProcessor"


def test_a_model_saved_with_its_processor_answers_as_before(tmp_path: Path) -> None:
    with ks.load("demo") as vlm:
        answer = vlm.ask(picture(1), "Describe it.", max_new_tokens=4).tokens
        vlm.model.save_pretrained(tmp_path)
        partial_processor(loading.model_path("demo"), {}).save_pretrained(tmp_path)
    with ks.load(str(tmp_path)) as vlm:
        assert vlm.ask(picture(1), "Describe it.", max_new_tokens=4).tokens == answer


def test_it_is_shown_and_copied_like_any_other(loaded: Any) -> None:
    assert type(loaded).__name__ in repr(loaded) and "NotLoaded" in repr(loaded)
    for other in (copy.copy(loaded), copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert type(other) is type(loaded) and other is not loaded and same(loaded, other)
        other.chat_template = "changed"
        assert loaded.chat_template != "changed"


def test_a_video_is_refused_by_name(loaded: Any) -> None:
    if not hasattr(loaded, "video_processor"):
        pytest.skip("it takes no videos")
    with pytest.raises(MissingExtra, match="without its video processor, which needs torchvision"):
        loaded(text=[loaded.video_token], videos=[CLIP])
    template = loaded.video_token
    messages = [{"role": "user", "content": [{"type": "video", "video": CLIP}]}]
    with pytest.raises(MissingExtra, match="torchvision"):
        loaded.apply_chat_template(messages, chat_template=template, tokenize=True)
