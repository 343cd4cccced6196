"""Tensors cross between the host and a device in a few named places, on a device that is simulated.

Whatever is left on the host, on another device, or read before the work that makes it is done,
fails here as it would on an accelerator. `test_gpu.py` asks the same of real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from support.answers import cold, conversation, logits
from support.models import build, picture, turn
from support.simulated_device import Event, device, simulation
from support.stores import KEYS

import keepsight as ks
from keepsight import Together
from keepsight.store import DiskStore, Store
from keepsight.store.remote import RemoteStore
from keepsight.system import devices

# Linear and full layers, and sliding ones; a model of full layers alone repeats the first.
FULL = pytest.param("qwen3_vl", marks=pytest.mark.slow)
KINDS = (FULL, "qwen3_5", "sliding")
GREEDY = {"do_sample": False}
pytestmark = pytest.mark.usefixtures("loud")


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with simulation(monkeypatch) as module:
        yield module


def on_device(kind: str) -> tuple[Any, Any]:
    model, processor = build(kind)
    return model.to(device()), processor


def on_two_devices(kind: str) -> tuple[Any, Any]:
    """The tower and the first half of the layers here, the others there."""
    model, processor = build(kind)
    inside = "model.language_model"
    count = len(model.get_decoder().layers)
    spread = {"model.visual": device(0), f"{inside}.embed_tokens": device(0)}
    spread |= {f"{inside}.layers.{i}": device(2 * i // count) for i in range(count)}
    spread |= {f"{inside}.norm": device(1), f"{inside}.rotary_emb": device(0)}
    return dispatch_model(model, {**spread, "lm_head": device(1)}), processor


def wrapped(parts: tuple[Any, Any], **options: Any) -> Any:
    return ks.wrap(*parts, **options)


def asked() -> list[list[Any]]:
    return conversation()[:3]


@pytest.fixture
def loud(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The scheduler goes on without a batch that fails, and a store without what it cannot write:
    here that is an error."""
    yield
    assert not caplog.records, caplog.records[0].getMessage()


def alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """What another pass computed: on a device equal to rounding."""
    return torch.allclose(found.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-4)


def computed(vlm: Any) -> int:
    return int(vlm.runtime.engine.prefill_tokens)


# -- one device ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_gives_back_what_lay_on_a_device(kind: str, tmp_path: Path) -> None:
    parts = on_device(kind)
    first, _, third = asked()
    with wrapped(parts, store=tmp_path) as vlm:
        before = [logits(vlm, first), logits(vlm, third)]
        assert alike(before[1], cold(vlm, third))
    with wrapped(parts, store=tmp_path) as vlm:
        assert torch.equal(logits(vlm, third), before[1])
        assert torch.equal(logits(vlm, first), before[0]) and computed(vlm) == 0
        kept = [tensor for node in vlm.runtime.tree.nodes() for tensor in node.tensors()]
        assert {tensor.device for tensor in kept} == {device()}
        vlm.runtime.tree.check()


@pytest.mark.parametrize("kind", ["qwen3_vl", "mllama"])
def test_stored_and_new_features_meet_in_one_prompt(kind: str, tmp_path: Path) -> None:
    parts = on_device(kind)
    with wrapped(parts, store=tmp_path) as vlm:
        vlm.encode(picture(1))
    both = [turn("Compare these two.", picture(1), picture(2))]
    with wrapped(parts, store=tmp_path) as vlm:
        found = logits(vlm, both)
        assert vlm.stats()["features"]["disk"] == vlm.stats()["features"]["encoded"] == 1
        assert alike(found, cold(vlm, both))


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_file_goes_to_the_device(kind: str, tmp_path: Path) -> None:
    parts = on_device(kind)
    with wrapped(parts) as vlm:
        session = vlm.session()
        session.ask("What do you see in this picture here?", [picture(1)], max_new_tokens=3)
        path = session.save(tmp_path / "talk.keep")
        expected = session.ask("And the colour of it?", [picture(2)], max_new_tokens=4, **GREEDY)
    with wrapped(parts) as vlm:
        resumed = vlm.resume(path)
        reply = resumed.ask("And the colour of it?", [picture(2)], max_new_tokens=4, **GREEDY)
        assert reply.tokens == expected.tokens and reply.usage.cached_tokens > 0
        assert reply.usage.images_encoded == 1 and not resumed.notes


