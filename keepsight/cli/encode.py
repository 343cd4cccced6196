"""The `encode` command: checks the user's options, runs them, shows results and writes errors to a
file.

All work on images is in `keepsight.encode`; here are only texts and files.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from keepsight.cli import progress
from keepsight.cli.loading_line import loading_line
from keepsight.cli.model_names import DEMO_NAMES, check_model
from keepsight.cli.options import (
    DeviceMap,
    Dtype,
    Json,
    MaxPixels,
    MinPixels,
    SomeModel,
    Tenant,
    holds_pictures,
    load,
    model_first,
    one_model,
    pixel_limits,
    refused_by,
)
from keepsight.cli.terminal import console, json_line, plain
from keepsight.errors import InputError, MissingExtra, StoreError
from keepsight.kinds import Record
from keepsight.system import private_files
from keepsight.system.places import check_store_writable, expanded
from keepsight.system.words import check_codec, check_dpi, parse_shard

if TYPE_CHECKING:
    from keepsight.encode.items import ReadOptions
    from keepsight.encode.on_ray import Shard
    from keepsight.encode.places import Encoded
    from keepsight.encode.sources import SourcePiece

# Packages in memory are useless to a run that reads each image once.
_VISION_BUDGET = "512MiB"
_MOST_SUFFIXES = 5  # kinds of left-out files that a line names
_OTHER = re.compile(r".*\.(md|rst|html?|xml|svg|json|ipynb|py|docx?|xlsx?|pptx?)", re.I | re.S)
_SOURCES = (
    "Images, folders, globs, lists (.txt, .csv, .jsonl), PDFs, videos, Parquet and Arrow files, "
    "folders of datasets.save_to_disk, tar and zip archives."
)


def encode(
    words: Annotated[list[str], typer.Argument(metavar="[MODEL] SOURCE...", help=_SOURCES)],
    to: Annotated[
        str, typer.Option("--to", help="The store: a folder, or an address such as s3://b/name.")
    ],
    files: Annotated[
        bool,
        typer.Option(
            "--files", help="Write .sight files into --to, one for each image, instead of a store."
        ),
    ] = False,
    model: SomeModel = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    store: Annotated[
        str | None, typer.Option(help="With --files: a store in which to look for packages first.")
    ] = None,
    min_pixels: MinPixels = None,
    max_pixels: MaxPixels = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens-per-image", min=1, help="Skip images of more tokens."),
    ] = None,
    column: Annotated[str, typer.Option(help="Column of a table with the images.")] = "image",
    dpi: Annotated[int, typer.Option(help="Resolution of PDF pages.")] = 144,
    fps: Annotated[
        float | None, typer.Option(help="Encode videos as images: frames per second.")
    ] = None,
    codec: Annotated[
        str, typer.Option(help="exact, bf16 or int8.", callback=refused_by(check_codec))
    ] = "exact",
    batch: Annotated[
        int, typer.Option(min=1, help="Pictures in one pass of the tower; their packages say so.")
    ] = 1,
    tenant: Tenant = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="This machine's share, such as 2/8.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that prepare images.")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="On a Ray cluster, or a local one.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="With --ray: number of workers.")
    ] = None,
    errors: Annotated[
        Path | None, typer.Option(help="File for a line of JSON on each image left out.")
    ] = None,
    as_json: Json = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List the files that are no images, too.")
    ] = False,
) -> None:
    """Encode images into a store, each different image once; run it again to resume."""
    model, sources = _model_and_sources(words, model)
    pixels = (min_pixels, max_pixels)
    rest = (errors, as_json, verbose)
    which = (sources, to, files, store, model, dtype, device_map, pixels, column, dpi, fps, shard)
    raise typer.Exit(
        run(EncodeOptions(*which, max_tokens, codec, batch, tenant, threads, ray, workers, *rest))
    )


def _model_and_sources(words: list[str], option: str | None) -> tuple[str, list[str]]:
    """The model, from the first word or `--model`, and what is to be encoded.

    A folder beside `--model` is a source, whatever is in it.
    """
    named, sources = model_first(words, False, option)
    if named is not None and option is not None and _is_there(named):
        named, sources = None, words
    model = one_model(named, option)
    first = sources[0]
    if named is not None or _is_there(first):
        return model, sources
    if first in DEMO_NAMES:
        raise InputError(
            f"no pictures are named; write: keepsight encode {first} PICTURES --to FOLDER"
        )
    near = difflib.get_close_matches(first, DEMO_NAMES, n=1, cutoff=0.8)
    if near:
        raise InputError(f"{first}: there is no such file or folder; did you mean {near[0]}?")
    return model, sources


def _is_there(name: str) -> bool:
    """Whether something of that name can be a source."""
    path = expanded(name)
    return holds_pictures(path) if name in DEMO_NAMES else os.path.lexists(path)


@dataclass(frozen=True)
class EncodeOptions:
    """The options of the command."""

    sources: list[str]
    to: str
    files: bool = False
    store: str | None = None
    model: str = "demo"
    dtype: str = "auto"
    device_map: str | None = None
    pixels: tuple[int | None, int | None] = (None, None)
    column: str = "image"
    dpi: int = 144
    fps: float | None = None
    shard: str | None = None
    max_tokens: int | None = None
    codec: str = "exact"
    batch: int = 1
    tenant: str | None = None
    threads: int | None = None
    ray: bool = False
    workers: int | None = None
    errors: Path | None = None
    as_json: bool = False
    verbose: bool = False

    def check(self) -> None:
        """Refuse impossible options before anything is loaded."""
        if self.store is not None and not self.files:
            raise InputError("--store goes with --files; without --files, --to is the store")
        for source in self.sources:
            plain_path = "://" not in source and not re.search(r"[*?\[]", source)
            if plain_path and not os.path.lexists(os.path.expanduser(source)):
                raise InputError(f"{source}: there is no such file or folder")
        if all(_OTHER.fullmatch(source) for source in self.sources):
            raise InputError(
                f"{self.sources[0]}: not a picture; expected images, PDFs, videos, archives (zip, "
                "tar), tables (parquet, arrow), lists (txt, csv, tsv, jsonl) or folders of them"
            )
        if not self.files:
            check_store_writable(self.to)
        if self.store is not None:
            check_store_writable(self.store)
        if self.workers is not None and not self.ray:
            raise InputError("--workers goes with --ray; --threads is for one machine")
        if self.ray and self.files:
            raise InputError("--ray writes to a store, which workers share; leave out --files")


def run(asked: EncodeOptions) -> int:
    """Run the command; return 1 if an image could not be used or the store refused it."""
    check_model(asked.model)
    asked.check()
    shard = parse_shard(asked.shard)
    check_dpi(asked.dpi)
    with loading_line("PyTorch"):
        from keepsight import encode as room  # start-up time: after checking options

    reading = room.ReadOptions(asked.column, asked.dpi, asked.fps)
    reading.check()
    err = console(stderr=True)
    found = room.find(asked.sources, asked.column)
    _say_left_out(found.left_out, err, asked.verbose)
    tally = progress.EncodeCounts()
    _count_aside(tally, found.pieces, reading, shard)
    with ExitStack() as stack:
        log = _error_log(stack, asked.errors)
        try:
            results = _results(stack, asked, found.pieces, reading, shard)
            for result in progress.shown(results, tally, err, asked.as_json):
                if asked.as_json:
                    json_line(result.to_dict())
                if log is not None and result.error is not None:
                    log.write(json.dumps(result.to_dict()) + "\n")
        except StoreError:
            if tally.done:
                _tell(tally, asked)  # what was done so far
            raise
        except KeyboardInterrupt:
            if tally.done:
                _tell(tally, asked)
            err.print("stopped: the same command goes on from here, and encodes nothing twice")
            raise
    _tell(tally, asked)
    return 1 if tally.failed else 0


def _say_left_out(places: list[str], err: Console, each: bool) -> None:
    """One line about files that are no images, by suffix; one line each if requested."""
    if not places:
        return
    counts = Counter(Path(place).suffix.lower() or "without a suffix" for place in places)
    kinds = [f"{count} {suffix}" for suffix, count in counts.most_common(_MOST_SUFFIXES)]
    more = ", ..." if len(counts) > _MOST_SUFFIXES else ""
    many = "file of another kind" if len(places) == 1 else "files of other kinds"
    hint = "" if each else "; -v lists them"
    err.print(plain(f"{len(places)} {many} left out: {', '.join(kinds)}{more}{hint}"))
    for place in places if each else ():
        err.print(plain(f"left out: {place}"), style="dim")


def _results(
    stack: ExitStack,
    asked: EncodeOptions,
    pieces: Iterable[SourcePiece],
    reading: ReadOptions,
    shard: Shard,
) -> Generator[Encoded]:
    """Yield the results. The model loads first: its line and the bar would share a row."""
    from keepsight import encode as room

    if asked.ray:
        from keepsight.encode.on_ray import run_on_ray

        return stack.enter_context(
            closing(run_on_ray(pieces, reading, _worker(asked), shard=shard, workers=asked.workers))
        )
    loaded = load(
        asked.model,
        asked.dtype,
        asked.device_map,
        asked.store if asked.files else asked.to,
        pixels=asked.pixels,
        tenant=asked.tenant,
        vision_budget=_VISION_BUDGET,
    )
    place = room.place_of(
        stack.enter_context(loaded),
        asked.to if asked.files else None,
        codec=asked.codec,
        max_tokens=asked.max_tokens,
        batch=asked.batch,
    )
    items = room.items(pieces, reading)
    return stack.enter_context(closing(room.run(items, place, shard, asked.threads)))


def _worker(asked: EncodeOptions) -> Record:
    """The options with which a worker on another machine loads the same model."""
    sized = {"size": pixel_limits(asked.model, *asked.pixels)} if any(asked.pixels) else None
    return {
        "model": asked.model,
        "store": asked.to,
        "dtype": asked.dtype,
        "device_map": asked.device_map,
        "image_options": sized,
        "codec": asked.codec,
        "batch": asked.batch,
        "max_tokens": asked.max_tokens,
        "tenant": asked.tenant,
        "vision_budget": _VISION_BUDGET,
        "threads": asked.threads,
    }


def _count_aside(
    tally: progress.EncodeCounts, pieces: Iterable[SourcePiece], reading: ReadOptions, shard: Shard
) -> None:
    """Count the images in a thread, because documents have to be opened for that."""
    from keepsight import encode as room

    def count() -> None:
        try:
            total = room.count(pieces, reading)
        except MissingExtra:
            return  # the run itself reports it
        # Shards have roughly equal sizes.
        tally.total = total if total is None or shard is None else round(total / shard[1])

    threading.Thread(target=count, name="keepsight-count", daemon=True).start()


def _error_log(stack: ExitStack, path: Path | None) -> IO[str] | None:
    if path is None:
        return None
    try:
        return stack.enter_context(
            open(path, "w", encoding="utf-8", buffering=1, opener=private_files.opener)
        )
    except OSError as error:
        raise InputError(f"--errors {path} cannot be written: {error.strerror}") from None


def _tell(tally: progress.EncodeCounts, asked: EncodeOptions) -> None:
    err = console(stderr=True)
    tally.total = tally.done  # restore the previous handler
    if asked.as_json:
        json_line(tally.to_dict())
    else:
        console().print(f"{tally}\nin {asked.to}")
    for name, status, error in tally.problems:
        why = error if error.startswith(name) else f"{name}: {error}"
        err.print(plain(f"{status}: {why}"), style=None if status == "skipped" else "red")
    untold = tally.failed + tally.counts.get("skipped", 0) - len(tally.problems)
    if untold > 0:
        where = asked.errors or "a file, with --errors FILE"
        err.print(f"and {untold} more; all are listed in {where}")
