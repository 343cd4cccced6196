"""Metrics for Prometheus: counters of requests and tokens, times, and the present state of the
caches.

Names follow other engines: queries and hits of the prefix cache are counted in tokens, those of the
multimodal cache in images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from keepsight.kinds import Record
from keepsight.report import Report, Usage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_Stats = Callable[[], Mapping[str, object]]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    def __init__(self, caches: Callable[[], Record], engine: _Stats) -> None:
        """`caches`, `engine`: what tells the states of caches and scheduler."""
        self.registry = CollectorRegistry()
        make: Record = {"namespace": "keepsight", "registry": self.registry}
        self._requests = Counter("requests", "Requests.", ["path", "status"], **make)
        self.active = Gauge("requests_active", "Requests being answered.", **make)
        self._prompt = Counter("prompt_tokens", "Tokens of prompts.", **make)
        self._completion = Counter("generation_tokens", "Tokens of answers.", **make)
        self._queries = Counter("prefix_cache_queries", "Prompt tokens looked up.", **make)
        self._hits = Counter("prefix_cache_hits", "Prompt tokens reused.", **make)
        self._mm_queries = Counter("mm_cache_queries", "Images looked up.", **make)
        self._mm_hits = Counter("mm_cache_hits", "Images that were not encoded again.", **make)
        self.hung_up = Counter("requests_cancelled", "Clients that hung up.", **make)
        times: Record = {**make, "buckets": _SECONDS}
        self._first = Histogram("time_to_first_token_seconds", "Until the first token.", **times)
        self._whole = Histogram("request_duration_seconds", "Until the last byte.", **times)
        self._queued = Histogram("request_queue_time_seconds", "Until work begins.", **times)
        self.registry.register(_State(caches, engine))

    def finished(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._whole.observe(seconds)

    def answered(self, usage: Usage, report: Report) -> None:
        self._prompt.inc(usage.prompt_tokens)
        self._completion.inc(usage.completion_tokens)
        self._queries.inc(usage.prompt_tokens)
        self._hits.inc(usage.cached_tokens)
        self._mm_queries.inc(usage.images)
        self._mm_hits.inc(usage.images_reused)
        times = report.milliseconds
        if "first_token" in times:
            self._first.observe(times["first_token"] / 1e3)
        if "queued" in times:
            self._queued.observe(times["queued"] / 1e3)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _gauge(name: str, about: str, rows: Mapping[str, object], label: str = "cache") -> Metric:
    made = GaugeMetricFamily(f"keepsight_{name}", about, labels=[label])
    for row, value in rows.items():
        if isinstance(value, int | float):
            made.add_metric([row], value)
    return made


def _count(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"keepsight_{name}", about, value=value)


class _State(Collector):
    """Caches and scheduler, read at each scrape."""

    def __init__(self, caches: Callable[[], Record], engine: _Stats) -> None:
        self._caches, self._engine = caches, engine

    def describe(self) -> Iterator[Metric]:
        return iter(())  # nothing before the first scrape

    def collect(self) -> Iterator[Metric]:
        caches = self._caches()
        parts = {name: part for name, part in caches.items() if isinstance(part, dict)}
        held = {name: part.get("bytes") for name, part in parts.items()}
        allowed = {name: part.get("budget") for name, part in parts.items()}
        yield _gauge("cache_bytes", "Bytes held.", held)
        yield _gauge("cache_budget_bytes", "Bytes allowed.", allowed)
        if (store := parts.get("store")) is not None:
            state = {str(store.get("state", "ok")): 1}
            yield _gauge("store_state", "1 for what it is.", state, "state")
            refused = store.get("refused", 0)
            yield _count("store_refused", "Entries that were not written.", refused)
        if (evicted := parts.get("prefix", {}).get("evictions")) is not None:
            yield _count("cache_evictions", "Snapshots evicted.", evicted)
        for name, value in self._engine().items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield GaugeMetricFamily(f"keepsight_engine_{name}", "Of the scheduler.", value)
