"""What is remembered, over the API: pictures by their keys, looking without a trace, tiers told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server_harness import TEMPLATE, Live, asked, bearer, live, opening, scene

import keepsight as ks
from keepsight.media.naming import Namer
from keepsight.server.config import ApiKey

KEYS = (ApiKey("ann", "ann-key"), ApiKey("bob", "bob-key"), ApiKey("root", "root-key", admin=True))
UNKNOWN = "0" * 64


@pytest.fixture
def locked(demo_parts: dict[str, Any], tmp_path: Path) -> Iterator[Live]:
    """A server with keys and a store; nothing is remembered."""
    with ks.wrap(*demo_parts["demo"], store=tmp_path) as vlm, live(vlm, keys=KEYS) as server:
        yield server


def about(seed: int) -> dict[str, Any]:
    return {"model": "demo", "messages": asked(scene(seed))}


def prepared(server: Live, seed: int, who: str) -> str:
    """Have a picture remembered; its key, as the report tells it."""
    told = server.call("/v1/prepare", about(seed), headers=bearer(who))[1]["report"]
    return str(told["images"][0]["key"])


def held(server: Live, who: str, query: str = "") -> dict[str, bool]:
    """The pictures in memory, and whether each is pinned."""
    rows = server.call(f"/v1/cache/images{query}", headers=bearer(who))[1]["data"]
    return {row["key"]: row["pinned"] for row in rows}


def act(server: Live, what: str, who: str, *keys: str, **more: Any) -> tuple[int, Any]:
    body = {"model": "demo", "images": list(keys), **more}
    return server.call(f"/v1/cache/{what}", body, headers=bearer(who))[:2]


def test_a_picture_is_pinned_and_deleted_by_its_key_alone(locked: Live) -> None:
    key, other = prepared(locked, 70, "ann"), prepared(locked, 71, "ann")
    assert held(locked, "ann") == {key: False, other: False}
    assert act(locked, "pin", "ann", key)[1]["images"] == [key]
    assert held(locked, "ann") == {key: True, other: False}
    locked.service.vlm.flush()
    store = locked.service.vlm.runtime.store_of("ann")
    pins = {e.media[0]: e.pinned for e in store.entries() if e.kind == "package"}
    assert pins == {key: True, other: False}
    assert act(locked, "pin", "ann", key, pinned=False)[0] == 200
    assert held(locked, "ann") == {key: False, other: False}
    status, told = act(locked, "delete", "ann", key)
    assert status == 200 and told["bytes_freed"] > 0 and told["images"] == [key]
    assert list(held(locked, "ann")) == [other]
    assert not any(key in entry.media for entry in store.entries()), "it is on no disk either"
    report = locked.call("/v1/cache/explain", about(70), headers=bearer("ann"))[1]["report"]
    assert report["cached_tokens"] == opening(report), "what stands before the other one as well"
    assert report["images"][0]["features"] == "tower"
    assert act(locked, "delete", "ann", key)[1]["bytes_freed"] == 0  # gone is gone


def test_any_salts_pins_and_statistics_take_nothing_from_anybody(
    locked: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepsight.core.runtime.MAX_SALTS", 2)
    monkeypatch.setattr("keepsight.core.runtime.MAX_TENANTS", 2)
    key = prepared(locked, 73, "ann")
    assert act(locked, "pin", "ann", key)[0] == 200
    known = set(locked.service.vlm.runtime.visions)
    for n in range(20):
        for path in ("stats", "images"):
            query = f"/v1/cache/{path}?cache_salt=number{n}"
            assert locked.call(query, headers=bearer("bob"))[0] == 200
    assert set(locked.service.vlm.runtime.visions) == known
    for n in range(6):
        body = {**about(74), "cache_salt": f"number{n}"}
        assert locked.call("/v1/prepare", body, headers=bearer("bob"))[0] == 200
    said = []
    for n in range(5):
        body = {**about(74), "cache_salt": f"pin{n}"}
        said.append(locked.call("/v1/cache/pin", body, headers=bearer("bob")))
    assert [status for status, *_ in said] == [200, 200, 400, 400, 400]
    assert said[-1][1]["error"]["code"] == "pins_full"
    assert held(locked, "ann") == {key: True}


TOOL = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}


def test_a_pinned_conversation_has_its_tools(demo_parts: dict[str, Any]) -> None:
    body = {**about(76), "tools": [TOOL]}
    with ks.wrap(*demo_parts["demo"], chat_template=TEMPLATE) as vlm, live(vlm) as server:
        status, told = server.call("/v1/cache/pin", body)[:2]
        assert status == 200, told
        report = server.call("/v1/cache/explain", body)[1]["report"]
        assert report["cached_tokens"] >= report["prompt_tokens"] - 16
        vlm.runtime.tree.evict(1 << 40)
        assert server.call("/v1/cache/explain", body)[1]["report"]["cached_tokens"] > 0
        for more in ({"pictures_only": True}, {"messages": None, "images": [UNKNOWN]}):
            told = server.call("/v1/cache/pin", {**body, **more})[1]
            assert told["error"]["param"] == "tools"


def test_a_key_of_another_tenant_is_one_that_nobody_has(locked: Live) -> None:
    key = prepared(locked, 72, "ann")
    for who in ("bob", "root"):
        hidden, absent = (act(locked, "pin", who, one) for one in (key, UNKNOWN))
        assert hidden[0] == absent[0] == 404
        assert str(hidden[1]).replace(key, UNKNOWN) == str(absent[1])
        hidden, absent = (act(locked, "delete", who, one) for one in (key, UNKNOWN))
        assert str(hidden).replace(key, UNKNOWN) == str(absent)
    assert act(locked, "delete", "ann", key, cache_salt="other")[1]["bytes_freed"] == 0
    assert held(locked, "ann") == {key: False}


def test_a_picture_that_only_the_disk_has_is_pinned_and_deleted(locked: Live) -> None:
    key, vlm = prepared(locked, 73, "ann"), locked.service.vlm
    vlm.flush()
    vlm.clear()
    assert held(locked, "ann") == {}
    assert held(locked, "ann", "?stored=true") == {key: False}
    assert held(locked, "bob", "?stored=true") == {}
    assert act(locked, "pin", "ann", key)[0] == 200
    [row] = locked.call("/v1/cache/images?stored=true", headers=bearer("ann"))[1]["data"]
    assert row["pinned"] and row["tier"] == "disk" and row["bytes"] > 0
    store = vlm.runtime.store_of("ann")
    assert [e.pinned for e in store.entries() if e.kind == "package"] == [True]
    assert act(locked, "delete", "ann", key)[1]["bytes_freed"] > 0
    assert not any(key in entry.media for entry in store.entries())


def test_flushing_is_an_administrators(locked: Live) -> None:
    assert locked.call("/v1/cache/flush", {}, headers=bearer("ann"))[0] == 403
    told = locked.call("/v1/cache/flush", {}, headers=bearer("root"))[1]
    assert told == {"object": "cache.flush", "stored": True}


# -- looking without a trace -------------------------------------------------------------------


def test_explaining_moves_and_remembers_nothing(demo: Any, tmp_path: Path) -> None:
    """Not what is on the disk, not what is least useful in memory, not the picture itself."""
    with ks.wrap(demo.model, demo.processor, store=tmp_path) as vlm, live(vlm) as server:
        for seed in (74, 75):
            server.call("/v1/prepare", about(seed))
        vlm.flush()
        vlm.clear()
        before = trace(vlm)
        for seed in (74, 76):  # known on the disk, and never seen
            told = server.call("/v1/cache/explain", about(seed))[1]["report"]
            known = told["cached_tokens"] == told["prompt_tokens"]
            assert known == (seed == 74)
        assert told["images"][0]["features"] == "tower"
        assert trace(vlm) == before
        server.call("/v1/prepare", about(74))
        server.call("/v1/prepare", about(75))
        before = trace(vlm)
        server.call("/v1/cache/explain", about(74))
        assert trace(vlm) == before, "it would now outlive what was used later"


def trace(vlm: Any) -> Any:
    """All that says what is where, and what goes first."""
    memory = vlm.runtime
    vlm.flush()
    nodes = {
        (node.end, node.code): (node.tier, sorted(node.ends), node.holds)
        for node in memory.tree.nodes()
        if node.tier
    }
    order = [(node.end, node.code) for node in memory.tree.device.order]
    shelves = [list(shelf._held) for shelf in (memory.caches.packages, memory.caches.pixels)]
    entries = {(entry.kind, entry.key) for entry in memory.store_of("").entries()}
    counts = (memory.tree.promotions, memory.engine.prefill_tokens)
    return nodes, order, shelves, entries, counts


def test_a_whole_prompt_says_from_which_tier_it_came(
    demo_parts: dict[str, Any], tmp_path: Path
) -> None:
    with ks.wrap(*demo_parts["demo"], store=tmp_path) as vlm:
        vlm.prepare(asked(scene(77)))
        vlm.flush()
        vlm.clear()
        parts = [{"type": "image", "image": scene(78)}, {"type": "text", "text": "Well?"}]
        messages = [{"role": "user", "content": parts}]
        told = vlm.chat(messages, max_new_tokens=1).report
        tiers = {(segment.status, segment.tier) for segment in told.segments}
        assert tiers == {("reused", "disk"), ("computed", None)}, "what is computed lay nowhere"
        vlm.flush()
        vlm.clear()
        told = vlm.chat(messages, max_new_tokens=1).report
        assert "whole prompt, from disk" in str(told)


def test_pictures_are_opened_without_the_model(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one would stop everybody's tokens while it is decoded."""
    look, has_it = Namer.look, []

    def watched(*given: Any) -> Any:
        has_it.append(server.service.vlm.runtime.lock._owner is not None)
        return look(*given)

    monkeypatch.setattr(Namer, "look", watched)
    for only in (False, True):
        has_it.clear()
        body = {**about(60), "pictures_only": only}
        for path in ("/v1/cache/pin", "/v1/cache/delete"):
            status, told, _ = server.call(path, body)
            assert status == 200 and len(told["images"]) == 1
        assert has_it and not any(has_it)
        assert server.call("/v1/cache/images")[1]["data"] == []


