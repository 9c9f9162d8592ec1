"""How many workers does a pool need? A pure function of what its workers say, and its state.

    signals of all workers ──need──> how many would be loaded as they should be
                           ──Stabilizer──> how many there shall be: quickly up, slowly down, not to and fro

Serve calls `ScalingPolicy` in its controller, some times a second. The module is sent there by value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.signals import StageSignals

SPARE = 0.75
"""Those that stay after a worker has gone are loaded to so much of their target at most."""
MAX_STEP_DOWN = 0.25
"""Share of the workers that may go at a time; one may always."""
SAMPLE_PERIOD_S = 0.5
_TINY = 1e-6


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """What is configured about one pool."""

    min_workers: int
    max_workers: int
    target_wait_s: float
    """Prefill: so long may a prompt wait that comes now."""
    target_use: float
    """Share of a worker's time (prefill) or KV blocks (decode) that may be in use."""
    upscale_delay_s: float
    downscale_delay_s: float

    def clamp(self, num_workers: int) -> int:
        return min(self.max_workers, max(self.min_workers, num_workers))


def prefill_need(signals: Sequence[StageSignals], rules: ScalingRules) -> float:
    """Workers that would have no more queue than they may, and no more work. 0 for no load."""
    queue = sum(each.queue_wait_s for each in signals) / rules.target_wait_s
    work = sum(each.busy for each in signals) / rules.target_use
    return max(queue, work)


def decode_need(signals: Sequence[StageSignals], rules: ScalingRules) -> float:
    """Workers that would have room for what runs and what waits for room. 0 for no load."""
    return sum(each.block_use + each.block_demand for each in signals) / rules.target_use


NEED = {"prefill": prefill_need, "decode": decode_need}


def recommended(need: float, num_workers: int, rules: ScalingRules) -> int:
    """By the present need alone. Between "too many" and "too few" there is room for noise."""
    if need > num_workers + _TINY:
        return rules.clamp(math.ceil(need - _TINY))
    return rules.clamp(min(num_workers, math.ceil(need / SPARE - _TINY)))


class Stabilizer:
    """Acts on what was recommended all along: for `upscale_delay_s` more workers, or for
    `downscale_delay_s` fewer. Its state is a list of (time, recommendation), oldest first."""

    def __init__(self, rules: ScalingRules) -> None:
        self._rules = rules

    def decide(
        self, history: Sequence[tuple[float, int]], now: float, num_workers: int, wanted: int
    ) -> tuple[int, list[tuple[float, int]]]:
        """The number of workers there shall be, and the history that goes with it.

        It begins with the present number, and does so again after each change: each step has its delay.
        """
        rules = self._rules
        kept = list(history) or [(now, num_workers)]
        if now - kept[-1][0] >= SAMPLE_PERIOD_S or wanted != kept[-1][1]:
            kept.append((now, wanted))
        target = num_workers
        if (fewest := _all_along(min, kept, now, rules.upscale_delay_s)) is not None:
            target = max(num_workers, fewest)
        if target == num_workers:
            most = _all_along(max, kept, now, rules.downscale_delay_s)
            if most is not None and most < num_workers:
                target = max(most, num_workers - max(1, int(num_workers * MAX_STEP_DOWN)))
        target = rules.clamp(target)
        if target != num_workers:
            return target, [(now, target)]
        longest_s = max(rules.upscale_delay_s, rules.downscale_delay_s)
        return target, _no_older_than(kept, now - longest_s)


def _all_along(
    extreme: Callable[[list[int]], int], history: Sequence[tuple[float, int]], now: float, window_s: float
) -> int | None:
    """The least or the most that was recommended over the whole window; None while it is not that old."""
    if now - history[0][0] < window_s:
        return None
    inside = [wanted for at, wanted in history if at > now - window_s]
    return extreme(inside or [history[-1][1]])


def _no_older_than(history: list[tuple[float, int]], since: float) -> list[tuple[float, int]]:
    """One entry at or before `since` stays, to tell that the window is full."""
    first = next((i for i, (at, _) in enumerate(history) if at > since), len(history))
    return history[max(0, first - 1) :]


class ScalingPolicy:
    """The policy of one pool, as Serve's `AutoscalingPolicy` takes it."""

    def __init__(self, role: str, **rules: Any) -> None:
        self._need = NEED[role]
        self._rules = ScalingRules(**rules)
        self._stabilizer = Stabilizer(self._rules)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context` is Serve's `AutoscalingContext`. Returns the target, and the next call's state."""
        num_workers = context.target_num_replicas
        signals = latest_signals(context.raw_metrics or {})
        if not signals:
            return num_workers, {}
        wanted = recommended(self._need(signals, self._rules), num_workers, self._rules)
        if len(signals) < num_workers:  # some start yet: they will take their share
            wanted = max(wanted, num_workers)
        history = context.policy_state.get("history", ())
        target, history = self._stabilizer.decide(history, context.current_time, num_workers, wanted)
        return target, {"history": history}


def latest_signals(metrics: Mapping[str, Mapping[Any, Sequence[Any]]]) -> list[StageSignals]:
    """What each worker said last. Of those that have not said everything yet, nothing."""
    by_worker: dict[Any, dict[str, float]] = {}
    for name in StageSignals.__slots__:
        for worker, series in metrics.get(name, {}).items():
            if series:
                by_worker.setdefault(worker, {})[name] = float(series[-1].value)
    return [
        StageSignals(**values)
        for values in by_worker.values()
        if len(values) == len(StageSignals.__slots__)
    ]
