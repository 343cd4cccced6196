"""Eight chats at once against the same eight one after another, side by side.

Run `python -m bench.together`. Each chat asks about a picture of its own. In every repetition the
same questions are answered once in turn, by direct calls, and once together, by clients that all
ask at the same moment; each way begins with an empty memory. A second pair asks other questions
about pictures that are known by then. Reported are ratios within one repetition: tokens per second
of all answers, and the time until a client has its first token, counted from the moment when all of
them ask. Answers are compared token by token.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from threading import Barrier

import keepsight
from bench.frame import Record, Told, bench, model_of, sides
from keepsight import Together
from keepsight.bench.contestants import decoding
from keepsight.bench.frame import interleaved, middle, now, ratio, spread
from keepsight.bench.options import SHAPES
from keepsight.bench.workloads import Pictures, user, words
from keepsight.kinds import Message
from keepsight.report import Piece
from keepsight.vlm import VLM

ROUNDS = {"new pictures": 1, "known pictures": 2}  # and what questions begin with
WAYS = ("in turn", "together")


def add(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told."""
    parser.add_argument("--device", help="where the model goes, such as cuda")
    parser.add_argument("--chats", type=int, default=8, help="how many clients ask")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--picture", default="448x448", help="width x height in pixels")


@dataclass
class Client:
    """One client's answer: its tokens, and milliseconds since all asked."""

    tokens: list[int] = field(default_factory=list)
    first: float = 0.0
    pause: float = 0.0  # the longest between two tokens
    _last: float = 0.0

    def hears(self, pieces: Iterable[Piece], since: float) -> None:
        """A whole answer."""
        for piece in pieces:
            if piece.token is not None:
                after = now() - since
                self.pause = max(self.pause, after - self._last if self.tokens else 0.0)
                self.first, self._last = self.first or after, after
                self.tokens.append(piece.token)


@dataclass
class Answers:
    """All answers of one way, and the seconds that they took together."""

    clients: list[Client]
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second, of all answers."""
        return sum(len(client.tokens) for client in self.clients) / self.seconds


def measure(options: argparse.Namespace) -> Record:
    """Both ways in turn."""
    with TemporaryDirectory() as folder:
        pictures = Pictures(Path(folder))
        size = sides(options.picture)
        paths = [pictures.path(700 + chat, *size) for chat in range(options.chats)]

        def asked(number: int) -> list[list[Message]]:
            return [[user(words(100 * number + i, 22), path)] for i, path in enumerate(paths)]

        loaded = keepsight.load(model_of(options), dtype=options.dtype, device_map=options.device)
        with loaded as vlm:

            def answered(way: str) -> dict[str, Answers]:
                vlm.clear()
                gc.collect()
                run = _in_turn if way == "in turn" else _together
                return {name: run(vlm, asked(n), options.tokens) for name, n in ROUNDS.items()}

            _together(vlm, asked(9), options.tokens)  # not counted: the library's first call
            ways = {way: lambda _, way=way: answered(way) for way in WAYS}
            met = interleaved(options.repetitions, ways)
    runs = {name: _sums([{w: one[w][name] for w in WAYS} for one in met]) for name in ROUNDS}
    return {"runs": runs, "equal": all(run["equal"] for run in runs.values())}


def _in_turn(vlm: VLM, chats: list[list[Message]], tokens: int) -> Answers:
    clients, start = [Client() for _ in chats], now()
    for client, messages in zip(clients, chats, strict=True):
        client.hears(vlm.stream(messages, **decoding(tokens)), start)
    return Answers(clients, (now() - start) / 1e3)


def _together(vlm: VLM, chats: list[list[Message]], tokens: int) -> Answers:
    clients, all_here = [Client() for _ in chats], Barrier(len(chats) + 1)

    def ask(client: Client, messages: list[Message]) -> None:
        all_here.wait()
        client.hears(served.submit(messages, **decoding(tokens)), now())

    with Together(vlm, max_running=len(chats)) as served, ThreadPoolExecutor(len(chats)) as pool:
        waiting = [pool.submit(ask, *pair) for pair in zip(clients, chats, strict=True)]
        all_here.wait()
        start = now()
        for one in waiting:
            one.result()
        return Answers(clients, (now() - start) / 1e3)


def _sums(rounds: list[dict[str, Answers]]) -> Record:
    """Medians over the repetitions, and of ratios within one."""
    told: Record = {}
    for way in WAYS:
        firsts = [[client.first for client in one[way].clients] for one in rounds]
        pauses = [max(client.pause for client in one[way].clients) for one in rounds]
        told[way] = {
            "tokens_per_second": middle(one[way].rate for one in rounds),
            "first_token_mean_ms": middle(map(mean, firsts), 1),
            "first_token_last_ms": middle(map(max, firsts), 1),
            "longest_pause_ms": middle(pauses, 1),
        }
    pairs = [(one["together"].rate, one["in turn"].rate) for one in rounds]
    told["speedup"], told["speedup_spread"] = ratio(pairs), spread(a / b for a, b in pairs)
    told["equal"] = all(
        [client.tokens for client in one["in turn"].clients]
        == [client.tokens for client in one["together"].clients]
        for one in rounds
    )
    return told


def tables(result: Record) -> Iterator[Told]:
    """The two ways beside each other."""
    columns = ["", "in turn, tokens/s", "together, tokens/s", "times", "equal tokens"]
    rows = [
        [name]
        + [f"{run[way]['tokens_per_second']:.1f}" for way in WAYS]
        + [f"{run['speedup']:.2f}", "yes" if run["equal"] else "NO"]
        for name, run in result["runs"].items()
    ]
    yield f"{result['chats']} chats, a picture of {result['picture']} each", columns, rows


main = bench("together", __doc__, add, measure, tables, shapes=(*SHAPES, "demo", "demo-hybrid"))

if __name__ == "__main__":
    raise SystemExit(main())
