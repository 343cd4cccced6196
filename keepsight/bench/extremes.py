"""The two extremes of a memory: nothing is known yet, and everything is on the disk.

Cold: a first request against stock, and the cost of a new picture, stage by stage. Restart: a new
engine answers a turn from the files of an earlier one, compared with the time to only read the same
bytes from the same files; once with the files in the page cache, as after a restart of the program,
and once without, as after a restart of the machine.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

import keepsight
from keepsight.bench.contestants import now
from keepsight.bench.measure import TOKENS, Bench, Round, Say, first_tokens, guard, ratio
from keepsight.bench.options import Scale
from keepsight.bench.workloads import Pictures, assistant, user, words
from keepsight.kinds import Message, Record
from keepsight.media.sources import decode_bytes
from keepsight.system import digests
from keepsight.vlm import VLM

# Where the files are when a restart begins; only some systems can drop them from the page cache.
_PLACES = ("page cache", "disk") if hasattr(os, "posix_fadvise") else ("page cache",)
_COLD_REPETITIONS = 9  # differences of three per cent are small; they need more pairs


def cold(bench: Bench, pictures: Pictures, scale: Scale, say: Say) -> Record:
    """First requests on an empty memory, for some numbers and sizes of pictures."""
    small = scale.small
    cases = {"one small image": [small], "one image": [scale.picture], "two images": [small, small]}
    repetitions = min(_COLD_REPETITIONS, 2 * scale.repetitions - 1)
    results = []
    for number, (name, sizes) in enumerate(cases.items()):
        say(f"cold: {name}")
        paths = [pictures.path(900 + 10 * number + i, *size) for i, size in enumerate(sizes)]
        results.append(_cold_case(bench, name, paths, scale, repetitions))
    path = pictures.path(950, *scale.picture)
    return {
        "repetitions": repetitions,
        "cases": results,
        "anatomy": anatomy(bench.vlm, path, scale.repetitions),
    }


def _cold_case(bench: Bench, name: str, paths: list[str], scale: Scale, repetitions: int) -> Record:
    messages = [user(words(9, scale.question), *paths)]
    met = []
    for repetition in range(repetitions):
        order = (bench.keepsight, bench.stock)[:: -1 if repetition % 2 else 1]
        answers = {}
        for contestant in order:
            bench.vlm.clear()
            gc.collect()
            answers[contestant.name] = contestant.answer(messages, TOKENS)
        met.append(Round(answers, 0, len(paths), 0))
    usage = met[0].answers["keepsight"].usage
    return {
        "name": name,
        "prompt_tokens": usage.prompt_tokens if usage else 0,
        "guard": guard(met),
        "keepsight_over_stock": ratio(met, "keepsight", "stock"),
        **first_tokens(met, "keepsight", "stock"),
    }


def anatomy(vlm: VLM, path: str, repetitions: int) -> dict[str, float]:
    """Cost of a new picture, stage by stage, and of `encode` relative to the tower alone."""
    data = Path(path).read_bytes()
    memory = vlm.runtime
    image, processor = decode_bytes(data, path), memory.needed_processor()
    pixels = memory.family.preprocess(processor, image, memory.image_options)
    stages: dict[str, Callable[[], object]] = {
        "decode_image": lambda: decode_bytes(data, path),
        "preprocess": lambda: memory.family.preprocess(processor, image, memory.image_options),
        "hash_file": lambda: digests.digest("file", data),
        "hash_pixels": lambda: pixels.key,
        "tower": lambda: memory.family.encode(pixels),
        "encode": lambda: vlm.encode(path),
    }
    samples: dict[str, list[float]] = {name: [] for name in stages}
    with torch.inference_mode():
        for _ in range(repetitions):
            vlm.clear()
            for name, stage in stages.items():
                start = now()
                stage()
                samples[name].append(now() - start)
    found = {f"{name}_ms": round(median(times), 2) for name, times in samples.items()}
    pairs = zip(samples["encode"], samples["tower"], strict=True)
    return {**found, "encode_over_tower": round(median(a / b for a, b in pairs), 3)}


def restart(vlm: VLM, pictures: Pictures, scale: Scale, say: Say) -> Record:
    """Third turn of a chat about one image, from the disk, with different questions each time."""
    picture = pictures.path(960, *scale.picture)
    history = []
    for turn in range(2):
        images = [] if turn else [picture]
        history += [user(words(turn, scale.question), *images)]
        history += [assistant(words(50 + turn, scale.answer))]
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in _PLACES}
    with TemporaryDirectory() as folder:
        with _again(vlm, folder) as first:
            for end in (1, 3):
                first.chat(history[:end], max_new_tokens=1)
            first.flush()
        for repetition in range(scale.repetitions):
            say(f"restart: repetition {repetition + 1} of {scale.repetitions}")
            for place, name in enumerate(_PLACES):
                question = words(80 + 100 * place + repetition, scale.question)
                messages = [*history, user(question)]
                rows[name].append(_one_restart(vlm, Path(folder), messages, name == "disk"))
    found: Record = {"repetitions": scale.repetitions}
    for name, measured in rows.items():
        found[name] = {k: round(median(row[k] for row in measured), 3) for k in measured[0]}
    return found


def _again(vlm: VLM, folder: str | Path) -> VLM:
    """Another engine on the same model, with nothing in memory."""
    return keepsight.wrap(vlm.model, vlm.processor, store=folder)


def _one_restart(vlm: VLM, folder: Path, messages: list[Message], drop: bool) -> dict[str, float]:
    with _again(vlm, folder) as second:
        if drop:
            forget_files(folder.glob("*/*/*"))
        start = now()
        pieces = second.stream(messages, max_new_tokens=2, min_new_tokens=2)
        next(pieces)
        first = now() - start
        report = list(pieces)[-1].report
        if report is None:
            raise RuntimeError("an answer came without its report")
        files = files_of(second, folder, report.cached_tokens)
        second.flush()
    if drop:
        forget_files(files)
    read, size = read_files(files)
    load = report.milliseconds["load"]
    return {
        "first_token_ms": first,
        "load_ms": load,
        "restore_ms": report.milliseconds["restore"],
        "read_ms": read,
        "load_over_read": load / read,
        "megabytes": size / 1e6,
        "cached_tokens": report.cached_tokens,
        "prompt_tokens": report.prompt_tokens,
    }


def files_of(vlm: VLM, folder: Path, cached_tokens: int) -> list[Path]:
    """The files that were read: the snapshots up to the match, and the fixed states at its end."""
    files = []
    for node in vlm.runtime.tree.nodes():
        if node.kv is not None and node.entry is not None and node.end <= cached_tokens:
            kinds = ["snapshot", "state"] if node.fixed else ["snapshot"]
            files += [f for kind in kinds for f in folder.glob(f"{kind}/*/{node.entry.name}.keep")]
    return files


def forget_files(files: Iterable[Path]) -> None:
    """Drop files from the page cache; they were written and synced."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def read_files(files: list[Path]) -> tuple[float, int]:
    """Milliseconds to read these files into memory, and their bytes."""
    start, size = now(), 0
    for file in files:
        size += len(file.read_bytes())
    return now() - start, size
