"""The `.keep` file of a conversation: messages, packages, and the snapshots of its history.

docs/package-format.md describes it. Before a snapshot is used, it is compared with the history that
it claims to belong to.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from keepsight.core.runtime import Runtime
from keepsight.errors import DamagedFile, InputError, KeepsightError, MadeElsewhere
from keepsight.formats import tensorfile
from keepsight.formats.package import Package
from keepsight.kinds import Message, Record
from keepsight.media import pictures
from keepsight.media.clips import open_clip
from keepsight.media.medium import MEDIA, Medium
from keepsight.media.sources import Source, open_source
from keepsight.prefix.match import Match
from keepsight.prefix.node import Node
from keepsight.prefix.prompt import Prompt, shift
from keepsight.prefix.tree import Tree

if TYPE_CHECKING:
    from keepsight.session.session import Session

FORMAT = 1
KIND = "session"


def save(session: Session, path: Path) -> Path:
    """Write a conversation, its packages and its snapshots."""
    tensorfile.save(path, KIND, FORMAT, *_content(session))
    return path


def spelled(session: Session) -> Iterator[bytes | memoryview]:
    """The parts of the file, in order, for who writes nothing to a disk."""
    return tensorfile.spelled(KIND, FORMAT, *_content(session))


def _content(session: Session) -> tuple[dict[str, torch.Tensor], Record]:
    runtime = session.runtime
    with runtime.lock:
        runtime.require_open()
        namespace = runtime.refresh(tenant=session.tenant)
        tensors: dict[str, torch.Tensor] = {}
        media, messages = _flatten(session, tensors)
        snapshots = _snapshots(session, namespace, tensors) if session.messages else []
        record = {
            "messages": messages,
            "media": media,
            "snapshots": snapshots,
            "weights": runtime.weights.all,
            "vision_weights": runtime.weights.vision,
            "about": session.vision.tower.about,
            "made": runtime.environment(),
        }
    return tensors, record


def load(session: Session, path: Path, accept_features: str | None) -> None:
    """Fill an empty conversation with what a file holds."""
    if accept_features not in (None, "same", "any"):
        raise InputError(f"accept_features={accept_features!r}; expected 'same' or 'any'")
    tensors, record = tensorfile.load(path, KIND, FORMAT)
    runtime = session.runtime
    with runtime.lock:
        namespace = runtime.refresh(tenant=session.tenant)
        try:
            media = _media_of(session, tensors, record, path, accept_features)
            session.messages = [_with_media(m, media) for m in record["messages"]]
            # A tenant's name is private: files do not contain it.
            differs = _other_environment(runtime, record)
            if differs:
                session.notes.append(f"prefixes are computed again: {differs}")
            elif record["snapshots"]:  # none of an empty conversation, which cannot be rendered
                _put_back(session, namespace, tensors, record["snapshots"])
        except KeepsightError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFile(f"{path}: the record lacks something: {error!r}") from error


def _flatten(
    session: Session, tensors: dict[str, torch.Tensor]
) -> tuple[list[Record], list[Message]]:
    """Messages with media replaced by numbers, and the packages behind the numbers."""
    numbers: dict[str, int] = {}
    media: list[Record] = []
    messages = []
    for message in session.messages:
        content = message["content"]
        if isinstance(content, list):
            content = [_flat_part(session, p, numbers, media, tensors) for p in content]
        messages.append(dict(message, content=content))
    return media, messages


def _flat_part(
    session: Session,
    part: Message,
    numbers: dict[str, int],
    media: list[Record],
    tensors: dict[str, torch.Tensor],
) -> Record:
    kind = part.get("type")
    if kind not in MEDIA:
        return part
    medium = session.vision.name(part[kind], kind)
    if medium.feature_id not in numbers:
        number = numbers[medium.feature_id] = len(media)
        package = session.vision.encode(medium)
        # A caller's package whose key differs from its claim must not come back as one we made.
        handed_in = medium.feature_id != package.feature_id
        form = _put_given(medium, number, tensors)
        facts = {"handed_in": True} if handed_in else {}
        media.append(package.record() | facts | ({"given": form} if form else {}))
        tensors |= {f"media/{number}/{k}": t for k, t in package.stored.items()}
    return {"type": kind, "medium": numbers[medium.feature_id]}


def _put_given(medium: Medium, number: int, tensors: dict[str, torch.Tensor]) -> str | None:
    """Put in what the session was given for a medium, and return its form; not for loose frames and
    samples."""
    data = None if medium.opened is None or not medium.opened.held else medium.opened.held.data
    form = "file"
    if isinstance(data, Image.Image):
        file, form = io.BytesIO(), "picture"
        try:
            data.save(file, "PNG", compress_level=1)
        except (OSError, ValueError):  # of a mode that PNG has not
            return None
        data = file.getvalue()
    if isinstance(data, np.ndarray):
        form, tensor = "array", torch.tensor(data)
    elif isinstance(data, bytes):
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        return None
    tensors[f"given/{number}"] = tensor
    return form


def _open_given(entry: Record, tensor: torch.Tensor) -> Source | None:
    """What the session was given for a medium."""
    if entry["given"] == "array":
        return open_source(tensor.numpy().copy())
    data = tensor.numpy().tobytes()
    if entry["given"] == "picture":
        return open_source(pictures.opened(data, "a picture of the session"))
    modality = entry.get("modality", "image")
    return open_source(data) if modality == "image" else open_clip(data, modality)


def _snapshots(session: Session, namespace: str, tensors: dict[str, torch.Tensor]) -> list[Record]:
    """The snapshots of the history as it will be rendered next time."""
    memory = session.runtime
    prompt = session.prompt()
    node = memory.tree.hold(memory.tree.match(namespace, prompt, memory.rule))
    try:
        if not memory.tree.load(node, prompt):
            return []
        return [_put_node(n, i, tensors) for i, n in enumerate(node.chain())]
    finally:
        memory.tree.release(node)


def _other_environment(memory: Runtime, record: Record) -> str:
    """What differs from the environment in which the file was written; empty if nothing does."""
    if record["weights"] != memory.weights.all:
        return "made under other weights"
    there, here = record.get("made", {}), memory.environment()
    if there == here:
        return ""
    names = [name for name in here if here[name] != there.get(name)]
    changes = [f"{name} {there.get(name)!r} there, {here[name]!r} here" for name in names]
    return "made elsewhere: " + ("; ".join(changes) or "under another version")


def _put_node(node: Node, number: int, tensors: dict[str, torch.Tensor]) -> Record:
    name = f"snapshot/{number}"
    tensors |= {f"{name}/kv/{k}": t for k, t in (node.kv or {}).items()}
    tensors |= {f"{name}/fixed/{k}": t for k, t in (node.fixed or {}).items()}
    tensors[f"{name}/ids"] = torch.from_numpy(node.ids)
    spans = [span.plain()[:4] for span in shift(node.spans, -node.start)]
    return {"start": node.start, "end": node.end, "spans": spans, "fixed": node.fixed is not None}


def _media_of(
    session: Session,
    tensors: dict[str, torch.Tensor],
    record: Record,
    path: Path,
    accept_features: str | None,
) -> list[Medium]:
    media = []
    for number, entry in enumerate(record["media"]):
        own = _under(tensors, f"media/{number}/")
        package = Package.from_record(own, entry, f"{path}, medium {number}")
        elsewhere = session.vision.differences(package)
        if elsewhere and accept_features == "same":
            raise MadeElsewhere(
                f"{path}: the features of medium {number} were made elsewhere ({elsewhere}); "
                "resume it with accept_features='any' to use them as they are"
            )
        if elsewhere:
            session.notes.append(f"features of medium {number} were made elsewhere: {elsewhere}")
        medium = session.vision.admit(package, bool(entry.get("handed_in")))
        with contextlib.suppress(KeepsightError):  # its features are enough where it cannot be read
            opened = _open_given(entry, tensors[f"given/{number}"]) if "given" in entry else None
            medium = session.kept(replace(medium, opened=opened))
        media.append(medium)
    return media


def _with_media(message: Message, media: list[Medium]) -> Message:
    content = message["content"]
    if not isinstance(content, list):
        return dict(message)
    parts = [
        {"type": kind, kind: media[part["medium"]]} if (kind := part["type"]) in MEDIA else part
        for part in content
    ]
    return dict(message, content=parts)


def _put_back(
    session: Session, namespace: str, tensors: dict[str, torch.Tensor], snapshots: list[Record]
) -> None:
    """Put snapshots into the tree, after comparing each with the history it claims to hold."""
    tree: Tree = session.runtime.tree
    prompt = session.prompt()
    node = tree.hold(Match(tree.root(namespace)))
    try:
        for number, entry in enumerate(snapshots):
            own = _under(tensors, f"snapshot/{number}/")
            kv = {k: t.clone() for k, t in _under(own, "kv/").items()}
            fixed = {k: t.clone() for k, t in _under(own, "fixed/").items()}
            start, end = entry["start"], entry["end"]
            belongs = _belongs(prompt, start, end, entry, own["ids"], kv)
            received = tree.receive(kv, fixed if entry["fixed"] else None)
            if start != node.end or not belongs or received is None:
                session.notes.append("a snapshot does not belong to this history; computed again")
                break
            child = tree.insert(node, prompt, end, *received)
            tree.release(node)
            node = child
    finally:
        tree.release(node)


def _belongs(
    prompt: Prompt,
    start: int,
    end: int,
    described: Record,
    ids: torch.Tensor,
    kv: dict[str, torch.Tensor],
) -> bool:
    """Whether a snapshot belongs to this stretch: its path matches, and every token has a row."""
    true = [
        [s.start - start, s.end - start, s.feature_id, s.offset] for s in prompt.clip(start, end)
    ]
    if not start < end <= len(prompt) or [span[:4] for span in described["spans"]] != true:
        return False
    grown = [tensor for name, tensor in kv.items() if not name.startswith("cross.")]
    rows = all(t.dim() > 1 and t.shape[-2] == end - start for t in grown)
    return rows and np.array_equal(ids.numpy(), prompt.ids[start:end])


def _under(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
