"""When blocks are reserved: rates, progress and the wait they give, by a hand-stepped clock."""

from __future__ import annotations

import pytest

from decode_worker.reservation import (
    DOUBT,
    MARGIN_S,
    READ_FACTOR,
    PrefillPace,
    Rate,
    reservation_delay_s,
)


class HandClock:
    def __init__(self) -> None:
        self.now_s = 500.0

    def __call__(self) -> float:
        return self.now_s


def test_rate_that_nobody_observed_says_nothing() -> None:
    rate = Rate()
    rate.observe(100, 0.0)
    assert rate.per_s is None
    assert rate.time_for(1) is None


def test_rate_follows_what_was_observed_lately() -> None:
    rate = Rate()
    rate.observe(100, 1.0)
    assert rate.per_s == pytest.approx(100)
    for _ in range(30):
        rate.observe(1000, 1.0)
    assert rate.per_s == pytest.approx(1000, rel=0.01)
    assert rate.time_for(500) == pytest.approx(0.5, rel=0.01)


def test_short_observation_hardly_moves_the_rate() -> None:
    rate = Rate()
    rate.observe(1000, 1.0)
    rate.observe(1, 0.0001)
    assert rate.per_s == pytest.approx(1000, rel=0.01)


def test_pace_knows_nothing_of_an_owner_that_was_never_measured() -> None:
    clock = HandClock()
    pace = PrefillPace(1000, 200, Rate(), clock)
    assert pace.remaining_s() is None
    clock.now_s += 5
    pace.note(200)
    assert pace.remaining_s() is None


def test_pace_of_a_measured_owner_is_known_from_the_start() -> None:
    clock, rate = HandClock(), Rate()
    rate.observe(100, 1.0)
    pace = PrefillPace(1000, 200, rate, clock)
    assert pace.remaining_s() == pytest.approx(8.0 * (1 - DOUBT))
    clock.now_s += 3
    assert pace.remaining_s() == pytest.approx(8.0 * (1 - DOUBT) - 3)
    clock.now_s += 30
    assert pace.remaining_s() == 0.0


def test_where_the_prefill_stands_at_first_is_not_taken_for_its_speed() -> None:
    """A ticket that waited in a queue hears of many tokens at once."""
    clock, rate = HandClock(), Rate()
    pace = PrefillPace(1000, 0, rate, clock)
    clock.now_s += 0.001
    pace.note(600)
    assert rate.per_s is None
    clock.now_s += 2.0
    pace.note(800)
    assert rate.per_s == pytest.approx(100)
    assert pace.remaining_s() == pytest.approx(2.0 * (1 - DOUBT))


def test_word_without_progress_changes_nothing() -> None:
    clock, rate = HandClock(), Rate()
    pace = PrefillPace(1000, 0, rate, clock)
    pace.note(0)
    clock.now_s += 1
    pace.note(0)
    pace.note(100)
    assert rate.per_s == pytest.approx(100)
    clock.now_s += 1
    pace.note(50)
    assert pace.remaining_s() == pytest.approx(9.0 * (1 - DOUBT) - 1)


def test_blocks_are_there_in_time_for_a_prefill_that_is_faster_than_the_last_ones() -> None:
    """Reserved only when it was done, they cost the client a wait for the engine."""
    clock, rate = HandClock(), Rate()
    rate.observe(512, 3.0)
    pace = PrefillPace(512, 0, rate, clock)
    clock.now_s += 2.1
    assert reservation_delay_s(pace.remaining_s(), 0.01) == 0


@pytest.mark.parametrize(("remaining_s", "read_s"), [(None, 0.1), (10.0, None), (None, None), (0.0, 0.0)])
def test_blocks_are_reserved_at_once_when_nothing_says_when(
    remaining_s: float | None, read_s: float | None
) -> None:
    assert reservation_delay_s(remaining_s, read_s) == 0


def test_reservation_comes_in_time_for_twice_the_read() -> None:
    assert reservation_delay_s(10.0, 1.0) == pytest.approx(10.0 - READ_FACTOR * 1.0 - MARGIN_S)
    assert reservation_delay_s(2.0, 1.0) == 0
