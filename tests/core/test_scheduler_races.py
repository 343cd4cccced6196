"""What several threads do at the same moment: look at pictures, name tenants, forget, hang up."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.models import build, picture, turn

import keepsight as ks
from keepsight import Together
from keepsight.errors import ModelKeepsChanging
from keepsight.system import digests

GREEDY = {"do_sample": False}


@contextmanager
def meanwhile(*work: Callable[[], Any]) -> Iterator[None]:
    """Do these over and over, each in a thread of its own, switching threads all the time."""
    over, interval = threading.Event(), sys.getswitchinterval()

    def go_on(one: Callable[[], Any]) -> None:
        while not over.is_set():
            one()

    threads = [threading.Thread(target=go_on, args=(one,)) for one in work]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)


def test_a_tenant_has_one_vision_however_many_threads_ask(vlm: Any) -> None:
    """A second one would know no names, and nobody would tell it of new weights."""
    found = {vlm.runtime.vision_of("a")}
    vlm.runtime.vision_of("b")

    def ask() -> None:
        found.add(vlm.runtime.vision_of("a"))

    with meanwhile(ask, ask, ask):
        for _ in range(100):
            with vlm.runtime.lock:
                vlm.runtime.refresh(tenant="a")
                vlm.runtime.refresh(tenant="b")
    assert len(found) == 1


def test_making_a_request_ready_makes_no_room_for_tenants(vlm: Any) -> None:
    """Room is made in the tree, which only whoever has the model may change."""
    has_it: list[bool] = []
    make_room = vlm.runtime._make_room_for

    def watched(tenant: str) -> None:
        has_it.append(vlm.runtime.lock._owner == threading.get_ident())
        make_room(tenant)

    namer = vlm.runtime.vision_of("x").namer
    vlm.runtime._make_room_for = watched
    look = namer.look

    def forgetful(*given: Any) -> Any:
        """While it looks, so many other tenants come that this one is let go of."""
        vlm.runtime.visions.pop("x", None)
        return look(*given)

    namer.look = forgetful
    with Together(vlm) as together:
        asked = [turn("Look.", picture(1))]
        reply = together.submit(asked, tenant="x", max_new_tokens=2, **GREEDY).result()
        assert reply.usage.images_encoded == 1
    assert has_it and all(has_it)


def test_a_picture_that_is_explained_stops_nobody(vlm: Any) -> None:
    """It is decoded without the model, named as it will be, and not known afterwards."""
    namer, asked = vlm.runtime.vision.namer, [turn("Look.", picture(1))]
    look, has_it = namer.look, []

    def watched(*given: Any) -> Any:
        has_it.append(vlm.runtime.lock._owner is not None)
        return look(*given)

    with Together(vlm) as together:
        before, namer.look = vlm.stats()["features"], watched
        told = together.explain(asked)
        assert has_it == [False] and not vlm.runtime.caches.aliases.nbytes
        assert vlm.stats()["features"] == before
        direct, given = vlm.explain(asked).to_dict(), told.to_dict()
        assert {**direct, "milliseconds": 0} == {**given, "milliseconds": 0}
        namer.look = look
        assert together.submit(asked, max_new_tokens=2, **GREEDY).result().usage.images_encoded == 1
        assert together.explain(asked).cached_tokens > 0


def test_a_picture_is_forgotten_while_others_are_named(vlm: Any) -> None:
    namer, number = vlm.runtime.vision.namer, iter(range(1 << 40))

    def learn() -> None:
        namer._remember(digests.digest("a name", next(number)), {"key": "k" * 64}, "")

    for at in range(5_000):
        namer._remember(str(at), {"key": "k" * 64}, "")
    with meanwhile(learn):
        for _ in range(20):
            namer.forget("none")


def test_settings_that_change_during_a_look_are_not_remembered_as_they_were(
    vlm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, namer = vlm.processor.image_processor, vlm.runtime.vision.namer
    namer._settings.clear()
    begun, go_on, told = threading.Event(), threading.Event(), type(processor).to_dict

    def slow(self: Any) -> Any:
        plain = told(self)
        if threading.current_thread() is looking:
            begun.set()
            go_on.wait(20)
        return plain

    monkeypatch.setattr(type(processor), "to_dict", slow)
    looking = threading.Thread(target=namer.settings)
    looking.start()
    assert begun.wait(20)
    before = processor.image_mean
    try:
        processor.image_mean = [0.1, 0.2, 0.3]
        with vlm.runtime.lock:
            vlm.runtime.refresh()
        go_on.set()
        looking.join()
        late = namer.settings()
        namer._settings.clear()
        assert namer.settings() == late
    finally:
        processor.image_mean = before
        go_on.set()


@pytest.mark.parametrize("steps", range(1, 10, 2))
def test_what_a_turn_under_way_computes_does_not_come_back_after_a_reset(
    tmp_path: Path, steps: int
) -> None:
    asked = [turn("Look.", picture(1)), turn("I do.", role="assistant"), turn("Two?", picture(2))]
    with ks.wrap(*build("qwen3_vl"), store=tmp_path) as vlm:
        wanted = vlm.chat(asked, max_new_tokens=3, **GREEDY).tokens
        vlm.clear(store=True)
        with Together(vlm, prefill_piece=8) as together, vlm.runtime.lock:
            other = together.submit([turn("Words.")], tenant="b", max_new_tokens=30, **GREEDY)
            ticket = together.submit(asked, max_new_tokens=3, **GREEDY)
            for _ in range(steps):
                vlm.runtime.engine.step()
            vlm.clear(store=True)
        assert ticket.result().tokens == wanted and other.result().tokens
        tree = vlm.runtime.tree
        assert not list(tree.nodes("")) and tree.check() is None
        vlm.clear(tenant="b", store=True)
        vlm.flush()
        assert tree.nbytes == 0 and vlm.stats()["features"]["packages"] == 0
        assert not list(tmp_path.rglob("*.sight"))
        again = vlm.chat(asked, max_new_tokens=3, **GREEDY)
        assert again.tokens == wanted and again.usage.cached_tokens == 0
        assert vlm.chat(asked, max_new_tokens=3, **GREEDY).usage.cached_tokens > 0


def training(layer: Any, given: Any, out: Any) -> None:
    """A hook that changes weights: the model is another one after each pass."""
    layer.down_proj.weight.mul_(1 + 1e-6)


def test_a_model_that_changes_in_each_pass_ends_with_its_name() -> None:
    model, processor = build("qwen3_vl")
    handle = model.get_decoder().layers[0].mlp.register_forward_hook(training)
    long = [turn("Please look at this picture very carefully. " * 6, picture(1), picture(2))]
    try:
        with ks.wrap(model, processor) as vlm:
            assert vlm.chat(long, max_new_tokens=2, **GREEDY).tokens  # alone it comes to an end
            with Together(vlm) as together:
                other = [turn("Look at this instead of that. " * 160, picture(3), picture(4))]
                ticket = together.submit(other, max_new_tokens=2, **GREEDY)
                with pytest.raises(ModelKeepsChanging, match="changed 9 times"):
                    ticket.result()
                handle.remove()
                assert together.submit(other, max_new_tokens=2, **GREEDY).result().tokens
    finally:
        handle.remove()


def test_listeners_pin_while_another_thread_pins(vlm: Any) -> None:
    shown = [turn("What is it?", picture(1))]

    def pin(_: Any) -> None:
        vlm.pin(picture(1))
        vlm.pin(shown, pinned=False)

    with meanwhile(lambda: pin(None)), Together(vlm) as together:
        for number in range(10):
            ticket = together.submit(
                [turn(f"And {number}?")], on_piece=pin, on_done=pin, max_new_tokens=3, **GREEDY
            )
            assert ticket.done.wait(30), "the scheduler waits for a thread that waits for it"
            assert ticket.error is None
