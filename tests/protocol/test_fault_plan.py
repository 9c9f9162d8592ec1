"""A plan of faults is data and a seed: nothing else decides."""

from __future__ import annotations

from enum import StrEnum

import pytest

from protocol.faults import FaultPlan


class Kind(StrEnum):
    RAIN = "rain"
    HAIL = "hail"


def test_the_script_goes_first_and_then_all_is_well() -> None:
    plan: FaultPlan[Kind] = FaultPlan()
    plan.script(Kind.RAIN, delay_s=3.0)
    plan.script(None)
    plan.script(Kind.HAIL)
    fates = [plan.take() for _ in range(5)]
    assert [fate and (fate.kind, fate.delay_s) for fate in fates] == [
        (Kind.RAIN, 3.0),
        None,
        (Kind.HAIL, 0.0),
        None,
        None,
    ]


def test_random_faults_are_the_same_for_the_same_seed() -> None:
    rates = {Kind.RAIN: 0.3, Kind.HAIL: 0.3}
    first, second = FaultPlan(rates, seed=5), FaultPlan(rates, seed=5)
    fates = [(first.take(), first.pick(7)) for _ in range(200)]
    assert fates == [(second.take(), second.pick(7)) for _ in range(200)]
    assert {fate and fate.kind for fate, _ in fates} == {None, Kind.RAIN, Kind.HAIL}


def test_faults_come_at_about_their_rates_and_delays_within_their_bound() -> None:
    plan = FaultPlan({Kind.RAIN: 0.1, Kind.HAIL: 0.4}, seed=1, max_delay_s=2.0)
    fates = [plan.take() for _ in range(4000)]
    kinds = [fate.kind for fate in fates if fate]
    assert 300 < kinds.count(Kind.RAIN) < 500
    assert 1450 < kinds.count(Kind.HAIL) < 1750
    assert all(0 <= fate.delay_s <= 2.0 for fate in fates if fate)


def test_resume_reaches_all_that_was_taken_and_nothing_later() -> None:
    plan: FaultPlan[Kind] = FaultPlan({Kind.RAIN: 1.0})
    first = plan.take()
    assert first is not None
    assert not plan.is_resumed(first)
    plan.resume()
    later = plan.take()
    assert later is not None
    assert plan.is_resumed(first)
    assert not plan.is_resumed(later)


@pytest.mark.parametrize("rates", [{Kind.RAIN: 1.1}, {Kind.RAIN: -0.1}, {Kind.RAIN: 0.6, Kind.HAIL: 0.6}])
def test_impossible_rates_are_refused(rates: dict[Kind, float]) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        FaultPlan(rates)
