"""Parses JSON bodies after measuring them, without blocking other requests.

A C parser holds the GIL until it is done. Its time depends on values, not bytes: a picture is one
long string, but 30 million numbers are slow. So values and the bytes between them are counted
first, and long strings are parsed separately, in pieces.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from keepsight.server.errors import ApiError
from keepsight.server.turns import LARGE_BODY, Threads

MOST_VALUES = 64_000  # values per body; enough for messages, parts and settings of any conversation
_BETWEEN = 8 << 20  # bytes outside of strings: numbers, constants, spaces
_PIECE = 1 << 16  # bytes examined at once
_LONG = 1 << 18  # bytes from which a string is parsed separately
_SMALL = 1 << 20  # bytes up to which a body is parsed directly, unless it may hold too much
_BEFORE_A_VALUE = (b",", b"[", b"{")


class BodyRoute(APIRoute):
    """A route whose body is parsed here."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, None, Response]]:
        """The route's own handler, after the parser."""
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            parsed = BodyRequest(request.scope, request.receive)
            await parsed.parse(request.scope["state"]["threads"])
            return await handle(parsed)

        return read


class BodyRequest(Request):
    """A request with its parsed body, or the reason why it has none."""

    async def parse(self, threads: Threads) -> None:
        """Parse the body if it claims to be JSON. Too expensive bodies are refused here, invalid
        ones when they are read."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (
            kind.startswith("application/") and kind.endswith("+json")
        ):
            return
        body = await self.body()
        try:
            if len(body) <= LARGE_BODY:
                self._json = parsed(body)
            else:
                self._json = await threads.run(lambda: parsed(body), large=True)
        except json.JSONDecodeError as error:
            self._error = error
        except ValueError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: ValueError) -> ApiError:
        """Why bytes are not valid JSON, or contain a number that cannot be read."""
        packed = self.headers.get("content-encoding", "identity")
        if packed != "identity":
            why = f"its Content-Encoding is {packed[:50]!r}; send it as plain JSON"
        elif isinstance(error, UnicodeDecodeError):
            why = "it is not UTF-8 text"
        else:
            why = "a whole number in it has more than 4,300 digits"
        return ApiError(400, f"the body cannot be read: {why}", code="invalid_json")

    async def json(self) -> object:
        """The value of the body."""
        if (error := getattr(self, "_error", None)) is not None:
            raise error
        return await super().json()


def parsed(body: bytes) -> object:
    """The value of a body; refuses bodies that would block others."""
    try:
        if len(body) <= _SMALL and sum(map(body.count, _BEFORE_A_VALUE)) <= MOST_VALUES:
            return json.loads(body)
        return _parsed_in_pieces(body, BodyScan(body).long_texts())
    except RecursionError:
        raise _refusal("its values are nested too deep") from None


def _parsed_in_pieces(body: bytes, long: list[tuple[int, int]]) -> object:
    """The value of a body, with long strings parsed separately."""
    mark = secrets.token_hex(16)  # placeholders; random, so no client can have sent them
    texts: dict[str, str] = {}
    parts, end = [], 0
    for start, stop in long:
        name = f"{mark}{len(texts)}"
        parts += [body[end:start], name.encode()]
        texts[name] = _text(body, start, stop)
        end = stop
    small = json.loads(b"".join([*parts, body[end:]]))
    return _filled(small, texts) if texts else small


def _filled(value: object, texts: dict[str, str]) -> object:
    """A value with long strings inserted for their placeholders."""
    if isinstance(value, str):
        return texts.get(value, value)
    if isinstance(value, list):
        return [_filled(one, texts) for one in value]
    if isinstance(value, dict):
        return {texts.get(name, name): _filled(one, texts) for name, one in value.items()}
    return value


def _text(body: bytes, start: int, stop: int) -> str:
    """The string between two quotes, parsed in pieces."""
    pieces = []
    while start < stop:
        end = _cut(body, start, min(start + _LONG, stop), stop)
        pieces.append(json.loads(b'"%b"' % body[start:end]))
        start = end
        time.sleep(0)  # let other threads run
    return "".join(pieces)


def _cut(body: bytes, start: int, end: int, stop: int) -> int:
    """Where a piece may end: not inside a character, an escape or a surrogate pair."""
    if end == stop:
        return end
    piece = body[start:end].replace(b"\\\\", b"__")
    escape = piece.rfind(b"\\", len(piece) - 12)  # a surrogate pair has twelve bytes
    if escape >= 0:
        first = piece[max(0, escape - 6) : escape]
        halves = first[:2] == b"\\u" and first[2:4].lower() in (b"d8", b"d9", b"da", b"db")
        return start + escape - (6 if halves else 0)
    while body[end] & 0xC0 == 0x80:
        end -= 1
    return end


@dataclass
class BodyScan:
    """Counts the contents of a body without parsing it."""

    body: bytes
    values: int = 0
    between: int = 0
    texts: int = 0

    def long_texts(self) -> list[tuple[int, int]]:
        """The ranges of long strings; refuses a body with too many values."""
        long, at, size = [], 0, len(self.body)
        while at < size:
            quote = self.body.find(b'"', at, at + _PIECE)
            self._count(self.body[at : quote if quote >= 0 else at + _PIECE])
            if quote < 0:
                at += _PIECE
                time.sleep(0)
                continue
            self.texts += 1
            end = self._end_of_text(quote + 1)
            if end - quote > _LONG:
                long.append((quote + 1, end))
            at = end + 1
        return long

    def _end_of_text(self, at: int) -> int:
        """The position of the quote that ends a string, or the end of the body."""
        body, size = self.body, len(self.body)
        while at < size:
            end = min(at + _PIECE, size)
            quote = body.find(b'"', at, end)
            if body.find(b"\\", at, quote if quote >= 0 else end) >= 0:
                piece = body[at:end]
                if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # it ends inside an escape
                    piece, end = body[at : end + 1], min(end + 1, size)
                quote = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__").find(b'"')
                quote += at if quote >= 0 else 0
            if quote >= 0:
                return quote
            at = end
            time.sleep(0)
        return size

    def _count(self, part: bytes) -> None:
        self.between += len(part)
        self.values += sum(map(part.count, _BEFORE_A_VALUE))
        if max(self.values, self.texts / 2) > MOST_VALUES:  # a name and its value are two strings
            raise _refusal(f"it holds more than {MOST_VALUES} values")
        if self.between > _BETWEEN:
            raise _refusal(f"more than {_BETWEEN} bytes of it are outside of texts")


def _refusal(why: str) -> ApiError:
    return ApiError(400, f"the body is refused before it is parsed: {why}", code="body_too_complex")
