"""Identity: full 256-bit digests over framed, typed records.

A digest is 64 hex characters of BLAKE3. Every part is framed as `tag, length, bytes`, so no two
different lists of parts give the same bytes. The kind of record is the first part, so an image can
never collide with a prompt. There are no shortened digests, and no digest of a name, a path or an
`id()`.

This module knows nothing about models, files or images: it turns bytes into names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from blake3 import blake3

from keepsight.kinds import Record

if TYPE_CHECKING:
    import torch

SCHEMA = "keepsight-1"

_FEW = 4096  # values examined first
_LARGE = 8 << 20  # bytes that several threads hash
_threads = [blake3.AUTO]
# A forked process has none of BLAKE3's threads, and would wait for them forever.
if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=lambda: _threads.__setitem__(0, 1))

Part: TypeAlias = "str | bytes | bytearray | int | float | bool | np.ndarray | torch.Tensor | None"


def digest(kind: str, *parts: Part | Iterable[object]) -> str:
    """The digest of a record: its kind and its parts, in order."""
    # BLAKE3 hashes a tree, so threads change the time and never the result. Fewer bytes are hashed
    # sooner than other threads wake on a busy machine.
    large = any(getattr(part, "nbytes", 0) >= _LARGE for part in parts)
    hasher = blake3(max_threads=_threads[0] if large else 1)
    _frame(hasher, b"k", f"{SCHEMA}/{kind}".encode())
    for part in parts:
        _feed(hasher, part)
    return hasher.hexdigest()


def canonical_json(value: object) -> str:
    """The one JSON text of a value: keys as text and sorted, no spaces.

    Keys become text before they are sorted, so a record reads back from a file as it was written.
    """
    plain = json.loads(json.dumps(value, default=_plain), object_pairs_hook=_sorted)
    return json.dumps(plain, separators=(",", ":"))


def weight_digest(tensor: torch.Tensor) -> str:
    """The digest of one weight's values.

    Values, not bytes: a checkpoint in bfloat16 that is loaded in float32 has the same weights.
    """
    return digest("weight", narrowest(tensor))


def fingerprint_of(digests: Iterable[tuple[str, str]]) -> str:
    """The digest of named weights, given the digest of each."""
    return digest("weights", *(part for pair in sorted(digests) for part in pair))


def narrowest(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in the first of bfloat16 and float16 that holds all of them."""
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        return tensor
    import torch

    flat = tensor.detach().reshape(-1)
    for dtype in (torch.bfloat16, torch.float16):
        # Most tensors that do not fit show it at once.
        if tensor.dtype == dtype or (_fits(flat[:_FEW], dtype) and _fits(flat, dtype)):
            return tensor.detach().to(dtype)
    return tensor


def _fits(values: torch.Tensor, dtype: torch.dtype) -> bool:
    import torch

    return torch.equal(values.to(dtype).to(values.dtype), values)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's values as bytes, row-major, on the CPU; copied only if needed."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    import torch

    return flat.view(torch.uint8).numpy().data


def _frame(hasher: blake3, tag: bytes, data: bytes | memoryview) -> None:
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    hasher.update(tag + size.to_bytes(8, "little"))
    hasher.update(data)


def _feed(hasher: blake3, part: Any) -> None:
    if isinstance(part, str):
        # File names may hold lone surrogates; no other text has their spelling.
        _frame(hasher, b"s", part.encode("utf-8", "surrogatepass"))
    elif isinstance(part, bytes | bytearray | memoryview):
        _frame(hasher, b"b", memoryview(part))
    elif part is None or isinstance(part, bool | int | float):
        # `n` for number: a separate tag, otherwise True would be the bytes b"True".
        _frame(hasher, b"n", f"{type(part).__name__} {part!r}".encode())
    elif _is_tensor(part):
        _frame(hasher, b"t", f"{part.dtype}{tuple(part.shape)}".encode())
        _frame(hasher, b"d", tensor_bytes(part))
    elif isinstance(part, np.ndarray):
        _frame(hasher, b"a", f"{part.dtype.str}{part.shape}".encode())
        _frame(hasher, b"d", np.ascontiguousarray(part).data.cast("B") if part.size else b"")
    elif isinstance(part, Mapping):
        _frame(hasher, b"j", canonical_json(part).encode())
    elif isinstance(part, list | tuple):
        _frame(hasher, b"l", str(len(part)).encode())
        for item in part:
            _feed(hasher, item)
    else:
        raise TypeError(f"a {type(part).__name__} has no canonical form to digest")


def _is_tensor(value: Any) -> bool:
    """Whether it is a tensor; before PyTorch is imported, nothing is."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def _plain(value: Any) -> object:
    """JSON for values of configs that JSON lacks: tensors, arrays, dtypes, enums, sets."""
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, Mapping):
        return dict(value)
    text = str(value)
    if " at 0x" in text:
        raise TypeError(f"{text} has no canonical form: it contains a memory address")
    return text


def _sorted(pairs: list[tuple[str, object]]) -> Record:
    found = dict(sorted(pairs, key=lambda pair: pair[0]))
    if len(found) < len(pairs):
        raise TypeError("two keys of a mapping have one spelling")
    return found
