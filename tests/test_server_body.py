"""Bodies of JSON: counted before they are parsed, and then parsed to what was sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hostile import bounded
from hypothesis import given
from hypothesis import strategies as st

from keepsight.server import body as bodies
from keepsight.server.body import MOST_VALUES, parsed
from keepsight.server.errors import ApiError

PIECES = [*'ab"\\/\n\té日😀\u2028\x7f', '\\"', "\\\\", "\\u"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=120).map("".join)
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@bounded(300)
@given(
    value=VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]), cut=st.integers(0)
)
def test_what_is_parsed_in_pieces_is_what_was_sent(
    value: Any, ascii_only: bool, indent: int | None, cut: int
) -> None:
    """With pieces and texts so short that each is cut many times, also where a body breaks off."""
    data = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("_LONG", 64), ("_PIECE", 50), ("_SMALL", -1)):
            patch.setattr(bodies, name, size)
        assert parsed(data) == value
        broken = data[: cut % (len(data) + 1)]
        assert _outcome(parsed, broken) == _outcome(json.loads, broken)


def _outcome(parse: Any, data: bytes) -> Any:
    try:
        return parse(data)
    except ValueError:
        return "no JSON"


COSTLY = {
    "numbers": b"[" + b"1," * 200_000 + b"1]",
    "texts": b'["' + b'","' * 200_000 + b'"]',
    "records": b"[" + b"{}," * 200_000 + b"1]",
    "names": b"{" + b",".join(b'"%d":0' % n for n in range(100_000)) + b"}",
    "quotes": b'"' * (3 << 20),
    "spaces": b'{"a":' + b" " * (9 << 20) + b"1}",
    "one number": b"[" + b"1" * (9 << 20) + b"]",
    "depth": b"[" * 50_000 + b"]" * 50_000,
    "deep records": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "numbers behind a picture": b'["' + b"A" * (2 << 20) + b'",' + b"1," * 100_000 + b"1]",
}


@pytest.mark.parametrize("what", COSTLY)
def test_what_costs_much_to_parse_is_refused_before(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "dee" not in what and what != "depth":

        def unexpected(*given: Any) -> None:
            raise AssertionError("it was parsed")

        monkeypatch.setattr(bodies.json, "loads", unexpected)
    with pytest.raises(ApiError, match="before it is parsed") as caught:
        parsed(COSTLY[what])
    assert caught.value.status == 400 and caught.value.code == "body_too_complex"


def test_what_any_client_may_send_is_parsed() -> None:
    history = [{"role": "user", "content": "x, y [z] {w}"}] * 15_000
    picture = "data:image/png;base64," + "AAAA" * (1 << 20)
    for value in (history, {"url": picture, "more": [picture, "é" * (1 << 20)]}):
        assert parsed(json.dumps(value).encode()) == value
    assert len(history) * 3 < MOST_VALUES
