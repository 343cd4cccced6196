"""Bodies of JSON: measured before they are parsed, and then parsed to what was sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from keepsight.server.access import MOST_VALUES, parsed
from keepsight.server.errors import ApiError

JSON = {"content-type": "application/json; charset=utf-8"}


class Anything(BaseModel):
    """A body of one field."""

    value: Any = None


COSTLY = {
    "numbers": b"[" + b"1," * MOST_VALUES + b"1]",
    "texts": b'["' + b'","' * MOST_VALUES + b'"]',
    "records": b"[" + b"{}," * MOST_VALUES + b"1]",
    "names": b"{" + b",".join(b'"%d":0' % n for n in range(MOST_VALUES + 1)) + b"}",
    "depth": b"[" * (MOST_VALUES + 1) + b"]",
    "numbers behind a picture": b'["' + b"A" * (2 << 20) + b'",' + b"1," * MOST_VALUES + b"1]",
}


@pytest.mark.parametrize("what", COSTLY)
def test_what_costs_much_to_parse_is_refused_before(what: str) -> None:
    with pytest.raises(ApiError, match="commas and brackets") as caught:
        parsed(Anything, COSTLY[what], JSON)
    assert caught.value.status == 400 and caught.value.code == "body_too_complex"


@pytest.mark.parametrize("body", [b"[" * 1000 + b"]" * 1000, b'{"a":' * 1000 + b"1" + b"}" * 1000])
def test_what_is_nested_deep_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="recursion limit") as caught:
        parsed(Anything, body, JSON)
    assert caught.value.code == "invalid_json"


def test_what_any_client_may_send_is_parsed() -> None:
    history = [{"role": "user", "content": "x, y [z] {w}"}] * 50_000
    picture = "data:image/png;base64," + "AAAA" * (1 << 20)
    for value in (history, {"url": picture, "more": [picture, "é" * (1 << 20)]}):
        assert parsed(Anything, json.dumps({"value": value}).encode(), JSON).value == value
    assert parsed(Anything, b"\xef\xbb\xbf{}", JSON) == parsed(Anything, b"", {}) == Anything()
