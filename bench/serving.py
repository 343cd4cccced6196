"""Servers side by side: the same client, requests and checkpoint for Keepsight's and for others.

Run `python -m bench.serving`. In every repetition each server is started, warmed with a
request that has nothing in common with the others, asked, and stopped, never two at once, in an
order that changes. The workloads are chats on one picture (W1), an agent with one more screenshot
at each step (W5), fixed references and a new picture (W7), and examples before a question (W8);
then eight clients ask at the same moment. Times are the client's: until the first text arrives, and
until the stream ends. Every ratio is taken within one repetition and says how many times faster
Keepsight's server was. Answers are compared with Keepsight's. At the end the same requests go to
the server and to a bare engine in this process, in turn: what the server itself costs.
"""

from __future__ import annotations

import argparse
import base64
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer

import keepsight
from bench import servers, serving_rivals
from bench.servers import KEEPSIGHT, Contestant, Running
from bench.serving_sums import Clients, Heard, Round, clients_told, cost, identity, workload_told
from bench.serving_tables import show
from keepsight.bench import machine
from keepsight.bench.checkpoints import SHAPES, SIZES, checkpoint
from keepsight.bench.options import Scale
from keepsight.bench.workloads import (
    Pictures,
    Step,
    Workload,
    assistant,
    user,
    words,
    workloads,
)
from keepsight.kinds import Message
from keepsight.models.loading import model_path
from keepsight.vlm import VLM

FORMAT = 1
WORKLOADS = ("W1", "W5", "W7", "W8")


@dataclass(frozen=True)
class Sizes:
    """How much is asked; `field.md` of W1 to W8 in what two cores do in minutes."""

    chat: tuple[int, int]  # picture of W1
    shot: tuple[int, int]  # of W5 and W7
    example: tuple[int, int]  # of W8 and of the clients
    turns: int  # of W1
    requests: int  # of the others
    references: int  # of W7
    examples: int  # of W8
    system: int  # words of W5's system prompt
    question: int  # words
    answer: int  # words of the replies in a history


SCALES = {
    "full": Sizes((1280, 800), (640, 512), (512, 512), 3, 3, 2, 4, 500, 22, 60),
    "smoke": Sizes((128, 96), (128, 96), (128, 96), 2, 2, 1, 2, 20, 10, 20),
}

EXPORTED = ("onnx", "onnx int8", "openvino", "openvino int8")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 when Keepsight's server answered one request in two ways."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    there, left_out = serving_rivals.rivals(options.dtype, options.threads)
    chosen = [servers.keepsight_server(options.dtype, options.threads), *there]
    exported = [servers.exported_server(way, options.threads) for way in options.exported]
    if options.rival:
        chosen = [one for one in chosen if one.name in (KEEPSIGHT, *options.rival)]
        left_out = {name: why for name, why in left_out.items() if name in options.rival}
    result = run([*chosen, *exported], left_out, options)
    result["command"] = " ".join(["python -m bench.serving", *_told(argv)])
    console = Console()
    console.width = max(console.width, 118)
    show(result, console)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    own = result["identity"][KEEPSIGHT]
    return 0 if own["equal"] == own["answers"] and result["overhead"]["equal"] else 1


def _told(argv: list[str]) -> Iterator[str]:
    """The command line without folders and files of this machine."""
    words_ = iter(argv)
    for word in words_:
        if word in ("--out", "--folder"):
            next(words_, None)
        elif not word.startswith(("--out=", "--folder=")):
            yield json.dumps(word) if " " in word else word


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    parser.add_argument("--shape", choices=(*SHAPES, "demo", "demo-hybrid"), default="qwen3_vl")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--scale", choices=SCALES, default="full", help="of the workloads")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="repeatable")
    names = tuple(serving_rivals.RIVALS)
    parser.add_argument("--rival", action="append", choices=names, help="repeatable; else all")
    parser.add_argument(
        "--exported", action="append", default=[], choices=EXPORTED, help="repeatable"
    )
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--clients", type=int, default=8, help="who ask at the same moment")
    parser.add_argument("--repetitions", type=int, default=3)
    threads = torch.get_num_threads()
    parser.add_argument("--threads", type=int, default=threads, help="of each server")
    parser.add_argument("--folder", type=Path, default=Path("bench/checkpoints"))
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    return parser


