"""Servers side by side: the same client, requests and checkpoint for Keepsight's and for others.

Run `python -m bench.serving`. In every repetition each server is started, warmed with a request
that has nothing in common with the others, asked, and stopped, never two at once, in an order that
changes. The workloads are chats on one picture (W1), an agent with one more screenshot at each step
(W5), fixed references and a new picture (W7), and examples before a question (W8); then eight
clients ask at the same moment. Times are the client's: until the first text arrives, and until the
stream ends. Every ratio is taken within one repetition and says how many times faster Keepsight's
server was. Answers are compared with Keepsight's. At the end the same requests go to the server and
to a bare engine in this process, in turn: what the server itself costs.
"""

from __future__ import annotations

import argparse
import base64
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier
from typing import Any

import torch
from tokenizers import Tokenizer

import keepsight
from bench import rivals, servers
from bench.frame import Record, Told, bench, model_of
from bench.servers import KEEPSIGHT, Contestant, Heard, Running
from keepsight.bench.frame import cells, interleaved, middle, now, say
from keepsight.bench.options import SHAPES, Scale
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

WORKLOADS = ("W1", "W5", "W7", "W8")
CHAT = {"full": (1280, 800), "smoke": (128, 96)}  # the picture of W1
SCALES = {  # W8 and the clients have the small pictures, W8 as many examples as `pages`
    "full": Scale(
        (640, 512),
        (512, 512),
        (0, 0),
        turns=3,
        requests=3,
        pages=4,
        references=2,
        system=500,
        question=22,
        answer=60,
    ),
    "smoke": Scale((128, 96), (128, 96), (0, 0)),
}
EXPORTED = ("onnx", "onnx int8", "openvino", "openvino int8")
GOAL = 1.05  # what the server may cost, in times to the first token of the bare engine
Chats = dict[str, list[list[Message]]]


