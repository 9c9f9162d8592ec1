"""What an engine has done, as Prometheus sees it: cumulative, so that no step is missed between scrapes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from worker_fakes import D0, FINGERPRINT

from engine import EngineStats
from protocol.histogram import SIZE_BOUNDS, Histogram, StepHistograms
from protocol.ids import Role
from protocol.membership import WorkerRecord
from protocol.signals import StageSignals
from rpc import EngineCollector

OWN = {"role": "decode", "worker_id": "d0"}
STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    num_reserving=1,
    num_swapped=4,
    num_held=5,
    num_fetching=6,
    blocks_total=100,
    blocks_free=25,
    num_preemptions_recompute=7,
    num_preemptions_swap=8,
    swapped_in_blocks=9,
    swapped_out_blocks=10,
    prefix_queries_tokens=1000,
    prefix_hits_tokens=600,
    prompt_tokens_computed=11,
    prompt_tokens_cached=12,
    prompt_tokens_transferred=13,
    generated_tokens=14,
)


@dataclass(slots=True)
class Page:
    """A registry with one engine's numbers."""

    stats: EngineStats = STATS
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        record = WorkerRecord(D0, Role.DECODE, "10.0.0.1:1", FINGERPRINT, 100)
        self.registry.register(EngineCollector(lambda: self.stats, lambda: record, StageSignals))

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"splitserve_{name}", OWN | labels)


def steps_of(num_steps: int) -> StepHistograms:
    steps = StepHistograms()
    for n in range(1, num_steps + 1):
        steps.observe(num_seqs=n, num_tokens=10 * n, schedule_s=1e-5, execute_s=0.02, apply_s=2e-5)
    return steps


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("num_requests_running", {}, 3),
        ("num_requests_waiting", {}, 3),
        ("num_requests_swapped", {}, 4),
        ("num_requests_held", {}, 5),
        ("num_requests_fetching", {}, 6),
        ("kv_cache_usage_perc", {}, 0.75),
        ("kv_cache_num_blocks", {}, 100),
        ("num_preemptions_total", {"kind": "recompute"}, 7),
        ("num_preemptions_total", {"kind": "swap"}, 8),
        ("kv_swap_blocks_total", {"direction": "in"}, 9),
        ("kv_swap_blocks_total", {"direction": "out"}, 10),
        ("prefix_cache_queries_total", {}, 1000),
        ("prefix_cache_hits_total", {}, 600),
        ("prompt_tokens_by_source_total", {"source": "computed"}, 11),
        ("prompt_tokens_by_source_total", {"source": "cached"}, 12),
        ("prompt_tokens_by_source_total", {"source": "transferred"}, 13),
        ("sampled_tokens_total", {}, 14),
    ],
)
def test_every_statistic_has_its_metric(name: str, labels: dict[str, str], value: float) -> None:
    assert Page().value(name, **labels) == value


def test_steps_are_counted_by_size_and_time() -> None:
    page = Page()
    page.stats = EngineStats(steps=steps_of(20).snapshot())
    assert page.value("iteration_num_seqs_count") == 20
    assert page.value("iteration_num_seqs_sum") == 210
    assert page.value("iteration_num_seqs_bucket", le="1.0") == 1
    assert page.value("iteration_num_seqs_bucket", le="8.0") == 8
    assert page.value("iteration_num_seqs_bucket", le="+Inf") == 20
    assert page.value("iteration_tokens_total_sum") == 2100
    assert page.value("iteration_seconds_sum", part="execute") == pytest.approx(0.4)
    assert page.value("iteration_seconds_bucket", part="schedule", le="1e-05") == 20
    assert page.value("iteration_seconds_bucket", part="apply", le="1e-05") == 0
    assert page.value("iteration_seconds_bucket", part="execute", le="0.01") == 0
    assert page.value("iteration_seconds_bucket", part="execute", le="0.025") == 20


def test_engine_that_has_not_run_shows_empty_histograms_of_the_same_buckets() -> None:
    page = Page()
    page.stats = EngineStats(steps=StepHistograms().snapshot())
    assert page.value("iteration_num_seqs_count") == 0
    assert page.value("iteration_num_seqs_bucket", le="16384.0") == 0


def test_page_is_valid_and_keeps_its_types() -> None:
    page = Page()
    page.stats = EngineStats(steps=steps_of(3).snapshot())
    families = text_string_to_metric_families(generate_latest(page.registry).decode())
    types = {family.name: family.type for family in families}
    assert types["splitserve_iteration_tokens_total"] == "histogram"
    assert types["splitserve_num_preemptions"] == "counter"
    assert set(types.values()) == {"counter", "gauge", "histogram"}


def test_value_on_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1, 2, 4))
    for value in (0, 1, 1.5, 2, 4, 4.5, 100):
        histogram.observe(value)
    snapshot = histogram.snapshot()
    assert snapshot.counts == (2, 2, 1, 2)
    assert snapshot.total == 113
    assert snapshot.cumulated() == [(1, 2), (2, 4), (4, 5), (float("inf"), 7)]


def test_snapshot_does_not_change_afterwards() -> None:
    histogram = Histogram(SIZE_BOUNDS)
    before = histogram.snapshot()
    histogram.observe(5)
    assert sum(before.counts) == 0
    assert sum(histogram.snapshot().counts) == 1