def test_a_conversation_is_saved_as_a_file_of_its_tenant(
    locked: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))  # no disk is touched
    vlm = locked.service.vlm
    body = about(77)
    body["messages"].append({"role": "assistant", "content": "A shape."})
    before = vlm.stats("ann")["features"]["packages"]
    with locked.opened("/v1/cache/save", body, headers=bearer("ann")) as reply:
        assert reply.headers["content-type"] == "application/octet-stream"
        (tmp_path / "a.keep").write_bytes(reply.read())
    assert vlm.stats("ann")["features"]["packages"] == before + 1 and not held(locked, "bob")
    session = vlm.resume(tmp_path / "a.keep", tenant="bob")
    said = {"role": "assistant", "content": [{"type": "text", "text": "A shape."}]}
    assert session.messages[1] == said
    reply = session.ask("What is in the picture?")
    assert reply.usage.images_encoded == 0 and reply.usage.cached_tokens > 16


def test_what_a_file_cannot_hold_is_refused_by_name(locked: Live) -> None:
    for more in ({"tools": [TOOL]}, {"chat_template_kwargs": {"enable_thinking": False}}):
        body = {**about(78), **more}
        status, said, _ = locked.call("/v1/cache/save", body, headers=bearer("ann"))
        assert status == 400 and next(iter(more)) in said["error"]["message"]
