"""How hard a worker is pressed, by its engine's counters in a time of our own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engine import EngineStats
from protocol.histogram import StepHistograms
from protocol.signals import StageSignals
from rpc.stage_meter import StageMeter


@dataclass
class Worker:
    """An engine that works as told, looked at every second."""

    now: float = 100.0
    num_waiting_tokens: int = 0
    num_demanded_blocks: int = 0
    blocks_free: int = 40
    steps: StepHistograms = field(default_factory=StepHistograms)

    def __post_init__(self) -> None:
        self.meter = StageMeter(lambda: self.stats, lambda: self.num_demanded_blocks, lambda: self.now)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting_tokens=self.num_waiting_tokens,
            blocks_total=40,
            blocks_free=self.blocks_free,
            steps=self.steps.snapshot(),
        )

    def work(self, seconds: int, busy: float, rate: float) -> StageSignals:
        """Compute `rate` tokens per second of computing, for a share `busy` of the time."""
        for _ in range(seconds):
            self.now += 1.0
            if busy:
                num_tokens = round(rate * busy)
                self.steps.observe(
                    num_seqs=1, num_tokens=num_tokens, schedule_s=0.0, execute_s=busy, apply_s=0.0
                )
            self.meter.look()
        return self.meter.signals()


def test_a_worker_that_never_worked_is_not_pressed() -> None:
    worker = Worker()
    assert worker.meter.signals() == StageSignals()
    worker.num_waiting_tokens = 1000  # nobody knows yet how long they take
    assert worker.work(3, busy=0.0, rate=0.0) == StageSignals()


def test_queue_is_told_in_seconds_at_the_rate_of_computing_not_of_time() -> None:
    """A worker that is idle most of the time is not slow."""
    worker = Worker()
    worker.work(30, busy=0.2, rate=500)
    worker.num_waiting_tokens = 1000
    signals = worker.meter.signals()
    assert signals.queue_wait_s == pytest.approx(2.0)
    assert signals.busy == pytest.approx(0.2, abs=0.01)


def test_busy_share_and_rate_follow_within_seconds_and_fade_when_work_ends() -> None:
    worker = Worker()
    worker.work(30, busy=0.9, rate=100)
    worker.num_waiting_tokens = 100
    assert worker.meter.signals().queue_wait_s == pytest.approx(1.0, abs=0.05)
    assert worker.work(20, busy=0.9, rate=200).queue_wait_s == pytest.approx(0.5, abs=0.05)
    assert worker.work(5, busy=0.0, rate=0).busy == pytest.approx(0.9 / 2.718, abs=0.05)
    assert worker.meter.signals().queue_wait_s == pytest.approx(0.5, abs=0.05)  # no work changes no rate


def test_a_step_of_many_seconds_counts_for_all_of_them() -> None:
    worker = Worker()
    worker.work(20, busy=0.0, rate=0)
    worker.now += 10.0
    worker.steps.observe(num_seqs=1, num_tokens=10, schedule_s=0.0, execute_s=10.0, apply_s=0.0)
    worker.meter.look()
    assert worker.meter.signals().busy == pytest.approx(1 - 1 / 2.718**2, abs=0.02)


def test_blocks_are_told_as_shares() -> None:
    worker = Worker(blocks_free=10, num_demanded_blocks=60)
    signals = worker.meter.signals()
    assert (signals.block_use, signals.block_demand) == (0.75, 1.5)
