"""Codecs for the features of a package: exact, bf16, or 8 bit integers per row.

A lossy codec records its error: it is measured when features are packed, on exactly the numbers
that unpacking gives, tensor by tensor. The codec is part of the provenance, so packed features have
their own feature id and never pass for exact ones.

Integers are affine: `code * scale + offset`, with the least value of a row as its offset. Rows of
real features are often not centred on zero; for those an offset saves up to half of the error of a
scale alone (docs/package-format.md has numbers).

Nothing here knows a model or a file: named tensors go in, named tensors come out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

import torch

from keepsight.errors import DamagedFile, InputError, WrongFormatVersion
from keepsight.kinds import Record
from keepsight.system.words import CODECS

EXACT = "exact"
Tensors = dict[str, torch.Tensor]
_FLOATS = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.float16)}
_FLOATS["bfloat16"] = torch.bfloat16
_DIGITS = 4  # significant digits of an error; more would make names depend on noise
_LEVELS = 255


def is_lossy(codec: object) -> TypeGuard[Record]:
    """Whether a provenance's codec is lossy."""
    return isinstance(codec, dict)


def describe(codec: object) -> str:
    """A codec and its error in one line, for reports."""
    if not is_lossy(codec):
        return str(codec)
    errors = codec["tensors"].values()
    rms = max(error["relative_rms"] for error in errors)
    row = max(error["worst_row"] for error in errors)
    largest = max(error["max_abs"] for error in errors)
    return f"{codec['name']}: off by {rms:.2%} (worst row {row:.2%}, largest {largest:.3g})"


# -- packing -----------------------------------------------------------------------------------


