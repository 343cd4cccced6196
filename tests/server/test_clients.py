"""`keepsight serve` as people meet it: command line, examples, curl, a closing server.

The example for Node is tested with other people's clients (`make test-clients`).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server_harness import Live, Scripted, answered, live, until
from typer.testing import CliRunner

import keepsight as ks
from keepsight import Ticket
from keepsight.cli.app import app
from keepsight.errors import Closed
from keepsight.report import Piece

ROOT = Path(ks.__file__).parent.parent
EXAMPLES = ROOT / "examples"
PICTURE = str(EXAMPLES / "picture.png")


def run(server: Live, *command: str) -> str:
    environment = {**os.environ, "KEEPSIGHT_URL": f"{server.url}/v1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_example(server: Live) -> None:
    out = run(server, sys.executable, str(EXAMPLES / "chat.py"), PICTURE)
    assert "A small green triangle in the center on a black background." in out
    assert "[image 0: reused, memory]" in out


def test_the_agents_loop_computes_only_what_is_new(server: Live) -> None:
    lines = run(server, sys.executable, str(EXAMPLES / "agent.py")).splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 4 and all(line.endswith("1 encoded") for line in steps)
    counts = [[int(word) for word in line.split() if word.isdigit()] for line in steps]
    for before, after in itertools.pairwise(counts):
        assert after[1] >= before[0] - 16  # all of the last step's prompt but its last words
    for step, colour in enumerate(("red", "green", "blue", "yellow")):
        assert colour in lines[2 * step + 1]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_curl_example(server: Live) -> None:
    reply = json.loads(run(server, "sh", str(EXAMPLES / "chat.sh"), PICTURE))
    assert "green triangle" in reply["choices"][0]["message"]["content"]


# -- the command -------------------------------------------------------------------------------


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name)
    )
    done = CliRunner().invoke(app, ["serve", "demo"])
    assert done.exit_code == 2 and "extra 'server'); run: pip install" in done.output


class Endless(Scripted):
    """A scheduler whose answers have no end, until it is closed."""

    def submit(self, messages: Any, **options: Any) -> Ticket:
        ticket = Ticket(options["on_piece"], options["on_done"])
        self.tickets.append(ticket)
        ticket.put(Piece("word ", 1))
        return ticket

    def close(self, drain: float | None = None) -> None:
        for ticket in self.tickets:
            if not ticket.done.is_set():
                ticket.end(Closed("closed"))


def test_what_is_cut_off_at_the_end_is_told_why(vlm: ks.VLM) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    ends: dict[str, Any] = {}
    with live(vlm, script := Endless()) as server:
        server.server._drain = 0.2

        def whole() -> None:
            ends["whole"] = server.chat(body)[:2]

        def stream() -> None:
            ends["stream"] = server.stream(body)[-1]

        def slow() -> None:  # one whose body never comes
            with server.raw() as connection:
                connection.sendall(
                    b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
                )
                ends["slow"] = answered(connection)

        threads = [threading.Thread(target=one) for one in (whole, stream, slow)]
        for thread in threads:
            thread.start()
        until(lambda: len(script.tickets) == 2 and len(server.server.server_state.tasks) == 3)
        server.server.handle_exit(signal.SIGTERM, None)
        for thread in threads:
            thread.join(20)
    assert ends["stream"]["error"]["code"] == "shutting_down"
    for status, told in (ends["whole"], ends["slow"]):
        assert status == 503 and told["error"]["code"] == "shutting_down"


def test_a_closing_server_finishes_what_runs(server: Live) -> None:
    """What streams is finished; new requests are told to come again; then it stops."""
    script = Scripted(*["word "] * 60, wait=0.03)
    with live(server.service.vlm, script) as closing:
        body = {"messages": [{"role": "user", "content": "x"}]}
        events: list[Any] = []
        reader = threading.Thread(target=lambda: events.extend(closing.stream(body)))
        reader.start()
        assert script.begun.wait(30)
        closing.server.handle_exit(signal.SIGTERM, None)
        status, refused, headers = closing.chat(body)
        assert status == 503 and refused["error"]["code"] == "shutting_down"
        assert headers["retry-after"] and closing.call("/health")[0] == 503
        reader.join(30)
        assert events[-1] == "[DONE]" and len(script.tickets) == 1
        assert sum("word" in json.dumps(event) for event in events) == 60


# -- whatever the schema allows, and what it does not ------------------------------------------


def fuzz(url: str, *options: str) -> None:
    """Schemathesis over the server's own schema: no 5xx, nothing that the schema does not say."""
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,"
        "response_schema_conformance,negative_data_rejection"
    )
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--checks", checks, "--seed", "1", "--generation-database", "none"),
        *("--request-timeout", "60", "--exclude-path", "/docs", *options),
    ]
    (ROOT / "build").mkdir(exist_ok=True)  # where it may leave files
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "build")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def brief(server: Live) -> Iterator[Live]:
    """A server whose answers are short."""
    with live(server.service.vlm, max_tokens=2) as it:
        yield it


def test_the_schema_says_that_more_is_taken(server: Live) -> None:
    """Bodies that are easily described too narrowly: null, one text for a list, no body at all."""
    described = server.call("/openapi.json")[1]
    parts = described["components"]["schemas"]
    assert parts["ChatRequest"]["properties"]["model"] == {"enum": ["demo", None]}
    assert parts["PinRequest"]["properties"]["model"] == {"enum": ["demo"]}
    stop = parts["ChatRequest"]["properties"]["stop"]["anyOf"]
    assert {one["type"] for one in stop} == {"string", "array", "null"}
    post = {
        path: one["post"]["requestBody"]["required"]
        for path, one in described["paths"].items()
        if "requestBody" in one.get("post", {})
    }
    assert post["/v1/chat/completions"] and not post["/v1/cache/reset"]
    ask = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    assert server.call("/v1/chat/completions", {**ask, "model": None, "stop": "x"})[0] == 200
    assert server.call("/v1/chat/completions", {**ask, "stop": False})[0] == 400
    assert server.call("/v1/cache/reset", b"", "POST")[0] == 200


def test_fuzzing(brief: Live) -> None:
    fuzz(brief.url, "--phases", "fuzzing", "--max-examples", "6")
    assert brief.call("/health")[0] == 200


@pytest.mark.slow
def test_fuzzing_for_long(brief: Live) -> None:
    fuzz(brief.url, "--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "100")
    assert brief.service.vlm.stats()["prefix"]["held_bytes"] == 0
