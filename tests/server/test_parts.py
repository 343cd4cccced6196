"""The server's parts alone: speech taken apart, limits, addresses, files, settings."""

from __future__ import annotations

import contextlib
import http.server
import io
import itertools
import json
import socket
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile import png_that_claims
from support.server_harness import png, scene, uri

from keepsight.errors import InputError, UnknownOption
from keepsight.server import fetch, schema
from keepsight.server.access import Caller
from keepsight.server.config import ApiKey, ServerConfig
from keepsight.server.errors import ApiError
from keepsight.server.fetch import Fetcher, is_public
from keepsight.server.files import Files
from keepsight.server.media import MessageReader
from keepsight.server.parser import OutputParser
from keepsight.server.responses import as_chat
from keepsight.server.sampling import Penalties
from keepsight.server.schema import ResponsesRequest

# -- speech ------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "left"}}\n</tool_call>'
CODED = (
    "<tool_call>\n<function=look>\n<parameter=at>\nleft\n</parameter>\n</function>\n</tool_call>"
)


def heard(pieces: list[str], thinking: bool = False, tools: bool = True) -> list[tuple[str, ...]]:
    speech = OutputParser(thinking, True, tools)
    said = [one for piece in pieces for one in speech.push(piece)] + list(speech.finish())
    joined: list[tuple[str, ...]] = []
    for one in said:
        if one.kind == "call":
            joined.append(("call", one.name, one.text))
        elif joined and joined[-1][0] == one.kind:
            joined[-1] = (one.kind, joined[-1][1] + one.text)
        else:
            joined.append((one.kind, one.text))
    return joined


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Hello.", [("text", "Hello.")]),
        ("<think>\nhm\n</think>\n\nHello.", [("thought", "hm\n"), ("text", "Hello.")]),
        (f"I look.\n{CALL}", [("text", "I look."), ("call", "look", '{"at": "left"}')]),
        (CODED, [("call", "look", '{"at": "left"}')]),
        (f"{CALL}\n{CALL}", [("call", "look", '{"at": "left"}')] * 2),
        ("a < b <tool", [("text", "a < b <tool")]),
        ("<tool_call>\nnot json\n</tool_call>", [("text", "<tool_call>\nnot json\n</tool_call>")]),
        ("say <think> in the middle", [("text", "say <think> in the middle")]),
        ('<tool_call>{"name": "look"', [("text", '<tool_call>{"name": "look"')]),
    ],
)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_speech_is_the_same_however_it_is_cut(
    text: str, wanted: list[tuple[str, ...]], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=8)))
    ends = [0, *cuts, len(text)]
    assert heard([text[a:b] for a, b in itertools.pairwise(ends)]) == wanted


def test_thoughts_that_the_template_opened() -> None:
    assert heard(["hm", "</th", "ink>\n\nYes."], thinking=True) == [
        ("thought", "hm"),
        ("text", "Yes."),
    ]
    assert heard(["never ", "closed"], thinking=True) == [("thought", "never closed")]
    assert heard([CALL], tools=False) == [("text", CALL)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<", "think>", "</think>", "<tool_call>", "x", "\n", "{", "</tool_call>"])
    )
)
def test_nothing_that_is_said_raises(pieces: list[str]) -> None:
    for _ in heard(pieces):
        pass


def test_penalties_are_openais() -> None:
    penalties = Penalties(0.5, 0.25, {3: -100.0})
    penalties(torch.tensor([[1, 1, 1]]), torch.zeros(1, 5))  # the prompt counts for nothing
    scores = penalties(torch.tensor([[1, 1, 1, 2, 2, 4]]), torch.zeros(1, 5))
    assert scores.tolist() == [[0.0, 0.0, -1.0, -100.0, -0.75]]


# -- addresses ---------------------------------------------------------------------------------


PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
    *("100.64.0.1", "224.0.0.1", "255.255.255.255", "198.18.0.1", "240.0.0.1", "::", "::1"),
    *("fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1"),
    *("64:ff9b::a00:1", "2002:7f00:1::", "2002:c0a8:101::", "::127.0.0.1", "fe80::1%eth0"),
    *("fec0::1", "feff::1", "3fff::1", "5f00::1", "100::1", "4000::1", "2001:2::1", "2001:20::1"),
    *("64:ff9b:1::a00:1", "::ffff:0:a00:1", "2002:a00:1::1", "2a00::5efe:a00:1", "ff0e::1"),
    *("0.1.2.3", "192.0.0.8", "192.0.0.9", "192.88.99.1", "2a00::200:5efe:127.0.0.1"),
    *("2001:db8::1", "2002:808:808::1", "nonsense"),
]


def test_addresses_that_are_not_fetched() -> None:
    assert [address for address in PRIVATE if is_public(address)] == []


class _Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path[4:] or self.path)
            self.end_headers()
            return
        body = b"x" * (100 if self.path == "/picture" else 5000)
        self.send_response(200 if self.path in ("/picture", "/large", "/endless") else 404)
        if self.path != "/endless":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def test_fetching_has_limits() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        open_to_all = Fetcher(1000, 5, allow_private=True)
        assert open_to_all.fetch(f"{url}/picture") == b"x" * 100
        assert open_to_all.fetch(f"{url}/to//picture") == b"x" * 100
        for path, why in (
            ("/large", "larger than"),
            ("/endless", "larger than"),
            ("/nothing", "404"),
            ("/to/", "redirects"),
            ("/to/file:///etc/passwd", "only http"),
            ("/to/ftp://example.org/", "only http"),
        ):
            with pytest.raises(ApiError, match=why):
                open_to_all.fetch(url + path)
        with pytest.raises(ApiError, match="not a public address"):
            Fetcher(1000, 5).fetch(f"{url}/picture")
        server.shutdown()


def test_urls_that_are_none() -> None:
    wrong = ["http://", "http://[", "http://a:99999/", "http://u:p@a/", "gopher://a/"]
    for url in (*wrong, "file:///etc/passwd"):
        with pytest.raises(ApiError) as caught:
            Fetcher(1000, 5).fetch(url)
        assert caught.value.status == 400 and "u:p" not in caught.value.message


def test_redirects_and_names_follow_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A public name that leads to a private one; and no second look at the resolver."""
    asked: list[str] = []

    def resolve(host: str, port: int, **options: Any) -> list[Any]:
        asked.append(host)
        answer = "127.0.0.1" if host == "inside" else "93.184.215.14"
        return [(2, 1, 6, "", (answer, port))]

    connected: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], timeout: float) -> Any:
        connected.append(address)
        raise OSError("nobody there")

    monkeypatch.setattr(fetch.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(fetch.socket, "create_connection", connect)
    with pytest.raises(ApiError, match="not a public address"):
        Fetcher(1000, 5).fetch("http://inside/x")
    with pytest.raises(ApiError, match="could not be fetched"):
        Fetcher(1000, 5).fetch("https://outside/x")
    assert asked == ["inside", "outside"] and connected == [("93.184.215.14", 443)]


def test_a_slow_site_does_not_hold_anybody() -> None:
    """A byte now and then keeps a socket's own timeout from ever running out."""

    def drip() -> None:
        connection, _ = silent.accept()
        with connection, contextlib.suppress(OSError):
            for _ in range(600):
                connection.sendall(b"H")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Thread(target=drip, daemon=True).start()
        port = silent.getsockname()[1]
        begun = time.monotonic()
        with pytest.raises(ApiError, match="took longer"):
            Fetcher(1000, 0.5, allow_private=True).fetch(f"http://127.0.0.1:{port}/")
        assert time.monotonic() - begun < 20  # half a minute is what the site would take


def test_a_resolver_that_never_answers_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(fetch.socket, "getaddrinfo", lambda *_, **__: over.wait(60) and [])
    try:
        with pytest.raises(ApiError, match="took longer"):
            Fetcher(1000, 0.2).fetch("http://outside/x")
    finally:
        over.set()


