"""What 64 decisions about one picture cost, against Transformers' `DecisionPipeline`, and 1,000
yes/no scores against stock forwards.

Run `python -m bench.decisions`. The picture has 1,024 tokens; the model is the same object. Stock
does the same work for each question, so a few of them are timed and the time is scaled to all; the
result says how many. Cold is a memory that has seen nothing; warm has seen the picture. Seconds are
the process's own, on one thread, so other work on the machine hardly changes them.

With `--http` the same questions go to `keepsight serve`, and to those others that are installed
(bench/rivals): to `transformers serve` as decisions, to llama-server and vLLM as chats held to the
labels. These seconds are a client's: run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import base64
import json
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, TypeVar

import torch
from PIL import Image
from transformers import DecisionConfig, DecisionPipeline

import keepsight as ks
from bench.frame import Record, Told, bench, model_of
from bench.rivals import rivals
from bench.servers import Contestant, Running, keepsight_server
from keepsight.bench.frame import cells
from keepsight.bench.workloads import Pictures, user
from keepsight.kinds import Message
from keepsight.models import loading

T = TypeVar("T")
SIDE = 1024  # pixels: 32 x 32 tokens of 32 pixels
WORDS = ("scratch", "logo", "crack", "person", "label", "screw", "dent", "shadow", "wheel", "cable")


def add(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told."""
    parser.add_argument("--decisions", type=int, default=64)
    parser.add_argument("--scores", type=int, default=1000)
    parser.add_argument("--sample", type=int, default=4, help="questions that stock is timed on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--http", action="store_true", help="also from server to server")


def measure(options: argparse.Namespace) -> Record:
    """Decisions and scores."""
    torch.set_num_threads(options.threads)
    path = model_of(options)
    model = loading.load_named(path, options.dtype, None, None)[0]
    processor = loading.load_processor(path, None)
    paths = [Pictures(options.folder).path(number, SIDE, SIDE) for number in (1, 2)]
    given = [(model, processor, Image.open(path).convert("RGB"), options) for path in paths]
    rows = [_decisions(*given[0]), _scores(*given[1])]
    if options.http:
        rows += _over_http(Path(path), paths[0], _labels(processor), options)
    return {"clock": "CPU seconds of the process; over HTTP a client's seconds", "rows": rows}


def _seconds(work: Callable[[], T]) -> tuple[T, float]:
    begun = process_time()
    found = work()
    return found, process_time() - begun


def _labels(processor: Any) -> list[str]:
    """Two labels of one token each: a tokenizer trained on code need not have Yes and No."""
    tokenizer = processor.tokenizer
    names = sorted(name for name in tokenizer.get_vocab() if name.isalpha())
    ids = ((name, tokenizer(name, add_special_tokens=False)["input_ids"]) for name in names)
    return [name for name, made in ids if len(made) == 1][:2]


def _question(number: int) -> str:
    return f"Is there a {WORDS[number % len(WORDS)]} at place {number}?"


def _asked(start: int, count: int) -> Record:
    numbers = range(start, start + count)
    return {f"q{i}": {"type": "noul", "instructions": _question(i)} for i in numbers}


def _decisions(
    model: Any, processor: Any, picture: Image.Image, options: argparse.Namespace
) -> Record:
    config, count = DecisionConfig(labels={"noul": _labels(processor)}), options.decisions
    given: Record = {"assets": {"<p>": picture}}
    tower: list[int] = []
    handle = model.model.visual.register_forward_hook(lambda *_: tower.append(1))
    with ks.wrap(model, processor) as vlm:

        def decided(start: int) -> Any:
            return vlm.decide("<p>", _asked(start, count), decision_config=config, **given)

        vlm.decide("x", _asked(0, 2), decision_config=config)  # what is made once for a model
        cold, cold_seconds = _seconds(lambda: decided(0))
        ran = len(tower)
        warm, warm_seconds = _seconds(lambda: decided(count))
    handle.remove()
    pipe = DecisionPipeline(
        model=model, tokenizer=processor.tokenizer, processor=processor, decision_config=config
    )
    seconds, worst = [], 0.0
    for number in range(min(options.sample, count)):
        asked = {"state": "<p>", "questions": _asked(number, 1), **given}
        theirs, spent = _seconds(partial(pipe, asked))
        seconds.append(spent)
        name = f"q{number}"
        worst = max(worst, abs(theirs[name]["noul"] - cold[name]["noul"]))
    return {
        "name": f"{count} decisions",
        **_sums(seconds, count, cold_seconds, cold.report, worst),
        "warm_seconds": round(warm_seconds, 3),
        "times_warm": round(median(seconds) * count / warm_seconds, 1),
        "towers": ran,
        "computed_tokens_warm": warm.report.computed_tokens,
    }


