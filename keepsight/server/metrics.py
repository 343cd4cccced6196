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
    """The metrics of one server."""

    def __init__(self) -> None:
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

    def watch(self, caches: Callable[[], Record], engine: _Stats) -> None:
        """Set the source of cache and scheduler states."""
        self.registry.register(_State(caches, engine))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _State(Collector):
    """Caches and scheduler, read at each scrape."""

    def __init__(self, caches: Callable[[], Record], engine: _Stats) -> None:
        self._caches, self._engine = caches, engine

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        caches = self._caches()
        size = GaugeMetricFamily("keepsight_cache_bytes", "Bytes held.", labels=["cache"])
        limit = GaugeMetricFamily(
            "keepsight_cache_budget_bytes", "Bytes allowed.", labels=["cache"]
        )
        for name, part in caches.items():
            if isinstance(part, dict) and isinstance(part.get("bytes"), int | float):
                size.add_metric([name], part["bytes"])
            if isinstance(part, dict) and isinstance(part.get("budget"), int | float):
                limit.add_metric([name], part["budget"])
        yield from (size, limit)
        yield from _of_store(caches.get("store"))
        evicted = caches.get("prefix", {}).get("evictions")
        if isinstance(evicted, int):
            gone = CounterMetricFamily("keepsight_cache_evictions", "Snapshots evicted.")
            gone.add_metric([], evicted)
            yield gone
        for name, value in self._engine().items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                gauge = GaugeMetricFamily(f"keepsight_engine_{name}", "Of the scheduler.")
                gauge.add_metric([], value)
                yield gauge


def _of_store(stats: Record | None) -> Iterator[Metric]:
    """What the store currently refuses, and what it has refused."""
    if stats is None:
        return
    state = GaugeMetricFamily("keepsight_store_state", "1 for what it is.", labels=["state"])
    state.add_metric([str(stats.get("state", "ok"))], 1)
    yield state
    refused = CounterMetricFamily("keepsight_store_refused", "Entries that were not written.")
    refused.add_metric([], stats.get("refused", 0))
    yield refused
