"""Which numbers does a decode worker expose beside its engine's?"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from protocol.errors import SplitserveError
from protocol.generation import Receipt

FETCH_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class DecodeMetrics:
    """Counters of one worker, in its own registry."""

    def __init__(self, registry: CollectorRegistry, num_peers: Callable[[], int]) -> None:
        peers = Gauge("splitserve_kv_peers", "Owners this worker is connected to", registry=registry)
        peers.set_function(num_peers)
        self._bytes = Counter("splitserve_kv_transfer_bytes", "KV bytes fetched", registry=registry)
        self._blocks = Counter("splitserve_kv_transfer_blocks", "KV blocks fetched", registry=registry)
        self._transfer_failures = Counter(
            "splitserve_kv_transfer_failures", "Take-overs that failed", ["kind"], registry=registry
        )
        self._recomputes = Counter(
            "splitserve_kv_recomputes", "Prompts computed here instead", registry=registry
        )
        self._failures = Counter(
            "splitserve_request_failures", "Requests failed here", ["kind"], registry=registry
        )
        self._fetch_s = Histogram(
            "splitserve_kv_transfer_seconds",
            "Prefill complete and blocks allocated, until validated",
            registry=registry,
            buckets=FETCH_BUCKETS_S,
        )
        self._queue_s = Histogram(
            "splitserve_request_decode_queue_seconds", "Blocks asked for until allocated", registry=registry
        )

    def observe_fetch(self, receipt: Receipt, num_blocks: int) -> None:
        self._bytes.inc(receipt.fetched_bytes)
        self._blocks.inc(num_blocks)
        self._fetch_s.observe(receipt.fetch_s)

    def observe_queue(self, receipt: Receipt) -> None:
        self._queue_s.observe(receipt.decode_queue_s)

    def observe_transfer_failure(self, error: SplitserveError) -> None:
        self._transfer_failures.labels(type(error).__name__).inc()

    def observe_recompute(self) -> None:
        self._recomputes.inc()

    def observe_failure(self, error: SplitserveError) -> None:
        self._failures.labels(type(error).__name__).inc()
