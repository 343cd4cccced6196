"""What one client may do to a server, and what another one notices of it.

Run `python -m bench.hostile`. Each kind of attack is a request, sent over and over on two
connections by a process of its own. Told is how long a small chat of another client, who has
another key, takes without and with it, in turns, and their quotient (medians): 2 or less is what is
hoped for. All kinds are in `KINDS`; a few are tried unless some are named, or `--all`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from bench.frame import Record, Told, bench

Request = bytes | list[bytes]  # on one connection; of a list the parts are sent slowly
MIB = 1 << 20
CHAT = "/v1/chat/completions"
FORM = "multipart/form-data; boundary=x"


def post(path: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def get(path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n".encode()


def chat(content: str, more: str = "", path: str = CHAT) -> bytes:
    """A chat whose content, and what is beside the messages, is JSON already."""
    messages = f'"messages": [{{"role": "user", "content": {content}}}]'
    return post(path, f'{{"model": "demo", {messages}{more}}}'.encode())


def response(text: str) -> bytes:
    return post("/v1/responses", f'{{"model": "demo", "input": {text}}}'.encode())


def unknown(value: str) -> bytes:
    return chat('"x"', f', "moderation": {value}')


def pictures(*files: bytes) -> str:
    """A content of pictures."""
    uris = ["data:image/png;base64," + base64.b64encode(data).decode() for data in files]
    return json.dumps([{"type": "image_url", "image_url": {"url": uri}} for uri in uris])


def flat_png(width: int, height: int, tail: bytes = b"") -> bytes:
    """A PNG of a few kilobytes, as large as it says."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    packer = zlib.compressobj(9)
    row = b"\0" + b"\x7f" * (3 * width)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    comment = chunk(b"tEXt", b"a\0" + tail)
    return b"\x89PNG\r\n\x1a\n" + head + comment + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def pdf(side: int, tail: str) -> bytes:
    page = f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 {side} {side}]>>"
    pages = "<</Type/Pages/Kids[3 0 R]/Count 1>>"
    objects = enumerate(["<</Type/Catalog/Pages 2 0 R>>", pages, page], 1)
    body = "".join(f"{number} 0 obj{text}endobj\n" for number, text in objects)
    return f"%PDF-1.4\n%{tail}\n{body}trailer<</Root 1 0 R>>".encode()


def upload(size: int, number: int) -> bytes:
    head = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
    head += b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return post("/v1/files", head + b"%d" % number + bytes(size) + b"\r\n--x--\r\n", FORM)


def words(count: int, seed: int) -> str:
    names = ["red", "blue", "green", "circle", "square", "large", "small", "left", "picture"]
    return json.dumps(" ".join(random.Random(seed).choices(names, k=count))[:400_000])


def parts(count: int, text: str) -> str:
    return json.dumps([{"type": "text", "text": text}] * count)


def same(make: Callable[[], Request]) -> Callable[[int], Request]:
    """The same request each time, made once."""
    made = functools.cache(make)
    return lambda number: made()


