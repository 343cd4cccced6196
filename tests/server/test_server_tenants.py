"""Law 8 over HTTP: what one key does changes nothing that another key can read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.server_harness import Live, asked, bearer, live, png, scene

import keepsight as ks
from keepsight.server.config import ApiKey

KEYS = (ApiKey("ann", "ann-key"), ApiKey("bob", "bob-key"))
STORES: dict[str, Any] = {
    "none": lambda path: {},
    "folder": lambda path: {"store": path},
    "address": lambda path: {"store": f"memory://{path}"},
    "both": lambda path: {"store": path, "remote": f"memory://{path}"},
}


def work(server: Live, who: str, seed: int) -> list[str]:
    """All that a client can do to what is remembered; the ids that came of it."""
    body = {"model": "demo", "messages": asked(scene(seed)), "max_tokens": 2}
    for _ in range(2):
        assert server.call("/v1/chat/completions", body, headers=bearer(who))[0] == 200
    prompt = {"model": "demo", "messages": body["messages"]}
    picture = server.call("/v1/prepare", prompt, headers=bearer(who))[1]["report"]["images"][0]
    pinned = {"model": "demo", "images": [picture["key"]]}
    assert server.call("/v1/cache/pin", pinned, headers=bearer(who))[0] == 200
    file = server.upload(png(scene(seed)), who=bearer(who))[1]["id"]
    asks = {"model": "demo", "input": "Hello?", "max_output_tokens": 2}
    response = server.call("/v1/responses", asks, headers=bearer(who))[1]["id"]
    server.service.vlm.flush()
    server.service.vlm.clear(tenant=who)  # what comes next is read from the store
    assert server.call("/v1/chat/completions", body, headers=bearer(who))[0] == 200
    server.service.vlm.flush()
    return [file, response]


def everything(server: Live, who: str, ids: list[str]) -> dict[str, Any]:
    """What every address that can be read answers, without the time at which it counted."""
    paths = server.call("/openapi.json")[1]["paths"]
    read = {path for path, methods in paths.items() if "get" in methods} | {"/openapi.json"}
    fields = {re.search(r"{(\w+)", path)[1] for path in read if "{" in path}  # type: ignore[index]
    assert fields <= {"name", "file_id", "response_id"}, "a new address: give it something"
    found = {}
    for path in sorted(read | {"/v1/cache/images?stored=true"}):
        for one in ids if "{" in path else [""]:
            status, body, _ = server.call(re.sub("{.*?}", one, path), headers=bearer(who))
            found[path, one] = (status, timeless(body))
    return found


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: timeless(part) for name, part in value.items() if name != "counted"}
    return [timeless(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", STORES)
def test_no_key_sees_what_another_does(
    demo_parts: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    stores = STORES[kind](tmp_path / "store")
    with ks.wrap(*demo_parts["demo"], **stores) as vlm:
        with live(vlm, keys=KEYS) as server:
            ids = work(server, "bob", 1)
            before = everything(server, "bob", ids)
            ids_of_ann = work(server, "ann", 2)
            assert everything(server, "bob", ids) == before
            theirs = everything(server, "bob", [*ids, *ids_of_ann])
            unknown = everything(server, "bob", ["nothing"])
            for (path, one), (status, _) in theirs.items():
                assert one not in ids_of_ann or status == unknown[path, "nothing"][0]
            counts = before["/v1/cache/stats", ""][1]["store"] or {}
            assert kind == "none" or counts["hits"] > 0 < counts["written"]