def run(
    contestants: list[Contestant], left_out: dict[str, str], options: argparse.Namespace
) -> dict[str, Any]:
    """Everything but the command, as plain data."""
    made = options.shape in SHAPES
    name = checkpoint(options.shape, options.size, options.folder) if made else options.shape
    model = Path(model_path(str(name))).absolute()
    sizes = SCALES[options.scale]
    start = time.monotonic()
    described = machine.describe()
    left_out = dict(left_out)
    with TemporaryDirectory() as folder:
        pictures = Pictures(Path(folder))
        plan = list(_plan(options.workload or WORKLOADS, pictures, sizes))
        clients = _clients(pictures, sizes, options.clients)
        rounds = _measure(contestants, left_out, model, plan, clients, options)
        overhead = _overhead(model, pictures, sizes, options)
    return {
        "benchmark": "keepsight serving",
        "format": FORMAT,
        "machine": described,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "shape": options.shape,
        "size": options.size if made else "",
        "dtype": options.dtype,
        "tokens": options.tokens,
        "repetitions": options.repetitions,
        "threads": options.threads,
        "scale": sizes.__dict__,
        "servers": {one.name: one.version for one in contestants if one.name in rounds},
        "left_out": left_out,
        "workloads": [workload_told(workload, rounds) for workload in plan],
        "clients": clients_told(rounds),
        "overhead": overhead,
        "identity": identity(rounds, Tokenizer.from_file(str(model / "tokenizer.json"))),
    }


# -- what is asked -------------------------------------------------------------------------------


def _plan(names: tuple[str, ...], pictures: Pictures, sizes: Sizes) -> Iterator[Workload]:
    usual = Scale(
        picture=sizes.shot,
        large=None,
        small=sizes.example,
        page=sizes.shot,
        peers=0,
        turns=sizes.turns,
        requests=sizes.requests,
        pages=0,
        references=sizes.references,
        system=sizes.system,
        question=sizes.question,
        answer=sizes.answer,
        repetitions=1,
    )
    for name in names:
        if name == "W8":
            yield _examples(pictures, sizes)
        else:
            scale = replace(usual, picture=sizes.chat) if name == "W1" else usual
            yield from workloads([name], pictures, scale)


def _examples(pictures: Pictures, sizes: Sizes) -> Workload:
    """Examples of pictures with their answers, the same in each request, then a new picture."""
    shown: list[Message] = []
    for number in range(sizes.examples):
        picture = pictures.path(800 + number, *sizes.example)
        shown += [user(words(80, 12), picture), assistant(words(880 + number, 8))]
    steps = []
    for request in range(sizes.requests):
        asked = user(words(80, 12), pictures.path(850 + request, *sizes.example))
        steps.append(Step(f"request {request + 1}", [*shown, asked]))
    width, height = sizes.example
    about = f"{sizes.examples} examples and a new picture, {width}x{height} each"
    return Workload("W8", about, steps, 1)


def _clients(pictures: Pictures, sizes: Sizes, count: int) -> dict[str, list[list[Message]]]:
    """Two rounds: pictures that are new, and other questions about the same."""
    paths = [pictures.path(900 + client, *sizes.example) for client in range(count)]
    rounds = {"new pictures": 900, "known pictures": 950}
    return {
        name: [[user(words(seed + i, sizes.question), path)] for i, path in enumerate(paths)]
        for name, seed in rounds.items()
    }


