"""`keepsight encode`: checks what is asked for, runs it, shows results, writes errors to a file.

All work on images is in `keepsight.encode`; here are only texts and files.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import threading
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, Annotated

import typer

from keepsight.cli import progress
from keepsight.cli.options import (
    DEMO_NAMES,
    JSON,
    Model,
    is_there,
    option,
    pixel_limits,
)
from keepsight.cli.terminal import console, json_line, loading_line, tell
from keepsight.errors import InputError, MissingExtra, StoreError
from keepsight.kinds import Options
from keepsight.system import private_files
from keepsight.system.places import check_store_writable
from keepsight.system.words import check_codec, check_dpi, parse_shard

_OTHER = re.compile(r".*\.(md|rst|html?|xml|svg|json|ipynb|py|docx?|xlsx?|pptx?)", re.I | re.S)
_SOURCES = (
    "Images, folders, globs, lists (.txt, .csv, .jsonl), PDFs, videos, Parquet and Arrow files, "
    "folders of datasets.save_to_disk, tar and zip archives."
)


def encode(
    model: Model,
    words: Annotated[list[str], typer.Argument(metavar="[MODEL] SOURCE...", help=_SOURCES)],
    to: str = option("The store: a folder, or an address such as s3://b/name.", default=...),
    files: bool = option(
        "Write .sight files into --to, one for each image, instead of a store.",
        "--files",
        default=False,
    ),
    store: str | None = option("With --files: a store in which to look for packages first."),
    max_tokens: int | None = option("Skip images of more tokens.", "--max-tokens-per-image", min=1),
    column: str = option("Column of a table with the images.", default="image"),
    dpi: int = option("Resolution of PDF pages.", default=144),
    fps: float | None = option("Encode videos as images: frames per second."),
    codec: str = option("exact, bf16 or int8.", check=check_codec, default="exact"),
    batch: int = option(
        "Pictures in one pass of the vision encoder; their packages say so.", min=1, default=1
    ),
    tenant: str | None = option("Whose memory to use; tenants of a store share nothing."),
    shard: str | None = option("This machine's share, such as 2/8.", metavar="I/N"),
    threads: int | None = option("Threads that prepare images.", min=1),
    ray: bool = option("On a Ray cluster, or a local one.", "--ray", default=False),
    workers: int | None = option("With --ray: number of workers.", min=1),
    errors: Path | None = option("File for a line of JSON on each image left out."),
    as_json: bool = JSON,
    verbose: bool = option(
        "List the files that are no images, too.", "--verbose", "-v", default=False
    ),
) -> None:
    """Encode images into a store, each different image once; run it again to resume."""
    sources = _sources(words, model)
    if store is not None and not files:
        raise InputError("--store goes with --files; without --files, --to is the store")
    for place in (None if files else to, store):
        check_store_writable(place or "")
    if workers is not None and not ray:
        raise InputError("--workers goes with --ray; --threads is for one machine")
    if ray and files:
        raise InputError("--ray writes to a store, which workers share; leave out --files")
    part = parse_shard(shard)
    check_dpi(dpi)
    log = None if errors is None else _error_log(errors)
    with loading_line("PyTorch"):
        from keepsight import encode as room  # start-up time: after checking options

    reading = room.ReadOptions(column, dpi, fps)
    reading.check()
    found = room.find(sources, column)
    _say_left_out(found.left_out, verbose)
    tally = progress.EncodeCounts()

    def count() -> None:
        """In a thread, because documents have to be opened. Shards have roughly equal sizes."""
        try:
            total = room.count(found.pieces, reading)
        except MissingExtra:
            return  # the run itself reports it
        tally.total = total if total is None or part is None else round(total / part[1])

    threading.Thread(target=count, name="keepsight-count", daemon=True).start()
    # Packages in memory are useless to a run that reads each image once.
    loading = {"store": store if files else to, "tenant": tenant, "vision_budget": "512MiB"}
    making: Options = {"codec": codec, "max_tokens": max_tokens, "batch": batch}
    with ExitStack() as stack:
        if log is not None:
            stack.enter_context(log)
        try:
            if ray:
                from keepsight.encode.on_ray import run_on_ray

                given: Options = {"model": model.model, "dtype": model.dtype, "threads": threads}
                given |= {"device_map": model.device_map, **loading, **making}
                given["image_options"] = pixel_limits(
                    str(model.model), model.min_pixels, model.max_pixels
                )
                results = run_on_ray(found.pieces, reading, given, shard=part, workers=workers)
            else:  # the model loads first: its line and the bar would share a row
                vlm = stack.enter_context(model.load(**loading))
                where = room.place_of(vlm, to if files else None, **making)
                results = room.run(room.items(found.pieces, reading), where, part, threads)
            stack.enter_context(closing(results))
            for result in progress.shown(results, tally, console(stderr=True), as_json):
                if as_json:
                    json_line(result.to_dict())
                if log is not None and result.error is not None:
                    log.write(json.dumps(result.to_dict()) + "\n")
        except (StoreError, KeyboardInterrupt) as error:
            if tally.done:
                tally.tell(to, errors, as_json)
            if isinstance(error, KeyboardInterrupt):
                again = "the same command goes on from here, and encodes nothing twice"
                tell(f"stopped: {again}")
            raise
    tally.tell(to, errors, as_json)
    raise typer.Exit(1 if tally.failed else 0)


def _sources(words: list[str], model: Model) -> list[str]:
    """What is to be encoded; the model is the first word or that of `--model`."""
    sources = model.first_of(words, False)
    first = sources[0]
    if len(sources) == len(words) and not is_there(first):
        if first in DEMO_NAMES:
            hint = f"keepsight encode {first} PICTURES --to FOLDER"
            raise InputError(f"no pictures are named; write: {hint}")
        if near := difflib.get_close_matches(first, DEMO_NAMES, n=1, cutoff=0.8):
            raise InputError(f"{first}: there is no such file or folder; did you mean {near[0]}?")
    for source in sources:
        is_path = "://" not in source and not re.search(r"[*?\[]", source)
        if is_path and not os.path.lexists(os.path.expanduser(source)):
            raise InputError(f"{source}: there is no such file or folder")
    if all(_OTHER.fullmatch(source) for source in sources):
        raise InputError(
            f"{first}: not a picture; expected images, PDFs, videos, archives (zip, tar), tables "
            "(parquet, arrow), lists (txt, csv, tsv, jsonl) or folders of them"
        )
    return sources


def _say_left_out(places: list[str], each: bool) -> None:
    """One line about files that are no images, by suffix; one line each if requested."""
    if places:
        counts = Counter(Path(place).suffix.lower() or "without a suffix" for place in places)
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common())
        hint = "" if each else "; -v lists them"
        tell(f"{len(places)} files of other kinds left out: {kinds}{hint}")
        for place in places if each else ():
            tell(f"left out: {place}", "dim")


def _error_log(path: Path) -> IO[str]:
    try:
        return open(path, "w", encoding="utf-8", buffering=1, opener=private_files.opener)
    except OSError as error:
        raise InputError(f"--errors {path} cannot be written: {error.strerror}") from None
