"""`Encoder`: the encoding run as a callable over batches of a table, in any number of processes.

`datasets.Dataset.map(Encoder(...), batched=True)` and Ray Data's `map_batches(Encoder, ...)` accept
it directly. It is pickled as its options: each process loads the model at the first batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from keepsight.core.settings import tenant_name
from keepsight.encode.items import At, Item, of_value
from keepsight.encode.places import Encoded, Making, ToStore
from keepsight.encode.run import run
from keepsight.errors import InputError
from keepsight.kinds import Record
from keepsight.media.sources import open_source
from keepsight.system.places import path_text
from keepsight.system.words import check_count

if TYPE_CHECKING:
    from keepsight.vlm import VLM

COLUMNS = ("feature_id", "tokens", "status", "error")
_BACK = 256  # packages of earlier batches that are checked again after each batch


class Encoder:
    """Encodes a column of images into a store, and adds columns with the result of each.

    `feature_id` and `tokens` name the package, `status` is as in `keepsight encode`, and `error`
    says why an image could not be used. All packages of a returned batch are safe in the store.
    Further options are those of `load`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "demo",
        *,
        store: str | os.PathLike[str],
        column: str = "image",
        prefix: str = "",
        max_tokens: int | None = None,
        codec: str = "exact",
        batch: int = 1,
        threads: int | None = None,
        torch_threads: int | None = None,
        tenant: str | None = None,
        **options: Any,
    ) -> None:
        if not (address := path_text(store, "store")):
            raise InputError("store='' is no place for packages; name a folder or an address")
        check_count(threads, "threads", "threads")
        check_count(torch_threads, "torch_threads", "threads")
        self._model, self._options = path_text(model, "model"), {"store": address, **options}
        self._column, self._prefix, self._threads = column, prefix, threads
        self._making = Making(tenant_name(tenant), codec, max_tokens, batch)
        # The thread count of a CPU is part of how features are made: workers that should make equal
        # ones need the number.
        self._torch_threads = torch_threads
        self._loaded: tuple[VLM, ToStore] | None = None

    def __call__(self, batch: Record) -> Record:
        """The batch, with four more columns."""
        if not isinstance(batch, Mapping):
            raise InputError(f"a {type(batch).__name__} is no batch; expected a dict of columns")
        if self._column not in batch:
            raise InputError(
                f"the batch has no column {self._column!r}, only: {', '.join(map(str, batch))}"
            )
        added = {self._prefix + name: name for name in COLUMNS}
        for name in added:
            if name in batch:
                raise InputError(f"the batch has a column {name!r} already; give a prefix=")
        results = list(self.encode(list(_cells(batch[self._column], self._column))))
        return batch | {name: [getattr(r, field) for r in results] for name, field in added.items()}

    def encode(self, items: Iterable[Item]) -> Iterator[Encoded]:
        """The results of some items, once their packages are safe."""
        if self._loaded is None:
            from keepsight.vlm import load

            if self._torch_threads is not None:
                torch.set_num_threads(self._torch_threads)
            vlm = load(self._model, **self._options)
            self._loaded = vlm, ToStore(vlm, self._making)
        return run(items, self._loaded[1], None, self._threads, back=_BACK)

    def close(self) -> None:
        """Release the model; the next batch would load it again."""
        if self._loaded is not None:
            self._loaded[0].close()
        self._loaded = None

    def __getstate__(self) -> Record:
        """The options alone: the model itself is never pickled."""
        return {**vars(self), "_loaded": None}


def _cells(values: Iterable[object], column: str) -> Iterator[Item]:
    """One item for each row, for any type of column."""
    one = isinstance(values, str | bytes | bytearray | Mapping | Image.Image)
    if one or not hasattr(values, "__iter__"):
        raise InputError(
            f"{column!r} is a {type(values).__name__}, expected a column with one image a row; in "
            "`datasets` that is map(..., batched=True)"
        )
    for row, value in enumerate(values):
        name = f"{column}, row {row} of the batch"
        if isinstance(value, list | tuple):
            raise InputError(
                f"{name}: expected one image, got a list; explode the column into one image a row"
            )
        if isinstance(value, Image.Image | np.ndarray | torch.Tensor):
            yield Item(name, name, lambda value=value: open_source(value))  # type: ignore[misc]
        else:
            yield from of_value(value, "", At(name, name))
