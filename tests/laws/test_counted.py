"""Law 7: bytes are counted. What outlives a call is on a shelf with a budget, or in the tree."""

from __future__ import annotations

import gc
import http.server
import io
import sys
import threading
import types
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.models import picture, turn

import keepsight as ks
from keepsight.errors import ImageError
from keepsight.formats.package import storage_bytes
from keepsight.media.caches import MediaCaches
from keepsight.store import writer
from keepsight.store.writer import Counts


def noise(seed: int) -> bytes:
    """A picture of some 60 kB that no two seeds share."""
    pixels = np.random.default_rng(seed).integers(0, 256, (140, 140, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class Site:
    """Pictures by number on loopback; how often each was sent. `tells` names the header that says
    when a picture changed."""

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        self.seeds: dict[int, int] = {}
        self.tells = "ETag"
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                number = int(self.path.partition("?")[0].strip("/"))
                seed = site.seeds.get(number, number)
                state = f'"{seed}"' if site.tells == "ETag" else formatdate(1e9 + seed, usegmt=True)
                asked = "If-None-Match" if site.tells == "ETag" else "If-Modified-Since"
                data = noise(seed)
                same = self.headers[asked] == state
                self.send_response(304 if same else 200)
                if site.tells:
                    self.send_header(site.tells, state)
                if not same:
                    site.sent[number] = site.sent.get(number, 0) + 1
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(b"" if same else data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{number}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.fixture
def small(demo_parts: dict[str, Any]) -> Iterator[Any]:
    """A model with little room: for what URLs gave there are 192 KiB."""
    with ks.wrap(*demo_parts["demo"], vision_budget="3MiB", cache_budget="3MiB") as vlm:
        yield vlm


def reached(start: Any, but: list[Any]) -> int:
    """Bytes of all texts, arrays and tensors that something leads to, each once."""
    seen, waiting, total = {id(one) for one in but}, [start], 0
    tensors: list[torch.Tensor] = []
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | types.ModuleType | torch.nn.Module):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            tensors.append(one)
        elif isinstance(one, types.FunctionType):  # not what is global to it
            waiting += [one.__defaults__, one.__kwdefaults__, *(one.__closure__ or ())]
        elif isinstance(one, bytes | bytearray | str):
            total += sys.getsizeof(one)
        elif isinstance(one, np.ndarray):
            total += one.nbytes
        elif type(one).__module__.split(".")[0] not in ("transformers", "tokenizers", "threading"):
            waiting += gc.get_referents(one)
    return total + storage_bytes(tensors)


def counted(vlm: Any) -> int:
    told = vlm.stats()
    features, prefix = told["features"], told["prefix"]
    shelves = sum(size for name, size in features.items() if name.endswith("bytes"))
    return int(shelves + prefix["bytes"] + prefix["host"]["bytes"] + prefix["lane_bytes"])


def test_all_that_outlives_a_call_is_counted(small: Any, site: Site) -> None:
    """After each of many calls: the books agree, budgets hold, and there is nothing beside them."""
    vlm = small
    chat = vlm.session()
    asked: list[Callable[[], Any]] = [
        lambda: vlm.ask(site.url(1), "What?", max_new_tokens=2),
        lambda: vlm.ask(noise(2), "What?", max_new_tokens=2),
        lambda: vlm.prepare([turn("What? " * 50, picture(1))], tenant="a"),
        lambda: [vlm.ask(site.url(n), "What?", max_new_tokens=1) for n in range(3, 9)],
        lambda: vlm.encode(site.url(9)),
        lambda: vlm.explain([turn("Which?", picture(2))]),
        lambda: chat.ask("What?", [site.url(10)], max_new_tokens=1),
        lambda: next(iter(vlm.stream([turn("And?", picture(3))]))),
        lambda: vlm.pin([turn("What?", picture(1))]),
        lambda: vlm.ask(site.url(1), "What?", max_new_tokens=2),
        lambda: vlm.delete(site.url(4)),
        lambda: vlm.clear(tenant="a"),
        lambda: vlm.ask([site.url(n) for n in (1, 2, 12)], "What?", max_new_tokens=1),
    ]
    beside = [vlm.model, vlm.processor, chat, site]
    slack = reached(vlm.runtime, beside) - counted(vlm) + (192 << 10)
    for ask in asked:
        ask()
        vlm.runtime.check()
        assert reached(vlm.runtime, beside) <= counted(vlm) + slack
    assert 0 < vlm.stats()["features"]["url_bytes"] <= 192 << 10
    vlm.clear()
    vlm.runtime.check()
    features = vlm.stats()["features"]
    assert [features[name] for name in ("url_bytes", "pixel_bytes", "name_bytes", "bytes")] == [
        0
    ] * 4


@pytest.mark.parametrize("tells", ["ETag", "Last-Modified", ""])
def test_an_address_is_asked_in_every_call(small: Any, site: Site, tells: str) -> None:
    site.tells = tells
    first = small.ask(site.url(0), "What?", max_new_tokens=4)
    again = small.ask(site.url(0), "What?", max_new_tokens=4)
    assert again.tokens == first.tokens and again.usage.images_encoded == 0
    assert site.sent == {0: 1 if tells else 2}
    site.seeds[0] = 77
    assert small.ask(site.url(0), "What?", max_new_tokens=4).usage.images_encoded == 1
    assert small.encode(site.url(0)).key == small.encode(noise(77)).key
    assert small.encode([site.url(0)])[0].key == small.encode(noise(77)).key
    assert small.session().ask("What?", [site.url(0)], max_new_tokens=1).usage.images_encoded == 0


def test_a_session_keeps_what_it_saw_and_says_so(small: Any, site: Site) -> None:
    chat = small.session()
    assert not chat.ask("What?", [site.url(0)], max_new_tokens=1).report.notes
    site.seeds[0] = 77
    reply = chat.ask("What now?", max_new_tokens=1)
    assert reply.usage.images_encoded == 0 and reply.usage.cached_tokens
    assert reply.report.notes == [f"kept as first seen, and not read again: {site.url(0)}"]
    assert chat.ask("And this?", [site.url(0)], max_new_tokens=1).usage.images_encoded == 1


def test_tenants_fetch_for_themselves(small: Any, site: Site) -> None:
    for tenant in ("a", "b"):
        small.encode(site.url(0), tenant=tenant)
    assert site.sent == {0: 2}
    assert small.stats("a")["features"]["url_bytes"] > 0
    small.clear(tenant="a")
    assert not small.stats("a")["features"]["url_bytes"]
    assert small.stats("b")["features"]["url_bytes"] > 0


def test_a_url_that_cannot_be_fetched_leaves_nothing(small: Any) -> None:
    with pytest.raises(ImageError, match="could not be fetched"):
        small.encode("http://127.0.0.1:9/nothing.png")
    assert counted(small) == 0


def test_what_urls_gave_expires_and_endless_ones_are_not_kept(site: Site) -> None:
    caches = MediaCaches.of(1 << 20, ttl=100.0)
    shelf = caches.downloads
    assert caches.fetch("", f"{site.url(1)}?{'x' * 10_000}") == noise(1) and not shelf.nbytes
    caches.fetch("", site.url(1))
    one = shelf.nbytes
    shelf._clock = lambda: 1e12  # type: ignore[method-assign]
    assert one and shelf.get("", site.url(1)) is None
    caches.fetch("", site.url(2))  # and what nobody asks for any more goes too
    assert abs(shelf.nbytes - one) < 1000


def test_counts_are_kept_of_the_latest_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_TENANTS", 10)
    counts = Counts()
    for number in range(100):
        counts.count(f"tenant {number}", "hits")
        counts.count("", "hits")
    assert len(counts._of) == 10 and counts.of("")["hits"] == 100


@pytest.mark.parametrize("budget", [600_000, 2_000_000, 5_000_000])
def test_snapshots_and_idle_lanes_share_one_budget(demo_parts: dict[str, Any], budget: int) -> None:
    with ks.wrap(*demo_parts["demo"], cache_budget=budget) as vlm:
        for number in range(8):
            words = f"Tell me more about {number}. " * (20 + 10 * number)
            vlm.chat([turn(words)], max_new_tokens=2)
            told = vlm.stats()["prefix"]
            assert told["bytes"] + told["lane_bytes"] <= told["budget"] == budget
            vlm.runtime.check()
