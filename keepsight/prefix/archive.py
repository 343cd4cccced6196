"""A node as entries of a store: a `snapshot` (rows, ids, the path) and a `state`.

What is read is compared with the node that asks for it, for a name may lie. A state is written
before its snapshot, so that a snapshot that is there has all that it needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from keepsight import digests
from keepsight.kinds import Record
from keepsight.prefix.node import LOGITS, Node, Tensors
from keepsight.prefix.prompt import Span
from keepsight.store import About, Below, Listing, Store, read_all

SNAPSHOT, STATE = "snapshot", "state"
_LATEST = 32  # entries upon one that are looked at
_TOGETHER = 32  # entries that are read together: more would only lie in memory twice
StoredEntry = tuple[Tensors, Record]


def write(store: Store, node: Node, ttl: float | None) -> None:
    """Hand a node to a store, after whatever of its past the store has lost meanwhile."""
    chain = node.chain()
    first = len(chain) - 1
    while first and not store.has(SNAPSHOT, chain[first - 1].digest):
        first -= 1
        if chain[first].in_memory_only or not chain[first].rows.tier:
            return  # of no use in a store without what it depends on
    for n in chain[first:]:
        _write_one(store, n, ttl)


def _write_one(store: Store, node: Node, ttl: float | None) -> None:
    for way in (node.rows.way, node.state.way):
        if way is not None:
            way.fence.wait()
    rows = node.rows.tensors or {}
    tensors = {name if name == LOGITS else f"kv/{name}": t for name, t in rows.items()}
    tensors["ids"] = torch.from_numpy(node.ids)
    media = tuple(sorted({span.key for span in node.spans if span.key}))
    if node.state.tensors:
        about = About(node.cost, (SNAPSHOT, node.digest), media, ttl)
        store.put(STATE, node.digest, node.state.tensors, {"end": node.end}, about)
    above = node.parent
    base = None if above is None or above.parent is None else (SNAPSHOT, above.digest)
    about = About(node.cost, base, media, ttl)
    record = path_of(node)
    if node.home.any_cut:  # others look for the longest common prefix before they read tensors
        record |= {"ids": node.ids.tolist(), "whole_spans": [list(s.all()) for s in node.spans]}
    store.put(SNAPSHOT, node.digest, tensors, record, about)
    node.on_disk, node.unreadable = True, False


def fetched(
    store: Store | None, nodes: Sequence[Node]
) -> Iterator[tuple[Node, StoredEntry | None]]:
    """Nodes with what the store has of their rows; a number of them is read together."""
    for start in range(0, len(nodes), _TOGETHER):
        some = nodes[start : start + _TOGETHER]
        wanted = [node.digest for node in some if not node.rows.tier]
        found = read_all(store, SNAPSHOT, wanted) if store is not None and wanted else {}
        for node in some:
            yield node, found.pop(node.digest, None)


def rows_in(store: Store, node: Node, found: StoredEntry | None) -> Tensors | None:
    """The rows of a node as they were read, or None; an entry of something else is rejected."""
    if found is None:
        return None
    if not _belongs(node, *found):
        store.reject(SNAPSHOT, node.digest, "it belongs to another path")
        return None
    named = found[0].items()
    rows = {name[3:]: tensor for name, tensor in named if name.startswith("kv/")}
    return rows | ({LOGITS: found[0][LOGITS]} if LOGITS in found[0] else {})


def below(store: Store, node: Node) -> Below:
    """What a store has upon a node and what depends on that, by digest of what they depend on."""
    if not isinstance(store, Listing):
        return {}
    if node.parent is not None:
        return store.below(SNAPSHOT, node.digest, _LATEST)
    found = store.below(SNAPSHOT, None, _LATEST)
    return {node.digest if base is None else base: upon for base, upon in found.items()}


def nodes_upon(node: Node, described: list[tuple[str, Record]]) -> Iterator[Node]:
    """Nodes as a store describes them that depend directly on a node; not read, and not adopted."""
    for digest, record in described:
        if digest in node.children or record.get("parent") != node.digest:
            continue
        with contextlib.suppress(KeyError, TypeError, ValueError):  # a record that lies: not there
            ids = np.array(record["ids"], dtype=np.int64)
            spans = tuple(Span(*row) for row in record["whole_spans"])
            found = Node(node, node.end, node.end + len(ids), digest, ids, spans)
            found.code()  # raises where a feature id is none
            if len(ids) and digest in _names_of(found):
                yield found


def _names_of(node: Node) -> list[str]:
    """The digests that a stretch of this content may have, without and with logits."""
    above = node.parent.digest if node.parent is not None else ""
    spans = [span.plain()[:4] for span in node.spans]
    kinds = ("segment", "terminal")
    return [digests.digest(kind, above, node.start, node.ids, spans) for kind in kinds]


def read_state(store: Store, node: Node) -> Tensors | None:
    """The fixed-size states at a node's end, or None."""
    found = store.get(STATE, node.digest)
    return found[0] if found is not None and found[1].get("end") == node.end else None


def path_of(node: Node) -> Record:
    """What a snapshot in a store says of its place, to be compared when it is read."""
    return {
        "parent": node.parent.digest if node.parent is not None else "",
        "start": node.start,
        "end": node.end,
        "spans": [span.plain()[:4] for span in node.spans],
    }


def _belongs(node: Node, tensors: Tensors, record: Record) -> bool:
    """Whether what was read is what belongs to this node: its path, and a row for every token."""
    ids, path = tensors.get("ids"), path_of(node)
    if ids is None or not np.array_equal(ids.numpy(), node.ids):
        return False
    if any(record.get(name) != value for name, value in path.items()):
        return False
    # What is no part of the sequence ("cross") has as many rows as the media have.
    kv = [t for n, t in tensors.items() if n.startswith("kv/") and not n.startswith("kv/cross.")]
    rows = [tensor.shape[-2] if tensor.dim() > 1 else -1 for tensor in kv]
    ends = LOGITS in tensors or not node.terminal
    return ends and all(count == len(node.ids) for count in rows)