def sent(messages: list[Message]) -> list[Message]:
    """The same conversation as OpenAI's clients send it, with pictures as data URIs."""
    return [
        {**message, "content": [_part(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    data = base64.b64encode(Path(part["image"]).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


# -- measuring -----------------------------------------------------------------------------------

_Asked = dict[str, list[list[Message]]]


def _measure(
    contestants: list[Contestant],
    left_out: dict[str, str],
    model: Path,
    plan: list[Workload],
    clients: _Asked,
    options: argparse.Namespace,
) -> dict[str, list[Round]]:
    """Rounds of each server. A rival that fails is left out altogether; Keepsight must not."""
    found: dict[str, list[Round]] = {}
    asked = {w.name: [sent(step.messages) for step in w.steps] for w in plan}
    rounds = {name: [sent(chat) for chat in chats] for name, chats in clients.items()}
    for repetition in range(options.repetitions):
        turn = repetition % len(contestants)
        for one in contestants[turn:] + contestants[:turn]:
            if one.name in left_out:
                continue
            _say(f"repetition {repetition + 1} of {options.repetitions}: {one.name}")
            try:
                one.prepare(model)
                met = _one(one, model, asked, rounds, options.tokens)
                found.setdefault(one.name, []).append(met)
            except servers.ServerFailed as error:
                if one.name == KEEPSIGHT:
                    raise
                _say(str(error))  # not for the result: a log names places of this machine
                left_out[one.name] = "it failed; what it said is on the terminal of the run"
    return {name: met for name, met in found.items() if name not in left_out}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _one(contestant: Contestant, model: Path, asked: _Asked, clients: _Asked, tokens: int) -> Round:
    """One server from its start to its end."""
    with Running(contestant, model) as server:
        server.ask(server.body(_unrelated(), tokens))
        alone = {
            name: [server.ask(server.body(messages, tokens)) for messages in chats]
            for name, chats in asked.items()
        }
        many = clients if contestant.many else {}
        return Round(alone, {name: _at_once(server, many[name], tokens) for name in many})


def _unrelated() -> list[Message]:
    with TemporaryDirectory() as folder:
        return sent([user("warm up, please", Pictures(Path(folder)).path(999, 320, 256))])


def _at_once(server: Running, chats: list[list[Message]], tokens: int) -> Clients:
    bodies = [server.body(messages, tokens) for messages in chats]
    all_here = Barrier(len(bodies) + 1)

    def ask(body: bytes) -> Heard:
        all_here.wait()
        return server.ask(body)

    with ThreadPoolExecutor(len(bodies)) as pool:
        waiting = [pool.submit(ask, body) for body in bodies]
        all_here.wait()
        start = time.perf_counter()
        heard = [one.result() for one in waiting]
        return Clients(heard, time.perf_counter() - start)


def _overhead(
    model: Path, pictures: Pictures, sizes: Sizes, options: argparse.Namespace
) -> dict[str, Any]:
    """The server against direct calls of the engine: W1, each request to both, in turn."""
    _say("the server against the bare engine")
    plan = next(_plan(("W1",), pictures, sizes))
    chats = [sent(step.messages) for step in plan.steps]
    rounds: list[list[dict[str, Heard]]] = []
    contestant = servers.keepsight_server(options.dtype, options.threads)
    with (
        keepsight.load(str(model), dtype=options.dtype) as vlm,
        Running(contestant, model) as served,
    ):
        ways: dict[str, Callable[[list[Message]], Heard]] = {
            "server": lambda chat: served.ask(served.body(chat, options.tokens)),
            "engine": lambda chat: _direct(vlm, chat, options.tokens),
        }
        for way in ways.values():
            way(_unrelated())
        for repetition in range(2 * options.repetitions):
            vlm.clear()
            served.forget()
            order = list(ways)[:: -1 if repetition % 2 else 1]
            rounds.append([{name: ways[name](chat) for name in order} for chat in chats])
    return cost(plan, rounds)


def _direct(vlm: VLM, messages: list[Message], tokens: int) -> Heard:
    """The engine heard as a client would hear it."""
    heard = Heard()
    start = time.perf_counter()
    for piece in vlm.stream(messages, max_new_tokens=tokens, do_sample=False):
        heard.hears(piece.text, 1e3 * (time.perf_counter() - start))
        if piece.usage is not None:
            heard.tokens, heard.prompt = piece.usage.completion_tokens, piece.usage.prompt_tokens
            heard.cached = piece.usage.cached_tokens
    heard.total = 1e3 * (time.perf_counter() - start)
    return heard


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers end with it
    raise SystemExit(main())
