"""Where does a worker's time to ready go, from the start of its process?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import psutil
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

LAST_PHASE = "listen"
"""Ends when the worker serves: `WorkerShell.start` sees to that."""


def process_age_s() -> float:
    """Seconds since this process was started, or forked."""
    return max(0.0, time.time() - float(psutil.Process().create_time()))


class StartupClock:
    """Phases one after the other; the first begins with the process. Used by one thread at a time."""

    def __init__(self, age_s: Callable[[], float] = process_age_s) -> None:
        self._age_s = age_s
        self._phases: dict[str, float] = {}
        self._ended_at_s = 0.0

    def end(self, phase: str) -> None:
        """What was done since the end of the phase before was `phase`. A worker that is ready stays so."""
        if LAST_PHASE in self._phases:
            return
        now_s = self._age_s()
        self._phases[phase] = max(0.0, now_s - self._ended_at_s)
        self._ended_at_s = now_s

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds by phase, in order."""
        return self._phases

    @property
    def ready_after_s(self) -> float | None:
        """All of them together; None until the last one has ended."""
        return sum(self._phases.values()) if LAST_PHASE in self._phases else None


class StartupCollector(Collector):
    """What a clock measured; nothing before its worker is ready."""

    def __init__(self, clock: StartupClock) -> None:
        self._clock = clock

    def describe(self) -> list[Metric]:
        """Nothing in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        ready_after_s = self._clock.ready_after_s
        if ready_after_s is None:
            return
        yield GaugeMetricFamily(
            "splitserve_time_to_ready_seconds", "Start of the process until it serves", value=ready_after_s
        )
        family = GaugeMetricFamily(
            "splitserve_startup_phase_seconds", "Parts of the time to ready", labels=["phase"]
        )
        for phase, seconds in self._clock.phases.items():
            family.add_metric([phase], seconds)
        yield family
