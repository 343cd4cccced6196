"""Which prompts are remembered: the tree of snapshots and its tiers. May import media and below.

`tier` counts the contents of one tier of memory, ranks them by usefulness, and copies tensors
between the model's device and the host. `residency` holds, demotes, pins, expires and forgets, and
checks the invariants. `archive` writes a node as entries of a store. Turns look up and remember
through `keepsight.prefix.tree`.
"""

from keepsight.prefix.residency import Residency

__all__ = ["Residency"]
