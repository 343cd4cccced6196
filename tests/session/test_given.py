"""What a session was given stays with it, whatever becomes of the file or of the owner's pixels."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.hostile import encoded
from support.models import build, picture, turn

import keepsight as ks
from keepsight.errors import ImageError
from keepsight.media.sources import Download
from keepsight.prompt.messages import kept_notes

FORMS: dict[str, Callable[[Path], Any]] = {
    "a path": lambda path: path,
    "a PIL image": lambda path: Image.open(path).convert("RGBA"),
    "an array": lambda path: np.array(Image.open(path)),
    "bytes": lambda path: path.read_bytes(),
}


def spoil(given: Any) -> None:
    """Change in place what a session was given."""
    if isinstance(given, Path):
        given.write_bytes(b"something else")
    elif isinstance(given, Image.Image):
        given.paste((1, 2, 3), (0, 0, *given.size))
    elif isinstance(given, np.ndarray):
        given[:] = 7


@pytest.mark.parametrize("form", FORMS)
def test_a_session_keeps_what_it_was_given(dense: Any, tmp_path: Path, form: str) -> None:
    picture(1).save(tmp_path / "a.png")
    given = FORMS[form](tmp_path / "a.png")
    chat = dense.session()
    first = chat.ask("What is it?", given, max_new_tokens=4)
    chat.save(tmp_path / "talk.keep")
    spoil(given)
    dense.clear()
    assert chat.regenerate(max_new_tokens=4).tokens == first.tokens
    assert dense.stats()["features"]["session_bytes"] > 0
    with ks.wrap(*build("qwen2_5_vl")) as other:  # other weights, another processor
        resumed = dense.resume(tmp_path / "talk.keep")
        for messages in (chat.messages, resumed.messages):
            reply = other.chat(messages[:1], max_new_tokens=4)
            with ks.wrap(other.model, other.processor) as fresh:
                same = FORMS[form](save(picture(1), tmp_path / "a.png"))
                wanted = fresh.ask(same, "What is it?", max_new_tokens=4)
            assert reply.tokens == wanted.tokens
            assert reply.usage.prompt_tokens == wanted.usage.prompt_tokens
            other.clear()
    resumed.save(tmp_path / "again.keep")
    assert (tmp_path / "again.keep").stat().st_size == (tmp_path / "talk.keep").stat().st_size


def test_a_session_keeps_the_features_of_a_package(dense: Any) -> None:
    """A change of the caller's tensors would enter the memory under the name of the true ones."""
    package, chat = dense.encode(picture(1)), dense.session()
    first = chat.ask("What is it?", package, max_new_tokens=4)
    package.tensors["features"].zero_()
    dense.clear()
    assert chat.regenerate(max_new_tokens=4).tokens == first.tokens
    assert dense.ask(picture(1), "What is it?", max_new_tokens=4).tokens == first.tokens


def test_a_prefix_keeps_what_it_was_given_and_says_so(dense: Any, tmp_path: Path) -> None:
    path = save(picture(1), tmp_path / "a.png")
    with dense.prefix([turn("Look!", path)]) as prefix:
        first = prefix.ask("What is it?", max_new_tokens=4)
        path.unlink()
        dense.clear()
        again = prefix.ask("What is it?", max_new_tokens=4)
    assert again.tokens == first.tokens and again.usage.images_encoded == 1
    assert again.report.notes == [f"kept as first seen, and not read again: {path}"]


def save(image: Image.Image, path: Path) -> Path:
    image.save(path)
    return path


def test_a_session_reads_a_picture_without_the_models_lock(
    dense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow address holds up nobody else's answer."""
    held: list[bool] = []

    def slow(url: str, known: Any = None) -> Download:
        held.append(dense.runtime.lock.held)
        return Download(encoded(picture(1)), {})

    monkeypatch.setattr("keepsight.media.caches.download", slow)
    reply = dense.session().ask("What is it?", "http://slow.example/a.png", max_new_tokens=1)
    assert reply.usage.images == 1 and held == [False]


def test_what_sessions_keep_is_counted_under_a_budget(dense: Any, tmp_path: Path) -> None:
    kept = dense.runtime.caches.kept
    before = kept.bytes_of(None)
    files = [save(picture(n), tmp_path / f"{n}.png") for n in range(3)]
    sizes = [len(file.read_bytes()) for file in files]
    kept.budget = before + sizes[1] + sizes[2]
    chat = dense.session()
    for file in files:
        chat.ask("What is it?", file, max_new_tokens=1)
    assert kept.bytes_of(None) == before + sizes[1] + sizes[2]
    dense.clear()
    chat.regenerate(max_new_tokens=1)  # the oldest is read from its file again
    files[0].unlink()
    dense.clear()
    with pytest.raises(ImageError, match="0.png"):
        chat.regenerate(max_new_tokens=1)
    chat.messages = chat.messages[2:]
    assert chat.regenerate(max_new_tokens=1).usage.images == 2
    chat.messages = []
    dense.clear()
    gc.collect()
    assert kept.bytes_of(None) == before


def test_a_note_names_an_address_without_its_secrets() -> None:
    with ks.load("demo") as vlm:
        medium = vlm.runtime.vision.name(picture(1))
        assert medium.opened is not None
        where = "https://ann:secret@host.example/a/red.png?key=secret"
        named = replace(medium, opened=replace(medium.opened, where=where))
        history = [{"role": "user", "content": [{"type": "image", "image": named}]}]
        [note] = kept_notes(history)
    assert note.endswith(": https://host.example/a/red.png")
