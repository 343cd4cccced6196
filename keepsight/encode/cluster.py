"""Encodes on Ray: each worker loads the model and takes pieces from a queue.

Only names are sent: every worker must reach the sources and the store. A dead worker costs only
time, because its finished packages are in the store and the rest goes to another worker.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Generator, Iterable, Iterator
from types import ModuleType

import torch

from keepsight.encode.items import ReadOptions
from keepsight.encode.mapping import Encoder
from keepsight.encode.results import Encoded
from keepsight.encode.sources import SourcePiece, items
from keepsight.errors import InputError, KeepsightError, MissingExtra, StoreError
from keepsight.kinds import Inputs, Options, Record
from keepsight.system.optional import optional

_TOGETHER = 32  # files or lines per task; an archive or a table is a task of its own
_SMALL = ("image", "text", "broken")
Shard = tuple[int, int] | None


class Worker:
    """One process of the cluster: a model that encodes the pieces it gets."""

    def __init__(self, options: Options, reading: Record, shard: Shard) -> None:
        self._encoder = Encoder(**options)
        self._reading, self._shard = ReadOptions(**reading), shard

    def __call__(self, batch: Inputs) -> dict[str, list[str]]:
        """The results of every image in some pieces."""
        pieces = [SourcePiece(**piece) for group in batch["pieces"] for piece in json.loads(group)]
        mine = (item for item in items(pieces, self._reading) if item.in_shard(self._shard))
        return {"result": [json.dumps(r.to_dict()) for r in self._encoder.encode(mine)]}


def run_on_ray(
    pieces: Iterable[SourcePiece],
    reading: ReadOptions,
    options: Options,
    *,
    shard: Shard = None,
    workers: int | None = None,
) -> Generator[Encoded]:
    """The results of each image, in the order in which workers finish."""
    ray = _ray()
    # As JSON, because file names may hold bytes that no table accepts as text.
    groups = [{"pieces": json.dumps([vars(p) for p in group])} for group in grouped(pieces)]
    if not groups:
        return
    # Another number of threads in a worker would make other features.
    options = {"torch_threads": torch.get_num_threads(), **options}
    started = not ray.is_initialized()
    if started:
        # The cluster named by RAY_ADDRESS or running here, otherwise a local one.
        ray.init(log_to_driver=False, include_dashboard=None, logging_level=logging.ERROR)
    try:
        yield from _results(ray, groups, (options, vars(reading), shard), workers)
    except ray.exceptions.RayTaskError as error:
        raise _plain_error(error) from error
    finally:
        if started:
            ray.shutdown()


def _results(
    ray: ModuleType,
    groups: list[dict[str, str]],
    arguments: tuple[Options, Record, Shard],
    workers: int | None,
) -> Iterator[Encoded]:
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    have = ray.cluster_resources()
    on_gpu = arguments[0].get("device_map") is not None and have.get("GPU", 0) > 0
    most = int(have.get("GPU" if on_gpu else "CPU", 1))
    count = min(len(groups), workers or most)
    found = ray.data.from_items(groups, override_num_blocks=len(groups)).map_batches(
        Worker,
        fn_constructor_args=arguments,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=max(1, count)),
        **({"num_gpus": 1} if on_gpu else {"num_cpus": 1}),
    )
    for row in found.iter_rows():
        yield Encoded(**json.loads(row["result"]))


def _plain_error(error: BaseException) -> KeepsightError:
    """A worker's error as it would have been raised here."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeepsightError):
        cause = getattr(cause, "cause", None) or cause.__cause__
    kind = next((k for k in (MissingExtra, StoreError) if isinstance(cause, k)), InputError)
    return kind(str(cause) if cause is not None else f"a worker failed: {error}")


def grouped(pieces: Iterable[SourcePiece]) -> Iterator[list[SourcePiece]]:
    """Pieces grouped into tasks."""
    for small, run in itertools.groupby(pieces, lambda piece: piece.kind in _SMALL):
        size = _TOGETHER if small else 1
        while group := list(itertools.islice(run, size)):
            yield group


def _ray() -> ModuleType:
    optional("ray.data", "ray", "ray[data]")
    return optional("ray", "ray")
