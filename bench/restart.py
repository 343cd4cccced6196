"""Restart: the first turn of a new process over a store that an earlier process filled.

Run `python -m bench.restart`. One process has a chat and ends. Then new ones are started to answer
the next turn: one over the store, with its files in the page cache; one over the store with its
files dropped from it, as after a restart of the machine; and one that has no store and computes
everything. Each tells how long every step took, from the interpreter's start to the first token.
Beside it, in the same process, the same files are read into memory and nothing is done with them:
that is what reading costs. `keepsight bench --workload restart` measures the same turn within one
process, many times; here it is the whole way, once per process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.frame import Child, Record, Told, bench, model_of, sides
from keepsight.bench.contestants import Keepsight
from keepsight.bench.frame import interleaved, middle, now, ratio, say
from keepsight.bench.hardware import PLACES, forget_files, history, read_files
from keepsight.bench.workloads import Pictures, user, words
from keepsight.models import loading
from keepsight.vlm import VLM

NOTHING = "nothing"
WAYS = (*PLACES, NOTHING)
# What a process does before it can answer, in order, and the stages of its first turn.
START = ("imports", "model", "processor", "memory")
TURN = ("check", "render", "match", "load", "restore", "encode", "prefill")


def add(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told."""
    parser.add_argument("--picture", default="1280x800", help="width x height in pixels")
    parser.add_argument("--turns", type=int, default=4, help="of the chat that is remembered")


def measure(options: argparse.Namespace) -> Record:
    """Every way in turn; each repetition asks something else."""
    model = model_of(options)
    with TemporaryDirectory() as folder:
        picture = Pictures(Path(folder)).path(970, *sides(options.picture))
        told = {"model": model, "dtype": options.dtype, "picture": picture}
        told |= {"turns": options.turns, "store": f"{folder}/store"}

        def start(way: str, question: int) -> Record:
            say(f"{way}: question {question}")
            with Child("restart", way=way, question=question, born=time.time(), **told) as process:
                return process.ask()

        say(f"{start('fill', 0)['stored'] / 1e6:.1f} MB stored")
        ways = {way: lambda number, way=way: start(way, asked(way, number)) for way in WAYS}
        return sums(interleaved(options.repetitions, ways))


def asked(way: str, repetition: int) -> int:
    """The number of a question. Over one store nothing is asked twice: the first process would
    leave its answer there. Without a store both questions are asked, by turns, to compare."""
    odd = {"page cache": False, "disk": True}.get(way, bool(repetition % 2))
    return 2 * repetition + odd


def child(
    way: str,
    question: int,
    born: float,
    model: str,
    dtype: str,
    picture: str,
    turns: int,
    store: str,
) -> Record:
    """What one process does; milliseconds of each step."""
    spent, last = {"imports": 1e3 * (time.time() - born)}, now()

    def note(name: str) -> None:
        nonlocal last
        spent[name], last = now() - last, now()

    weights = loading.load_named(model, dtype, None, None)[0]
    note("model")
    processor = loading.load_processor(model, None)
    note("processor")
    folder, told = Path(store), history(picture, turns, 22, 45)
    files = [file for file in folder.rglob("*") if file.is_file()]
    if way == "disk":
        forget_files(files)
    last = now()
    kept: Record = {} if way == NOTHING else {"store": store}
    kept["files"] = loading.files_digest(model, weights.dtype)
    with VLM(weights, processor, **kept) as vlm:
        note("memory")
        if way == "fill":
            for end in range(1, len(told), 2):
                vlm.chat(told[:end], max_new_tokens=1)
            vlm.flush()
            return {"stored": sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())}
        answer = Keepsight(vlm).answer([*told, user(words(90 + question, 22))], 4)
        usage, read = answer.counted, (0.0, 0)
        if way != NOTHING:
            read = read_files(vlm, folder, usage.cached_tokens, way == "disk")
    return {
        "tokens": answer.tokens,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "start": spent,
        "turn": {name: answer.stages.get(name, 0.0) for name in TURN},
        "first_token_ms": answer.first,
        "bare_read_ms": read[0],
        "megabytes": read[1] / 1e6,
        "question": question,
    }


def sums(rounds: list[Record]) -> Record:
    """Medians of every step of every way, and ratios within each repetition."""
    runs: Record = {}
    for way in rounds[0]:
        rows = [one[way] for one in rounds]
        found: Record = {"repetitions": len(rows)}
        for name in ("prompt_tokens", "cached_tokens", "first_token_ms", "bare_read_ms"):
            found[name] = middle((row[name] for row in rows), 3)
        found["megabytes"] = middle((row["megabytes"] for row in rows), 3)
        for part in ("start", "turn"):
            found[part] = {k: middle(row[part][k] for row in rows) for k in rows[0][part]}
        found["load_over_read"] = ratio((row["turn"]["load"], row["bare_read_ms"]) for row in rows)
        found["samples"] = [round(row["first_token_ms"], 2) for row in rows]
        runs[way] = found
    result: Record = {"runs": runs}
    for place in PLACES:
        times = [(o[NOTHING]["first_token_ms"], o[place]["first_token_ms"]) for o in rounds]
        result[f"nothing_over_{place.replace(' ', '_')}"] = ratio(times)
    answers: dict[int, set[tuple[int, ...]]] = {}
    for one in rounds:
        for row in one.values():
            answers.setdefault(row["question"], set()).add(tuple(row["tokens"]))
    return {**result, "equal": all(len(given) == 1 for given in answers.values())}


def tables(result: Record) -> Iterator[Told]:
    """All ways: what reading costs, and where the rest goes."""
    runs = {way: run for way, run in result["runs"].items() if run}
    named = {way: "no store" if way == NOTHING else f"files in the {way}" for way in runs}
    fields = {"tokens of the prompt": "prompt_tokens", "of them reused": "cached_tokens"}
    fields |= {"MB read": "megabytes", "first token, from the question": "first_token_ms"}
    fields |= {"bare reading of the same files": "bare_read_ms"}
    rows = [[told, *(f"{run[f]:.1f}" for run in runs.values())] for told, f in fields.items()]
    rows.append(["load over it", *(str(run["load_over_read"] or "-") for run in runs.values())])
    for part, names in (("start", START), ("turn", TURN)):
        for name in names:
            spent = [f"{run[part].get(name, 0.0):.1f}" for run in runs.values()]
            rows.append([f"{part}: {name}", *spent])
    heading = (
        "the first turn of a new process, in milliseconds (without a store it takes "
        f"{result['nothing_over_page_cache']} times as long)"
    )
    yield heading, ["", *named.values()], rows


main = bench("restart", __doc__, add, measure, tables, repetitions=5)

if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(child(**json.loads(sys.argv[2]))), flush=True)
    else:
        raise SystemExit(main())
