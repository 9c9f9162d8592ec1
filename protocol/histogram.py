"""How are values distributed? Cumulative histograms that one thread fills and another one reads.

A snapshot holds all that was ever observed, so that a reader who comes rarely misses nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SECONDS_BOUNDS = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """A histogram at one moment."""

    bounds: tuple[float, ...] = ()
    """Upper bounds of the buckets, inclusive, ascending; one more bucket is above them all."""
    counts: tuple[int, ...] = (0,)
    """Observations per bucket, not cumulated; one entry more than `bounds`."""
    total: float = 0.0
    """Sum of all observations."""

    def cumulated(self) -> list[tuple[float, int]]:
        """(upper bound, observations up to it), the last bound infinite: Prometheus' form."""
        num_so_far = 0
        buckets: list[tuple[float, int]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            num_so_far += count
            buckets.append((bound, num_so_far))
        return buckets


class Histogram:
    """Counts observations by size. Used by one thread; its snapshots by any."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class StepsSnapshot:
    """All computing steps of one engine so far."""

    num_seqs: HistogramSnapshot = HistogramSnapshot()
    num_tokens: HistogramSnapshot = HistogramSnapshot()
    schedule_s: HistogramSnapshot = HistogramSnapshot()
    execute_s: HistogramSnapshot = HistogramSnapshot()
    apply_s: HistogramSnapshot = HistogramSnapshot()


class StepHistograms:
    """What an engine's steps were like. Used by the engine's thread."""

    def __init__(self) -> None:
        self._num_seqs, self._num_tokens = Histogram(SIZE_BOUNDS), Histogram(SIZE_BOUNDS)
        self._schedule_s = Histogram(SECONDS_BOUNDS)
        self._execute_s = Histogram(SECONDS_BOUNDS)
        self._apply_s = Histogram(SECONDS_BOUNDS)

    def observe(
        self, *, num_seqs: int, num_tokens: int, schedule_s: float, execute_s: float, apply_s: float
    ) -> None:
        """Count one computing step."""
        self._num_seqs.observe(num_seqs)
        self._num_tokens.observe(num_tokens)
        self._schedule_s.observe(schedule_s)
        self._execute_s.observe(execute_s)
        self._apply_s.observe(apply_s)

    def snapshot(self) -> StepsSnapshot:
        return StepsSnapshot(
            self._num_seqs.snapshot(),
            self._num_tokens.snapshot(),
            self._schedule_s.snapshot(),
            self._execute_s.snapshot(),
            self._apply_s.snapshot(),
        )
