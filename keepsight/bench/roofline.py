"""The limits of the machine: memory bandwidth for decoding, matrix products for the tower.

Both are measured in the same run. A decoded token must read every weight of the language model
once, so bytes over bandwidth is its minimum time. A tower does a known number of operations per
picture; its rate is compared with one large matrix product of PyTorch, which nothing on the machine
beats.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from keepsight.bench.contestants import now
from keepsight.bench.measure import Bench, Say
from keepsight.bench.options import Scale
from keepsight.bench.workloads import Pictures, user, words
from keepsight.kinds import Record
from keepsight.media.sources import decode_bytes
from keepsight.vlm import VLM

Shape = tuple[int, ...]
_TOKENS = 33  # tokens decoded per repetition; the first one belongs to prefill
_SIDE = 2048  # size of the product
_BUFFER = 1 << 28  # least bytes read to measure the bandwidth


def _attention(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query, key, value))


_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
ATTENTION = {} if _FLASH is None else {_FLASH: _attention}  # which torch's counter leaves out


def roofline(bench: Bench, pictures: Pictures, scale: Scale, say: Say) -> Record:
    """Compare decoding with the machine's bandwidth, and the tower with its products."""
    say("roofline")
    return {
        "repetitions": scale.repetitions,
        "decode": _decode(bench, scale),
        "tower": _tower(bench.vlm, pictures, scale),
    }


def _decode(bench: Bench, scale: Scale) -> dict[str, float]:
    """Milliseconds per token, alone and without drafts, over the time to read the weights."""
    weights = _bytes_of_a_step(bench.vlm)
    buffer = torch.ones(max(weights, _BUFFER) // 4)
    engine, guesses = bench.vlm.runtime.engine, bench.vlm.runtime.engine.guessing
    samples: dict[str, list[float]] = {"read": [], "keepsight": [], "stock": []}
    try:
        engine.guessing = False
        for repetition in range(scale.repetitions):
            messages = [user(words(200 + repetition, scale.question))]
            samples["read"].append(_timed(buffer.sum))
            for who in (bench.keepsight, bench.stock)[:: -1 if repetition % 2 else 1]:
                answer = who.answer(messages, _TOKENS)
                samples[who.name].append((answer.total - answer.first) / (_TOKENS - 1))
    finally:
        engine.guessing = guesses
    bandwidth = buffer.nbytes / min(samples["read"]) / 1e6
    ms, stock = median(samples["keepsight"]), median(samples["stock"])
    pairs = zip(samples["keepsight"], samples["stock"], strict=True)
    floor = weights / bandwidth / 1e6
    return {
        "megabytes": round(weights / 1e6, 1),
        "read_gb_s": round(bandwidth, 2),
        "floor_ms": round(floor, 2),
        "keepsight_ms": round(ms, 2),
        "stock_ms": round(stock, 2),
        "keepsight_over_floor": round(ms / floor, 3),
        "stock_over_keepsight": round(median(b / a for a, b in pairs), 3),
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


def _tower(vlm: VLM, pictures: Pictures, scale: Scale) -> dict[str, float]:
    """Operations per second of the tower on one picture, and of one large product."""
    memory, path = vlm.runtime, pictures.path(970, *scale.picture)
    with open(path, "rb") as file:
        image = decode_bytes(file.read(), path)
    pixels = memory.family.preprocess(memory.needed_processor(), image, memory.image_options)
    square = torch.randn(_SIDE, _SIDE).to(vlm.model.dtype)
    with torch.inference_mode():
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            memory.family.encode(pixels)
        operations = counter.get_total_flops()
        tower = [_timed(lambda: memory.family.encode(pixels)) for _ in range(scale.repetitions)]
        product = [_timed(lambda: square @ square) for _ in range(2 * scale.repetitions)]
    rate, roof = operations / median(tower) / 1e6, 2 * _SIDE**3 / min(product) / 1e6
    return {
        "gflop": round(operations / 1e9, 4),
        "ms": round(median(tower), 2),
        "gflop_s": round(rate, 1),
        "product_gflop_s": round(roof, 1),
        "floor_ms": round(operations / roof / 1e6, 4),
    }


def _timed(work: Callable[[], object]) -> float:
    start = now()
    work()
    return now() - start
