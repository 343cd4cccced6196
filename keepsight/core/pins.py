"""Pinned, gone, or only looked at: what a caller says of an image or of one conversation.

Pins and deletions reach every tier: memory, the store's folder, and whatever lies behind it. An
image may also be meant by its key, which reports tell, so nobody needs its bytes for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeGuard

from keepsight.core.call import Call
from keepsight.core.runtime import Runtime
from keepsight.core.turn import Turn
from keepsight.errors import ImageError
from keepsight.formats.package import Package
from keepsight.kinds import Message
from keepsight.media.features import Vision
from keepsight.media.medium import Medium, Pictures
from keepsight.models.families import Pixels
from keepsight.prefix.node import Node
from keepsight.prefix.prompt import Prompt
from keepsight.prefix.tree import Tree
from keepsight.report import Report
from keepsight.store import Store


def pin(runtime: Runtime, what: Pictures | list[Message], pinned: bool, call: Call) -> None:
    """Keep (or no longer keep) an image's features, or a conversation's features and prefix. What
    there is no room for is refused, and then nothing of it is kept."""
    vision, shelf = runtime.vision_of(call.tenant), runtime.shelves.packages
    runtime.refresh(call.exact, call.tenant)
    with contextlib.ExitStack() as undo:
        if _is_conversation(what):
            media = _pin_path(runtime, what, pinned, call, undo)
        else:
            media = tuple(_named(vision, what))
        for medium in media:
            before = vision.is_pinned(medium)
            package, _ = vision.package(medium)
            if pinned and not shelf.has(call.tenant, package.feature_id):
                shelf.put_pinned(call.tenant, package.feature_id, package)
            if pinned and not before:
                undo.callback(vision.pin, medium, False)
            vision.pin(medium, pinned)
        undo.pop_all()


def _pin_path(
    runtime: Runtime, messages: list[Message], pinned: bool, call: Call, undo: contextlib.ExitStack
) -> tuple[Medium, ...]:
    """Prefill a conversation's prompt and pin its path before anything else can take its place."""
    store = runtime.store_of(call.tenant)
    turn = _turn(runtime, call, lambda: runtime.render(messages, call))
    try:
        turn.begin(sample=False)
        turn.prefill()
        reached = turn.reached
        if pinned and not reached.pinned:
            undo.callback(_pin_nodes, runtime.tree, store, reached, False)
        _pin_nodes(runtime.tree, store, reached, pinned)
    finally:
        turn.finish()
    return turn.prompt.media


def _pin_nodes(tree: Tree, store: Store | None, node: Node, pinned: bool) -> None:
    tree.pin(node, pinned)
    for one in node.chain() if store is not None else ():
        for kind in ("snapshot", "state"):
            store.pin(kind, one.digest, pinned)  # type: ignore[union-attr]


def _turn(runtime: Runtime, call: Call, render: Callable[[], Prompt]) -> Turn:
    return Turn(runtime, render, {}, call.exact, tenant=call.tenant)


def delete(runtime: Runtime, what: Pictures | list[Message], call: Call) -> int:
    """Remove images and all that was computed from them; the bytes freed."""
    tenant = call.tenant
    runtime.refresh(call.exact, tenant)
    if not _is_conversation(what):
        media = list(_named(runtime.vision_of(tenant), what))
        return sum(runtime.forget(medium, tenant) for medium in media)
    prompt = runtime.render(what, call)
    freed: int = sum(runtime.forget(medium, tenant) for medium in prompt.media)
    return freed + _forget_path(runtime, prompt, call)


def _forget_path(runtime: Runtime, prompt: Prompt, call: Call) -> int:
    """The snapshots of a prompt that no other prompt goes through, deepest first."""
    freed = 0
    turn = _turn(runtime, call, lambda: prompt)
    try:
        turn.begin(sample=False)
        node: Node | None = turn.match.node
    finally:
        turn.finish()
    store = runtime.store_of(call.tenant)
    while node is not None and node.parent is not None and not _stood_on(node):
        above = node.parent
        freed += int(runtime.tree.forget(node))
        if store is not None:
            freed += store.delete("snapshot", node.digest)
        node = above
    return freed


def _stood_on(node: Node) -> bool:
    """Whether anything that is kept stands on this snapshot."""
    return any(child.rows.tier or child.on_disk for child in node.children.values())


def _named(vision: Vision, what: object) -> list[Medium]:
    """The media behind one image in any form, or behind a list of them."""
    images = what if isinstance(what, list | tuple) else [what]
    return [vision.name(image, getattr(image, "modality", "image")) for image in images]


def _is_conversation(what: object) -> TypeGuard[list[Message]]:
    return isinstance(what, list | tuple) and bool(what) and isinstance(what[0], dict)


# -- by key ----------------------------------------------------------------------------------------


def is_known(runtime: Runtime, key: str, tenant: str) -> bool:
    """Whether features of an image are held anywhere for a tenant."""
    return bool(_features_of(runtime, key, tenant))


def pin_images(runtime: Runtime, keys: list[str], pinned: bool, tenant: str) -> int:
    """Keep (or no longer keep) the features of images where they lie, all of them or none; how many
    features are held."""
    shelf, store, found = runtime.shelves.packages, runtime.store_of(tenant), 0
    with contextlib.ExitStack() as undo:
        for made in (made for key in keys for made in _features_of(runtime, key, tenant)):
            new = pinned and not shelf.pinned(tenant, made)
            held = shelf.pin(tenant, made, pinned)
            if held and new:
                undo.callback(shelf.pin, tenant, made, False)
            if store is not None:
                entry = store.entry("package", made) if pinned else None
                if entry is not None and not entry.pinned:
                    undo.callback(store.pin, "package", made, False)
                held |= store.pin("package", made, pinned)
            found += held
        undo.pop_all()
    return found


def delete_image(runtime: Runtime, key: str, tenant: str) -> int:
    """Remove an image and all that was computed from it; the bytes freed."""
    return runtime.forget(Medium(key, "", "", {}, (), None, _no_pixels), tenant)


def _no_pixels() -> Pixels:
    raise ImageError("an image that is only named by its key has no pixels to encode")


def _features_of(runtime: Runtime, key: str, tenant: str) -> list[str]:
    """The feature ids of an image, in whichever making. A store has no list of images, so it is
    walked through, but only where memory has none."""
    shelf, store = runtime.shelves.packages, runtime.store_of(tenant)
    held = [made for made, package in shelf.items(tenant) if package.key == key]
    if held or store is None:
        return held
    return [e.key for e in store.entries() if e.kind == "package" and key in e.media]


# -- only looking ----------------------------------------------------------------------------------


def foresee(runtime: Runtime, messages: list[Message], call: Call) -> Report:
    """The report that a call would give. Nothing is computed with the model, brought from one tier
    to another, or made more useful; a picture that nobody knows is still not known afterwards."""

    vision = runtime.vision_of(call.tenant)

    def name(image: object, modality: str) -> Medium:
        if isinstance(image, Medium | Package):
            return vision.name(image, modality)
        return vision.medium_of(vision.namer.look(image, modality))

    def render() -> Prompt:
        return runtime.render(messages, call, name=name)

    return _turn(runtime, call, render).foresee()