def _over_http(
    model: Path, picture: str, labels: list[str], options: argparse.Namespace
) -> Iterator[Record]:
    """The same questions from a client, on each server by itself."""
    data = base64.b64encode(Path(picture).read_bytes()).decode()
    asset = {"type": "image", "format": "png", "data_base64": data}
    about: Record = {"model": str(model), "state": "<p>", "assets": {"<p>": asset}}
    count, few = options.decisions, min(options.sample, options.decisions)
    there, _ = rivals(options.dtype, options.threads)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "decision.json"
        config.write_text(json.dumps({"labels": {"noul": labels}}))
        own = keepsight_server(options.dtype, options.threads)
        ours, quick = _heard(own, model, config, {**about, "questions": _asked(0, count)})
        for rival in there:
            row: Record = {
                "name": f"{count} decisions over HTTP, {rival.name}",
                "cold_seconds": quick,
            }
            if rival.name == "transformers serve":
                asked = {**about, "questions": _asked(0, few)}
                theirs, slow = _heard(rival, model, config, asked)
                row |= {"stock_seconds": slow * count / few, "stock_timed_on": few}
                gaps = [abs(theirs[name]["noul"] - ours[name]["noul"]) for name in theirs]
                row["worst_difference"] = max(gaps)
            elif rival.name in _HELD:
                row |= {"stock_seconds": _by_chats(rival, model, data, labels, count)}
            else:
                continue
            yield {**row, "times_cold": row["stock_seconds"] / quick}


# How a server without decisions is held to the labels: one chat for each question.
_HELD: dict[str, Callable[[list[str]], Record]] = {
    "llama-server": lambda labels: {"grammar": "root ::= " + " | ".join(map(json.dumps, labels))},
    "vLLM": lambda labels: {"structured_outputs": {"choice": labels}},
}


def _by_chats(rival: Contestant, model: Path, data: str, labels: list[str], count: int) -> float:
    """A client's seconds; the picture stands first, so that its prompt is read once."""
    held = {"model": str(model), "temperature": 0, "max_tokens": 4, **_HELD[rival.name](labels)}
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    def answer(server: Running, text: str, *before: Record) -> str:
        content = [*before, {"type": "text", "text": f"{text} {' or '.join(labels)}?"}]
        asked = {**held, "messages": [{"role": "user", "content": content}]}
        return str(server.post("/v1/chat/completions", asked)["choices"][0]["message"]["content"])

    with Running(rival, model) as server, ThreadPoolExecutor(8 if rival.many else 1) as pool:
        answer(server, "x")
        begun = perf_counter()
        found = [*pool.map(lambda n: answer(server, _question(n), image), range(count))]
        spent = perf_counter() - begun
    if not {text.strip() for text in found} <= set(labels):
        raise RuntimeError(f"{rival.name} answered something else: {found}")
    return spent


def _heard(one: Contestant, model: Path, config: Path, asked: Record) -> tuple[Record, float]:
    """The answers of a server that has seen nothing, and a client's seconds."""
    words = ["--decision-config", str(config)]
    told = replace(one, command=lambda model, port: [*one.command(model, port), *words])
    warm_up = {**asked, "state": "x", "assets": {}, "questions": _asked(0, 1)}
    with Running(told, model) as server:
        server.post("/v1/systemone", warm_up)
        begun = perf_counter()
        found = server.post("/v1/systemone", asked)
        return found.get("answers", found), perf_counter() - begun


def _scores(
    model: Any, processor: Any, picture: Image.Image, options: argparse.Namespace
) -> Record:
    labels, count = _labels(processor), options.scores
    chats = [_chat(picture, number) for number in range(count)]
    with ks.wrap(model, processor) as vlm:
        vlm.score([_chat(picture.resize((64, 64)), 0)], labels)
        scored, ours = _seconds(lambda: vlm.score(chats, labels))
    found: Any = scored
    ids = processor.tokenizer(labels, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def stock(chat: list[Message]) -> torch.Tensor:
        inputs = processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        logits = model(**inputs, use_cache=False, logits_to_keep=1).logits[0, -1]
        return torch.log_softmax(logits, -1)

    seconds, worst = [], 0.0
    for chat, mine in zip(chats[: options.sample], found, strict=False):
        chances, spent = _seconds(partial(stock, chat))
        seconds.append(spent)
        for one, (token,) in zip(mine.logprobs, ids, strict=True):
            worst = max(worst, abs(float(chances[token]) - one))
    return {"name": f"{count} yes/no scores", **_sums(seconds, count, ours, found[0].report, worst)}


def _chat(picture: Any, number: int) -> list[Message]:
    asked = user(f"{_question(number)} Yes or No?")
    return [{**asked, "content": [{"type": "image", "image": picture}, *asked["content"]]}]


def _sums(stock: list[float], count: int, ours: float, report: Any, worst: float) -> Record:
    whole = median(stock) * count
    return {
        "stock_seconds": round(whole, 2),
        "stock_timed_on": len(stock),
        "cold_seconds": round(ours, 3),
        "times_cold": round(whole / ours, 1),
        "prompt_tokens": report.prompt_tokens,
        "computed_tokens": report.computed_tokens,
        "exactness": report.exactness,
        "worst_difference": worst,
    }


def tables(result: Record) -> Iterator[Told]:
    """Both, beside stock."""
    columns = ["", "stock s", "cold s", "times", "warm s", "times warm", "computed", "of", "off by"]
    fields = ["name", "stock_seconds:.1f", "cold_seconds:.2f", "times_cold:.1f"]
    fields += ["warm_seconds:.2f", "times_warm:.1f", "computed_tokens", "prompt_tokens"]
    rows = [cells(row, *fields, "worst_difference:.1e") for row in result["rows"]]
    about = "stock is timed on a few, and scaled; llama-server and vLLM answer all, as short chats"
    yield about, columns, rows


main = bench("decisions", __doc__, add, measure, tables, repetitions=0)

if __name__ == "__main__":
    raise SystemExit(main())