class _Plain(socket.socket):
    def do_handshake(self) -> None:
        pass


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://name/a", "name"),
        ("https://name:8443/a", "name:8443"),
        ("http://name:443/a", "name:443"),
    ],
)
def test_the_usual_port_is_not_said(monkeypatch: pytest.MonkeyPatch, url: str, host: str) -> None:
    one, theirs = socket.socketpair()
    ours = _Plain(fileno=one.detach())
    here = [(2, 1, 6, "", ("127.0.0.1", 443))]
    no_tls = types.SimpleNamespace(wrap_socket=lambda sock, **_: sock)
    monkeypatch.setattr(fetch.socket, "getaddrinfo", lambda *_, **__: here)
    monkeypatch.setattr(fetch.socket, "create_connection", lambda *_: ours)
    monkeypatch.setattr(fetch.ssl, "create_default_context", lambda: no_tls)
    theirs.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
    assert Fetcher(1000, 5, allow_private=True).fetch(url) == b"x"
    assert f"\r\nHost: {host}\r\n".encode() in theirs.recv(10_000)
    theirs.close()


# -- who may ------------------------------------------------------------------------------------


def test_a_caller_is_told_when_to_come_again() -> None:
    now = [0.0]
    key = ApiKey("ann", "k", requests_per_minute=2, tokens_per_minute=100)
    caller = Caller(key, lambda: now[0])
    caller.admit()
    caller.admit()
    with pytest.raises(ApiError, match="requests a minute") as caught:
        caller.admit()
    assert caught.value.headers() == {"retry-after": "30"}
    now[0] = 29.0
    with pytest.raises(ApiError, match="requests a minute"):
        caller.admit()
    now[0] = 30.0
    caller.admit()
    now[0] = 60.0
    caller.spend(250)
    with pytest.raises(ApiError, match="tokens a minute"):
        caller.admit()


# -- what a request speaks of --------------------------------------------------------------------


def read(message: dict[str, Any], **options: Any) -> list[Any]:
    reader = MessageReader(ServerConfig(**options), Files(1 << 20, 60), "")
    asked = schema.ChatMessage.model_validate({"role": "user", **message})
    return list(reader.messages([asked], "")[0]["content"])


def gathered_all(part: dict[str, Any], **options: Any) -> list[Any]:
    """All that one part of a message becomes."""
    return read({"content": [part]}, **options)


def gathered(part: dict[str, Any], **options: Any) -> Any:
    return gathered_all(part, **options)[0]


