"""Data sets to packages. May import vlm and below.

`sources` defines what a user may name, `items` one image, and `run` keeps the tower busy. Packages
go to a place: `store` or `files`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from keepsight.core.settings import tenant_name
from keepsight.encode.items import Item, ReadOptions
from keepsight.encode.places import Encoded, Making, Place, ToFiles, ToStore
from keepsight.encode.run import run
from keepsight.encode.sources import SourcePiece, Sources, SourceScan, count, find, items
from keepsight.system.words import check_count, parse_shard

if TYPE_CHECKING:
    from keepsight.vlm import VLM

__all__ = [
    "Encoded",
    "Item",
    "ReadOptions",
    "SourcePiece",
    "SourceScan",
    "count",
    "encode",
    "find",
    "items",
    "parse_shard",
    "place_of",
    "run",
]


def encode(
    sources: Sources,
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
    """Encode every image of `sources` (one path, or several) into the model's store, or as `.sight`
    files into a folder.

    Results come in order. An image that cannot be used is a result too. `batch` pictures go through
    the tower in one pass; their provenance says so, because that may round otherwise.
    """
    reading = ReadOptions(column, dpi, fps)
    reading.check()
    check_count(threads, "threads", "threads")
    part = parse_shard(shard)
    found = find(sources, column)
    place = place_of(vlm, files, tenant=tenant, codec=codec, max_tokens=max_tokens, batch=batch)
    return run(items(found.pieces, reading), place, part, threads)


def place_of(
    vlm: VLM,
    files: str | os.PathLike[str] | None = None,
    *,
    tenant: str | None = None,
    **options: Any,
) -> Place:
    """The place for packages, made as the options say: the model's store, or a folder of files."""
    making = Making(vlm.tenant if tenant is None else tenant_name(tenant), **options)
    return ToStore(vlm, making) if files is None else ToFiles(vlm, making, files)
