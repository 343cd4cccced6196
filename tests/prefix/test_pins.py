"""Pinned, expired, deleted: what a caller says of one image or conversation, in every tier."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hostile import encoded
from support.model_parts import picture
from support.models import demo_parts

import keepsight as ks
from keepsight import Together
from keepsight.errors import InputError, MadeElsewhere, NotStored, PinsFull
from keepsight.media.sources import Download

QUESTION = "What is in this picture, and where does it stand?"
MODELS = ["demo", "demo-hybrid"]


@pytest.fixture(params=MODELS)
def name(request: Any) -> str:
    return str(request.param)


def load(name: str, **options: Any) -> Any:
    return ks.wrap(*demo_parts(name), **options)


def conversation(seed: int) -> list[Any]:
    parts = [{"type": "image", "image": picture(seed)}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": parts}]


def entries(vlm: Any) -> set[tuple[str, str]]:
    vlm.flush()
    return {(entry.kind, entry.key) for entry in vlm.runtime.store.entries()}


# -- pins --------------------------------------------------------------------------------------


def test_what_is_pinned_stays_in_memory(name: str) -> None:
    with load(name, cache_budget="1100KB", vision_budget="40KB") as vlm:
        vlm.pin(conversation(1))
        encoded = vlm.stats()["features"]["encoded"]
        for seed in range(2, 8):
            vlm.chat(conversation(seed), max_new_tokens=1)
        assert vlm.stats()["prefix"]["evictions"] and len(vlm.runtime.caches.packages) < 7
        told = vlm.explain(conversation(1))
        assert told.cached_tokens == told.prompt_tokens
        vlm.encode(picture(1))
        assert vlm.stats()["features"]["encoded"] == encoded + 6
        vlm.runtime.tree.evict(1 << 40)
        assert vlm.explain(conversation(1)).cached_tokens == told.prompt_tokens
        vlm.runtime.tree.check()
        vlm.pin(conversation(1), False)
        vlm.runtime.tree.evict(1 << 40)
        assert vlm.explain(conversation(1)).cached_tokens == 0
        vlm.runtime.tree.check()


def test_a_package_that_is_pinned_answers_for_no_picture(tmp_path: Path) -> None:
    """Its tensors may be others than its name says, or become so."""
    with load("demo") as vlm:
        true = vlm.encode(picture(1))
    true.save(tmp_path / "a.sight")
    with load("demo") as vlm:
        package = ks.Package.load(tmp_path / "a.sight")
        package.tensors["features"].zero_()
        vlm.pin(package)
        found = vlm.encode(picture(1)).tensors["features"]
        assert torch.equal(found, true.tensors["features"])
        vlm.pin(package, False)
        assert vlm.stats()["features"]["encoded"] == 1


def test_what_is_pinned_stays_on_disk(name: str, tmp_path: Path) -> None:
    with load(name, store=tmp_path, store_budget="1MB") as vlm:
        vlm.pin(picture(1))
        for seed in range(2, 8):
            vlm.chat(conversation(seed), max_new_tokens=1)
            vlm.flush()
    with load(name, store=tmp_path, store_budget="1MB") as vlm:
        assert vlm.chat(conversation(1), max_new_tokens=1).usage.images_encoded == 0
        assert vlm.stats()["store"]["bytes"] <= 1_000_000


# -- gone --------------------------------------------------------------------------------------


def test_delete_means_gone_from_every_tier(name: str, tmp_path: Path) -> None:
    near, far = tmp_path / "near", f"file://{tmp_path / 'far'}"
    with load(name, store=near, remote=far, host_budget="1GiB") as vlm:
        before = {tier: count(tmp_path / tier) for tier in ("near", "far")}
        vlm.chat(conversation(1), max_new_tokens=2)
        vlm.chat([*conversation(2), *said(), *conversation(1)], max_new_tokens=2)
        vlm.flush()
        assert vlm.delete(picture(1)) > 0
        vlm.flush()
        again = vlm.explain(conversation(1))
        shown = next(s.start for s in again.segments if s.kind == "image")
        assert again.cached_tokens <= shown  # what stands before it may serve another prompt
        assert {s.features for s in again.segments} == {None, "tower"}
        # What stood before the deleted image is still there.
        kept = vlm.explain([*conversation(2), *said()])
        assert kept.cached_tokens > 0
        assert vlm.delete([picture(1), picture(2)]) > 0
        vlm.delete([{"role": "user", "content": "Hello!"}])
        vlm.flush()
        # The words before any first picture may be left: a state behind them, and their keys.
        opening = vlm.explain(conversation(3)).cached_tokens
        assert opening <= (shown if name == "demo-hybrid" else 0)
        for tier, start in before.items():
            assert count(tmp_path / tier) == start + (2 if opening else 0), tier
        vlm.runtime.tree.check()
        fresh = vlm.chat(conversation(1), max_new_tokens=2)
        assert fresh.usage.images_encoded == 1 and fresh.usage.cached_tokens == opening


def test_delete_touches_no_other_tenant(name: str, tmp_path: Path) -> None:
    with load(name, store=tmp_path) as vlm:
        for tenant in ("a", "b"):
            vlm.chat(conversation(1), max_new_tokens=1, tenant=tenant)
        vlm.flush()
        vlm.delete(picture(1), tenant="a")
        vlm.delete(picture(1))  # nobody's: there is none
        assert vlm.explain(conversation(1), tenant="a").cached_tokens == 0
        assert vlm.explain(conversation(1), tenant="b").cached_tokens > 0


def test_delete_during_an_answer(name: str, tmp_path: Path) -> None:
    """The answer goes on to its end; nothing of the image is left behind by it."""
    with load(name, store=tmp_path) as vlm:
        whole = vlm.chat(conversation(1), max_new_tokens=8).text
        vlm.clear(store=True)
        pieces = vlm.stream(conversation(1), max_new_tokens=8)
        text = next(pieces).text
        vlm.delete(picture(1))
        assert text + "".join(piece.text for piece in pieces) == whole
        told = vlm.explain(conversation(1))
        assert told.cached_tokens == 0 and told.segments[-1].reason == "new"
        vlm.runtime.tree.check()


def test_delete_before_an_answer_has_come_to_the_picture(name: str, tmp_path: Path) -> None:
    """The turn has named it, and encodes it only after it was deleted: for this answer alone."""
    with load(name, store=tmp_path) as vlm:
        empty = entries(vlm)
        both = [*conversation(2), *said(), *conversation(1)]
        with Together(vlm) as together:
            with vlm.runtime.lock:
                going = together.submit([{"role": "user", "content": "Hello!"}], tenant="other")
                reading = together.prepare(both)
                while not vlm.stats()["features"]["encoded"]:
                    vlm.runtime.engine.step()
                vlm.delete(picture(1))
                vlm.delete(picture(2))
            assert reading.result().usage.images_encoded == 2
            going.cancel()
        vlm.clear(tenant="other", store=True)
        assert entries(vlm) == empty and not len(vlm.runtime.caches.packages)
        assert vlm.explain(both).segments[-1].reason == "new"
        vlm.runtime.tree.check()
        assert vlm.chat(both, max_new_tokens=1).usage.images_encoded == 2


def test_delete_during_the_first_answer_that_a_tenant_gets(name: str) -> None:
    """All that the tenant has is held then, and was never anything that could be let go."""
    with load(name) as vlm:
        pieces = vlm.stream(conversation(1), max_new_tokens=4, min_new_tokens=4, tenant="new here")
        next(pieces)
        assert vlm.delete(picture(1), tenant="new here") > 0
        assert sum(piece.token is not None for piece in pieces) == 3
        assert vlm.runtime.tree.held_bytes() == vlm.runtime.tree.bytes_of("new here") == 0
        vlm.runtime.tree.check()


def said() -> list[Any]:
    return [{"role": "assistant", "content": [{"type": "text", "text": "A picture."}]}]


def count(folder: Path) -> int:
    """Files of entries about images or prompts: not the store's own marker, index, weights."""
    kinds = ("package", "snapshot", "state", "alias", "made")
    return sum(len(list(folder.glob(f"**/{kind}/??/*"))) for kind in kinds)


