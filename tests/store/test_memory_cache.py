"""What is kept in memory for several tenants, against a plain model of it."""

from __future__ import annotations

from collections import OrderedDict
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


class OldestMachine(RuleBasedStateMachine):
    """A dictionary in order of use is the model; a thing's size is its value."""

    BUDGET = 20
    names = st.sampled_from("abcdef")

    def __init__(self) -> None:
        super().__init__()
        self.recent: MemoryCache[int] = MemoryCache(self.BUDGET, lambda size: size)
        self.model: OrderedDict[str, int] = OrderedDict()

    @rule(name=names, size=st.integers(0, 25))
    def put(self, name: str, size: int) -> None:
        self.recent.put("", name, size)
        self.model.pop(name, None)
        if size <= self.BUDGET:
            self.model[name] = size
        while sum(self.model.values()) > self.BUDGET:
            self.model.popitem(last=False)

    @rule(name=names)
    def get(self, name: str) -> None:
        assert self.recent.get("", name) == self.model.get(name)
        if name in self.model:
            self.model.move_to_end(name)

    @rule(name=names)
    def pop(self, name: str) -> None:
        self.recent.pop("", name)
        self.model.pop(name, None)

    @rule()
    def clear(self) -> None:
        self.recent.clear()
        self.model.clear()

    @invariant()
    def agrees(self) -> None:
        audit_cache(self.recent)
        assert len(self.recent) == len(self.model)
        assert self.recent.nbytes == sum(self.model.values())
        assert all(self.recent.has("", n) == (n in self.model) for n in "abcdef")


TestOldest = OldestMachine.TestCase
TestOldest.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_books_are_really_checked() -> None:
    recent: MemoryCache[int] = MemoryCache(9, lambda size: size)
    recent.put("", "a", 3)
    recent.nbytes = 4
    with pytest.raises(AssertionError, match="4 bytes"):
        audit_cache(recent)
