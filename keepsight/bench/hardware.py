"""What the machine gives at most: reading of files, reading of weights, and matrix products.

A restart is compared with the time to only read the same bytes from the same files; a decoded token
with the time to read every weight of the language model once; the tower's operations a second with
those of one large product of PyTorch, which nothing on the machine beats.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import keepsight
from keepsight.bench.contestants import Keepsight
from keepsight.bench.frame import interleaved, middle, now, ratio, say
from keepsight.bench.measure import Bench, timed
from keepsight.bench.options import Scale
from keepsight.bench.workloads import Pictures, assistant, user, words
from keepsight.kinds import Message, Record
from keepsight.media.sources import decode_bytes
from keepsight.vlm import VLM

# Where the files are when a restart begins; only some systems can drop them from the page cache.
PLACES = ("page cache", "disk") if hasattr(os, "posix_fadvise") else ("page cache",)
_TOKENS = 33  # tokens decoded per repetition; the first one belongs to prefill
_SIDE = 2048  # size of the product
_BUFFER = 1 << 28  # least bytes read to measure the bandwidth


# -- files ---------------------------------------------------------------------------------------


def history(picture: str, turns: int, question: int, answer: int) -> list[Message]:
    """A chat about one image."""
    said = []
    for turn in range(turns):
        images = [] if turn else [picture]
        said += [user(words(turn, question), *images), assistant(words(50 + turn, answer))]
    return said


def restart(vlm: VLM, pictures: Pictures, scale: Scale) -> Record:
    """Third turn of a chat about one image, from the disk, with different questions each time."""
    told = history(pictures.path(960, *scale.picture), 2, scale.question, scale.answer)
    with TemporaryDirectory() as folder:
        with keepsight.wrap(vlm.model, vlm.processor, store=folder) as first:
            for end in (1, 3):
                first.chat(told[:end], max_new_tokens=1)
            first.flush()

        def once(place: str, number: int) -> dict[str, float]:
            say(f"restart, {place}: repetition {number + 1} of {scale.repetitions}")
            question = words(80 + 100 * PLACES.index(place) + number, scale.question)
            with keepsight.wrap(vlm.model, vlm.processor, store=folder) as second:
                return from_files(second, Path(folder), [*told, user(question)], place == "disk")

        ways = {place: lambda number, place=place: once(place, number) for place in PLACES}
        rounds = interleaved(scale.repetitions, ways)
    found: Record = {"repetitions": scale.repetitions}
    for place in PLACES:
        found[place] = {k: middle((r[place][k] for r in rounds), 3) for k in rounds[0][place]}
    return found


def from_files(vlm: VLM, folder: Path, messages: list[Message], drop: bool) -> dict[str, float]:
    """An answer that begins with files, beside the bare reading of these files."""
    if drop:
        forget_files(folder.glob("*/*/*"))
    answer = Keepsight(vlm).answer(messages, 2)
    read, size = read_files(vlm, folder, answer.counted.cached_tokens, drop)
    return {
        "first_token_ms": answer.first,
        "load_ms": answer.stages["load"],
        "restore_ms": answer.stages["restore"],
        "read_ms": read,
        "load_over_read": answer.stages["load"] / read,
        "megabytes": size / 1e6,
        "cached_tokens": answer.counted.cached_tokens,
        "prompt_tokens": answer.counted.prompt_tokens,
    }


def read_files(vlm: VLM, folder: Path, cached: int, drop: bool) -> tuple[float, int]:
    """Milliseconds to read the files of a match into memory, and their bytes: the snapshots up to
    it, and the fixed states at its end."""
    files = []
    for node in vlm.runtime.tree.nodes():
        if node.kv is not None and node.entry is not None and node.end <= cached:
            kinds = ["snapshot", "state"] if node.fixed else ["snapshot"]
            files += [f for kind in kinds for f in folder.glob(f"{kind}/*/{node.entry.name}.keep")]
    vlm.flush()
    if drop:
        forget_files(files)
    start = now()
    size = sum(len(file.read_bytes()) for file in files)
    return now() - start, size


def forget_files(files: Iterable[Path]) -> None:
    """Drop files from the page cache; they were written and synced."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


# -- weights and products ------------------------------------------------------------------------


def _attention(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query, key, value))


_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
ATTENTION = {} if _FLASH is None else {_FLASH: _attention}  # which torch's counter leaves out


def roofline(bench: Bench, pictures: Pictures, scale: Scale) -> Record:
    """Compare decoding with the machine's bandwidth, and the tower with its products."""
    say("roofline")
    return {
        "repetitions": scale.repetitions,
        "decode": _decode(bench, scale),
        "tower": _tower(bench.vlm, pictures.path(970, *scale.picture), scale.repetitions),
    }


def _decode(bench: Bench, scale: Scale) -> Record:
    """Milliseconds per token, alone and without drafts, over the time to read the weights."""
    weights = _bytes_of_a_step(bench.vlm)
    buffer = torch.ones(max(weights, _BUFFER) // 4)

    def asked(number: int) -> list[Message]:
        return [user(words(200 + number, scale.question))]

    engine = bench.vlm.runtime.engine
    guesses, engine.guessing = engine.guessing, False
    try:
        rounds = interleaved(
            scale.repetitions,
            {
                "read": lambda _: timed(buffer.sum),
                "keepsight": lambda n: bench.keepsight.answer(asked(n), _TOKENS).per_token,
                "stock": lambda n: bench.stock.answer(asked(n), _TOKENS).per_token,
            },
        )
    finally:
        engine.guessing = guesses
    bandwidth = buffer.nbytes / min(one["read"] for one in rounds) / 1e6
    ms, floor = median(one["keepsight"] for one in rounds), weights / bandwidth / 1e6
    return {
        "megabytes": round(weights / 1e6, 1),
        "read_gb_s": round(bandwidth, 2),
        "floor_ms": round(floor, 2),
        "keepsight_ms": round(ms, 2),
        "stock_ms": middle(one["stock"] for one in rounds),
        "keepsight_over_floor": round(ms / floor, 3),
        "stock_over_keepsight": ratio((one["stock"], one["keepsight"]) for one in rounds),
    }


def _bytes_of_a_step(vlm: VLM) -> int:
    """Bytes of the language model's weights and its head; one row of an embedding table."""
    modules = list(vlm.runtime.family.text_modules())  # includes the head
    table = vlm.model.get_input_embeddings().weight
    head = vlm.model.get_output_embeddings().weight
    found = {w.data_ptr(): w.nbytes for module in modules for w in module.parameters()}
    if table.data_ptr() != head.data_ptr():
        found.pop(table.data_ptr(), None)
    return sum(found.values())


def _tower(vlm: VLM, path: str, repetitions: int) -> Record:
    """Operations per second of the tower on one picture, and of one large product."""
    memory = vlm.runtime
    image = decode_bytes(Path(path).read_bytes(), path)
    pixels = memory.family.preprocess(memory.needed_processor(), image, memory.image_options)
    square = torch.randn(_SIDE, _SIDE).to(vlm.model.dtype)
    with torch.inference_mode():
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            memory.family.encode(pixels)
        operations = counter.get_total_flops()
        tower = median(timed(lambda: memory.family.encode(pixels)) for _ in range(repetitions))
        product = min(timed(lambda: square @ square) for _ in range(2 * repetitions))
    roof = 2 * _SIDE**3 / product / 1e6
    return {
        "gflop": round(operations / 1e9, 4),
        "ms": round(tower, 2),
        "gflop_s": round(operations / tower / 1e6, 1),
        "product_gflop_s": round(roof, 1),
        "floor_ms": round(operations / roof / 1e6, 4),
    }