# -- time --------------------------------------------------------------------------------------


def test_what_has_expired_is_used_by_nobody(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    with load(name, store=tmp_path, ttl="1h") as vlm:
        vlm.chat(conversation(1), max_new_tokens=1)
        vlm.flush()
        assert vlm.explain(conversation(1)).cached_tokens > 0
    now = [0.0]
    import time

    for clock in ("time", "monotonic"):
        true = getattr(time, clock)
        monkeypatch.setattr(time, clock, lambda true=true: true() + now[0])
    with load(name, store=tmp_path, ttl="1h") as vlm:
        now[0] = 1800.0
        assert vlm.chat(conversation(1), max_new_tokens=1).usage.images_encoded == 0
        now[0] = 3700.0
        late = vlm.chat(conversation(1), max_new_tokens=1)
        assert late.usage.images_encoded == 1 and late.usage.cached_tokens == 0


@pytest.mark.parametrize("ttl", [0, -1, "soon", "1y", True, float("inf"), float("nan"), ""])
def test_a_time_is_seconds_or_a_text(ttl: Any) -> None:
    with pytest.raises(InputError, match="not a time"):
        ks.load("demo", ttl=ttl)


# -- sessions elsewhere ------------------------------------------------------------------------


def test_a_session_goes_on_in_another_dtype(name: str, tmp_path: Path) -> None:
    """Its packages are used as they are, its prefix is computed again, and the reports say so."""
    file = tmp_path / "talk.keep"
    with load(name) as vlm:
        chat = vlm.session()
        chat.ask(QUESTION, images=[picture(1)], max_new_tokens=8)
        chat.save(file)
    with ks.load(name, dtype="bfloat16") as vlm:
        with pytest.raises(MadeElsewhere, match="dtype 'torch.float32', here 'torch.bfloat16'"):
            vlm.resume(file, accept_features="same")
        with pytest.raises(InputError, match="accept_features"):
            vlm.resume(file, accept_features="some")
        chat = vlm.resume(file)
        reply = chat.ask("And what is its colour?", max_new_tokens=4)
        assert reply.usage.images_encoded == 0 and reply.usage.cached_tokens == 0
        notes = " | ".join(reply.report.notes)
        assert "medium 0 were made elsewhere" in notes and "prefixes are computed again" in notes
        # What came in with other features never meets what this model makes itself.
        own = vlm.chat(conversation(1), max_new_tokens=1)
        assert own.usage.images_encoded == 1
        features = own.report.segments
        assert all(segment.reason != "memory" or segment.kind == "text" for segment in features)


def test_a_session_is_of_the_tenant_that_resumes_it(name: str, tmp_path: Path) -> None:
    file = tmp_path / "talk.keep"
    with load(name) as vlm:
        chat = vlm.session(tenant="a")
        chat.ask(QUESTION, images=[picture(1)], max_new_tokens=4)
        chat.save(file)
        assert b"tenant" not in file.read_bytes()
    with load(name) as vlm:
        chat = vlm.resume(file, tenant="b")
        assert not chat.notes and chat.tenant == "b"
        assert chat.ask("And?", max_new_tokens=2).usage.cached_tokens > 0
        assert vlm.explain(conversation(1), tenant="a").cached_tokens == 0
        assert vlm.explain(conversation(1)).cached_tokens == 0


# -- slow pictures -----------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["a picture", "a conversation"])
@pytest.mark.parametrize("call", ["pin", "delete"])
def test_a_slow_host_of_a_picture_stops_no_other_answer(
    monkeypatch: pytest.MonkeyPatch, call: str, of: str
) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def slow(url: str, known: Any = None) -> Download:
        asked.set()
        goes_on.wait(60)
        return Download(encoded(picture(1)), {})

    monkeypatch.setattr("keepsight.media.caches.download", slow)
    address: Any = "http://slow.example/1.png"
    if of == "a conversation":
        address = [{"role": "user", "content": [{"type": "image", "image": address}]}]
    with load("demo") as vlm:
        vlm.encode(picture(1))
        waiting = threading.Thread(target=getattr(vlm, call), args=(address,))
        waiting.start()
        assert asked.wait(60)
        answer = threading.Thread(target=vlm.chat, args=(conversation(2),))
        answer.start()
        answer.join(20)
        stopped = answer.is_alive()
        goes_on.set()
        waiting.join(60), answer.join(60)
        assert not stopped and not waiting.is_alive()
        pinned = vlm.runtime.caches.packages.pinning()
        known = vlm.runtime.caches.packages.items("")
        assert bool(pinned) == (call == "pin")
        assert len(list(known)) == (2 if call == "pin" else 1)
        vlm.runtime.check()


# -- how much may be pinned ---------------------------------------------------------------------


def _counted(vlm: Any) -> tuple[int, int]:
    told = vlm.stats()
    return told["prefix"]["held_bytes"], len(vlm.runtime.caches.packages._pins)


@pytest.mark.parametrize(
    "limits",
    [{"cache_budget": "1200KB"}, {"vision_budget": "100KB"}, {"tenant_quota": "300KB"}],
)
def test_pins_count_against_budgets_and_quotas(name: str, limits: dict[str, str]) -> None:
    with load(name, **limits) as vlm:
        with pytest.raises(PinsFull, match="would come to .* bytes|no room to pin"):
            for seed in range(1, 30):
                before = _counted(vlm)
                vlm.pin(conversation(seed))
        assert before[0] or before[1] or "tenant_quota" in limits
        assert _counted(vlm) == before, "what is refused is not half pinned"
        vlm.runtime.tree.check()
        vlm.runtime.check()
        assert vlm.chat(conversation(40), max_new_tokens=1).tokens


def test_a_pin_takes_the_room_of_what_is_not_pinned() -> None:
    with load("demo", vision_budget="80KB") as vlm:
        for seed in (1, 2, 3, 4, 5, 6):
            for _ in range(5):
                vlm.encode(picture(seed))
        with pytest.raises(PinsFull, match="no room to pin these features: half of vision_budget"):
            for seed in range(7, 30):
                vlm.pin(picture(seed))
        shelf = vlm.runtime.caches.packages
        vlm.runtime.check()
        kept = [shelf.pinned("", key) for key, _ in shelf.items("")]
        assert all(kept) and len(kept) > 1


def test_pins_leave_a_disk_within_its_budget(tmp_path: Path) -> None:
    with load("demo", store=tmp_path, store_budget="400KB") as vlm:
        for seed in range(1, 30):
            vlm.pin(picture(seed))
        with pytest.raises(NotStored, match="pins take"):
            vlm.flush()
        for seed in (30, 31):  # of which at most one finds room
            vlm.pin(picture(seed))
            with contextlib.suppress(NotStored):
                vlm.flush()
        held = [e.nbytes for e in vlm.runtime.store.entries() if e.pinned]
        assert held and sum(held) <= vlm.stats()["store"]["bytes"] <= 400_000
