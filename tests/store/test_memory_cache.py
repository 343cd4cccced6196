"""What is kept in memory for several tenants, against a plain model of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.tree_invariants import audit_cache

from keepsight.errors import PinsFull
from keepsight.store import MemoryCache

TENANTS, KEYS = st.sampled_from(["", "a", "b", "a\x1fsalt", "a\x1fother"]), st.sampled_from("klmno")


class Shelves(RuleBasedStateMachine):
    """Anything may be gone, but nothing may come back changed, to another, or after its time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.shelf: MemoryCache[bytes] = MemoryCache(
            100, len, quota=60, ttl=50, clock=lambda: self.now
        )
        self.model: dict[Any, tuple[bytes, float]] = {}
        self.pinned: set[Any] = set()

    @rule(tenant=TENANTS, key=KEYS, size=st.integers(0, 70))
    def put(self, tenant: str, key: str, size: int) -> None:
        item = bytes([len(self.model) % 256]) * size
        self.shelf.put(tenant, key, item)
        self.model[tenant, key] = (item, self.now)
        if not self.shelf.pinned(tenant, key):  # it has grown, and there is no room for it
            self.pinned.discard((tenant, key))

    @rule(tenant=TENANTS, key=KEYS)
    def get(self, tenant: str, key: str) -> None:
        had = self.shelf.has(tenant, key)
        found = self.shelf.get(tenant, key)
        assert (found is not None) == had
        if found is not None:
            item, made = self.model[tenant, key]
            assert found == item and self.now - made < 50
        else:
            self.pinned.discard((tenant, key))

    @rule(tenant=TENANTS, key=KEYS, on=st.booleans())
    def pin(self, tenant: str, key: str, on: bool) -> None:
        before = (tenant, key) in self.pinned
        try:
            held = self.shelf.pin(tenant, key, on) and on and self.shelf.has(tenant, key)
        except PinsFull:
            held = before  # and nothing has changed
        if held:
            self.pinned.add((tenant, key))
        else:
            self.pinned.discard((tenant, key))

    @rule(tenant=TENANTS, key=KEYS)
    def pop(self, tenant: str, key: str) -> None:
        self.shelf.pop(tenant, key)
        self.pinned.discard((tenant, key))
        assert not self.shelf.has(tenant, key)

    @rule(seconds=st.integers(0, 30))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(tenant=TENANTS)
    def clear(self, tenant: str) -> None:
        self.shelf.clear(tenant)
        self.pinned = {place for place in self.pinned if place[0] != tenant}
        assert self.shelf.bytes_of(tenant) == 0 and not list(self.shelf.items(tenant))

    @invariant()
    def the_books(self) -> None:
        audit_cache(self.shelf)
        for place in self.pinned:
            if self.now - self.model[place][1] < 50:
                assert self.shelf.has(*place), "what is pinned stays"


Shelves.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestShelves = Shelves.TestCase


def test_the_least_recently_used_goes_first() -> None:
    recent: MemoryCache[int] = MemoryCache(20, lambda size: size)
    for name, size in (("a", 8), ("b", 8), ("c", 4)):
        recent.put("", name, size)
    assert recent.get("", "a") == 8
    recent.put("", "c", 5)  # anew, and larger
    assert recent.get("", "b") is None and (recent.get("", "a"), recent.get("", "c")) == (8, 5)
    recent.put("", "d", 9)
    assert [recent.has("", name) for name in "abcd"] == [False, False, True, True]
    recent.put("", "e", 21)  # it finds no room, and nothing goes for it
    recent.put("", "c", 21)  # what was under its name is not what was put
    assert [recent.has("", name) for name in "abcde"] == [False, False, False, True, False]
    recent.clear()
    assert recent.nbytes == len(recent) == 0


def test_the_books_are_really_checked() -> None:
    recent: MemoryCache[int] = MemoryCache(9, lambda size: size)
    recent.put("", "a", 3)
    recent.nbytes = 4
    with pytest.raises(AssertionError, match="4 bytes"):
        audit_cache(recent)
