"""A new replica's time to ready, and where it went."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from rpc import StartupClock, StartupCollector
from rpc.startup import process_age_s


def test_phases_add_up_to_the_time_since_the_process_began() -> None:
    ages_s = iter((4.0, 4.5, 10.0))
    clock = StartupClock(lambda: next(ages_s))
    registry = CollectorRegistry()
    registry.register(StartupCollector(clock))
    clock.end("imports")
    clock.end("weights")
    assert registry.get_sample_value("splitserve_time_to_ready_seconds") is None
    clock.end("listen")
    assert registry.get_sample_value("splitserve_time_to_ready_seconds") == 10.0
    seconds = {
        phase: registry.get_sample_value("splitserve_startup_phase_seconds", {"phase": phase})
        for phase in clock.phases
    }
    assert seconds == {"imports": 4.0, "weights": 0.5, "listen": 5.5}


def test_a_worker_that_is_ready_stays_so() -> None:
    ages_s = iter((1.0, 2.0))
    clock = StartupClock(lambda: next(ages_s))
    clock.end("listen")
    clock.end("listen")
    assert clock.ready_after_s == 1.0


def test_a_process_has_an_age() -> None:
    assert 0 < process_age_s() < 1e6
