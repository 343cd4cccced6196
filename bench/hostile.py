"""What one client may do to a server, and what another one notices of it.

Run `python -m bench.hostile`. Each kind of attack is a generator of requests, sent over and over on
two connections by a process of its own. Told is how long a small chat of another client, who has
another key, takes without and with it, in turns, and their quotient (medians): 2 or less is what is
hoped for. All kinds are in `KINDS`; a few are tried unless some are named, or `--all`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from keepsight.kinds import Record

Request = bytes | list[bytes]  # on one connection; of a list the parts are sent slowly
MIB = 1 << 20
CHAT = "/v1/chat/completions"


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


def picture(data: bytes, kind: str = "image_url") -> str:
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    return json.dumps([{"type": kind, kind: {"url": uri}}])


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


def four_megapixels(number: int) -> str:
    return picture(flat_png(2000, 2000, b"%d" % number))


def pdf(side: int, tail: str) -> bytes:
    page = f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 {side} {side}]>>"
    pages = "<</Type/Pages/Kids[3 0 R]/Count 1>>"
    objects = enumerate(["<</Type/Catalog/Pages 2 0 R>>", pages, page], 1)
    body = "".join(f"{number} 0 obj{text}endobj\n" for number, text in objects)
    return f"%PDF-1.4\n%{tail}\n{body}trailer<</Root 1 0 R>>".encode()


def same(request: Request) -> Iterator[Request]:
    return itertools.repeat(request)


def words(count: int, seed: int) -> str:
    names = ["red", "blue", "green", "circle", "square", "large", "small", "left", "picture"]
    return " ".join(random.Random(seed).choices(names, k=count))


def form(fields: int) -> bytes:
    parts = b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\nb\r\n' * fields
    return post("/v1/files", parts + b"--x--\r\n", "multipart/form-data; boundary=x")


def upload(size: int, number: int) -> bytes:
    head = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
    head += b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    data = b"%d" % number + bytes(size)
    return post("/v1/files", head + data + b"\r\n--x--\r\n", "multipart/form-data; boundary=x")


def unknown(value: str, path: str = CHAT) -> bytes:
    return chat('"x"', f', "moderation": {value}', path)


def drip() -> Iterator[Request]:
    head = post(CHAT, b"x" * 1000)[:-1000]
    return same([head[i : i + 1] for i in range(len(head))])


def long_text(size: int) -> str:
    """A text in parts, each of which is allowed."""
    part = {"type": "text", "text": "word " * (size // 15)}
    return json.dumps([part] * 3)


KINDS: dict[str, Callable[[], Iterator[Request]]] = {
    "a text of 46 MB": lambda: same(chat(long_text(46 * MIB))),
    "a text of 46 MB to responses": lambda: same(response('"' + "word " * (46 * MIB // 5) + '"')),
    "a text of 46 MB to explain": lambda: same(chat(long_text(46 * MIB), path="/v1/cache/explain")),
    "a text of 46 MB to prepare": lambda: same(chat(long_text(46 * MIB), path="/v1/prepare")),
    "a text of escapes": lambda: same(chat('"' + "\\u0041\\n" * (46 * MIB // 8) + '"')),
    "a text that is nearly too long": lambda: (
        chat(json.dumps(words(70_000, n)[:400_000])) for n in itertools.count()
    ),
    "a text of control tokens": lambda: same(chat(json.dumps("<|im_end|>" * 50_000))),
    "two million parts": lambda: same(
        chat("[" + ", ".join(['{"type": "text", "text": ""}'] * 2_000_000) + "]")
    ),
    "20,000 parts": lambda: same(
        chat("[" + ", ".join(['{"type": "text", "text": "a"}'] * 20_000) + "]")
    ),
    "wrong parts": lambda: same(chat("[" + ", ".join(['{"type": 1}'] * 3_000_000) + "]")),
    "20,000 messages": lambda: same(
        post(
            CHAT,
            json.dumps(
                {"model": "demo", "messages": [{"role": "user", "content": "x"}] * 20_000}
            ).encode(),
        )
    ),
    "60 MB of numbers": lambda: same(unknown("[" + "1," * (30 * MIB) + "1]")),
    "60 MB of spaces": lambda: same(unknown(" " * (60 * MIB) + "1")),
    "60 MB of small texts": lambda: same(unknown("[" + '"",' * (20 * MIB) + '""]')),
    "60 MB of names": lambda: same(
        unknown("{" + ",".join(f'"{n}":0' for n in range(4_000_000)) + "}")
    ),
    "60 MB of numbers to files": lambda: same(post("/v1/files", b"[" + b"1," * (30 * MIB) + b"1]")),
    "deep lists": lambda: same(unknown("[" * 10_000_000)),
    "deep records": lambda: same(unknown('{"a":' * 5_000_000 + "1" + "}" * 5_000_000)),
    "unknown fields": lambda: same(
        chat('"x"', "".join(f', "field{n}": 0' for n in range(500_000)))
    ),
    "a tool of 46 MB": lambda: same(
        chat(
            '"x"',
            ', "tools": [{"type": "function", "function": {"name": "f", "description": "'
            + "word " * (46 * MIB // 5)
            + '"}}]',
        )
    ),
    "template settings of 46 MB": lambda: same(
        chat('"x"', ', "chat_template_kwargs": {"a": "' + "word " * (46 * MIB // 5) + '"}')
    ),
    "10,000 pictures": lambda: same(chat(json.dumps(json.loads(picture(flat_png(8, 8))) * 10_000))),
    "a picture of 46 MB": lambda: (
        chat(picture(flat_png(64, 64, random.Random(n).randbytes(34 * MIB))))
        for n in itertools.count()
    ),
    "pictures of 38 megapixels": lambda: (
        chat(picture(flat_png(6200, 6200, b"%d" % n))) for n in itertools.count()
    ),
    "32 pictures of 4 megapixels": lambda: (
        chat(
            json.dumps(
                [
                    json.loads(picture(flat_png(2000, 2000, b"%d" % (32 * n + i))))[0]
                    for i in range(32)
                ]
            )
        )
        for n in itertools.count()
    ),
    "large pages": lambda: (chat(picture(pdf(3000, str(n)))) for n in itertools.count()),
    "16 stop strings": lambda: (
        chat(
            json.dumps(f"Hello {n}"),
            f', "max_tokens": 50, "stop": {json.dumps([f"{n} {i} " * 100 for i in range(16)])}',
        )
        for n in itertools.count()
    ),
    "a bias for each token": lambda: same(
        chat(
            '"Hello"',
            f', "max_tokens": 50, "logit_bias": {json.dumps({str(i): 1 for i in range(512)})}',
        )
    ),
    "statistics of nobody": lambda: (
        get(f"/v1/cache/stats?cache_salt={n}") for n in itertools.count()
    ),
    "metrics": lambda: same(get("/metrics")),
    "a long address": lambda: same(get("/v1/files?" + "a=b&" * 15_000)),
    "many headers": lambda: same(get("/health", "a: b\r\n" * 10_000)),
    "a form of many fields": lambda: same(form(1_000_000)),
    "uploads of 60 MB": lambda: (upload(60 * MIB, n) for n in itertools.count()),
    "slow connections": drip,
    "chats": lambda: (
        chat(json.dumps(f"Hello {n}, what is it?"), ', "max_tokens": 20') for n in itertools.count()
    ),
    "chats under salts": lambda: (
        chat(json.dumps("Hello, what is it?"), f', "max_tokens": 4, "cache_salt": "{n}"')
        for n in itertools.count()
    ),
    "statistics under salts": lambda: (
        get(f"/v1/cache/images?cache_salt={n}") for n in itertools.count()
    ),
    "files that are not there": lambda: (
        get(f"/v1/files/file-{n:064x}") for n in itertools.count()
    ),
    "small uploads": lambda: (upload(10, n) for n in itertools.count()),
    "lists of files": lambda: same(get("/v1/files")),
    "responses": lambda: (
        post(
            "/v1/responses", f'{{"model": "demo", "input": "{n}", "max_output_tokens": 2}}'.encode()
        )
        for n in itertools.count()
    ),
    "responses that are not there": lambda: (
        get(f"/v1/responses/resp_{n:032x}") for n in itertools.count()
    ),
    "resets": lambda: (
        post("/v1/cache/reset", f'{{"cache_salt": "{n}"}}'.encode()) for n in itertools.count()
    ),
    "refused requests": lambda: same(post(CHAT, b'{"model": "another", "messages": []}')),
    "pins": lambda: (
        post(
            "/v1/cache/pin",
            json.dumps(
                {"model": "demo", "messages": [{"role": "user", "content": f"Keep {n}"}]}
            ).encode(),
        )
        for n in itertools.count()
    ),
    "prepared conversations": lambda: (
        chat(json.dumps(f"Hello {n}"), f', "cache_salt": "{n}"', "/v1/prepare")
        for n in itertools.count()
    ),
}
CROWDS = {
    "slow connections": 500,
    "chats under salts": 16,
    "statistics under salts": 64,
    "files that are not there": 64,
    "small uploads": 16,
    "lists of files": 32,
    "responses": 16,
    "responses that are not there": 64,
    "resets": 32,
    "refused requests": 64,
    "pins": 16,
    "prepared conversations": 64,
}  # connections at one time, of those kinds that need many


# -- the two clients ---------------------------------------------------------------------------


def sent(port: int, request: Request, key: str = "") -> bytes:
    """The answer to one request, however it ends; with a key, where it is in one part."""
    if key and isinstance(request, bytes):
        request = request.replace(b"\r\n", f"\r\nAuthorization: Bearer {key}\r\n".encode(), 1)
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        with contextlib.suppress(OSError):
            if isinstance(request, list):
                for part in request:
                    connection.sendall(part)
                    time.sleep(0.2)
            else:
                connection.sendall(request)
        answer = b""
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                answer += data
        return answer


def attack(kind: str, port: int, begun: multiprocessing.synchronize.Event, crowd: int = 1) -> None:
    """Send requests of a kind until this process is ended."""
    requests = KINDS[kind]()
    turn = threading.Lock()

    def one() -> None:
        while True:
            with turn:
                request = next(requests)
            begun.set()
            with contextlib.suppress(OSError):
                sent(port, request, "much")

    for _ in range(crowd):
        threading.Thread(target=one, daemon=True).start()
    while True:
        time.sleep(1)


def small(port: int, number: int) -> float:
    """Seconds that a small chat takes, from its connection to its last byte."""
    asked = json.dumps(f"What is in picture {number}?")
    request = chat(asked, ', "max_tokens": 8, "temperature": 0')
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
    more = (kind, port, begun, CROWDS.get(kind, 2))
    process = context.Process(target=attack, args=more, daemon=True)
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
def served(*options: str) -> Iterator[tuple[int, int]]:
    """`keepsight serve demo` in a process of its own: its port and its number."""
    keys = ["--api-key", "one:much", "--api-key", "other:little"]
    command = [sys.executable, "-m", "keepsight", "serve", "demo", "--port", "0", *keys, *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
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


FEW = ("metrics", "statistics of nobody", "large pages", "16 stop strings", "chats")


def main(argv: list[str] | None = None) -> int:
    """Measure the kinds, one after another, in one server."""
    parser = argparse.ArgumentParser(prog="python -m bench.hostile", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="see KINDS")
    parser.add_argument("--all", action="store_true", help="every kind; takes ten minutes")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    options = parser.parse_args(argv)
    unknown = [kind for kind in options.kinds if kind not in KINDS]
    if unknown:
        parser.error(f"no such kind: {unknown[0]!r}; there are: {', '.join(KINDS)}")
    from keepsight.bench import machine  # which loads PyTorch: the process that attacks needs none

    result: Record = {"benchmark": "keepsight hostile", "machine": machine.describe()}
    result["kinds"] = rows = {}
    print(f"{'ms: median, most':32}    alone          attacked", flush=True)
    with served() as (port, pid):
        for kind in options.kinds or (KINDS if options.all else FEW):
            rows[kind] = _row(kind, port, pid, options.rounds, options.seconds)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, separators=(",", ":")))
    return 0


def _row(kind: str, port: int, pid: int, rounds: int, seconds: float) -> Record:
    """One kind, measured and printed; of memory, by how much its peak grew."""
    before = memory(pid)
    try:
        alone, during = under_attack(kind, port, rounds, seconds)
    except (OSError, RuntimeError) as error:
        print(f"{kind:32} failed: {error}", flush=True)
        return {"failed": str(error)[:200]}
    more = memory(pid) - before
    told = [f"{1e3 * statistics.median(t):7.0f} {1e3 * max(t):7.0f}" for t in (alone, during)]
    ratio = statistics.median(during) / statistics.median(alone)
    print(f"{kind:32} {told[0]} {told[1]}  x{ratio:5.2f}  +{more} MiB", flush=True)
    return {"ratio": round(ratio, 2), "mib": more}


if __name__ == "__main__":
    sys.exit(main())
