"""What a router measures about the requests of its users, and about all legs between the workers.

The canary's requests are none of its users', its legs are legs like others.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from protocol.errors import SplitserveError
from protocol.generation import Receipt
from protocol.ports import Clock
from router.answers import Piece
from router.ports import LocalReason

PREFIX = "splitserve_"

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_LONG = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class RouterMetrics:
    """A router's own registry. Names and meanings follow vLLM's where they are the same."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        histogram, counter, gauge = self._histogram, self._counter, self._gauge
        self.ttft_s = histogram("time_to_first_token_seconds", "From arrival to the first token", _TTFT)
        self.itl_s = histogram("inter_token_latency_seconds", "Between two tokens of a choice", _PER_TOKEN)
        self.tpot_s = histogram(
            "request_time_per_output_token_seconds", "A choice's mean time per later token", _PER_TOKEN
        )
        self.e2e_s = histogram("e2e_request_latency_seconds", "From arrival to the last token", _LONG)
        self.queue_s = histogram(
            "request_queue_time_seconds", "Waits for a place in flight and for both engines", _QUEUE
        )
        self.router_queue_s = histogram(
            "request_router_queue_time_seconds", "Wait for a place in flight", _QUEUE
        )
        self.successes = counter("request_success", "Requests that ended well", "finished_reason")
        self.failures = counter("request_failure", "Requests that ended with an error", "error")
        self.retries = counter("request_retries", "Further legs after a failure at a worker", "error")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that ended well")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens of those that were cached")
        self.generation_tokens = counter("generation_tokens", "Tokens given to clients")
        self.resumes = counter("request_resumes", "Legs whose client had tokens already")
        self.reoffers = counter("ticket_reoffers", "Tickets offered to another decode worker")
        self.local_prefills = counter("local_prefills", "Prompts that decode workers compute", "reason")
        self.credit_wait_s = histogram(
            "request_credit_wait_seconds", "Waits of legs for a decode worker's credit", _QUEUE
        )
        self.handover_s = histogram(
            "request_handover_seconds", "From the first token to the decode worker's first", _TTFT
        )
        self.responses = counter("http_responses", "HTTP responses given", "path", "status")
        self.running = gauge("num_requests_in_flight", "Requests at the workers now")
        self.waiting = gauge("num_requests_queued", "Requests that wait for a place now")
        self.waiting_for_credit = gauge("num_requests_waiting_for_credit", "Legs that wait for credit now")
        self.workers = gauge("num_usable_workers", "Workers that can take requests now", "pool")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)


class LegMetrics:
    """The `LegObserver` that counts."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def retried(self, error: SplitserveError) -> None:
        self._metrics.retries.labels(type(error).__name__).inc()

    def resumed(self) -> None:
        self._metrics.resumes.inc()

    def reoffered(self) -> None:
        self._metrics.reoffers.inc()

    def computed_locally(self, reason: LocalReason) -> None:
        self._metrics.local_prefills.labels(reason.value).inc()

    def waited_for_credit(self, seconds: float) -> None:
        self._metrics.credit_wait_s.observe(seconds)

    def handed_over(self, seconds: float) -> None:
        self._metrics.handover_s.observe(seconds)


@dataclass(slots=True)
class _ChoiceTimes:
    first_s: float
    last_s: float
    num_tokens: int = 0


class RequestTimer:
    """Measures one request."""

    def __init__(self, metrics: RouterMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._arrived = clock()
        self._choices: dict[int, _ChoiceTimes] = {}
        self._has_ended = False
        self._router_queue_s = self._prefill_queue_s = self._decode_queue_s = 0.0

    def admitted(self) -> None:
        self._router_queue_s = self._clock() - self._arrived
        self._metrics.router_queue_s.observe(self._router_queue_s)

    def waited(self, receipt: Receipt) -> None:
        """What a worker says about the wait until the request had blocks; of several legs the longest."""
        self._prefill_queue_s = max(self._prefill_queue_s, receipt.prefill_queue_s)
        self._decode_queue_s = max(self._decode_queue_s, receipt.decode_queue_s)

    def tokens(self, num_tokens: int, index: int = 0) -> None:
        """So many tokens of a choice have come now."""
        if not num_tokens:
            return
        now = self._clock()
        if not self._choices:
            self._metrics.ttft_s.observe(now - self._arrived)
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _ChoiceTimes(now, now)
        else:
            self._metrics.itl_s.observe((now - choice.last_s) / num_tokens)
        choice.last_s = now
        choice.num_tokens += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)

    def finished(self, last: Piece) -> None:
        """All choices have ended, with this piece of the one that took longest."""
        self._has_ended = True
        self._metrics.successes.labels(last.finish_reason or "").inc()
        self._metrics.prompt_tokens.inc(last.usage.num_prompt_tokens)
        self._metrics.cached_tokens.inc(last.usage.num_cached_tokens)
        self._metrics.e2e_s.observe(self._clock() - self._arrived)
        self._metrics.queue_s.observe(self._router_queue_s + self._prefill_queue_s + self._decode_queue_s)
        for choice in self._choices.values():
            if choice.num_tokens > 1:
                self._metrics.tpot_s.observe((choice.last_s - choice.first_s) / (choice.num_tokens - 1))

    def failed(self, error: SplitserveError) -> None:
        """Counts unless the request has finished: then only the client's reading of it failed."""
        if not self._has_ended:
            self._has_ended = True
            self._metrics.failures.labels(type(error).__name__).inc()
