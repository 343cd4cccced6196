"""Pins, removes or looks up an image or a conversation.

Pins and deletions reach every tier: memory, the store's folder, and tiers behind it. An image may
be named by its key, which reports show, instead of its bytes.

Pictures are read in the caller's thread, before the model's lock is taken. Memory changes under the
lock. A store changes without it, because a disk may be slow. `Runtime.housekeeping` makes such
calls wait for each other, so memory and store see them in one order. A thread that already has the
model (a listener, or a hook of the model) does not wait: who is at it may wait for the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TypeGuard

from keepsight.core.answer import asked, read
from keepsight.core.call import Call
from keepsight.core.order import Order
from keepsight.core.runtime import Runtime
from keepsight.core.sequence import Sequence
from keepsight.errors import ImageError, StoreError
from keepsight.kinds import Message
from keepsight.media.medium import Medium, Pictures
from keepsight.media.video_steps import shows
from keepsight.models.families import Pixels
from keepsight.prefix.node import Node
from keepsight.prefix.prompt import Prompt
from keepsight.report import Report
from keepsight.store import Store
from keepsight.store.contract import Name

Undo = contextlib.ExitStack


def pin(runtime: Runtime, what: Pictures | list[Message], pinned: bool, call: Call) -> None:
    """Pin (or unpin) an image's features, or a conversation's features and prefix. If there is no
    room the call is refused and pins nothing."""
    seq: Sequence | None = None
    if _is_conversation(what):
        seq = asked(runtime, what, call, answers=False)
    else:
        named = _looked_at(runtime, what, call.tenant)
    with _one_at_a_time(runtime), contextlib.ExitStack() as undo:
        with runtime.lock:
            runtime.refresh(call.tenant)
            path = [] if seq is None else _pin_path(runtime, seq, pinned, undo)
            media = named() if seq is None else seq.prompt.media
            names = path + _pin_features(runtime, media, pinned, call.tenant, undo)
        _pin_in_store(runtime.store_of(call.tenant), names, pinned, undo)
        undo.pop_all()


def _pin_features(
    runtime: Runtime, media: Iterable[Medium], pinned: bool, tenant: str, undo: Undo
) -> list[Name]:
    """Pin features in memory alone; return the names to pin in a store."""
    vision, packages = runtime.vision_of(tenant), runtime.caches.packages
    names: list[Name] = []
    for medium in media:
        before = vision.is_pinned(medium)
        package, _ = vision.package(medium)
        # Not under the name that a package claims: a caller's has another until it is proved.
        if pinned and not packages.has(tenant, medium.feature_id):
            packages.put_pinned(tenant, medium.feature_id, package.copied())
        if pinned and not before:
            undo.callback(_locked, runtime, vision.pin, medium, False)
        vision.pin(medium, pinned)
        names += [("package", name) for name in vision.stored_as(medium)]
    return names


def _pin_path(runtime: Runtime, seq: Sequence, pinned: bool, undo: Undo) -> list[Name]:
    """Read a conversation's prompt and pin its path before anything else can evict it; return the
    names to pin in a store."""
    seq.keeps_node = True
    read(runtime, seq)
    reached = seq.node
    if reached is None:
        raise StoreError("the conversation was forgotten while it was pinned; pin it again")
    try:
        if pinned and not reached.pinned:
            undo.callback(_locked, runtime, runtime.tree.pin, reached, False)
        runtime.tree.pin(reached, pinned)
        entries = [one.entry for one in reached.chain() if one.entry is not None]
    finally:
        runtime.tree.release(reached)
    names = [("snapshot", entry.name) for entry in entries]
    return names + [("state", name) for e in entries for name in (e.name, e.ending)]


def _pin_in_store(store: Store | None, names: list[Name], pinned: bool, undo: Undo) -> int:
    """Pin those of these entries that a store has; return their number. Only the caller waits for
    the disk."""
    if store is None:
        return 0
    count = 0
    for name in names:
        entry = store.entry(*name) if pinned else None
        if entry is not None and not entry.pinned:
            undo.callback(_unpin_in_store, store, name)
        count += store.pin(*name, pinned)
    return count


def _unpin_in_store(store: Store, name: Name) -> None:
    with contextlib.suppress(StoreError):  # the error that led here names the disk's problem
        store.pin(*name, False)


def _one_at_a_time(runtime: Runtime) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if runtime.lock.held else runtime.housekeeping


def _locked(runtime: Runtime, work: Callable[..., object], *arguments: object) -> None:
    with runtime.lock:
        work(*arguments)


# -- removing --------------------------------------------------------------------------------------


def clear(runtime: Runtime, tenant: str | None, stored: bool) -> None:
    """Forget everything in memory, of all tenants or of one; with `stored` in all tiers."""
    store = runtime.store_of(tenant or "")
    if store is not None and tenant is None:
        store = store.of(None)  # all tenants

    def forget() -> int:
        runtime.clear(tenant)
        return 0

    if stored and store is not None:
        _everywhere(runtime, forget, store.clear, forget)
    else:
        _locked(runtime, forget)


def delete(runtime: Runtime, what: Pictures | list[Message], call: Call) -> int:
    """Remove images and everything computed from them; return the bytes freed."""
    tenant, store = call.tenant, runtime.store_of(call.tenant)
    order: Order | None = None
    if _is_conversation(what):
        order = Order(runtime, what, call).rendered()
    else:
        named = _looked_at(runtime, what, tenant)
    media: list[Medium] = []
    path: dict[str, None] = {}  # digests of snapshots, deepest first

    def forget() -> int:
        runtime.refresh(tenant)
        runtime.forget_said(tenant)
        prompt = None if order is None else order.current()
        media.extend(named() if prompt is None else prompt.media)
        freed: int = sum(runtime.forget(medium, tenant) for medium in media)
        return freed + (0 if prompt is None else _forget_path(runtime, prompt, call, path))

    def remove() -> int:
        return _remove(store, [medium.key for medium in media], path)

    def again() -> None:
        for medium in media:
            runtime.forget(medium, tenant)
        for node in [n for n in runtime.tree.nodes(tenant) if n.entry and n.entry.name in path]:
            runtime.tree.forget(node)

    return _everywhere(runtime, forget, remove, again)


def _everywhere(
    runtime: Runtime,
    forget: Callable[[], int],
    remove: Callable[[], int],
    again: Callable[[], object],
) -> int:
    """Forget something in memory and remove it from a store; return the bytes freed.

    A disk may be slow, so no lock that answers need is held meanwhile. `again` forgets what was
    read back from the store before it was removed there.
    """
    with _one_at_a_time(runtime):
        with runtime.lock:
            freed = forget()
        try:
            return freed + remove()
        finally:
            _locked(runtime, again)


def _remove(store: Store | None, images: list[str], snapshots: Iterable[str]) -> int:
    if store is None:
        return 0
    freed = sum(store.delete_media(key) for key in dict.fromkeys(images))
    return freed + sum(store.delete("snapshot", digest) for digest in snapshots)


def _forget_path(runtime: Runtime, prompt: Prompt, call: Call, path: dict[str, None]) -> int:
    """Forget the snapshots of a prompt that no other prompt shares, deepest first, and add them to
    `path`."""
    freed = 0
    namespace = runtime.refresh(call.tenant)
    node: Node | None = runtime.tree.match(namespace, prompt, runtime.rule).node
    while node is not None and node.parent is not None:
        above = node.parent
        if any(child.tier or child.entry for child in node.children.values()):
            break  # another depends on it
        freed += int(runtime.tree.forget(node))
        if node.own_entry is not None:
            path[node.own_entry.name] = None
        node = above
    return freed


def _looked_at(runtime: Runtime, what: object, tenant: str) -> Callable[[], list[Medium]]:
    """Look at one image in any form, or at a list of them, in this thread; what is returned names
    them, under the model's lock."""
    images = what if isinstance(what, list | tuple) else [what]
    vision = runtime.bound_vision_of(tenant)
    bound = vision.namer.bound
    with runtime.lock.beside():
        looked = [vision.look_any(image) for image in images]

    def named() -> list[Medium]:
        if runtime.vision_of(tenant).namer.bound is not bound:  # settings changed meanwhile
            return [vision.name_any(image) for image in images]
        return [vision.name_looked(one) for one in looked]

    return named


