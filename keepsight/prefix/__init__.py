"""Which prompts are remembered: the tree of snapshots and its tiers. May import media and below.

`tier` counts what is in one tier of memory, knows what is least useful in it, and copies tensors
between the model's device and the host. `residency` holds, demotes, pins, expires and forgets, and
checks that the laws hold. `archive` spells a node as entries of a store. Looking and remembering,
which is what turns do, is in `keepsight.prefix.tree`.
"""

from keepsight.prefix.residency import Residency

__all__ = ["Residency"]