def at(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_local_files_only_under_an_allowed_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    for folder in (inside, outside):
        (folder / "a.png").write_bytes(png(scene(1)))
    (inside / "link.png").symlink_to(outside / "a.png")
    allowed = {"allow_path": (str(inside),)}
    for url in (str(inside / "a.png"), (inside / "a.png").as_uri()):
        assert gathered(at(url), **allowed)["image"] == png(scene(1))
        with pytest.raises(ApiError, match="--allow-path"):
            gathered(at(url))
    messages = set()
    for url in (
        str(outside / "a.png"),
        str(inside / "link.png"),
        f"{inside}/../out/a.png",
        str(inside / "nothing.png"),
        str(inside),
        "a.png",
        "/dev/zero",
        "\0",
    ):
        with pytest.raises(ApiError) as caught:
            gathered(at(url), **allowed)
        messages.add(caught.value.message)
    assert len(messages) == 1  # what is forbidden looks like what is not there


def test_a_bomb_is_refused_by_its_header() -> None:
    with pytest.raises(ApiError, match="bomb"):
        gathered(at(uri(png_that_claims(60_000, 60_000))))
    with pytest.raises(ApiError, match="64x64, this server takes at most 4000"):
        gathered(at(uri(scene(1).resize((64, 64)))), max_image_pixels=4000)


@pytest.mark.parametrize(
    "third",
    [
        at("http://127.0.0.1/a.png"),
        at("data:image/png;base64,???"),
        {"type": "file", "file": {"file_id": "file-x"}},
        {"type": "video_url", "video_url": {"url": "http://127.0.0.1/a.mp4"}},
        {"type": "input_audio", "input_audio": {"data": "???"}},
        {"type": "image_embeds", "image_embeds": "???"},
        "http://127.0.0.1/a.png",
    ],
    ids=lambda third: third if isinstance(third, str) else third["type"],
)
def test_one_too_many_is_refused_before_it_is_read(third: Any) -> None:
    """Reading it would find another error."""
    message: dict[str, Any] = {"content": [at(uri(scene(1)))] * 2 + [third]}
    place = "messages[0].content[2]"
    if isinstance(third, str):
        message = {"content": "x", "images": [uri(scene(1))] * 2 + [third]}
        place = "messages[0].images[2]"
    with pytest.raises(ApiError, match="more than 2 images") as caught:
        read(message, max_images=2)
    assert (caught.value.code, caught.value.param) == ("too_many_images", place)


def test_too_many_pages() -> None:
    buffer = io.BytesIO()
    scene(1).save(buffer, "PDF", save_all=True, append_images=[scene(2), scene(3)])
    part = {"type": "file", "file": {"file_data": uri(buffer.getvalue())}}
    with pytest.raises(ApiError, match="3 pages; expected 1 to 2"):
        gathered(part, max_images=2)
    assert len(gathered_all(part, max_images=3)) == 3


def _pdf(*sides: int) -> bytes:
    """A PDF of empty pages; a few hundred bytes, whatever their sizes."""
    kids = " ".join(f"{number + 3} 0 R" for number in range(len(sides)))
    objects = ["<</Type/Catalog/Pages 2 0 R>>", f"<</Type/Pages/Kids[{kids}]/Count {len(sides)}>>"]
    objects += [f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 {side} {side}]>>" for side in sides]
    body = "".join(f"{i + 1} 0 obj{text}endobj\n" for i, text in enumerate(objects))
    return f"%PDF-1.4\n{body}trailer<</Root 1 0 R>>".encode()


def test_pages_are_measured_before_they_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    import pypdfium2

    part = {"type": "file", "file": {"file_data": uri(_pdf(72, 5000))}}
    drawn: list[Any] = []
    monkeypatch.setattr(pypdfium2.PdfPage, "render", lambda *a, **b: drawn.append(a))
    with pytest.raises(ApiError, match="page 2 of a PDF is 10000x10000 at 144 dpi") as caught:
        gathered(part)
    assert caught.value.code == "image_too_large" and not drawn
    pages = gathered_all({**part, "max_pixels": 4000})
    monkeypatch.undo()
    sizes = [page["image"].decode().size for page in pages]
    assert sizes[0] == sizes[1] and 3000 < sizes[0][0] * sizes[0][1] < 5000


def test_clips_are_measured_before_they_are_decoded() -> None:
    import av
    import numpy as np
    import soundfile

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
        for packet in [p for _ in range(20) for p in stream.encode(frame)] + stream.encode(None):
            container.mux(packet)
    video: dict[str, Any] = {"type": "video_url", "video_url": {"url": uri(buffer.getvalue())}}
    assert gathered(video)["type"] == "video"
    with pytest.raises(ApiError, match="more than 100000 bytes"):
        gathered(video, clip_bytes=100_000)  # 20 frames of 9,216 bytes
    samples = io.BytesIO()
    soundfile.write(samples, np.zeros(100_000, np.float32), 16_000, format="FLAC")
    data = uri(samples.getvalue()).partition(",")[2]
    sound: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": data, "format": "flac"}}
    assert gathered(sound)["type"] == "audio"
    with pytest.raises(ApiError, match="more than 100000 bytes"):
        gathered(sound, clip_bytes=100_000)
    video["video_url"] = {"url": uri(b"\x00\x00\x00\x18ftypisom" + b"x" * 50)}
    sound["input_audio"] = {"data": uri(b"x" * 50).partition(",")[2], "format": "flac"}
    for part in (video, sound):
        with pytest.raises(ApiError, match="cannot be read"):
            gathered(part)


def test_caps_on_pixels_name_another_picture() -> None:
    data = png(scene(1).resize((400, 300)))
    part = {**at(uri(data)), "max_pixels": 30_000}
    source = gathered(part)["image"]
    assert source.decode().size == (200, 150)
    assert source.name == gathered(part)["image"].name
    assert source.name != gathered({**part, "max_pixels": 20_000})["image"].name
    assert gathered({**part, "max_pixels": 200_000})["image"] == data


def test_a_thought_that_comes_back_is_never_lost() -> None:
    def thoughts(*items: dict[str, Any]) -> list[tuple[str, str | None]]:
        body = {"model": "demo", "input": list(items)}
        found = as_chat(ResponsesRequest.model_validate(body)).messages
        return [(message.role, message.reasoning_content) for message in found]

    def thought(text: str, kind: str = "content") -> dict[str, Any]:
        part = {"type": "summary_text" if kind == "summary" else "reasoning_text", "text": text}
        return {"type": "reasoning", kind: [part]}

    asked = {"role": "user", "content": "x"}
    said = {"role": "assistant", "content": "y"}
    assert thoughts(asked, thought("a", "summary"), said)[1] == ("assistant", "a")
    assert thoughts(asked, thought("a"), thought("b"), said)[1] == ("assistant", "a\nb")
    cut_off = [("user", None), ("assistant", "a"), ("user", None)]
    assert thoughts(asked, thought("a"), asked) == cut_off
    assert thoughts(asked, thought("a")) == cut_off[:2]
    assert thoughts(asked, {"type": "reasoning", "summary": []}, asked) == [("user", None)] * 2


# -- settings ------------------------------------------------------------------------------------


def test_files_of_settings(tmp_path: Path) -> None:
    toml = tmp_path / "a.toml"
    toml.write_text(
        'allow-origin = ["http://a"]\n[[keys]]\nname = "ann"\nkey = "secret"\n'
        "requests_per_minute = 5\n"
    )
    config = ServerConfig(config=str(toml))
    assert config.allow_origin == ("http://a",) and config.keys[0].requests_per_minute == 5
    assert "secret" not in repr(config)
    yaml = tmp_path / "a.yaml"
    yaml.write_text(json.dumps({"port": 9, "max_body": "1MiB"}))
    assert ServerConfig(config=str(yaml)).max_body == 1 << 20


_KEY = "[[keys]]\nname = 'a'\nkey = 'b'\n"


@pytest.mark.parametrize(
    ("text", "error", "why"),
    [
        ("prot = 9", UnknownOption, "did you mean 'port'"),
        ("port = 'x'", InputError, "port is"),
        ("port = true", InputError, "port is"),
        ("port = [", InputError, "cannot be read"),
        ("[[keys]]\nname = 'a'", InputError, "keys.0.key"),
        ("[[keys]]\nname = 'a'\nkey = 'b'\nadmim = true", UnknownOption, "did you mean 'admin'"),
        (f"{_KEY}admin = 'maybe'", InputError, "keys.0.admin: expected a valid boolean"),
        (f"{_KEY}tenant = 5", InputError, "keys.0.tenant: expected a valid string"),
        (f"{_KEY}requests_per_minute = true", InputError,
            "keys.0.requests_per_minute: expected a whole number"),
        (f"{_KEY}tokens_per_minute = 1.5", InputError,
            "keys.0.tokens_per_minute: expected a valid integer"),
        (f"{_KEY}files_bytes = [1]", InputError, "is not a size"),
        ("[[keys]]\nname = 'a'\nkey = 'cl\u00e9'", InputError, "ASCII letters"),
        ("[[keys]]\nname = 'a'\nkey = 'b '", InputError, "without spaces"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(
    tmp_path: Path, text: str, error: type[Exception], why: str
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=why):
        ServerConfig(config=str(path))


def test_values_that_make_no_sense() -> None:
    wrong: list[tuple[str, Any]] = [("max_images", 0), ("max_image_pixels", 0), ("max_tokens", 0)]
    wrong += [("max_waiting", -1), ("max_connections", 0), ("max_body", 0)]
    wrong += [("allow_origin", (one,)) for one in ("example.com", "https://example.com/")]
    for name, value in (*wrong, ("trusted_proxy", ("*",))):
        with pytest.raises(InputError, match=name):
            ServerConfig(**{name: value})
