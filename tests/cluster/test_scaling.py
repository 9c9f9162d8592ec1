"""The scaling policy follows the load and nothing else: quickly up, slowly down, not to and fro."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scaling import (
    ScalingPolicy,
    ScalingRules,
    Stabilizer,
    decode_need,
    latest_signals,
    prefill_need,
    recommended,
)
from protocol.signals import StageSignals

RULES = ScalingRules(
    min_workers=1,
    max_workers=8,
    target_wait_s=2.0,
    target_use=0.8,
    upscale_delay_s=5.0,
    downscale_delay_s=60.0,
)
TICK_S = 0.5


@pytest.mark.parametrize(
    ("waits_s", "busy", "need"),
    [
        ([], [], 0.0),
        ([0.0], [0.0], 0.0),
        ([2.0], [0.8], 1.0),
        ([0.0], [0.4], 0.5),
        ([6.0], [1.0], 3.0),  # the queue says more than the work
        ([0.1, 0.1], [1.0, 1.0], 2.5),  # all work without a pause: more, though nobody waits yet
        ([8.0, 0.0], [0.8, 0.8], 4.0),  # one long queue counts, however short the others' are
    ],
)
def test_prefill_workers_are_needed_for_the_queue_or_for_the_work(
    waits_s: list[float], busy: list[float], need: float
) -> None:
    signals = [StageSignals(queue_wait_s=w, busy=b) for w, b in zip(waits_s, busy, strict=True)]
    assert prefill_need(signals, RULES) == pytest.approx(need)


@pytest.mark.parametrize(
    ("uses", "demands", "need"),
    [
        ([], [], 0.0),
        ([0.8], [0.0], 1.0),
        ([0.4, 0.4], [0.0, 0.0], 1.0),
        ([0.5], [1.1], 2.0),  # a long prompt that finds no room, though half is free
        ([1.0, 1.0], [0.4, 0.8], 4.0),
    ],
)
def test_decode_workers_are_needed_for_the_blocks_in_use_and_those_waited_for(
    uses: list[float], demands: list[float], need: float
) -> None:
    signals = [StageSignals(block_use=u, block_demand=d) for u, d in zip(uses, demands, strict=True)]
    assert decode_need(signals, RULES) == pytest.approx(need)


@pytest.mark.parametrize(
    ("need", "present", "wanted"),
    [
        (0.0, 1, 1),
        (0.0, 4, 1),
        (1.0, 1, 1),
        (1.01, 1, 2),
        (3.0, 1, 3),
        (99.0, 1, 8),
        (1.6, 2, 2),  # the one that stays would be over its target
        (0.8, 2, 2),  # it would be too near to it
        (0.75, 2, 1),
        (2.9, 4, 4),
        (2.2, 4, 3),
    ],
)
def test_recommendation_leaves_room_between_too_many_and_too_few(
    need: float, present: int, wanted: int
) -> None:
    assert recommended(need, present, RULES) == wanted


@settings(deadline=None)
@given(need=st.floats(0, 20), present=st.integers(1, 8))
def test_what_was_recommended_is_not_taken_back_under_the_same_load(need: float, present: int) -> None:
    """Else the number would go to and fro under a load that does not change."""
    once = recommended(need, present, RULES)
    assert recommended(need, once, RULES) == once


@dataclass
class Pool:
    """A pool that Serve's controller scales by our policy, in virtual time."""

    need: Callable[[float], float]
    """Present load, in workers, by the time."""
    rules: ScalingRules = RULES
    num_workers: int = 1

    def run(self, seconds: float) -> list[tuple[float, int]]:
        """(time, number of workers) of each change."""
        stabilizer, history = Stabilizer(self.rules), list[tuple[float, int]]()
        changes = []
        for tick in range(int(seconds / TICK_S)):
            now = tick * TICK_S
            wanted = recommended(self.need(now), self.num_workers, self.rules)
            target, history = stabilizer.decide(history, now, self.num_workers, wanted)
            if target != self.num_workers:
                self.num_workers = target
                changes.append((now, target))
        assert len(history) <= 2 + self.rules.downscale_delay_s / TICK_S
        return changes


def test_a_step_of_load_is_followed_up_within_seconds_and_down_within_minutes() -> None:
    changes = Pool(lambda now: 2.6 if 10 <= now < 300 else 0.1).run(600)
    assert [number for _, number in changes] == [3, 2, 1]
    assert [at for at, _ in changes] == pytest.approx([15, 360, 420], abs=TICK_S)