def _is_conversation(what: object) -> TypeGuard[list[Message]]:
    return isinstance(what, list | tuple) and bool(what) and isinstance(what[0], dict)


# -- by key ----------------------------------------------------------------------------------------


def are_known(runtime: Runtime, keys: list[str], tenant: str) -> dict[str, bool]:
    """For each image, whether a tenant's features of it exist in any tier."""
    return {key: bool(_features_of(runtime, key, tenant)) for key in keys}


def pin_images(runtime: Runtime, keys: list[str], pinned: bool, tenant: str) -> int:
    """Pin (or unpin) the features of images, all or none; return how many features are pinned."""
    packages = runtime.caches.packages
    with _one_at_a_time(runtime), contextlib.ExitStack() as undo:
        found = [made for key in keys for made in _features_of(runtime, key, tenant)]
        with runtime.lock:
            for made in found:
                new = pinned and not packages.pinned(tenant, made)
                if packages.pin(tenant, made, pinned) and new:
                    undo.callback(_locked, runtime, packages.pin, tenant, made, False)
        names = [("package", made) for made in found]
        _pin_in_store(runtime.store_of(tenant), names, pinned, undo)
        undo.pop_all()
    return len(found)


def delete_images(runtime: Runtime, keys: list[str], tenant: str) -> int:
    """Remove images and everything computed from them; return the bytes freed."""
    media = [Medium(key, "", "", {}, (), None, _no_pixels) for key in keys]

    def forget() -> int:
        return sum(runtime.forget(medium, tenant) for medium in media)

    store = runtime.store_of(tenant)
    return _everywhere(runtime, forget, lambda: _remove(store, keys, ()), forget)


def _no_pixels() -> Pixels:
    raise ImageError("an image given by its key has no pixels to encode")


def _features_of(runtime: Runtime, key: str, tenant: str) -> list[str]:
    """The feature ids of an image, in every namespace. A store has no list of images, so it is
    scanned, but only if memory has none."""
    packages, store = runtime.caches.packages, runtime.store_of(tenant)
    with runtime.lock:
        held = [made for made, package in packages.items(tenant) if shows(package, key)]
    if held or store is None:
        return held
    return [e.key for e in store.entries() if e.kind == "package" and key in e.media]


# -- only looking ----------------------------------------------------------------------------------


def predict_report(runtime: Runtime, messages: list[Message], call: Call) -> Report:
    """The report that a call would give. The model does not run, no entry moves between tiers or
    becomes fresher, and an unknown picture stays unknown. Pictures are looked at in this thread."""
    runtime.require_answers()
    runtime.tokenizer()
    seq = Sequence(Order(runtime, messages, call).rendered().prompt, call.tenant)
    with runtime.lock:
        runtime.engine.look(seq)
        return seq.report()
