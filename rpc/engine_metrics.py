"""Which numbers about its engine does a worker of either role expose? vLLM's, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.membership import WorkerRecord
from rpc.engine_link import EngineStats

PREFIX = "splitserve_"


class EngineCollector(Collector):
    """Reads the engine's statistics at scrape time."""

    def __init__(self, stats: Callable[[], EngineStats], record: Callable[[], WorkerRecord]) -> None:
        self._stats = stats
        self._record = record

    def describe(self) -> list[Metric]:
        """Nothing in advance: the engine may not run yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        used_blocks = stats.blocks_total - stats.blocks_free
        num_queued = stats.num_waiting + stats.num_reserving
        yield self._gauge("num_requests_running", "Sequences that take part in steps", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for blocks", num_queued)
        yield self._gauge("num_requests_held", "Sequences that wait for their reader", stats.num_held)
        yield self._gauge("num_requests_fetching", "Sequences whose KV is being read", stats.num_fetching)
        yield self._gauge(
            "kv_cache_usage_perc",
            "Used share of the KV blocks, 0 to 1",
            used_blocks / max(1, stats.blocks_total),
        )
        yield self._counter("num_preemptions", "Sequences pushed back to waiting", stats.num_preemptions)
        yield self._counter("prefix_cache_queries", "Tokens looked up", stats.prefix_queries_tokens)
        yield self._counter("prefix_cache_hits", "Tokens found cached", stats.prefix_hits_tokens)
        yield self._counter("prompt_tokens", "Prompt tokens computed", stats.prompt_tokens_computed)
        yield self._counter("generation_tokens", "Tokens generated", stats.generated_tokens)

    def _labels(self) -> tuple[list[str], list[str]]:
        record = self._record()
        return ["role", "worker_id"], [record.role.value, record.identity.worker_id]

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        names, values = self._labels()
        family = GaugeMetricFamily(PREFIX + name, text, labels=names)
        family.add_metric(values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        names, values = self._labels()
        family = CounterMetricFamily(PREFIX + name, text, labels=names)
        family.add_metric(values, value)
        return family