def test_growing_load_is_followed_step_by_step() -> None:
    numbers = [number for _, number in Pool(lambda now: now / 30).run(240)]
    assert numbers == [2, 3, 4, 5, 6, 7, 8]


def test_a_peak_that_is_shorter_than_the_delay_changes_nothing() -> None:
    assert Pool(lambda now: 5.0 if now % 20 < 4 else 0.5).run(600) == []


def test_a_pause_that_is_shorter_than_the_delay_changes_nothing() -> None:
    pool = Pool(lambda now: 0.0 if now % 60 < 50 else 3.5, num_workers=4)
    assert pool.run(1200) == []


def test_of_many_workers_a_quarter_goes_at_a_time() -> None:
    pool = Pool(lambda now: 0.0, rules=replace(RULES, max_workers=40), num_workers=40)
    assert [number for _, number in pool.run(300)] == [30, 23, 18, 14]


@settings(max_examples=30, deadline=None)
@given(
    level=st.floats(0.1, 7.5),
    noise=st.floats(0, 0.1),
    seed=st.integers(0, 10_000),
    present=st.integers(1, 8),
)
def test_a_noisy_load_ends_up_with_enough_workers_and_no_flapping(
    level: float, noise: float, seed: int, present: int
) -> None:
    """Ten minutes of a load that trembles by up to 10 %: the number settles and does not come back."""
    rng = random.Random(seed)
    pool = Pool(lambda now: level * rng.uniform(1 - noise, 1 + noise), num_workers=present)
    numbers = [present, *(number for _, number in pool.run(600))]
    assert numbers in (sorted(numbers), sorted(numbers, reverse=True))
    assert pool.num_workers >= math.floor(level * (1 - noise))
    assert pool.num_workers <= math.ceil(level * (1 + noise) / 0.75)


@settings(max_examples=30, deadline=None)
@given(needs=st.lists(st.floats(0, 30), min_size=1, max_size=200), present=st.integers(1, 8))
def test_the_bounds_hold_and_each_step_has_its_delay(needs: list[float], present: int) -> None:
    pool = Pool(lambda now: needs[int(now / TICK_S) % len(needs)], num_workers=present)
    before, last_at = present, 0.0
    for at, number in pool.run(300):
        assert 1 <= number <= 8
        assert at - last_at >= (RULES.upscale_delay_s if number > before else RULES.downscale_delay_s)
        assert number >= before - max(1, before // 4)
        before, last_at = number, at


def context(signals: Sequence[StageSignals], target: int, now: float, state: dict[str, Any]) -> Any:
    """What Serve hands to a policy."""
    metrics = {
        name: {
            worker: [SimpleNamespace(value=0.0), SimpleNamespace(value=asdict(each)[name])]
            for worker, each in enumerate(signals)
        }
        for name in StageSignals.__slots__
    }
    return SimpleNamespace(
        target_num_replicas=target, raw_metrics=metrics, current_time=now, policy_state=state
    )


def test_policy_takes_the_last_word_of_each_worker_and_keeps_its_state_with_serve() -> None:
    policy = ScalingPolicy("decode", **asdict(RULES))
    state: dict[str, Any] = {}
    target, numbers = 1, []
    for tick in range(14):
        full = [StageSignals(block_use=0.9, block_demand=0.3)]
        target, state = policy(context(full, target, tick * TICK_S, state))
        numbers.append(target)
    assert numbers == [1] * 10 + [2] * 4


def test_policy_changes_nothing_while_nobody_says_anything() -> None:
    policy = ScalingPolicy("prefill", **asdict(RULES))
    assert policy(context([], 3, 1000.0, {})) == (3, {})


def test_no_worker_is_taken_away_while_another_one_starts() -> None:
    """Its share of the load still lies on the others, or is about to come to it."""
    policy = ScalingPolicy("prefill", **asdict(RULES))
    state: dict[str, Any] = {}
    for tick in range(500):
        target, state = policy(context([StageSignals()], 2, tick * TICK_S, state))
        assert target == 2


def test_a_worker_that_has_not_said_everything_counts_as_not_heard() -> None:
    one = {"w": [SimpleNamespace(value=1.0)]}
    assert latest_signals({"busy": one}) == []
    assert latest_signals(dict.fromkeys(StageSignals.__slots__, one)) == [StageSignals(1, 1, 1, 1)]
