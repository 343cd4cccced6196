"""Many clients at once, some of whom hang up: answers are those of each alone, and nothing is left.

The quick one is a few seconds; the slow one goes on for minutes and looks at memory.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from typing import Any

from server_harness import Live, asked, live, scene

import keepsight as ks

SCENES = range(40, 46)
QUESTIONS = ("What is in the picture?", "What color is the shape in the picture?")


def conversation(seed: int, question: str) -> dict[str, Any]:
    return {"model": "demo", "messages": asked(scene(seed), text=question), "max_tokens": 24}


def expected(server: Live) -> dict[tuple[int, str], str]:
    """What each conversation is answered when nobody else asks."""
    answers = {}
    for seed in SCENES:
        for question in QUESTIONS:
            reply = server.chat(conversation(seed, question))[1]
            answers[seed, question] = reply["choices"][0]["message"]["content"]
    return answers


def hang_up(server: Live, body: dict[str, Any], rng: random.Random) -> None:
    """Ask for a stream and go away at some point."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"content-type": "application/json"}
    data = json.dumps({**body, "stream": True, "n": rng.randint(1, 3)})
    connection.request("POST", "/v1/chat/completions", data, headers)
    if rng.random() < 0.7:
        connection.getresponse().read(rng.randint(1, 400))
    connection.close()


def client(
    server: Live, answers: dict[Any, str], seed: int, until: float, wrong: list[Any]
) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until and not wrong:
        which = rng.choice(SCENES), rng.choice(QUESTIONS)
        body = conversation(*which)
        if rng.random() < 0.2:
            body["cache_salt"] = f"salt {rng.randint(0, 3)}"
        try:
            if rng.random() < 0.3:
                hang_up(server, body, rng)
                continue
            status, reply, _ = server.chat(body)
        except Exception as error:
            wrong.append(error)
            return
        if status == 429:
            time.sleep(0.1)
        elif status != 200 or reply["choices"][0]["message"]["content"] != answers[which]:
            wrong.append((status, which, reply))


def soak(server: Live, seconds: float, clients: int) -> None:
    answers = expected(server)
    wrong: list[Any] = []
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=client, args=(server, answers, seed, until, wrong))
        for seed in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 120)
    assert not wrong, wrong[0]
    deadline = time.monotonic() + 60
    while server.service.together.stats()["in_flight"]:
        assert time.monotonic() < deadline, "a place was not given back"
        time.sleep(0.05)
    assert server.service.vlm.stats()["prefix"]["held_bytes"] == 0


def test_a_crowd_for_a_moment(demo_parts: dict[str, Any]) -> None:
    model, processor = demo_parts["demo"]
    with ks.wrap(model, processor) as vlm, live(vlm, max_running=4) as server:
        soak(server, 4, 6)
