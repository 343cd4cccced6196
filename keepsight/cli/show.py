"""Describes a `.sight` or `.keep` file: its contents, what it is bound to, and whether it is
intact.

The file is read and checked in full, as any use would, so a file shown without complaint is a file
that loads. No model is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from keepsight import store
from keepsight.cli.terminal import plain, table
from keepsight.errors import DamagedFile, InputError, NotKeepsightFile
from keepsight.formats import package, tensorfile
from keepsight.formats.package import Package
from keepsight.kinds import Record
from keepsight.session import keep_file
from keepsight.system.places import expanded
from keepsight.system.units import bytes_text

_FORMATS = {
    package.KIND: package.FORMAT,
    keep_file.KIND: keep_file.FORMAT,
    "snapshot": store.FORMAT,
    "state": store.FORMAT,
}
_WHAT = {
    package.KIND: "a package: the features of one image",
    keep_file.KIND: "a session: a conversation, its pictures and what was prefilled of it",
    "snapshot": "a snapshot of a store: one stretch of a prefix",
    "state": "a state of a store: the fixed-size layers behind one stretch of a prefix",
}


def describe(file: str | Path) -> Record:
    """Everything about a file, as plain data. Damage raises a named error."""
    path = expanded(file)
    try:
        size = path.stat().st_size
        start = time.perf_counter()
        record = tensorfile.read_record(path)
        header = time.perf_counter()
        kind = record["kind"]
        if kind not in _FORMATS:
            raise NotKeepsightFile(f"{path}: a Keepsight file of an unknown kind, {kind!r}")
        tensors, record = tensorfile.read(path, kind, _FORMATS[kind])
        end = time.perf_counter()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    described = {
        "path": str(path),
        "kind": kind,
        "what": _WHAT[kind],
        "format": record["format"],
        "bytes": size,
        "tensor_bytes": sum(t.nbytes for t in tensors.values()),
        "tensors": [_tensor(name, t, record["tensors"][name]) for name, t in tensors.items()],
        "reading_ms": {
            "record": round(1e3 * (header - start), 3),
            "everything, checked": round(1e3 * (end - header), 3),
        },
        "integrity": f"sound: the record and {len(tensors)} tensors match their digests",
    }
    return described | _PARTS[kind](path, tensors, record)


def _tensor(name: str, tensor: torch.Tensor, digest: str) -> Record:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = list(tensor.shape)
    return {"name": name, "dtype": dtype, "shape": shape, "bytes": tensor.nbytes, "digest": digest}


def _package(path: Path, tensors: dict[str, torch.Tensor], record: Record) -> Record:
    loaded = Package.from_record(tensors, record, str(path))
    about = loaded.about
    return {
        "modality": loaded.modality,
        "tokens": loaded.tokens,
        "grid": loaded.grid,
        "key": loaded.key,
        "identity": loaded.identity,
        "feature_id": loaded.feature_id,
        "codec": loaded.codec,
        "bound_to": {
            "model": about.get("model_type"),
            "name": about.get("name"),
            "commit": about.get("commit"),
            "vision weights": loaded.weights,
            "vision settings": loaded.settings,
            "image processor": about.get("image_processor"),
            "processor settings": about.get("processor_settings"),
        },
        "provenance": loaded.provenance,
    }


def _session(path: Path, tensors: dict[str, torch.Tensor], record: Record) -> Record:
    try:
        messages, media = record["messages"], record["media"]
        about = record["about"]
        return {
            "messages": [_message(message) for message in messages],
            "images": len(media),
            "image_tokens": sum(int(medium["tokens"]) for medium in media),
            "prefilled_tokens": max((int(s["end"]) for s in record["snapshots"]), default=0),
            "bound_to": {
                "model": about.get("model_type"),
                "name": about.get("name"),
                "commit": about.get("commit"),
                "weights": record["weights"],
                "vision weights": record["vision_weights"],
            },
            "provenance": media[0]["provenance"] if media else record.get("made", {}),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFile(f"{path}: the record lacks something: {error!r}") from error


def _message(message: Record) -> Record:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {
        "role": message["role"],
        "text": " ".join(part["text"] for part in parts if part.get("type") == "text"),
        "images": sum(part.get("type") == "image" for part in parts),
    }


def _snapshot(path: Path, tensors: dict[str, torch.Tensor], record: Record) -> Record:
    known = {name: record[name] for name in ("start", "end", "parent") if name in record}
    return {"tokens": known, "bound_to": {"parent": record.get("parent")}, "provenance": {}}


_PARTS: dict[str, Callable[[Path, dict[str, torch.Tensor], Record], Record]] = {
    package.KIND: _package,
    keep_file.KIND: _session,
    "snapshot": _snapshot,
    "state": _snapshot,
}


# -- for people --------------------------------------------------------------------------------


def render(described: Record) -> RenderableType:
    """The tables that describe a file."""
    parts: list[RenderableType] = [_facts(described)]
    for message in described.get("messages", []):
        pictures = f" [{message['images']} images]" if message["images"] else ""
        parts.append(Text(plain(f"  {message['role']}:{pictures} {message['text']}")))
    for title in ("bound_to", "provenance"):
        rows = {name: value for name, value in described[title].items() if value is not None}
        if rows:
            shown = table("", "", title=f"\n{title.replace('_', ' ')}")
            for name, value in rows.items():
                shown.add_row(plain(f"  {name}"), plain(_text(value)))
            parts.append(shown)
    return Group(*parts, _tensors(described["tensors"]))


def _facts(described: Record) -> RenderableType:
    ms = described["reading_ms"]
    everything = ms["everything, checked"]
    speed = bytes_text(1e3 * described["bytes"] / max(everything, 1e-3))
    facts = {
        "file": described["path"],
        "what": f"{described['what']} (format {described['format']})",
        "size": f"{bytes_text(described['bytes'])} on disk, "
        f"{bytes_text(described['tensor_bytes'])} of tensors",
        "integrity": described["integrity"],
        "reading": f"record {ms['record']:.1f} ms, everything {everything:.1f} ms ({speed}/s)",
    }
    shown_facts = ("tokens", "images", "image_tokens", "prefilled_tokens", "grid", "codec")
    for name in (*shown_facts, "key", "identity"):
        if name in described:
            facts[name.replace("_", " ")] = _text(described[name])
    shown = table("", "")
    for name, value in facts.items():
        style = "green" if name == "integrity" else "bold" if name == "file" else ""
        shown.add_row(name, Text(plain(value), style=style))
    return shown


def _tensors(tensors: list[Record]) -> RenderableType:
    right = ("shape", "bytes")
    shown = table("tensor", "dtype", "shape", "bytes", "digest", right=right, title="\ntensors")
    for t in tensors[:24]:
        shape = "x".join(map(str, t["shape"]))
        digest = f"{t['digest'][:12]}…"
        shown.add_row(plain(t["name"]), t["dtype"], shape, bytes_text(t["bytes"]), digest)
    if len(tensors) > 24:
        shown.add_row(f"and {len(tensors) - 24} more", "", "", "", "")
    return shown


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(v)}" for name, v in value.items())
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
