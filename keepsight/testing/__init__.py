"""Test suites to run on your own store, layer or family. May import keepsight and below.

Subclass one, define its maker, and let pytest collect it; `tests/test_store.py`,
`tests/test_state.py` and `tests/test_families_*.py` do so for the built-in ones. Nothing here
imports pytest or knows how methods work: only what they promise.
"""

from keepsight.testing.families import FamilyTests
from keepsight.testing.states import StateTests
from keepsight.testing.stores import BoundedStoreTests, StoreTests

__all__ = ["BoundedStoreTests", "FamilyTests", "StateTests", "StoreTests"]