def add(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told."""
    several: Record = {"action": "append", "help": "repeatable"}
    parser.add_argument("--scale", choices=SCALES, default="full", help="of the workloads")
    parser.add_argument("--workload", choices=WORKLOADS, **several)
    parser.add_argument("--rival", choices=tuple(rivals.RIVALS), **several)
    parser.add_argument("--exported", default=[], choices=EXPORTED, **several)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--clients", type=int, default=8, help="who ask at the same moment")
    threads = torch.get_num_threads()
    parser.add_argument("--threads", type=int, default=threads, help="of each server")


def measure(options: argparse.Namespace) -> Record:
    """All servers, then Keepsight's beside the engine."""
    torch.set_num_threads(options.threads)
    there, left_out = rivals.rivals(options.dtype, options.threads)
    if options.rival:
        there = [one for one in there if one.name in options.rival]
        left_out = {name: why for name, why in left_out.items() if name in options.rival}
    own = servers.keepsight_server(options.dtype, options.threads)
    exported = [servers.exported_server(way, options.threads) for way in options.exported]
    contestants = [own, *there, *exported]
    model, scale = Path(model_path(model_of(options))).absolute(), SCALES[options.scale]
    with TemporaryDirectory() as folder:
        pictures = Pictures(Path(folder))
        plan = list(planned(options.workload or WORKLOADS, pictures, options.scale))
        asked = {w.name: [sent(step.messages) for step in w.steps] for w in plan}
        paths = [pictures.path(900 + client, *scale.small) for client in range(options.clients)]
        clients = {
            name: [sent([user(words(n + i, scale.question), p)]) for i, p in enumerate(paths)]
            for name, n in {"new pictures": 900, "known pictures": 950}.items()
        }
        rounds = _rounds(contestants, left_out, model, asked, clients, options)
        (chat,) = planned(("W1",), pictures, options.scale)
        overhead = _overhead(own, model, chat, options)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    same = identity(rounds, tokenizer)
    return {
        "size": options.size if options.shape in SHAPES else "",
        "servers": {one.name: one.version for one in contestants if one.name in rounds},
        "left_out": left_out,
        "workloads": [workload_told(workload, rounds) for workload in plan],
        "clients": clients_told(rounds),
        "overhead": overhead,
        "identity": same,
        "equal": same[KEEPSIGHT]["equal"] == same[KEEPSIGHT]["answers"] and overhead["equal"],
    }


# -- what is asked -------------------------------------------------------------------------------


def planned(names: Iterable[str], pictures: Pictures, scale: str) -> Iterator[Workload]:
    """The workloads of these names."""
    usual = SCALES[scale]
    for name in names:
        if name == "W8":
            yield _examples(pictures, usual)
        else:
            size = CHAT[scale] if name == "W1" else usual.picture
            yield from workloads([name], pictures, replace(usual, picture=size))


def _examples(pictures: Pictures, scale: Scale) -> Workload:
    """Examples of pictures with their answers, the same in each request, then a new picture."""
    shown: list[Message] = []
    for number in range(scale.pages):
        picture = pictures.path(800 + number, *scale.small)
        shown += [user(words(80, 12), picture), assistant(words(880 + number, 8))]
    asked = [pictures.path(850 + number, *scale.small) for number in range(scale.requests)]
    steps = [
        Step(f"request {number}", [*shown, user(words(80, 12), path)])
        for number, path in enumerate(asked, 1)
    ]
    width, height = scale.small
    about = f"{scale.pages} examples and a new picture, {width}x{height} each"
    return Workload("W8", about, steps, 1)


def sent(messages: list[Message]) -> list[Message]:
    """The same conversation as OpenAI's clients send it, with pictures as data URIs."""

    def part(given: Message) -> Message:
        if given["type"] != "image":
            return given
        data = base64.b64encode(Path(given["image"]).read_bytes()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    return [
        {**message, "content": [part(one) for one in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


# -- measuring -----------------------------------------------------------------------------------


@dataclass
class Clients:
    """Answers to all clients, and the seconds that they took together."""

    heard: list[Heard]
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second, of all answers."""
        return sum(one.tokens for one in self.heard) / self.seconds

    @property
    def first(self) -> float:
        """When the clients had their first text, on average."""
        return sum(one.first for one in self.heard) / len(self.heard)


@dataclass
class Round:
    """What one server answered in one repetition: by workload, and by round of clients."""

    alone: dict[str, list[Heard]]
    clients: dict[str, Clients]


Rounds = dict[str, list[Round]]  # by server, one for each repetition


def _rounds(
    contestants: list[Contestant],
    left_out: dict[str, str],
    model: Path,
    asked: Chats,
    clients: Chats,
    options: argparse.Namespace,
) -> Rounds:
    """Rounds of each server. A rival that fails is left out altogether; Keepsight must not."""

    def answers(contestant: Contestant, number: int) -> Round | None:
        """One server from its start to its end."""
        if contestant.name in left_out:
            return None
        say(f"repetition {number + 1} of {options.repetitions}: {contestant.name}")
        try:
            contestant.prepare(model)
            with Running(contestant, model) as server:
                server.ask(_unrelated(), options.tokens)
                alone = {
                    name: [server.ask(chat, options.tokens) for chat in chats]
                    for name, chats in asked.items()
                }
                many = clients if contestant.many else {}
                return Round(alone, {n: _at_once(server, many[n], options.tokens) for n in many})
        except servers.ServerFailed as error:
            if contestant.name == KEEPSIGHT:
                raise
            say(str(error))  # not for the result: a log names places of this machine
            left_out[contestant.name] = "it failed; what it said is on the terminal of the run"
            return None

    ways = {one.name: lambda number, one=one: answers(one, number) for one in contestants}
    found: list[dict[str, Any]] = interleaved(options.repetitions, ways)
    names = [one.name for one in contestants if one.name not in left_out]
    return {name: [one[name] for one in found] for name in names}


def _unrelated() -> list[Message]:
    with TemporaryDirectory() as folder:
        return sent([user("warm up, please", Pictures(Path(folder)).path(999, 320, 256))])


def _at_once(server: Running, chats: list[list[Message]], tokens: int) -> Clients:
    all_here = Barrier(len(chats) + 1)

    def ask(chat: list[Message]) -> Heard:
        all_here.wait()
        return server.ask(chat, tokens)

    with ThreadPoolExecutor(len(chats)) as pool:
        waiting = [pool.submit(ask, chat) for chat in chats]
        all_here.wait()
        start = now()
        heard = [one.result() for one in waiting]
        return Clients(heard, (now() - start) / 1e3)


def _overhead(own: Contestant, model: Path, plan: Workload, options: argparse.Namespace) -> Record:
    """The server against direct calls of the engine: each request to both, in turn."""
    say("the server against the bare engine")
    chats = [sent(step.messages) for step in plan.steps]
    rounds = []
    with keepsight.load(str(model), dtype=options.dtype) as vlm, Running(own, model) as served:
        ways: dict[str, Callable[[list[Message]], Heard]] = {
            "server": lambda chat: served.ask(chat, options.tokens),
            "engine": lambda chat: _direct(vlm, chat, options.tokens),
        }
        for way in ways.values():
            way(_unrelated())
        for number in range(2 * options.repetitions):
            vlm.clear()
            served.forget()
            met = []
            for chat in chats:
                asked = {n: lambda _, way=way, chat=chat: way(chat) for n, way in ways.items()}
                met += interleaved(number + 1, asked, number)
            rounds.append(met)
    return cost(plan, rounds)


def _direct(vlm: VLM, messages: list[Message], tokens: int) -> Heard:
    """The engine heard as a client would hear it."""
    heard, start = Heard(), now()
    for piece in vlm.stream(messages, max_new_tokens=tokens, do_sample=False):
        heard.hears(piece.text, now() - start)
        if piece.usage is not None:
            heard.tokens, heard.prompt = piece.usage.completion_tokens, piece.usage.prompt_tokens
            heard.cached = piece.usage.cached_tokens
    heard.total = now() - start
    return heard


# -- what it comes to ----------------------------------------------------------------------------


RATIOS = {
    "first_token_ratio": "first token",
    "total_ratio": "whole answer",
    "rate_ratio": "decoding",
}


def workload_told(workload: Workload, rounds: Rounds) -> Record:
    """Each step of a workload: medians of every server, and its ratios."""
    steps: list[Record] = []
    for number, step in enumerate(workload.steps):
        own = [met.alone[workload.name][number] for met in rounds[KEEPSIGHT]]
        told: Record = {}
        for name, met in rounds.items():
            heard = [one.alone[workload.name][number] for one in met]
            told[name] = _server(heard, list(zip(heard, own, strict=True)))
        steps.append({"name": step.name, "servers": told})
    later = {
        name: {r: middle((s["servers"][name][r] for s in steps[1:] or steps), 3) for r in RATIOS}
        for name in rounds
    }
    return {"name": workload.name, "about": workload.about, "steps": steps, "later": later}


def _server(heard: list[Heard], pairs: list[tuple[Heard, Heard]]) -> Record:
    """One server's answers to one request, beside Keepsight's of the same repetitions."""
    return {
        "prompt_tokens": heard[0].prompt,
        "cached_tokens": heard[0].cached,
        "tokens": min(one.tokens for one in heard),
        "first_token_ms": middle((one.first for one in heard), 1),
        "total_ms": middle((one.total for one in heard), 1),
        "tokens_per_second": middle((one.rate for one in heard), 1),
        "first_token_ratio": middle((one.first / mine.first for one, mine in pairs), 3),
        "total_ratio": middle((one.total / mine.total for one, mine in pairs), 3),
        "rate_ratio": middle((mine.rate / max(one.rate, 1e-3) for one, mine in pairs), 3),
    }


def clients_told(rounds: Rounds) -> Record:
    """Clients who ask at the same moment: all their tokens per second, and the first of each."""
    told: Record = {}
    for name in rounds[KEEPSIGHT][0].clients:
        told[name] = {}
        own = [one.clients[name] for one in rounds[KEEPSIGHT]]
        for server, met in rounds.items():
            if name not in met[0].clients:
                continue
            pairs = [(one.clients[name], mine) for one, mine in zip(met, own, strict=True)]
            told[name][server] = {
                "tokens_per_second": middle((one.rate for one, _ in pairs), 1),
                "rate_ratio": middle((mine.rate / one.rate for one, mine in pairs), 3),
                "first_token_ms": middle((one.first for one, _ in pairs), 1),
                "first_token_ratio": middle((one.first / mine.first for one, mine in pairs), 3),
            }
    return told


def identity(rounds: Rounds, tokenizer: Tokenizer) -> Record:
    """Every answer beside Keepsight's of the first repetition, as the tokenizer reads the texts.

    `same_prompt` counts those whose prompt had as many tokens, pictures and all.
    """
    told: Record = {}
    for server, met in rounds.items():
        counts: Record = dict.fromkeys(
            ("answers", "same_prompt", "equal", "tokens", "tokens_agree"), 0
        )
        for where, heard, mine in _answers(met, rounds[KEEPSIGHT][0]):
            # Some servers keep back the half of a letter that an answer may end in.
            texts = [one.text.rstrip("\ufffd") for one in (heard, mine)]
            given, expected = (tokenizer.encode(t, add_special_tokens=False).ids for t in texts)
            both = zip(given, expected, strict=False)
            parted = (i for i, (one, other) in enumerate(both) if one != other)
            counts["answers"] += 1
            counts["same_prompt"] += heard.prompt == mine.prompt
            counts["equal"] += texts[0] == texts[1]
            counts["tokens"] += len(expected)
            counts["tokens_agree"] += next(parted, min(len(given), len(expected)))
            if texts[0] != texts[1]:
                first = {"where": where, "keepsight": texts[1][:60], "server": texts[0][:60]}
                counts.setdefault("first_difference", first)
        told[server] = counts
    return told


def _answers(met: list[Round], own: Round) -> Iterator[tuple[str, Heard, Heard]]:
    """Every answer of a server, where it was given, and Keepsight's to the same request."""
    for one in met:
        groups = [(name, heard, own.alone[name]) for name, heard in one.alone.items()]
        groups += [(n, many.heard, own.clients[n].heard) for n, many in one.clients.items()]
        for name, heard, mine in groups:
            for number, pair in enumerate(zip(heard, mine, strict=True), 1):
                yield f"{name}, {number}", *pair


def cost(workload: Workload, rounds: list[list[dict[str, Heard]]]) -> Record:
    """The server over the bare engine: turn 1 is cold, later turns are warm."""
    steps: list[Record] = []
    for number, step in enumerate(workload.steps):
        met = [(one[number]["server"], one[number]["engine"]) for one in rounds]
        steps.append(
            {
                "name": step.name,
                "server_ms": middle((server.first for server, _ in met), 1),
                "engine_ms": middle((engine.first for _, engine in met), 1),
                "added_ms": middle((server.first - engine.first for server, engine in met), 3),
                "first_token_ratio": middle((s.first / e.first for s, e in met), 3),
                "total_ratio": middle((s.total / e.total for s, e in met), 3),
            }
        )
    ratios = [step["first_token_ratio"] for step in steps]
    return {
        "about": workload.about,
        "steps": steps,
        "cold": ratios[0],
        "warm": middle(ratios[1:] or ratios, 3),
        "goal": GOAL,
        "equal": all(o["server"].text == o["engine"].text for one in rounds for o in one),
    }


# -- telling -------------------------------------------------------------------------------------


def in_short(result: Record) -> Iterator[str]:
    """How many times sooner than others' the later answers of each workload start."""
    for workload in result["workloads"]:
        ratios = [
            f"{told['first_token_ratio']:.2f} times sooner than {name}'s"
            for name, told in workload["later"].items()
            if name != KEEPSIGHT
        ]
        if ratios and len(workload["steps"]) > 1:
            about = f"{workload['name']} ({workload['about']})"
            yield f"{about}: later answers start {', '.join(ratios)}."


def tables(result: Record) -> Iterator[Told]:
    """Keepsight's times beside how many times slower each rival was."""
    others = [name for name in result["servers"] if name != KEEPSIGHT]
    for workload in result["workloads"]:
        rows = []
        for step in workload["steps"]:
            mine = step["servers"][KEEPSIGHT]
            row = [step["name"], str(mine["prompt_tokens"]), str(mine["cached_tokens"])]
            row.append(f"{mine['first_token_ms']:.0f}")
            rows.append([*row, *_ratios("first_token_ratio", others, step["servers"])])
        for field, name in RATIOS.items():
            row = [f"{name}, median after the first", "", "", ""]
            rows.append([*row, *_ratios(field, others, workload["later"])])
        columns = ["request", "prompt", "reused", "first token, ms", *others]
        about = f"{workload['name']}, {workload['about']}"
        yield f"{about} (rivals: how many times slower)", columns, rows
    rows = [
        [name, f"{told[KEEPSIGHT]['tokens_per_second']:.1f}", *_ratios("rate_ratio", others, told)]
        for name, told in result["clients"].items()
    ]
    columns = ["clients", "tokens/s of all", *others]
    yield "clients at once (rivals: how many times slower all answers)", columns, rows
    overhead = result["overhead"]
    fields = ("name", "server_ms:.1f", "engine_ms:.1f", "first_token_ratio:.3f")
    rows = [cells(step, *fields) for step in overhead["steps"]]
    rows += [[name, "", "", f"{overhead[name]:.3f}"] for name in ("cold", "warm")]
    heading = f"the server over the bare engine, first token (aim {overhead['goal']:.2f})"
    yield heading, ["request", "server, ms", "engine, ms", "ratio"], rows
    rows = [
        [name, f"{t['equal']} of {t['answers']}", f"{t['tokens_agree']} of {t['tokens']}"]
        for name, t in result["identity"].items()
    ]
    yield "answers equal to Keepsight's", ["server", "answers", "tokens"], rows


def _ratios(field: str, names: list[str], told: Record) -> list[str]:
    return [f"{told[name][field]:.2f}" if name in told else "-" for name in names]


main = bench("serving", __doc__, add, measure, tables, shapes=(*SHAPES, "demo", "demo-hybrid"))

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers end with it
    raise SystemExit(main())