def pack(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[Tensors, Record]:
    """The tensors to store in place of some tensors, and the record that unpacking needs.

    Tensors that the codec would not make smaller stay unchanged; if that is all of them, the record
    is empty and nothing is lost.
    """
    packed: Tensors = {}
    claims: Record = {}
    for title, tensor in tensors.items():
        if not _shrinks(tensor, name):
            packed[title] = tensor
            continue
        plain = tensor.detach().to("cpu")
        if not torch.isfinite(plain).all():
            raise InputError(
                f"{title!r} holds NaN or infinity: such features cannot be packed as {name}; "
                "encode the image again, or keep them exact"
            )
        parts = {title: plain.to(torch.bfloat16)} if name == "bf16" else _as_int8(title, plain)
        again = _unpack_one(title, parts, name, tensor.dtype)
        if not torch.isfinite(again).all():
            raise InputError(f"{title!r} holds numbers too large for {name}; keep it exact")
        packed |= parts
        claims[title] = {"dtype": str(tensor.dtype).removeprefix("torch."), **_error(again, plain)}
    return packed, {"name": name, "tensors": claims} if claims else {}


def _shrinks(tensor: torch.Tensor, name: str) -> bool:
    floating = tensor.dtype in _FLOATS.values() and tensor.numel() > 0
    return name != EXACT and floating and tensor.element_size() > (2 if name == "bf16" else 1)


def _as_int8(title: str, tensor: torch.Tensor) -> Tensors:
    """Codes from 0 to 255 between the least and the greatest value of each row."""
    wide = tensor.to(torch.float64)
    # The offset is a value of the row, so a constant row is exact.
    offset = wide.amin(-1).to(torch.float32)
    reach = (wide.amax(-1) - offset) / _LEVELS
    scale = reach.to(torch.float32)
    # Rounded up, so that the greatest value is reached too; never zero.
    up = torch.nextafter(scale, torch.tensor(math.inf))
    scale = torch.where(scale < reach, up, scale).clamp_min(torch.finfo(torch.float32).tiny)
    codes = ((wide - offset[..., None]) / scale[..., None]).round().clamp(0, _LEVELS)
    return {
        title: codes.to(torch.uint8),
        f"{title}.scale": scale,
        f"{title}.offset": offset,
    }


def _error(found: torch.Tensor, true: torch.Tensor) -> dict[str, float]:
    """The errors of the unpacked numbers; root mean squares are relative to the true ones."""
    true = true.to(torch.float64).reshape(-1, true.shape[-1])
    off = (found.to(torch.float64).reshape(true.shape) - true).square()
    lost, whole = off.sum(-1), true.square().sum(-1)
    rows = (lost / whole.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
    return {
        "max_abs": _short(off.max().sqrt()),
        "relative_rms": _short((lost.sum() / whole.sum().clamp_min(1e-300)).sqrt()),
        "worst_row": _short(rows.max()),
    }


def _short(error: torch.Tensor) -> float:
    return float(f"{error.item():.{_DIGITS - 1}e}")


# -- unpacking ---------------------------------------------------------------------------------


def unpack(packed: Mapping[str, torch.Tensor], codec: Record, where: str) -> Tensors:
    """The original floating tensors of packed ones, after checking codec and tensors."""
    name, claims = _checked(codec, where)
    parts: dict[str, Tensors] = {title: {} for title in claims}
    tensors: Tensors = {}
    for title, tensor in packed.items():
        base = title.removesuffix(".scale").removesuffix(".offset")
        if base in claims:
            parts[base][title] = tensor
        else:
            tensors[title] = tensor
    for title, its in parts.items():
        dtype = _FLOATS[claims[title]["dtype"]]
        _check_parts(title, its, name, dtype, where)
        tensors[title] = _unpack_one(title, its, name, dtype)
    return tensors


def _unpack_one(title: str, parts: Tensors, name: str, dtype: torch.dtype) -> torch.Tensor:
    if name == "bf16":
        return parts[title].to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # Two separate roundings: a fused operation would give other bits on other machines.
    rows = parts[title].to(wide).mul_(parts[f"{title}.scale"][..., None])
    return rows.add_(parts[f"{title}.offset"][..., None]).to(dtype)


def _checked(codec: Record, where: str) -> tuple[str, dict[str, Record]]:
    name, claims = codec.get("name"), codec.get("tensors")
    if isinstance(name, str) and name not in CODECS:
        raise WrongFormatVersion(
            f"{where}: packed as {name!r}, this Keepsight reads {', '.join(CODECS)}; "
            "use the Keepsight that wrote it, or encode the image again"
        )
    if name not in CODECS[1:] or codec.keys() != {"name", "tensors"}:
        raise DamagedFile(f"{where}: the record's codec is not described properly")
    if not isinstance(claims, dict) or not claims or not all(map(_is_claim, claims.values())):
        raise DamagedFile(f"{where}: the record's codec lacks the dtype or the error of a tensor")
    return name, claims


def _is_claim(claim: object) -> bool:
    errors = ("max_abs", "relative_rms", "worst_row")
    return (
        isinstance(claim, dict)
        and claim.keys() == {"dtype", *errors}
        and isinstance(claim["dtype"], str)
        and claim["dtype"] in _FLOATS
        and all(type(claim[e]) is float and 0 <= claim[e] < math.inf for e in errors)
    )


def _check_parts(title: str, parts: Tensors, name: str, dtype: torch.dtype, where: str) -> None:
    """Require that all parts exist, have the right shapes, and give finite numbers."""
    wanted = {title: torch.bfloat16}
    if name == "int8":
        wanted = {title: torch.uint8}
        wanted |= dict.fromkeys((f"{title}.scale", f"{title}.offset"), torch.float32)
    if parts.keys() != wanted.keys():
        odd = ", ".join(sorted(parts.keys() ^ wanted.keys()))
        raise DamagedFile(f"{where}: packed as {name}, and {odd} is missing or unexpected")
    shape = parts[title].shape
    for part, tensor in parts.items():
        right = shape if part == title else shape[:-1]
        if tensor.dtype != wanted[part] or tensor.shape != right or not shape:
            raise DamagedFile(
                f"{where}: {part!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected "
                f"{wanted[part]} of shape {tuple(right)}"
            )
    if name == "bf16":
        largest = parts[title].abs().amax() if parts[title].numel() else torch.zeros(())
    else:
        scale, offset = parts[f"{title}.scale"], parts[f"{title}.offset"]
        if not (torch.isfinite(scale) & (scale > 0) & torch.isfinite(offset)).all():
            raise DamagedFile(f"{where}: {title!r} has an impossible scale or offset")
        ends = torch.stack([offset, _LEVELS * scale + offset])
        largest = ends.abs().amax() if ends.numel() else torch.zeros(())
    if not largest.double() <= torch.finfo(dtype).max:
        raise DamagedFile(f"{where}: {title!r} would not be finite as {dtype}")
