"""Writes and reads nodes as entries of a store: `snapshot` (rows, ids, the path) and `state` (what
is valid at its end: states of fixed size, or the last logits).

A snapshot's name is the digest of its stretch and of the entry that it goes on from, at any token
of that one. Content is compared with the requesting node, because a name may be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from keepsight.kinds import Record
from keepsight.prefix.node import LOGITS, Node, Stored, Tensors, cut
from keepsight.prefix.prompt import Prompt, Span, shift
from keepsight.store import About, Below, Store

SNAPSHOT, STATE = "snapshot", "state"
_LATEST = 32  # most entries examined above one entry
_TOGETHER = 32  # entries read together; more would only take memory twice
StoredEntry = tuple[Tensors, Record]


def write(store: Store, node: Node, ttl: float | None, cost: float) -> None:
    """Write a node to a store, after those ancestors that the store has lost."""
    chain = node.chain()
    if node.ends and node.own_entry is None:
        node.entry = None  # a state needs an entry that ends with it
    first = len(chain)
    while first and not is_there(store, chain[first - 1]):
        first -= 1
    if not all(n.tier for n in chain[first:]):
        return  # useless in a store without what it depends on
    for n in chain[first:] or [node]:
        spent = cost if n is node else 0.0
        if not is_there(store, n):
            _write_rows(store, n, ttl, spent)
        _write_ends(store, n, ttl, spent)


def is_there(store: Store, node: Node) -> bool:
    """Whether a store has the rows of a node."""
    return node.entry is not None and store.has(SNAPSHOT, node.entry.name)


def _write_rows(store: Store, node: Node, ttl: float | None, cost: float) -> None:
    above = node.parent
    if above is None or above.entry is None:
        return
    node.settled()
    base = None if above.parent is None else (SNAPSHOT, above.entry.name)
    prompt = Prompt.of_path(node.start, node.ids, node.spans)
    name = prompt.segment_digest(above.entry.name, node.start, node.end)
    spans = shift(node.spans, -node.start)
    record = {
        "parent": above.entry.name,
        "start": node.start,
        "end": node.end,
        "spans": [span.plain()[:4] for span in spans],
        "ids": node.ids.tolist(),  # others compare the path before they read tensors
        "whole_spans": [list(span.all()) for span in spans],
    }
    rows = {f"kv/{name}": tensor for name, tensor in node.rows.items()}
    tensors = {**rows, "ids": torch.from_numpy(node.ids)}
    store.put(SNAPSHOT, name, tensors, record, About(cost, base, _media_of(node), ttl))
    node.entry, node.unreadable = Stored(name, node.start, node.end), False


def _write_ends(store: Store, node: Node, ttl: float | None, cost: float) -> None:
    """Write what is valid at a node's end: it depends on the rows, and comes after them."""
    if (entry := node.own_entry) is None:
        return
    about = About(cost, (SNAPSHOT, entry.name), _media_of(node), ttl)
    last = {name: tensor for name, tensor in node.ends.items() if name == LOGITS}
    for name, tensors in ((entry.name, node.states), (entry.ending, last)):
        if tensors and not store.has(STATE, name):
            node.settled()
            store.put(STATE, name, tensors, {"end": node.end}, about)


def _media_of(node: Node) -> tuple[str, ...]:
    return tuple(sorted({span.key for span in node.spans if span.key}))


def rows_of(store: Store, nodes: Sequence[Node]) -> Iterator[tuple[Node, Tensors | None]]:
    """The rows of nodes from the store, several entries per read; None where that failed."""
    names = list(dict.fromkeys(node.entry.name for node in nodes if node.entry is not None))
    found: dict[str, StoredEntry] = {}
    for node in nodes:
        if node.entry is None:
            yield node, None
            continue
        if node.entry.name in names:
            some, names = names[:_TOGETHER], names[_TOGETHER:]
            found = store.get_all(SNAPSHOT, some)
        read = found.get(node.entry.name)
        yield node, None if read is None else _rows_in(store, node, node.entry, *read)


def _rows_in(
    store: Store, node: Node, entry: Stored, tensors: Tensors, record: Record
) -> Tensors | None:
    """The rows of a node in an entry; one with other content is rejected."""
    path = described(entry.name, record)
    ids, length = tensors.get("ids"), entry.end - entry.start
    rows = {name[3:]: t for name, t in tensors.items() if name.startswith("kv/")}
    # Rows outside of the sequence ("cross") are as many as the media have.
    counts = [t.shape[-2] if t.dim() > 1 else -1 for n, t in rows.items() if n[:6] != "cross."]
    belongs = path is not None and ids is not None and set(counts) <= {length}
    belongs = belongs and (record["start"], record["end"]) == (entry.start, entry.end)
    if not belongs or path is None or ids is None or not np.array_equal(ids.numpy(), record["ids"]):
        store.reject(SNAPSHOT, entry.name, "it belongs to another path")
        return None
    if node.shared(path) != len(node.ids):
        store.reject(SNAPSHOT, entry.name, "it belongs to another path")
        return None
    return cut(rows, node.start - entry.start, node.end - entry.start, length)


def described(name: str, record: Record) -> Prompt | None:
    """The path of an entry as its record has it, up to its end; None if the record lies. What is
    before its start is blank."""
    try:
        start, spans = record["start"], tuple(Span(*row) for row in record["whole_spans"])
        ids = np.array(record["ids"], dtype=np.int64)
        if [span.plain()[:4] for span in spans] != record["spans"] or start < 0 or not len(ids):
            return None
        path = Prompt.of_path(start, ids, shift(spans, start))
        true = path.segment_digest(record["parent"], start, len(path))
        return path if true == name and record["end"] == len(path) else None
    except (KeyError, TypeError, ValueError):
        return None


def below(store: Store, node: Node, entry: Stored) -> Below:
    """What goes on from an entry, and from those in turn, by the name of what they go on from."""
    if node.parent is not None:
        return store.below(SNAPSHOT, entry.name, _LATEST)
    found = store.below(SNAPSHOT, None, _LATEST)
    return {entry.name if base is None else base: upon for base, upon in found.items()}


def read_end(store: Store, node: Node, what: str) -> Tensors | None:
    """What is valid at a node's end, under its name; None if it is not there."""
    found = store.get(STATE, what)
    return found[0] if found is not None and found[1].get("end") == node.end else None