LONG = "word " * (46 * MIB // 15)  # a third of what a body may have
KINDS: dict[str, Callable[[int], Request]] = {
    "a text of 46 MB": same(lambda: chat(parts(3, LONG))),
    "a text of 46 MB to responses": same(lambda: response(json.dumps(LONG * 3))),
    "a text of 46 MB to explain": same(lambda: chat(parts(3, LONG), path="/v1/cache/explain")),
    "a text of 46 MB to prepare": same(lambda: chat(parts(3, LONG), path="/v1/prepare")),
    "a text of escapes": same(lambda: chat('"' + "\\u0041\\n" * (46 * MIB // 8) + '"')),
    "a text that is nearly too long": lambda n: chat(words(70_000, n)),
    "a text of control tokens": same(lambda: chat(json.dumps("<|im_end|>" * 50_000))),
    "two million parts": same(lambda: chat(parts(2_000_000, ""))),
    "20,000 parts": same(lambda: chat(parts(20_000, "a"))),
    "wrong parts": same(lambda: chat("[" + ", ".join(['{"type": 1}'] * 3_000_000) + "]")),
    "20,000 messages": same(lambda: chat('"x"' + '}, {"role": "user", "content": "x"' * 19_999)),
    "60 MB of numbers": same(lambda: unknown("[" + "1," * (30 * MIB) + "1]")),
    "60 MB of spaces": same(lambda: unknown(" " * (60 * MIB) + "1")),
    "60 MB of small texts": same(lambda: unknown("[" + '"",' * (20 * MIB) + '""]')),
    "60 MB of names": same(
        lambda: unknown("{" + ",".join(f'"{n}":0' for n in range(4_000_000)) + "}")
    ),
    "60 MB of numbers to files": same(lambda: post("/v1/files", b"[" + b"1," * (30 * MIB) + b"1]")),
    "deep lists": same(lambda: unknown("[" * 10_000_000)),
    "deep records": same(lambda: unknown('{"a":' * 5_000_000 + "1" + "}" * 5_000_000)),
    "unknown fields": same(
        lambda: chat('"x"', "".join(f', "field{n}": 0' for n in range(500_000)))
    ),
    "a tool of 46 MB": same(
        lambda: chat(
            '"x"',
            ', "tools": [{"type": "function", "function": {"name": "f", "description": '
            f"{json.dumps(LONG * 3)}}}}}]",
        )
    ),
    "template settings of 46 MB": same(
        lambda: chat('"x"', f', "chat_template_kwargs": {{"a": {json.dumps(LONG * 3)}}}')
    ),
    "10,000 pictures": same(lambda: chat(pictures(*[flat_png(8, 8)] * 10_000))),
    "a picture of 46 MB": lambda n: chat(
        pictures(flat_png(64, 64, random.Random(n).randbytes(34 * MIB)))
    ),
    "pictures of 38 megapixels": lambda n: chat(pictures(flat_png(6200, 6200, b"%d" % n))),
    "32 pictures of 4 megapixels": lambda n: chat(
        pictures(*(flat_png(2000, 2000, b"%d" % (32 * n + i)) for i in range(32)))
    ),
    "large pages": lambda n: chat(pictures(pdf(3000, str(n)))),
    "16 stop strings": lambda n: chat(
        f'"Hello {n}"',
        f', "max_tokens": 50, "stop": {json.dumps([f"{n} {i} " * 100 for i in range(16)])}',
    ),
    "a bias for each token": same(
        lambda: chat(
            '"Hello"',
            f', "max_tokens": 50, "logit_bias": {json.dumps({str(i): 1 for i in range(512)})}',
        )
    ),
    "statistics of nobody": lambda n: get(f"/v1/cache/stats?cache_salt={n}"),
    "metrics": same(lambda: get("/metrics")),
    "a long address": same(lambda: get("/v1/files?" + "a=b&" * 15_000)),
    "many headers": same(lambda: get("/health", "a: b\r\n" * 10_000)),
    "a form of many fields": same(
        lambda: post(
            "/v1/files",
            b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\nb\r\n' * 1_000_000
            + b"--x--\r\n",
            FORM,
        )
    ),
    "uploads of 60 MB": lambda n: upload(60 * MIB, n),
    "slow connections": same(lambda: [bytes([one]) for one in post(CHAT, b"x" * 1000)[:-1000]]),
    "chats": lambda n: chat(f'"Hello {n}, what is it?"', ', "max_tokens": 20'),
    "chats under salts": lambda n: chat('"Hello"', f', "max_tokens": 4, "cache_salt": "{n}"'),
    "statistics under salts": lambda n: get(f"/v1/cache/images?cache_salt={n}"),
    "files that are not there": lambda n: get(f"/v1/files/file-{n:064x}"),
    "small uploads": lambda n: upload(10, n),
    "lists of files": same(lambda: get("/v1/files")),
    "responses": lambda n: response(f'"{n}", "max_output_tokens": 2'),
    "responses that are not there": lambda n: get(f"/v1/responses/resp_{n:032x}"),
    "resets": lambda n: post("/v1/cache/reset", f'{{"cache_salt": "{n}"}}'.encode()),
    "refused requests": same(lambda: post(CHAT, b'{"model": "another", "messages": []}')),
    "pins": lambda n: chat(f'"Keep {n}"', path="/v1/cache/pin"),
    "prepared conversations": lambda n: chat(
        f'"Hello {n}"', f', "cache_salt": "{n}"', "/v1/prepare"
    ),
}
FEW = ("metrics", "statistics of nobody", "large pages", "16 stop strings", "chats")
# Connections at one time, of those kinds that need many.
CROWDS = {"slow connections": 500, "lists of files": 32, "resets": 32}
CROWDS |= dict.fromkeys(("chats under salts", "small uploads", "responses", "pins"), 16)
CROWDS |= dict.fromkeys(("statistics under salts", "files that are not there"), 64)
CROWDS |= dict.fromkeys(("responses that are not there", "refused requests"), 64)
CROWDS |= {"prepared conversations": 64}


# -- the two clients -----------------------------------------------------------------------------


def sent(port: int, request: Request, key: str = "") -> bytes:
    """The answer to one request, however it ends; with a key, where it is in one part."""
    if key and isinstance(request, bytes):
        request = request.replace(b"\r\n", f"\r\nAuthorization: Bearer {key}\r\n".encode(), 1)
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        with contextlib.suppress(OSError):
            for part in [request] if isinstance(request, bytes) else request:
                connection.sendall(part)
                time.sleep(0.2 if isinstance(request, list) else 0)
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                answer += data
    return answer


def attack(kind: str, port: int, begun: Any) -> None:
    """Send requests of a kind until this process is ended."""
    numbers, turn = itertools.count(), threading.Lock()

    def one() -> None:
        while True:
            with turn:
                request = KINDS[kind](next(numbers))
            begun.set()
            with contextlib.suppress(OSError):
                sent(port, request, "much")

    for _ in range(CROWDS.get(kind, 2)):
        threading.Thread(target=one, daemon=True).start()
    signal.pause()


def small(port: int, number: int) -> float:
    """Seconds that a small chat takes, from its connection to its last byte."""
    request = chat(f'"What is in picture {number}?"', ', "max_tokens": 8, "temperature": 0')
    begun = time.perf_counter()
    answer = sent(port, request, "little")
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer[:500])
    return time.perf_counter() - begun


def measured(port: int, seconds: float, first: int = 0) -> list[float]:
    """What a small chat takes, again and again for so long."""
    until = time.perf_counter() + seconds
    taken: list[float] = []
    while time.perf_counter() < until or not taken:
        taken.append(small(port, first + len(taken)))
    return taken


def under_attack(
    kind: str, port: int, rounds: int = 5, seconds: float = 2.0
) -> tuple[list[float], list[float]]:
    """What a small chat takes without and with an attack, in turns: a machine has its moods."""
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(target=attack, args=(kind, port, begun), daemon=True)
    small(port, 10**6)
    process.start()
    alone: list[float] = []
    during: list[float] = []
    try:
        begun.wait(60)
        for _ in range(rounds):
            during += measured(port, seconds, 1000 + len(during))
            os.kill(process.pid or 0, signal.SIGSTOP)
            time.sleep(1.0)  # what it has sent is still worked on
            alone += measured(port, seconds, len(alone))
            os.kill(process.pid or 0, signal.SIGCONT)
            time.sleep(0.5)
        return alone, during
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def served() -> Iterator[tuple[int, int]]:
    """`keepsight serve demo` in a process of its own: its port and its number."""
    command = [sys.executable, "-m", "keepsight", "serve", "demo", "--port", "0"]
    command += ["--api-key", "one:much", "--api-key", "other:little"]
    silent = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=silent, text=True)
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        yield int(line.split(" at ")[1].split()[0].rsplit(":", 1)[1]), process.pid
    finally:
        process.kill()
        process.wait()


def memory(pid: int) -> int:
    """The most memory that a process has had, in MiB."""
    with open(f"/proc/{pid}/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmHWM"].split()[0]) >> 10


# -- the benchmark -------------------------------------------------------------------------------


def add(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told."""
    parser.add_argument("kinds", nargs="*", type=_kind, metavar="KIND", help="see KINDS")
    parser.add_argument("--all", action="store_true", help="every kind; takes ten minutes")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")


def _kind(text: str) -> str:
    if text not in KINDS:
        raise argparse.ArgumentTypeError(f"no {text!r}; there are: {', '.join(KINDS)}")
    return text


def measure(options: argparse.Namespace) -> Record:
    """The kinds, one after another, in one server."""
    rows: Record = {}
    with served() as (port, pid):
        for kind in options.kinds or (KINDS if options.all else FEW):
            print(kind, file=sys.stderr, flush=True)
            before = memory(pid)
            try:
                alone, during = under_attack(kind, port, options.rounds, options.seconds)
            except (OSError, RuntimeError) as error:
                rows[kind] = {"failed": str(error)[:200]}
                continue
            rows[kind] = {"ratio": round(median(during) / median(alone), 2)}
            rows[kind]["mib"] = memory(pid) - before  # by how much its peak grew
            for name, taken in (("alone", alone), ("attacked", during)):
                rows[kind] |= {f"{name}_ms": round(1e3 * median(taken), 1)}
                rows[kind] |= {f"{name}_most_ms": round(1e3 * max(taken), 1)}
    return {"kinds": rows}


def tables(result: Record) -> Iterator[Told]:
    """One row for each kind."""
    fields = ("alone_ms", "alone_most_ms", "attacked_ms", "attacked_most_ms", "ratio", "mib")
    rows = [
        [kind, *(str(row.get(field, "-")) for field in fields), row.get("failed", "")]
        for kind, row in result["kinds"].items()
    ]
    columns = ["", "alone, ms", "most", "attacked, ms", "most", "times", "MiB more", "failed"]
    yield "a small chat beside another client's attack", columns, rows


main = bench("hostile", __doc__, add, measure, tables, shapes=(), repetitions=0)

if __name__ == "__main__":
    raise SystemExit(main())
