"""Data sets to packages. May import vlm and below.

`sources` defines what a user may name, `items` one image, and `run` keeps the tower busy. Packages
go to the places in `to_store` and `to_files`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from keepsight.core.settings import tenant_name
from keepsight.encode.items import Item, ReadOptions
from keepsight.encode.results import Encoded, EncodeTarget
from keepsight.encode.run import run
from keepsight.encode.sources import SourcePiece, SourceScan, count, find, items
from keepsight.encode.to_files import ToFiles
from keepsight.encode.to_store import ToStore
from keepsight.errors import InputError
from keepsight.system.words import parse_shard

if TYPE_CHECKING:
    from keepsight.vlm import VLM

__all__ = [
    "Encoded",
    "SourceScan",
    "Item",
    "SourcePiece",
    "ReadOptions",
    "count",
    "encode",
    "find",
    "items",
    "parse_shard",
    "run",
    "target_of",
]


def encode(
    sources: Sequence[str | os.PathLike[str]],
    vlm: VLM,
    *,
    files: str | os.PathLike[str] | None = None,
    column: str = "image",
    dpi: int = 144,
    fps: float | None = None,
    shard: str | None = None,
    max_tokens: int | None = None,
    codec: str = "exact",
    batch: int = 1,
    tenant: str | None = None,
    threads: int | None = None,
) -> Iterator[Encoded]:
    """Encode every image of `sources` into the model's store, or as `.sight` files into a folder.

    Results come in order. An image that cannot be used is a result too. `batch` pictures go through
    the tower in one pass; their provenance says so, because that may round otherwise.
    """
    reading = ReadOptions(column, dpi, fps)
    reading.check()
    part = parse_shard(shard)
    found = find(sources, column)
    target = target_of(vlm, files, tenant=tenant, codec=codec, most=max_tokens, batch=batch)
    return run(items(found.pieces, reading), target, part, threads)


def target_of(
    vlm: VLM,
    files: str | os.PathLike[str] | None = None,
    *,
    tenant: str | None = None,
    codec: str = "exact",
    most: int | None = None,
    batch: int = 1,
) -> EncodeTarget:
    """The place for packages: the model's store, or a folder of files."""
    whose = vlm.tenant if tenant is None else tenant_name(tenant)
    if most is not None and most < 1:
        raise InputError(f"max_tokens={most}; expected at least 1")
    if files is not None:
        return ToFiles(vlm, files, whose, codec, most, batch)
    return ToStore(vlm, whose, codec, most, batch)
