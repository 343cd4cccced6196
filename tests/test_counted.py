"""Law 7: bytes are counted. What outlives a call is on a shelf with a budget, or in the tree."""

from __future__ import annotations

import gc
import http.server
import io
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from models import picture, turn
from PIL import Image

import keepsight as ks
from keepsight.errors import ImageError, MediaChanged
from keepsight.formats.package import storage_bytes
from keepsight.media.caches import Downloads, MediaCaches
from keepsight.server.served_model import ServedModel
from keepsight.store import SharedMemoryCache, priority
from keepsight.store.tally import StoreCounters
from keepsight.system.accounts import under_salt


def noise(seed: int) -> bytes:
    """A picture of some 60 kB that no two seeds share."""
    pixels = np.random.default_rng(seed).integers(0, 256, (140, 140, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class Site:
    """Pictures by number on loopback; how often each was fetched."""

    def __init__(self) -> None:
        self.fetched: dict[int, int] = {}
        self.seeds: dict[int, int] = {}
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                number = int(self.path.strip("/"))
                site.fetched[number] = site.fetched.get(number, 0) + 1
                data = noise(site.seeds.get(number, number))
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

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
    with ks.wrap(*demo_parts["demo"], grain=16, vision_budget="3MiB", cache_budget="3MiB") as vlm:
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
    shelves = sum(features[name] for name in ("bytes", "pixel_bytes", "url_bytes", "name_bytes"))
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
        lambda: vlm.ask(site.url(1), "What?", exact=False, max_new_tokens=2),
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


def test_a_known_url_is_not_fetched_again_and_its_bytes_may_go(small: Any, site: Site) -> None:
    vlm = small
    first = vlm.ask(site.url(0), "What?", max_new_tokens=4)
    for number in range(1, 9):
        vlm.encode(site.url(number))
    shelves = vlm.runtime.caches
    shelves.downloads.clear("")
    again = vlm.ask(site.url(0), "What?", max_new_tokens=4)
    assert again.tokens == first.tokens and again.usage.images_encoded == 0
    assert site.fetched == dict.fromkeys(range(9), 1)
    shelves.packages.clear()
    vlm.runtime.tree.clear()
    assert vlm.ask(site.url(0), "What?", max_new_tokens=4).tokens == first.tokens
    assert site.fetched[0] == 2  # it had to be looked at again, and was the same


def test_a_url_that_gives_something_else_is_never_taken_for_what_it_was(
    small: Any, site: Site
) -> None:
    vlm = small
    chat = vlm.session()
    chat.ask("What?", [site.url(0)], max_new_tokens=1)
    site.seeds[0] = 77
    assert chat.ask("What now?", max_new_tokens=1).usage.images_encoded == 0
    vlm.runtime.caches.downloads.clear("")
    vlm.runtime.caches.packages.clear()
    vlm.runtime.tree.clear()
    with pytest.raises(MediaChanged, match="ask again"):
        chat.ask("And now?", max_new_tokens=1)
    given = vlm.encode(site.url(0))
    assert given.key == vlm.encode(noise(77)).key
    with pytest.raises(MediaChanged):  # and the conversation still means the first
        chat.ask("And now?", max_new_tokens=1)


def test_tenants_fetch_for_themselves(small: Any, site: Site) -> None:
    for tenant in ("a", "b"):
        small.encode(site.url(0), tenant=tenant)
    assert site.fetched == {0: 2}
    assert small.stats("a")["features"]["url_bytes"] > 0
    small.clear(tenant="a")
    assert not small.stats("a")["features"]["url_bytes"]
    assert small.stats("b")["features"]["url_bytes"] > 0


def test_a_url_that_cannot_be_fetched_leaves_nothing(small: Any) -> None:
    with pytest.raises(ImageError, match="could not be fetched"):
        small.encode("http://127.0.0.1:9/nothing.png")
    assert counted(small) == 0


def test_endless_urls_are_fetched_and_not_remembered() -> None:
    shelves = MediaCaches.of(1 << 20)
    downloads = Downloads(shelves.downloads, shelves.urls, fetch=lambda url: noise(1))
    url = "http://127.0.0.1/" + "x" * 10_000
    assert downloads.get(url) == noise(1) and downloads.source(url).decode().size == (140, 140)
    assert shelves.downloads.nbytes == shelves.urls.nbytes == 0


def test_what_urls_gave_expires() -> None:
    shelves = MediaCaches.of(1 << 20, ttl=100.0)
    downloads = Downloads(shelves.downloads, shelves.urls, fetch=lambda url: noise(1))
    downloads.source("http://127.0.0.1/1")
    for shared in (shelves.downloads, shelves.urls):
        assert shared.nbytes
        shared._clock = lambda: 1e12
        assert shared.get("", "http://127.0.0.1/1") is None
    downloads.source("http://127.0.0.1/2")  # and what nobody asks for any more goes too
    assert shelves.downloads.nbytes == len(noise(1))


def test_names_have_a_budget_of_their_own() -> None:
    names: SharedMemoryCache[str] = SharedMemoryCache(10_000, len)
    for number in range(300):
        names.put(f"tenant {number % 3}", str(number), "x" * 100)
        names.check()
    assert names.nbytes == 10_000 == sum(names.bytes_of(f"tenant {n}") for n in range(3))
    assert names.get("tenant 2", "299") and names.get("tenant 0", "0") is None
    names.forget("tenant 0", lambda name: name.startswith("x"))
    names.clear("tenant 1")
    assert names.nbytes == names.bytes_of("tenant 2") > 0
    names.check()


def test_a_tenant_over_its_quota_of_small_things_loses_its_own() -> None:
    shelf: SharedMemoryCache[str] = SharedMemoryCache(1000, len, quota=300)
    shelf.put("a", "first", "x" * 100)
    for number in range(9):
        shelf.put("b", str(number), "x" * 100)
        shelf.get("b", "0")
        shelf.check()
    assert shelf.get("a", "first") and shelf.get("b", "0") and shelf.get("b", "8")
    assert shelf.bytes_of("b") == 300
    shelf.put("b", "too large", "x" * 301)
    shelf.pop("b", "none")
    assert shelf.bytes_of("b") == 300
    salted = under_salt("b", "salt")
    shelf.put(salted, "key", "x" * 100)
    shelf.check()
    assert (shelf.bytes_of("b"), shelf.bytes_of(salted), shelf.get("a", "first")) == (
        200,
        100,
        "x" * 100,
    )
    shelf.clear(salted)
    shelf.put("b", "empty", "")
    shelf.check()
    assert shelf.bytes_of("b") == 200


def test_template_options_are_remembered_by_their_digest(demo: Any) -> None:
    subject = ServedModel(demo, "demo")
    subject.thinks = True
    for number in range(100):
        subject.opens_thinking({"enable_thinking": "x" * 100_000 + str(number)}, "ann")
    assert sum(map(sys.getsizeof, subject._opened)) < 20_000


def test_no_time_tells_which_template_options_another_tenant_has(
    demo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, rendered = ServedModel(demo, "demo"), list[Any]()
    subject.thinks = True
    monkeypatch.setattr(subject, "_prompt", lambda asked, options: rendered.append(options) or "")
    for tenant in ("ann", "ann", "bob", "bob"):
        subject.opens_thinking({"enable_thinking": "a secret"}, tenant)
    assert len(rendered) == 2  # the first time of each


def test_counts_are_kept_of_the_latest_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority.trim, "__defaults__", (10,))
    tally = StoreCounters()
    for number in range(100):
        tally.count(f"tenant {number}", "hits")
        tally.count("", "hits")
    assert len(tally.counts) == 10 and tally.counts[""]["hits"] == 100


@pytest.mark.parametrize("budget", [600_000, 2_000_000, 5_000_000])
def test_snapshots_and_idle_lanes_share_one_budget(demo_parts: dict[str, Any], budget: int) -> None:
    with ks.wrap(*demo_parts["demo"], cache_budget=budget) as vlm:
        for number in range(8):
            words = f"Tell me more about {number}. " * (20 + 10 * number)
            vlm.chat([turn(words)], max_new_tokens=2)
            told = vlm.stats()["prefix"]
            assert told["bytes"] + told["lane_bytes"] <= told["budget"] == budget
            vlm.runtime.check()