def test_a_package_from_a_file_is_used_on_the_device(tmp_path: Path) -> None:
    with wrapped(on_device("qwen3_vl")) as vlm:
        path = vlm.encode(picture(1)).save(tmp_path / "one.sight")
        given = [turn("Compare these two.", ks.Package.load(path), picture(2))]
        pixels = [turn("Compare these two.", picture(1), picture(2))]
        assert alike(logits(vlm, given), logits(vlm, pixels))


@pytest.mark.parametrize("kind", [FULL, "qwen3_5"])
def test_pins_forks_and_an_address_on_a_device(kind: str, tmp_path: Path) -> None:
    parts, place = on_device(kind), {"remote": (tmp_path / "far").as_uri()}
    question, more = ("What do you see in this picture here?", [picture(1)]), {"max_new_tokens": 3}
    with wrapped(parts, cache_budget="48KiB", **place) as vlm:
        vlm.pin(picture(1))
        session = vlm.session()
        session.ask(*question, **more, **GREEDY)
        other = session.fork()
        expected = [one.ask("And the colour of it?", **more, **GREEDY) for one in (session, other)]
        assert expected[0].tokens == expected[1].tokens
        path = other.save(tmp_path / "talk.keep")
        after = other.ask("And its place?", [picture(2)], **more, **GREEDY).tokens
        vlm.runtime.tree.check()
    with wrapped(parts, **place) as vlm:
        resumed = vlm.resume(path)
        for one in (resumed.fork(), resumed):
            assert one.ask("And its place?", [picture(2)], **more, **GREEDY).tokens == after
        assert vlm.stats()["features"]["encoded"] == 0
        kept = [tensor for node in vlm.runtime.tree.nodes() for tensor in node.tensors()]
        assert {tensor.device for tensor in kept} == {device()}


