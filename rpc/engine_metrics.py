"""Which numbers about its engine does a worker of either role expose? vLLM's, under vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.histogram import HistogramSnapshot
from protocol.membership import WorkerRecord
from protocol.signals import StageSignals
from rpc.engine_link import EngineStats

PREFIX = "splitserve_"


class EngineCollector(Collector):
    """Reads the engine's statistics at scrape time. All are cumulative: no step is missed."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        record: Callable[[], WorkerRecord],
        signals: Callable[[], StageSignals],
    ) -> None:
        self._stats = stats
        self._signals = signals
        self._record = record

    def describe(self) -> list[Metric]:
        """Nothing in advance: the engine may not run yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from self._states(stats)
        yield from self._memory(stats)
        yield from self._pressure(self._signals())
        yield from self._tokens(stats)
        yield from self._steps(stats)

    def _states(self, stats: EngineStats) -> Iterator[Metric]:
        num_queued = stats.num_waiting + stats.num_reserving
        yield self._gauge("num_requests_running", "Sequences that take part in steps", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for blocks", num_queued)
        yield self._gauge("num_requests_swapped", "Sequences swapped to the host", stats.num_swapped)
        yield self._gauge("num_requests_held", "Sequences that wait for their reader", stats.num_held)
        yield self._gauge("num_requests_fetching", "Sequences whose KV is being read", stats.num_fetching)

    def _pressure(self, signals: StageSignals) -> Iterator[Metric]:
        yield self._gauge(
            "queue_wait_seconds", "Until a prompt that comes now has its turn", signals.queue_wait_s
        )
        yield self._gauge("engine_busy_ratio", "Share of the time in which steps run, 0 to 1", signals.busy)
        yield self._gauge(
            "kv_block_demand_ratio", "KV blocks waited for, to all there are", signals.block_demand
        )

    def _memory(self, stats: EngineStats) -> Iterator[Metric]:
        used_blocks = stats.blocks_total - stats.blocks_free
        used_share = used_blocks / max(1, stats.blocks_total)
        yield self._gauge("kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1", used_share)
        yield self._gauge("kv_cache_num_blocks", "KV blocks there are", stats.blocks_total)
        preemptions = {"recompute": stats.num_preemptions_recompute, "swap": stats.num_preemptions_swap}
        yield self._counter("num_preemptions", "Sequences that lost their blocks", preemptions, "kind")
        swaps = {"in": stats.swapped_in_blocks, "out": stats.swapped_out_blocks}
        yield self._counter("kv_swap_blocks", "KV blocks moved from or to the host", swaps, "direction")

    def _tokens(self, stats: EngineStats) -> Iterator[Metric]:
        queries, hits = stats.prefix_queries_tokens, stats.prefix_hits_tokens
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache", {"": queries})
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache", {"": hits})
        sources = {
            "computed": stats.prompt_tokens_computed,
            "cached": stats.prompt_tokens_cached,
            "transferred": stats.prompt_tokens_transferred,
        }
        yield self._counter(
            "prompt_tokens_by_source", "Tokens by where their KV came from", sources, "source"
        )
        yield self._counter("sampled_tokens", "Tokens sampled by the engine", {"": stats.generated_tokens})

    def _steps(self, stats: EngineStats) -> Iterator[Metric]:
        steps = stats.steps
        num_seqs, num_tokens = {"": steps.num_seqs}, {"": steps.num_tokens}
        yield self._histogram("iteration_num_seqs", "Sequences per engine step", num_seqs)
        yield self._histogram("iteration_tokens_total", "Tokens computed per engine step", num_tokens)
        parts = {"schedule": steps.schedule_s, "execute": steps.execute_s, "apply": steps.apply_s}
        yield self._histogram("iteration_seconds", "Seconds of an engine step by part", parts, "part")

    def _labels(self, label: str = "") -> tuple[list[str], list[str]]:
        """Names of a family's labels, `label` of its own first, and the values of all others."""
        record = self._record()
        names = [label] if label else []
        return [*names, "role", "worker_id"], [record.role.value, record.identity.worker_id]

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        names, values = self._labels()
        family = GaugeMetricFamily(PREFIX + name, text, labels=names)
        family.add_metric(values, value)
        return family

    def _counter(self, name: str, text: str, by_label: Mapping[str, float], label: str = "") -> Metric:
        names, values = self._labels(label)
        family = CounterMetricFamily(PREFIX + name, text, labels=names)
        for key, value in by_label.items():
            family.add_metric([key, *values] if label else values, value)
        return family

    def _histogram(
        self, name: str, text: str, by_label: Mapping[str, HistogramSnapshot], label: str = ""
    ) -> Metric:
        names, values = self._labels(label)
        family = HistogramMetricFamily(PREFIX + name, text, labels=names)
        for key, snapshot in by_label.items():
            buckets = [(_text(bound), float(count)) for bound, count in snapshot.cumulated()]
            family.add_metric([key, *values] if label else values, buckets, snapshot.total)
        return family


def _text(bound: float) -> str:
    return "+Inf" if math.isinf(bound) else repr(float(bound))
