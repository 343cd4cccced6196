"""Test suites to run on your own store, layer or family.

Subclass one, define its maker, and let pytest collect it with this checkout's `tests` on its path
(`PYTHONPATH=tests`); `tests/store/test_store.py`, `tests/core/test_state.py` and `tests/families`
do so for the built-in ones. Nothing here imports pytest or knows how methods work: only what they
promise.
"""

from support.families import FamilyTests
from support.states import StateTests
from support.stores import BoundedStoreTests, StoreTests

__all__ = ["BoundedStoreTests", "FamilyTests", "StateTests", "StoreTests"]
