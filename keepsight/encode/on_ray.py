"""`keepsight encode --ray`: an `Encoder` mapped over pieces of sources.

Only names are sent: every worker must reach the sources and the store. A dead worker costs only
time, because its finished packages are in the store and the rest goes to another worker.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Generator, Iterable, Iterator

import torch

from keepsight.encode.encoder import Encoder
from keepsight.encode.items import ReadOptions
from keepsight.encode.places import Encoded
from keepsight.encode.sources import SourcePiece, items
from keepsight.errors import InputError, KeepsightError
from keepsight.kinds import Inputs, Options
from keepsight.system.optional import optional

_TOGETHER = 32  # files or lines per task; an archive or a table is a task of its own
Shard = tuple[int, int] | None


class PieceEncoder(Encoder):
    """An `Encoder` of all images in some pieces; results are lines of JSON."""

    def __init__(self, reading: ReadOptions, shard: Shard, options: Options) -> None:
        super().__init__(**options)
        self._reading, self._shard = reading, shard

    def __call__(self, batch: Inputs) -> dict[str, list[str]]:
        pieces = [SourcePiece(**piece) for group in batch["pieces"] for piece in json.loads(group)]
        mine = (item for item in items(pieces, self._reading) if item.in_shard(self._shard))
        return {"result": [json.dumps(result.to_dict()) for result in self.encode(mine)]}


def run_on_ray(
    pieces: Iterable[SourcePiece],
    reading: ReadOptions,
    options: Options,
    *,
    shard: Shard = None,
    workers: int | None = None,
) -> Generator[Encoded]:
    """The results of each image, in the order in which workers finish. The cluster is the one named
    by RAY_ADDRESS or running here, otherwise a local one."""
    data, ray = optional("ray.data", "ray", "ray[data]"), optional("ray", "ray")
    # As JSON, because file names may hold bytes that no table accepts as text.
    groups = [{"pieces": json.dumps([vars(p) for p in group])} for group in grouped(pieces)]
    if not groups:
        return
    # Another number of threads in a worker would make other features.
    options = {"torch_threads": torch.get_num_threads(), **options}
    if started := not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=None, logging_level=logging.ERROR)
    try:
        data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        have = ray.cluster_resources()
        kind = "GPU" if options.get("device_map") is not None and have.get("GPU", 0) else "CPU"
        found = data.from_items(groups, override_num_blocks=len(groups)).map_batches(
            PieceEncoder,
            fn_constructor_args=(reading, shard, options),
            batch_size=1,
            concurrency=max(1, min(len(groups), workers or int(have.get(kind, 1)))),
            **{f"num_{kind.lower()}s": 1},
        )
        for row in found.iter_rows():
            yield Encoded(**json.loads(row["result"]))
    except ray.exceptions.RayTaskError as error:
        cause: BaseException | None = error
        while cause is not None and type(cause).__module__ != KeepsightError.__module__:
            cause = getattr(cause, "cause", None) or cause.__cause__
        raise cause or InputError(f"a worker failed: {error}") from None
    finally:
        if started:
            ray.shutdown()


def grouped(pieces: Iterable[SourcePiece]) -> Iterator[list[SourcePiece]]:
    """Pieces grouped into tasks."""
    for small, run in itertools.groupby(pieces, lambda p: p.kind in ("image", "text", "broken")):
        while group := list(itertools.islice(run, _TOGETHER if small else 1)):
            yield group
