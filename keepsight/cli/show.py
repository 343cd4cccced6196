"""Describes a `.sight` or `.keep` file, or an export: what it holds and is bound to, and whether it
is intact.

All of it is read and checked, as any use would, so what is shown without complaint is what loads.
No model is needed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from keepsight import store
from keepsight.cli.terminal import facts, plain, table
from keepsight.errors import DamagedFile, InputError, NotKeepsightFile
from keepsight.formats import package, tensorfile
from keepsight.formats.package import Package
from keepsight.kinds import Record
from keepsight.runtimes import load as exported
from keepsight.runtimes.manifest import PARTS, Manifest
from keepsight.session import keep_file
from keepsight.system.places import expanded
from keepsight.system.units import bytes_text

_KINDS = {
    package.KIND: (package.FORMAT, "a package: the features of one image"),
    keep_file.KIND: (
        keep_file.FORMAT,
        "a session: a conversation, its pictures and what was prefilled of it",
    ),
    "snapshot": (store.FORMAT, "a snapshot of a store: one stretch of a prefix"),
    "state": (
        store.FORMAT,
        "a state of a store: the fixed-size layers behind one stretch of a prefix",
    ),
}
_RUNTIMES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}
_HELD = {
    None: "float32",
    "int8": "int8 (decoder and head), float32 (vision encoder)",
    "int4": "int4 (decoder), int8 (head), float32 (vision encoder)",
}
_MOST_TENSORS = 24


def describe(file: str | Path) -> Record:
    """Everything about a file or an export, as plain data. Damage raises a named error."""
    path = expanded(file)
    start = time.perf_counter()
    try:
        if exported.is_export(path):
            return _export(path)
        size = path.stat().st_size
        record = tensorfile.read_record(path)
        header = time.perf_counter()
        kind = record["kind"]
        if kind not in _KINDS:
            raise NotKeepsightFile(f"{path}: a Keepsight file of an unknown kind, {kind!r}")
        number, what = _KINDS[kind]
        tensors, record = tensorfile.read(path, kind, number)
        end = time.perf_counter()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    described = {
        "path": str(path),
        "kind": kind,
        "what": what,
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
    if kind == package.KIND:
        return described | _package(Package.from_record(tensors, record, str(path)))
    if kind == keep_file.KIND:
        try:
            return described | _session(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFile(f"{path}: the record lacks something: {error!r}") from error
    known = {name: record[name] for name in ("start", "end", "parent") if name in record}
    bound = {"parent": record.get("parent")}
    return described | {"tokens": known, "bound_to": bound, "provenance": {}}


def _tensor(name: str, tensor: torch.Tensor, digest: str) -> Record:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = list(tensor.shape)
    return {"name": name, "dtype": dtype, "shape": shape, "bytes": tensor.nbytes, "digest": digest}


def _bound_to(about: Record) -> Record:
    names = {"model": "model_type", "name": "name", "commit": "commit"}
    return {name: about.get(key) for name, key in names.items()}


def _package(loaded: Package) -> Record:
    names = ("modality", "tokens", "grid", "key", "identity", "feature_id", "codec")
    return {name: getattr(loaded, name) for name in names} | {
        "bound_to": {
            **_bound_to(loaded.about),
            "vision weights": loaded.weights,
            "vision settings": loaded.settings,
            "image processor": loaded.about.get("image_processor"),
            "processor settings": loaded.about.get("processor_settings"),
        },
        "provenance": loaded.provenance,
    }


def _session(record: Record) -> Record:
    media = record["media"]
    weights = {"weights": record["weights"], "vision weights": record["vision_weights"]}
    return {
        "messages": [_message(message) for message in record["messages"]],
        "images": len(media),
        "image_tokens": sum(int(medium["tokens"]) for medium in media),
        "prefilled_tokens": max((int(s["end"]) for s in record["snapshots"]), default=0),
        "bound_to": _bound_to(record["about"]) | weights,
        "provenance": media[0]["provenance"] if media else record.get("made", {}),
    }


def _message(message: Record) -> Record:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {
        "role": message["role"],
        "text": " ".join(part["text"] for part in parts if part.get("type") == "text"),
        "images": sum(part.get("type") == "image" for part in parts),
    }


def _export(folder: Path) -> Record:
    start = time.perf_counter()
    manifest = exported.read(folder)
    seconds = time.perf_counter() - start
    others = exported.other_versions(manifest).items()
    return of_manifest(folder, manifest) | {
        "other_versions": {name: {"made": was, "here": here} for name, (was, here) in others},
        "reading_ms": round(1e3 * seconds, 3),
        "integrity": f"sound: {len(manifest.files)} files match their digests",
    }


def of_manifest(folder: Path, manifest: Manifest) -> Record:
    """What an export says of itself, as plain data."""
    files = manifest.files
    sizes = {
        part: sum(file.bytes for name, file in files.items() if name.startswith(f"graphs/{part}."))
        for part in PARTS
    }
    names = ("format", "runtime", "quantised", "most_patches", "bytes", "deviation", "weights")
    return {
        "folder": str(folder),
        "kind": "export",
        "what": f"an export for {_RUNTIMES[manifest.runtime]}, held in {_HELD[manifest.quantised]}",
        "model": manifest.model_type,
        **{name: getattr(manifest, name) for name in names},
        "files": len(files),
        "graphs": sizes,
        "versions": manifest.versions,
    }


# -- for people --------------------------------------------------------------------------------

_SECTIONS = ("bound_to", "provenance", "weights", "versions", "other_versions")


def render(described: Record) -> RenderableType:
    """What `--json` says, for people: facts, and a table for each thing that has many."""
    said, parts = dict[str, object](), list[RenderableType]()
    for name, value in described.items():
        title = name.replace("_", " ")
        if name == "messages":
            for message in value:
                pictures = f" [{message['images']} images]" if message["images"] else ""
                parts.append(Text(plain(f"  {message['role']}:{pictures} {message['text']}")))
        elif name not in (*_SECTIONS, "tensors"):
            words = bytes_text(value) if name.endswith("bytes") else _text(value)
            said[title] = Text(words, "green") if name == "integrity" else words
        elif value and name != "tensors":
            rows = {f"  {inner}": _text(one) for inner, one in value.items()}
            parts.append(facts(rows, f"\n{title}"))
    if "tensors" in described:
        parts.append(_tensors(described["tensors"]))
    return Group(facts(said), *parts)


def _tensors(tensors: list[Record]) -> RenderableType:
    rows = [
        (t["name"], t["dtype"], _text(t["shape"]), bytes_text(t["bytes"]), t["digest"][:12])
        for t in tensors[:_MOST_TENSORS]
    ]
    if (more := len(tensors) - _MOST_TENSORS) > 0:
        rows.append((f"and {more} more", "", "", "", ""))
    head = ("tensor", "dtype", "shape", "bytes", "digest")
    return table(*head, right=("shape", "bytes"), title="\ntensors", rows=rows)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(v)}" for name, v in value.items())
    if isinstance(value, list):
        return "x".join(map(_text, value))
    if isinstance(value, float):
        return f"{value:.3g}"
    return "" if value is None else str(value)
