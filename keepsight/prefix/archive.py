"""Writes and reads a node as entries of a store: a `snapshot` (rows, ids, the path) and a `state`.

Entries are compared with the requesting node, because a name may be wrong. A state is written
before its snapshot, so a stored snapshot is always complete.
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
_LATEST = 32  # most entries examined above one node
_TOGETHER = 32  # entries read together; more would only take memory twice
StoredEntry = tuple[Tensors, Record]


def write(store: Store, node: Node, ttl: float | None) -> None:
    """Write a node to a store, after those ancestors that the store has lost."""
    chain = node.chain()
    first = len(chain) - 1
    while first and not store.has(SNAPSHOT, chain[first - 1].digest):
        first -= 1
        if not chain[first].rows.tier:
            return  # useless in a store without what it depends on
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
    # Others compare the prefix before they read tensors.
    spans = [list(span.all()) for span in node.spans]
    record = {**path_of(node), "ids": node.ids.tolist(), "whole_spans": spans}
    store.put(SNAPSHOT, node.digest, tensors, record, about)
    node.on_disk, node.unreadable = True, False


def fetched(
    store: Store | None, nodes: Sequence[Node]
) -> Iterator[tuple[Node, StoredEntry | None]]:
    """Yield nodes with their rows from the store, several per read."""
    for start in range(0, len(nodes), _TOGETHER):
        some = nodes[start : start + _TOGETHER]
        wanted = [node.digest for node in some if not node.rows.tier]
        found = read_all(store, SNAPSHOT, wanted) if store is not None and wanted else {}
        for node in some:
            yield node, found.pop(node.digest, None)


def rows_in(store: Store, node: Node, found: StoredEntry | None) -> Tensors | None:
    """The rows of a node as read, or None; an entry with other content is rejected."""
    if found is None:
        return None
    if not _belongs(node, *found):
        store.reject(SNAPSHOT, node.digest, "it belongs to another path")
        return None
    named = found[0].items()
    rows = {name[3:]: tensor for name, tensor in named if name.startswith("kv/")}
    return rows | ({LOGITS: found[0][LOGITS]} if LOGITS in found[0] else {})


def below(store: Store, node: Node) -> Below:
    """Store's entries above a node, and above those in turn, by digest of what they depend on."""
    if not isinstance(store, Listing):
        return {}
    if node.parent is not None:
        return store.below(SNAPSHOT, node.digest, _LATEST)
    found = store.below(SNAPSHOT, None, _LATEST)
    return {node.digest if base is None else base: upon for base, upon in found.items()}


def dependents_of(node: Node, described: list[tuple[str, Record]]) -> Iterator[Node]:
    """Nodes that directly depend on a node, as described in the store; not read, and not
    adopted."""
    for digest, record in described:
        if digest in node.children or record.get("parent") != node.digest:
            continue
        with contextlib.suppress(KeyError, TypeError, ValueError):  # a record that lies: not there
            ids = np.array(record["ids"], dtype=np.int64)
            spans = tuple(Span(*row) for row in record["whole_spans"])
            found = Node(node, node.end, node.end + len(ids), digest, ids, spans)
            found.code()  # raises for what is no feature id
            if len(ids) and digest in _names_of(found):
                yield found


def _names_of(node: Node) -> list[str]:
    """The possible digests of this stretch, without and with logits."""
    above = node.parent.digest if node.parent is not None else ""
    spans = [span.plain()[:4] for span in node.spans]
    kinds = ("segment", "terminal")
    return [digests.digest(kind, above, node.start, node.ids, spans) for kind in kinds]


def read_state(store: Store, node: Node) -> Tensors | None:
    """The fixed-size states at a node's end, or None."""
    found = store.get(STATE, node.digest)
    return found[0] if found is not None and found[1].get("end") == node.end else None


def path_of(node: Node) -> Record:
    """The place of a snapshot as its stored record gives it, for comparison."""
    return {
        "parent": node.parent.digest if node.parent is not None else "",
        "start": node.start,
        "end": node.end,
        "spans": [span.plain()[:4] for span in node.spans],
    }


def _belongs(node: Node, tensors: Tensors, record: Record) -> bool:
    """Whether an entry belongs to this node: its path matches, and every token has a row."""
    ids, path = tensors.get("ids"), path_of(node)
    if ids is None or not np.array_equal(ids.numpy(), node.ids):
        return False
    if any(record.get(name) != value for name, value in path.items()):
        return False
    # Rows outside of the sequence ("cross") are as many as the media have.
    kv = [t for n, t in tensors.items() if n.startswith("kv/") and not n.startswith("kv/cross.")]
    rows = [tensor.shape[-2] if tensor.dim() > 1 else -1 for tensor in kv]
    return all(count == len(node.ids) for count in rows)
