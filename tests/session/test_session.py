"""Conversations: sharing between branches, files, and resuming elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.answers import logits
from support.hostile import opened_up
from support.models import build, in_both, picture

import keepsight as ks
from keepsight.errors import DamagedFile, FileError, InputError, StoreError, WrongIdentity
from keepsight.formats import tensorfile

LONG = "Please look at this picture very carefully and then tell me all that you see in it."


def test_forks_share_and_part(demo: Any) -> None:
    """(That answers are right is held in laws/test_random_conversations.py.)"""
    one = demo.session()
    one.ask(LONG, picture(1), max_new_tokens=6)
    two = one.fork()
    a = one.ask("What is the colour of it?", max_new_tokens=6)
    b = two.ask("Where does it stand in there?", picture(2), max_new_tokens=6)
    assert min(a.usage.cached_tokens, b.usage.cached_tokens) > 50
    assert b.usage.images_encoded == 1
    assert len(one.messages) == len(two.messages) == 4
    assert one.messages[:2] == two.messages[:2] and one.messages[2:] != two.messages[2:]


def test_edit_and_regenerate(demo: Any) -> None:
    session = demo.session()
    session.ask(LONG, picture(1), max_new_tokens=6)
    second = session.ask("What colour does the shape have?", picture(2), max_new_tokens=6)
    again = session.regenerate(max_new_tokens=6)
    assert again.tokens == second.tokens
    assert again.usage.cached_tokens == again.usage.prompt_tokens
    edited = session.edit(1, "What size does the shape have?", max_new_tokens=6)
    assert edited.usage.images == 2 and edited.usage.images_encoded == 0
    assert edited.usage.cached_tokens > 0
    first = session.edit(0, "Describe it.", [picture(3)], max_new_tokens=6)
    assert first.usage.images == 1 and len(session.messages) == 2
    for wrong in (5, "0", 0.5, None):
        with pytest.raises(InputError, match=f"there is no user turn {wrong!r}; there are 1"):
            session.edit(wrong, "What?")


def test_a_failed_turn_leaves_the_history(dense: Any) -> None:
    session = dense.session("Be brief.")
    session.ask("Hello!", max_new_tokens=3)
    before = list(session.messages)
    with pytest.raises(InputError):
        session.ask("Look!", b"no image")
    with pytest.raises(InputError):
        session.edit(0, "Look!", b"no image")
    assert session.messages == before
    stream = session.stream("And now?", max_new_tokens=5)
    next(stream)
    stream.close()
    assert session.messages == before
    assert session.ask("And now?", max_new_tokens=3).text is not None


@pytest.mark.parametrize("name", ["demo", "demo-hybrid"])
def test_save_and_resume(demo_parts: Any, tmp_path: Path, name: str) -> None:
    model, processor = demo_parts[name]
    path = tmp_path / "talk.keep"
    with ks.wrap(model, processor) as vlm:
        session = vlm.session("You look at pictures.")
        session.ask(LONG, picture(1), max_new_tokens=6)
        session.ask("And this?", picture(2), max_new_tokens=6)
        session.save(path)
        expected = session.ask("Compare the pictures.", max_new_tokens=8)
    with ks.wrap(model, processor) as vlm:
        resumed = vlm.resume(path)
        assert not resumed.notes
        reply = resumed.ask("Compare the pictures.", max_new_tokens=8)
        assert reply.tokens == expected.tokens
        assert reply.usage.images_encoded == 0 and reply.usage.cached_tokens > 0
        assert torch.equal(logits(vlm, resumed.messages[:-1]), logits(vlm, session.messages[:-1]))
        vlm.runtime.tree.check()
    with ks.wrap(model, processor, pack=True) as vlm:  # other circumstances
        resumed = vlm.resume(path)
        assert resumed.notes
        reply = resumed.ask("Compare the pictures.", max_new_tokens=8)
        assert reply.usage.images_encoded == 0 and reply.usage.cached_tokens == 0


def test_resume_with_other_vision_weights_is_refused(demo_parts: Any, tmp_path: Path) -> None:
    model, processor = demo_parts["demo"]
    path = tmp_path / "talk.keep"
    with ks.wrap(model, processor) as vlm:
        session = vlm.session()
        session.ask(LONG, picture(1), max_new_tokens=3)
        session.save(path)
    other, processor = demo_parts["demo-hybrid"]
    with ks.wrap(other, processor) as vlm, pytest.raises(WrongIdentity) as caught:
        vlm.resume(path)
    assert caught.value.field == "vision weights" and caught.value.expected != caught.value.found


def test_cut_and_flipped_session_files_are_refused(demo: Any, tmp_path: Path) -> None:
    session = demo.session()
    session.ask(LONG, picture(1), max_new_tokens=3)
    data = session.save(tmp_path / "talk.keep").read_bytes()
    bad = tmp_path / "bad.keep"
    for spot in range(0, len(data), max(1, len(data) // 30)):
        flipped = data[:spot] + bytes([data[spot] ^ 1 << spot % 8]) + data[spot + 1 :]
        for damaged in (data[:spot], flipped):
            bad.write_bytes(damaged)
            with pytest.raises(FileError):
                demo.resume(bad)
    assert demo.resume(tmp_path / "talk.keep").ask("Well?", max_new_tokens=2).tokens


def test_a_lying_session_file_never_reaches_the_tree(demo: Any, tmp_path: Path) -> None:
    """A sound file whose snapshots belong to another text: they are dropped, and it says so."""
    session = demo.session()
    session.ask(LONG, picture(1), max_new_tokens=3)
    path = session.save(tmp_path / "talk.keep")
    tensors, record = opened_up(path, "session")
    for message in record["messages"]:
        if message["role"] == "user":
            message["content"][-1]["text"] = "Please look at nothing at all, and say nothing."
    lying = tmp_path / "lying.keep"
    tensorfile.save(lying, "session", 1, tensors, record)
    demo.clear()
    resumed = demo.resume(lying)
    assert resumed.notes
    demo.runtime.tree.check()
    messages = [*resumed.messages[:1]]
    with ks.wrap(demo.model, demo.processor) as fresh:
        assert torch.equal(logits(demo, messages), logits(fresh, messages))
    del record["media"]
    tensorfile.save(lying, "session", 1, tensors, record)
    with pytest.raises(DamagedFile):
        demo.resume(lying)


@pytest.mark.parametrize("change", ["dtype", "heads", "layers", "state"])
def test_snapshots_of_another_shape_never_reach_the_tree(
    demo: Any, tmp_path: Path, change: str
) -> None:
    """Right ids, right rows, right digests, and still nothing this model could have made."""
    session = demo.session()
    session.ask(LONG, picture(1), max_new_tokens=3)
    tensors, record = opened_up(session.save(tmp_path / "talk.keep"), "session")
    for name, tensor in list(tensors.items()):
        if "/kv/" in name and change == "dtype":
            tensors[name] = tensor.to(torch.float16)
        elif "/kv/" in name and change == "heads":
            tensors[name] = torch.cat([tensor, tensor], dim=-3)
        elif "/kv/kv" in name and change == "layers":
            tensors[name] = tensor[:-2].clone()
        elif "/fixed/" in name and change == "state":
            tensors[name] = tensor[..., :-1].clone()
    lying = tmp_path / "lying.keep"
    tensorfile.save(lying, "session", 1, tensors, record)
    with ks.wrap(demo.model, demo.processor) as fresh:
        resumed = fresh.resume(lying)
        changed = change != "state" or any("/fixed/" in name for name in tensors)
        assert any("does not belong" in note for note in resumed.notes) == changed
        reply = resumed.ask("And its colour?", max_new_tokens=4)
        assert reply.tokens == session.ask("And its colour?", max_new_tokens=4).tokens
        fresh.runtime.tree.check()


def test_an_empty_conversation_is_saved_and_resumed(dense: Any, tmp_path: Path) -> None:
    session = dense.resume(dense.session().save(tmp_path / "empty.keep"))
    assert session.messages == [] and session.notes == []
    assert session.ask("Hello!", max_new_tokens=2).tokens


@pytest.mark.parametrize("name", ["missing.keep", "file/talk.keep", "zero\0byte", "half \ud800"])
def test_a_file_that_cannot_be_opened_is_named(dense: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    for load in (dense.resume, ks.Package.load):
        with pytest.raises(StoreError, match="cannot be read: "):
            load(tmp_path / name)
    session = dense.session()
    session.ask("Hello!", max_new_tokens=2)
    if name != "missing.keep":
        with pytest.raises(StoreError, match="cannot be written: "):
            session.save(tmp_path / name)
        assert session.ask("Well?", max_new_tokens=2).tokens


@pytest.mark.parametrize(
    ("kind", "dtype"),
    in_both(["sliding", "gemma3_sliding", "gemma4", "qwen3_5", "internvl"], ["sliding", "qwen3_5"]),
)
def test_sessions_of_other_layers_go_on_elsewhere(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    with ks.wrap(*build(kind, dtype)) as vlm:
        session = vlm.session()
        session.ask(LONG, picture(1), max_new_tokens=4)
        path = session.save(tmp_path / "a.keep")
        expected = session.ask("More?", picture(2, 160, 96), max_new_tokens=4)
    with ks.wrap(*build(kind, dtype)) as vlm:
        resumed = vlm.resume(path)
        reply = resumed.ask("More?", picture(2, 160, 96), max_new_tokens=4)
        assert reply.tokens == expected.tokens and not resumed.notes
        assert reply.usage.cached_tokens == expected.usage.cached_tokens > 0
        assert reply.usage.images_encoded == 1
