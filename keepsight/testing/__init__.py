"""Conformance suites that ship: what anyone who brings a store, a kind of layer or a model family
has to fulfil.

Subclass one, give it its maker, and let pytest collect it; `tests/test_store.py`,
`tests/test_state.py` and `tests/test_families_*.py` do so for what is built in. Nothing here
imports pytest, or knows what the methods do inside: only what they promise.
"""

from keepsight.testing.families import FamilyTests
from keepsight.testing.states import StateTests
from keepsight.testing.stores import StoreTests

__all__ = ["FamilyTests", "StateTests", "StoreTests"]
