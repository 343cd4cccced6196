"""Responses that are kept: gone on from, read, deleted; each tenant's own, bounded, expiring."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.server_harness import Live, Scripted, bearer, live, scene, uri

from keepsight.server.config import ApiKey
from keepsight.server.errors import ApiError
from keepsight.server.responses import ResponseStore
from keepsight.server.schema import MessageItem, ResponsesRequest

PATH = "/v1/responses"
KEYS = (ApiKey("ann", "ann-key"), ApiKey("bob", "bob-key"))
SHOWN = {
    "role": "user",
    "content": [
        {"type": "input_image", "image_url": uri(scene(1))},
        {"type": "input_text", "text": "What is in the picture?"},
    ],
}
NEXT = {"role": "user", "content": "And now?"}


@pytest.fixture(scope="module")
def server(tooled: Live) -> Live:
    return tooled


def respond(server: Live, *items: Any, who: str | None = None, **more: Any) -> tuple[int, Any]:
    body = {"model": "demo", "input": list(items), "max_output_tokens": 8, **more}
    return server.call(PATH, body, headers=bearer(who or ""))[:2]


def test_a_response_goes_on_from_another_as_if_all_were_sent(server: Live) -> None:
    first = respond(server, SHOWN, metadata={"run": "1"})[1]
    assert first["store"] is True and first["metadata"] == {"run": "1"}
    second = respond(server, NEXT, previous_response_id=first["id"])[1]
    assert second["previous_response_id"] == first["id"]
    by_hand = respond(server, SHOWN, *first["output"], NEXT, store=False)[1]
    assert second["output"][-1]["content"][0]["text"] == by_hand["output"][-1]["content"][0]["text"]
    assert second["usage"]["input_tokens"] == by_hand["usage"]["input_tokens"]
    assert by_hand["store"] is False and server.call(f"{PATH}/{by_hand['id']}")[0] == 404
    other = respond(server, NEXT, previous_response_id=first["id"], instructions="Be brief.")[1]
    assert other["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    third = respond(server, NEXT, previous_response_id=other["id"])[1]
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    assert third["usage"]["images"] == 1  # the picture of the first is still in the prompt
    named = respond(server, SHOWN, {"type": "item_reference", "id": first["output"][0]["id"]}, NEXT)
    assert named[1]["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    # What went on from a reference has the item itself, not the reference.
    after = respond(server, NEXT, previous_response_id=named[1]["id"])
    assert after[1]["usage"]["input_tokens"] == third["usage"]["input_tokens"]


def test_a_response_is_read_listed_and_deleted(server: Live) -> None:
    first = respond(server, NEXT)[1]
    address = f"{PATH}/{first['id']}"
    assert server.call(address)[1] == first
    asked = server.call(f"{address}/input_items")[1]["data"]
    assert [item["content"] for item in asked] == [[{"type": "input_text", "text": "And now?"}]]
    gone = server.call(address, method="DELETE")
    assert gone[1] == {"id": first["id"], "object": "response", "deleted": True}
    status, reply, _ = server.call(address)
    assert status == 404 and reply["error"]["code"] == "response_not_found"
    status, reply = respond(server, NEXT, previous_response_id=first["id"])
    assert status == 404 and reply["error"]["param"] == "previous_response_id"
    lost = {"type": "item_reference", "id": first["output"][0]["id"]}
    status, reply = respond(server, lost, NEXT)
    assert status == 404 and reply["error"]["param"] == "input[0].id"


def test_what_a_response_was_asked_with_is_listed_in_pages(server: Live) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    said = {"role": "assistant", "content": "A ring.", "id": "msg_own"}
    result = {"type": "function_call_output", "call_id": "c", "output": "A ring."}
    first = respond(server, SHOWN, call, result, said, NEXT)[1]
    address = f"{PATH}/{first['id']}/input_items"
    whole = server.call(address)[1]
    ids = [item["id"] for item in whole["data"]]
    kinds = ("message", "message", "function_call_output", "function_call", "message")
    assert tuple(item["type"] for item in whole["data"]) == kinds  # the last one comes first
    assert ids[1] == "msg_own" and len(set(ids)) == 5
    assert whole["data"][1]["content"][0]["type"] == "output_text"
    ends = {name: whole[name] for name in ("object", "first_id", "last_id", "has_more")}
    assert ends == {"object": "list", "first_id": ids[0], "last_id": ids[-1], "has_more": False}
    page = server.call(f"{address}?limit=2&order=asc&after={ids[4]}")[1]
    assert [item["id"] for item in page["data"]] == [ids[3], ids[2]] and page["has_more"]
    for query, name in (("limit=0", "limit"), ("order=up", "order"), ("after=msg_x", "after")):
        status, reply, _ = server.call(f"{address}?{query}")
        assert status == 400 and reply["error"]["param"] == name
    for place in (address, f"{PATH}/{first['id']}"):  # a client asks for more than there is
        status, _, headers = server.call(f"{place}?include[]=message.input_image.image_url")
        assert (status, headers["x-keepsight-unused"]) == (200, "?include[]")
    # An id in the list means its item, as that of an answer does.
    named = respond(server, {"type": "item_reference", "id": ids[4]}, NEXT)[1]["usage"]
    assert named["images"] == 1
    assert named["input_tokens"] == respond(server, SHOWN, NEXT)[1]["usage"]["input_tokens"]


def test_a_stream_is_kept_before_its_client_hears_of_its_end(server: Live) -> None:
    body = {"model": "demo", "input": "Hello!", "max_output_tokens": 4, "stream": True}
    last = server.events(PATH, body)[-1]["response"]
    assert last["store"] is True and server.call(f"{PATH}/{last['id']}")[1] == last


def test_tenants_and_salts_see_nothing_of_each_other(vlm: Any) -> None:
    with live(vlm, Scripted("hi"), keys=KEYS) as server:
        first = respond(server, NEXT, who="ann")[1]["id"]
        salted = respond(server, NEXT, who="ann", cache_salt="s")[1]["id"]
        assert respond(server, NEXT, who="ann", previous_response_id=first)[0] == 200
        for who, more in (("bob", {}), ("ann", {"cache_salt": "s"})):
            assert respond(server, NEXT, who=who, previous_response_id=first, **more)[0] == 404
        for method in ("GET", "DELETE"):
            answer = server.call(f"{PATH}/{first}", None, method, bearer("bob"))
            assert answer[0] == 404 and "never stored here" in answer[1]["error"]["message"]
            assert server.call(f"{PATH}/{salted}", None, method, bearer("ann"))[0] == 404
        assert server.call(f"{PATH}/{salted}?cache_salt=s", headers=bearer("ann"))[0] == 200
        server.call("/v1/cache/reset", {"cache_salt": "s"}, headers=bearer("ann"))
        assert server.call(f"{PATH}/{salted}?cache_salt=s", headers=bearer("ann"))[0] == 404
        assert server.call(f"{PATH}/{first}", headers=bearer("ann"))[0] == 200
        server.call("/v1/cache/reset", {}, headers=bearer("bob"))
        assert server.call(f"{PATH}/{first}", headers=bearer("ann"))[0] == 200
        server.call("/v1/cache/reset", {}, headers=bearer("ann"))
        assert server.call(f"{PATH}/{first}", headers=bearer("ann"))[0] == 404


def test_a_server_that_keeps_none_says_so(vlm: Any) -> None:
    with live(vlm, Scripted("hi"), responses_budget=0) as server:
        body = {"model": "demo", "input": "x", "store": True}
        _, reply, headers = server.call(PATH, body)
        assert reply["store"] is False and headers["x-keepsight-unused"] == "store"
        assert server.call(f"{PATH}/{reply['id']}")[0] == 404


def made(number: int, size: int = 10, previous: str | None = None) -> dict[str, Any]:
    item = {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": "y" * size}
    return {"id": f"resp_{number}", "previous_response_id": previous, "output": [item]}


def test_bytes_and_numbers_are_bounded_for_each_key_alone() -> None:
    asked = [MessageItem(role="user", content="x")]
    kept = ResponseStore(2 * 10_000, 60, owners=2, most=5)
    assert kept.put("bob", "bob", asked, made(0))
    for number in range(1, 8):
        assert kept.put("ann", "ann", asked, made(number))
    with pytest.raises(ApiError, match="no such response"):
        kept.get("ann", "ann", "resp_2")
    kept.get("ann", "ann", "resp_3")  # used: now the newest
    for number in range(8, 12):
        assert kept.put("ann", "a salt of hers", asked, made(number))
    kept.get("ann", "ann", "resp_3")
    assert not kept.put("ann", "ann", asked, made(12, 20_000))
    assert kept.put("ann", "ann", asked, made(13, 9_000))
    assert kept.nbytes <= 20_000
    kept.get("bob", "bob", "resp_0")


def meaning(*ids: str, previous: str | None = None) -> ResponsesRequest:
    references = [{"type": "item_reference", "id": one} for one in ids]
    body = {"model": "demo", "input": [*references, NEXT], "previous_response_id": previous}
    return ResponsesRequest.model_validate(body)


def test_what_a_request_refers_to_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, read = ResponseStore(1 << 20, 60, largest=1000), []
    for number in range(5):
        kept.put("", "", [], made(number, 200, previous=f"resp_{number - 1}" if number else None))
    assert len(kept.conversation("", "", meaning("msg_0", "msg_0"))) == 3
    with pytest.raises(ApiError, match="take more than 1000 bytes") as refused:
        kept.conversation("", "", meaning(*["msg_0"] * 9))
    assert refused.value.param == "input[3].id"
    # A chain is refused before it is read.
    monkeypatch.setattr("keepsight.server.responses.json.loads", lambda text: read.append(1))
    with pytest.raises(ApiError, match="1000 bytes.*begin a new conversation") as refused:
        kept.conversation("", "", meaning(previous="resp_4"))
    assert refused.value.param == "previous_response_id" and not read


def test_what_expires_is_gone_and_its_items_with_it() -> None:
    now = [1000.0]
    kept = ResponseStore(1 << 20, 60, clock=lambda: now[0])
    kept.put("", "", [MessageItem(role="user", content="x")], made(1))
    now[0] += 59
    kept.get("", "", "resp_1")
    kept.put("", "", [], made(2, previous="resp_1"))
    now[0] += 2
    with pytest.raises(ApiError, match="has expired"):
        kept.get("", "", "resp_1")
    kept.sweep()
    assert kept.nbytes == len(json.dumps(made(2, previous="resp_1"), separators=(",", ":"))) + 2
    now[0] += 60
    kept.sweep()
    assert kept.nbytes == 0
