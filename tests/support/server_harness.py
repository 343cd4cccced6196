"""A live server for tests: the demo model in a thread or a process of its own, on a free port."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from PIL import Image

from keepsight import Ticket, Together
from keepsight.demo.scene import Scene
from keepsight.errors import Busy
from keepsight.report import Piece, Report, Usage
from keepsight.server.config import ServerConfig
from keepsight.server.running import Server, make_server
from keepsight.server.service import Service

CHAT = "/v1/chat/completions"
QUESTION = "What is in the picture?"
TEMPLATE = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}
{%- elif message.content %}
{%- for part in message.content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
HELLO = [{"role": "user", "content": "hello"}]


def until(true: Callable[[], Any]) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def bearer(name: str) -> dict[str, str]:
    """The header of a key that is called so."""
    return {"authorization": f"Bearer {name}-key"}


def answered(connection: socket.socket) -> tuple[int, Any]:
    """Status and JSON (or text) of the answer that comes, in however many pieces it does."""
    with http.client.HTTPResponse(connection) as answer:
        answer.begin()
        return answer.status, parsed(answer.read())


def refusal(answer: tuple[int, Any, Any], status: int = 400) -> Any:
    """The error of an answer, in OpenAI's shape."""
    assert answer[0] == status, answer[:2]
    error = answer[1]["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert answer[2]["x-request-id"].startswith("req_")
    return error


class Client:
    """A server that listens, as its clients see it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def opened(
        self,
        path: str,
        body: Any = None,
        method: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """An answer to be read. A body of bytes is sent as it is."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        every = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, every, method=method)
        return urllib.request.urlopen(request, timeout=120)

    def call(self, path: str, *given: Any, **more: Any) -> tuple[int, Any, Any]:
        """Status, JSON (or text), headers."""
        try:
            with self.opened(path, *given, **more) as answer:
                return answer.status, parsed(answer.read()), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, parsed(error.read()), error.headers

    def chat(self, body: dict[str, Any], **more: Any) -> tuple[int, Any, Any]:
        return self.call(CHAT, {"model": "demo", **body}, **more)

    def stream(self, body: dict[str, Any]) -> list[Any]:
        """The events of an answer in a chat."""
        return self.events(CHAT, {"model": "demo", **body, "stream": True})

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream."""
        with self.opened(path, body) as answer:
            lines = answer.read().decode().split("\n")
        data = [line[6:] for line in lines if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in data]

    def crowd(self, path: str, body: Any, count: int, who: str = "") -> list[Any]:
        """So many requests that somebody sends at once; a list that their answers come to."""
        answers: list[Any] = []

        def ask() -> None:
            answers.append(self.call(path, body, headers=bearer(who)))

        for _ in range(count):
            threading.Thread(target=ask, daemon=True).start()
        return answers

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def sending(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A connection on which a request was sent."""
        data = json.dumps({"model": "demo", **body}).encode()
        connection = self.raw()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def upload(self, data: bytes, who: dict[str, str] | None = None, **fields: str) -> Any:
        """Status, JSON, headers of a file sent."""
        parts = [
            f'--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
            for name, value in {"purpose": "vision", **fields}.items()
        ]
        parts.append(
            b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
        )
        body = b"".join([*parts, data, b"\r\n--x--\r\n"])
        headers = {"content-type": "multipart/form-data; boundary=x", **(who or {})}
        return self.call("/v1/files", body, "POST", headers)


class Live(Client):
    """A server in a thread of this process."""

    def __init__(self, service: Service, server: Server, port: int) -> None:
        super().__init__(port)
        self.service, self.server = service, server


class Process(Client):
    """`keepsight serve` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        super().__init__(port)
        self.process = process

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit status."""
        self.process.send_signal(how)
        return self.process.wait(120)


@contextmanager
def served(*flags: str, log: bool = False) -> Iterator[Process]:
    """A real server with these flags; what is left of it at the end is killed."""
    command = [sys.executable, "-m", "keepsight", "serve", "demo", "--port", "0"]
    command += [] if log else ["--no-log"]
    errors = subprocess.PIPE if log else None
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://[^:]+:(\d+)", process.stdout.readline())
        assert found, "the server did not start"
        yield Process(process, int(found[1]))
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


@contextmanager
def live(vlm: Any, together: Any = None, **settings: Any) -> Iterator[Live]:
    """A live server over a model."""
    config = ServerConfig(port=0, log=False, warm_up=False, drain=5, **settings)
    engine = together or Together(
        vlm, max_running=config.max_running, max_waiting=config.max_waiting
    )
    if isinstance(engine, Scripted):
        engine.vlm = vlm
    service = Service(vlm, engine, "demo", config)
    server = make_server(service)
    ports: list[int] = []
    server.ready = ports.append
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not ports and thread.is_alive():
        time.sleep(0.01)
    try:
        yield Live(service, server, ports[0])
    finally:
        server.should_exit = True
        thread.join(30)
        service.close()


def scene(seed: int) -> Image.Image:
    image: Image.Image = Scene(random.Random(seed)).draw()
    return image


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def uri(image: Image.Image | bytes) -> str:
    data = image if isinstance(image, bytes) else png(image)
    return "data:image/png;base64," + base64.b64encode(data).decode()


def asked(*images: Any, text: str = QUESTION) -> list[dict[str, Any]]:
    """A conversation of one question about pictures (data URIs are made, texts are URLs)."""
    parts: list[dict[str, Any]] = []
    for image in images:
        url = image if isinstance(image, str) else uri(image)
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


class Scripted:
    """A scheduler that says what it is told, a piece per token, and notes what it was asked."""

    def __init__(self, *pieces: str, wait: float = 0.0, busy: bool = False) -> None:
        self.pieces, self.wait, self.busy = pieces, wait, busy
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self.tickets: list[Ticket] = []
        self.begun = threading.Event()
        self.vlm: Any = None  # who knows what there is to be remembered

    def explain(self, messages: Any, **options: Any) -> Report:
        report: Report = self.vlm.explain(messages, **options)
        return report

    def named(self, messages: Any, tenant: str, learn: bool = False) -> Any:
        return messages

    def beside(self, account: str) -> Any:
        return nullcontext()

    def submit(self, messages: Any, **options: Any) -> Ticket:
        if self.busy:
            raise Busy(3, 7.0)
        self.asked.append((messages, options))
        ticket = Ticket(options["on_piece"], options["on_done"])
        if "template_kwargs" in options:  # which may open a thought
            template = {**options["template_kwargs"], "tools": options.get("tools")}
            ticket.prompt_ids = self.vlm.render(messages, **template).ids
        self.tickets.append(ticket)
        self.begun.set()
        threading.Thread(target=self._say, args=(ticket,), daemon=True).start()
        return ticket

    def _say(self, ticket: Ticket) -> None:
        for number, text in enumerate(self.pieces):
            if ticket.cancelled:
                break
            ticket.put(Piece(text, number))
            time.sleep(self.wait)
        else:
            usage = Usage(10, len(self.pieces), 4)
            ticket.put(Piece("", None, usage, Report(prompt_tokens=10, cached_tokens=4), "stop"))
        ticket.end()

    def stats(self) -> dict[str, Any]:
        return {"running": sum(not t.done.is_set() for t in self.tickets)}

    def close(self, drain: float | None = None) -> None:
        for ticket in self.tickets:
            ticket.cancel()


def opening(report: dict[str, Any]) -> int:
    """How many tokens stand before the first picture of a prompt."""
    return min(int(s["start"]) for s in report["segments"] if s["kind"] == "image")
