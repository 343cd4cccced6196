"""Which prompts are remembered: a radix tree of paths in tiers. May import media and below.

A `node` is one edge; `tier` counts the contents of one tier of memory; `residency` holds, splits,
demotes, pins, expires and forgets; `tree` looks up and remembers; `archive` writes nodes as entries
of a store; `invariants` checks. Turns use what `cache` promises.
"""