@pytest.mark.parametrize("kind", [FULL, "qwen3_5"])
def test_the_host_tier_gives_back_what_lay_on_a_device(kind: str) -> None:
    with wrapped(on_device(kind), cache_budget="48KiB") as vlm:
        first, again = ([logits(vlm, messages) for messages in asked()] for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        told = vlm.stats()["prefix"]
        assert told["demotions"] > 0 and told["promotions"] > 0 and told["host"]["bytes"] > 0
        vlm.runtime.tree.check()


def test_a_batch_from_a_store(tmp_path: Path) -> None:
    parts = on_device("qwen3_vl")
    answers = []
    for _ in range(2):
        with wrapped(parts, store=tmp_path) as vlm, Together(vlm) as together:
            tickets = [together.submit(m, max_new_tokens=5, **GREEDY) for m in asked()]
            answers.append([ticket.result().tokens for ticket in tickets])
            work = computed(vlm)
    assert answers[0] == answers[1] and work == 0


def test_a_model_that_moves_leaves_nothing_behind() -> None:
    """Two devices of one kind have one namespace: what lies on the first is of no use."""
    model, processor = on_device("qwen3_5")
    first, second, _ = asked()
    with wrapped((model, processor)) as vlm:
        known = cold(vlm, second)
        logits(vlm, first)
        model.to(device(1))
        assert alike(logits(vlm, second), known)
        assert {t.device for n in vlm.runtime.tree.nodes() for t in n.tensors()} == {device(1)}
        vlm.runtime.tree.check()


# -- streams -------------------------------------------------------------------------------------


def test_the_writer_waits_for_the_device(streams: Any, tmp_path: Path) -> None:
    """Its thread has the default stream, the work is queued on another."""
    parts = on_device("qwen3_5")
    streams.current_stream().synchronize()
    with streams.stream(streams.Stream(device())), wrapped(parts, store=tmp_path) as vlm:
        before = logits(vlm, asked()[0])
        vlm.flush()
    with wrapped(parts, store=tmp_path) as vlm:
        assert torch.equal(logits(vlm, asked()[0]), before) and computed(vlm) == 0


@pytest.mark.parametrize("make", [DiskStore, lambda path: RemoteStore(f"file://{path}")])
def test_what_waits_to_be_written_is_whole_and_off_the_device(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for a gigabyte of others; the device's memory is not for that."""
    store: Store = make(tmp_path)
    go_on, wait, mine = threading.Event(), Event.synchronize, threading.get_ident()

    def late(event: Event) -> None:
        assert threading.get_ident() == mine or go_on.wait(30)
        wait(event)

    monkeypatch.setattr(Event, "synchronize", late)  # the device is slow for the thread that writes
    numbers = torch.arange(7.0)
    store.put("package", KEYS[0], {"a": numbers.to(device())}, {})
    waiting = store.get("package", KEYS[0])
    assert waiting is not None and type(waiting[0]["a"]) is torch.Tensor
    assert torch.equal(waiting[0]["a"], numbers)
    store.put("package", KEYS[1], {"a": numbers.to(device())}, {})
    go_on.set()
    store.flush()
    for key in KEYS[:2]:
        found = store.get("package", key)
        assert found is not None and torch.equal(found[0]["a"], numbers)
    store.close()


def test_copies_to_the_host_are_not_there_before_their_fence() -> None:
    """The control for the two tests above: the simulated device does not copy at once."""
    numbers = torch.arange(7.0)
    found, fence = devices.to_host({"a": numbers.to(device())})
    assert not torch.equal(found["a"], numbers)
    fence.wait()
    assert torch.equal(found["a"], numbers)


def test_a_copy_queued_while_another_thread_waits_is_not_lost(streams: Any) -> None:
    """Another control: several writers wait at a time, and the engine queues copies meanwhile."""
    source, target = torch.arange(7.0).to(device()), torch.zeros(7)
    running, queued, stream = threading.Event(), threading.Event(), streams.Stream(device())
    stream.wait_stream(streams.current_stream())

    def slow() -> None:
        running.set()
        queued.wait(0.3)

    stream.copies.append((stream.tick(), 0, slow))
    waiting = threading.Thread(target=stream.synchronize)
    waiting.start()
    assert running.wait(30)
    with streams.stream(stream):
        target.copy_(source, non_blocking=True)
    queued.set()
    waiting.join()
    stream.synchronize()
    assert torch.equal(target, torch.arange(7.0))


@pytest.mark.parametrize("kind", [FULL, "qwen3_5"])
def test_callers_with_streams_of_their_own_follow_each_other(kind: str, streams: Any) -> None:
    with wrapped(on_device(kind)) as vlm:
        known = cold(vlm, asked()[1])
        for messages in asked()[:2]:
            with streams.stream(streams.Stream(device())):
                vlm.prepare(messages)  # nobody waits for what it computes
        with streams.stream(streams.Stream(device())):
            assert alike(logits(vlm, asked()[1]), known)


# -- two devices ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FULL, "qwen3_5"])
def test_a_model_on_two_devices(kind: str, tmp_path: Path) -> None:
    """Each layer's state lives where the layer computes, whoever wrote it: the same model on one
    device stacks its rows in another way."""
    first, second, _ = asked()
    one, two = on_device(kind), on_two_devices(kind)
    for parts, folder in ((one, "one"), (two, "two")):
        with wrapped(parts, store=tmp_path / folder) as vlm:
            known = [logits(vlm, first), logits(vlm, second)]
            assert alike(known[1], cold(vlm, second))
            last = {lane.full[-1].keys.device for lane in vlm.runtime.engine.lanes._idle}
            assert last == {device(int(folder == "two"))}
    for parts, folder in ((one, "two"), (two, "one"), (two, "two")):
        with wrapped(parts, store=tmp_path / folder) as vlm:
            assert torch.equal(logits(vlm, second), known[1]) and computed(vlm) == 0


def test_a_session_file_of_two_devices(tmp_path: Path) -> None:
    one, two = on_device("qwen3_5"), on_two_devices("qwen3_5")
    with wrapped(two) as vlm:
        session = vlm.session()
        session.ask("What do you see in this picture here?", [picture(1)], max_new_tokens=3)
        path = session.save(tmp_path / "talk.keep")
    for parts in (one, two):
        with wrapped(parts) as vlm:
            reply = vlm.resume(path).ask("And the colour of it?", max_new_tokens=3)
            assert reply.usage.cached_tokens > 0


def test_a_batch_on_two_devices() -> None:
    with wrapped(on_two_devices("qwen3_5")) as vlm:
        known = [vlm.chat(m, max_new_tokens=5, **GREEDY).tokens for m in asked()]
        vlm.clear()
        with Together(vlm) as together:
            tickets = [together.submit(m, max_new_tokens=5, **GREEDY) for m in asked()]
            assert [ticket.result().tokens for ticket in tickets] == known
