"""Which numbers does a prefill worker expose beside its engine's?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from protocol.errors import SplitserveError
from protocol.generation import Receipt
from protocol.handoff import Verdict


class PrefillMetrics:
    """Counters of one worker, in its own registry."""

    def __init__(self, registry: CollectorRegistry, num_held: Callable[[], int]) -> None:
        held = Gauge("splitserve_held_tickets", "Tickets whose blocks are held", registry=registry)
        held.set_function(num_held)
        self._waiting = Gauge(
            "splitserve_waiting_readers", "Readers that wait for progress now", registry=registry
        )
        self._granted = Counter("splitserve_tickets_granted", "Tickets handed out", registry=registry)
        self._early = Counter(
            "splitserve_tickets_early", "Tickets handed out before the prefill was done", registry=registry
        )
        self._orphaned = Counter(
            "splitserve_lease_orphaned", "Leases cut short since the reader's call broke", registry=registry
        )
        self._fenced = Counter(
            "splitserve_readers_fenced", "Releases after another reader's valid one", registry=registry
        )
        self._expired = Counter("splitserve_lease_expired", "Leases that lapsed", registry=registry)
        self._verdicts = Counter(
            "splitserve_ticket_releases", "Releases by readers", ["verdict"], registry=registry
        )
        self._failures = Counter(
            "splitserve_request_failures", "Requests failed here", ["kind"], registry=registry
        )
        self._queue_s = Histogram(
            "splitserve_request_prefill_queue_seconds", "Submission until blocks", registry=registry
        )
        self._prefill_s = Histogram(
            "splitserve_request_prefill_time_seconds", "Blocks until first token", registry=registry
        )

    def observe_prefill(self, receipt: Receipt) -> None:
        self._queue_s.observe(receipt.prefill_queue_s)
        self._prefill_s.observe(receipt.prefill_s)

    def observe_failure(self, error: SplitserveError) -> None:
        self._failures.labels(type(error).__name__).inc()

    def observe_grant(self, *, is_early: bool) -> None:
        self._granted.inc()
        if is_early:
            self._early.inc()

    def waiting_reader(self) -> AbstractContextManager[None]:
        """For as long as a reader waits."""
        return self._waiting.track_inprogress()

    def observe_orphan(self) -> None:
        self._orphaned.inc()

    def observe_fenced_reader(self) -> None:
        self._fenced.inc()

    def observe_expiry(self) -> None:
        self._expired.inc()

    def observe_verdict(self, verdict: Verdict) -> None:
        self._verdicts.labels(verdict.value).inc()
