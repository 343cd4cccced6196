"""Suites to run on a store, a layer or a family of your own. May import keepsight and below.

Subclass one, give it its maker, and let pytest collect it; `tests/test_store.py`,
`tests/test_state.py` and `tests/test_families_*.py` do so for what is built in. Nothing here
imports pytest, or knows what the methods do inside: only what they promise.
"""

from keepsight.testing.families import FamilyTests
from keepsight.testing.states import StateTests
from keepsight.testing.stores import StoreTests

__all__ = ["FamilyTests", "StateTests", "StoreTests"]
