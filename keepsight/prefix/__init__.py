"""Which prompts are remembered: a radix tree of paths in tiers. May import media and below.

A `node` is one edge; `residency` holds, splits, demotes, pins, expires and forgets; `tree` looks up
and remembers; `archive` writes nodes as entries of a store.
"""
