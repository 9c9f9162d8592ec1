"""An engine with other ranks stops in time, whatever these do."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from cluster.ranks.leading_engine import LeadingEngine
from protocol.errors import EngineFault

LIMIT_S = 30.0


class StoppedEngine:
    """Stops at once, or hangs."""

    def __init__(self, fault: EngineFault | None = None) -> None:
        self._fault = fault

    def stop(self, timeout_s: float) -> None:
        if self._fault is not None:
            raise self._fault


class FrozenLeader:
    """Its followers never answer."""

    def __init__(self) -> None:
        self.is_aborted = threading.Event()

    def stop(self) -> None:
        if not self.is_aborted.wait(LIMIT_S):
            raise AssertionError("it was waited for as long as for a step")
        raise EngineFault("the group was aborted")

    def abort(self) -> None:
        self.is_aborted.set()


class CountedFollowers:
    def __init__(self) -> None:
        self.num_ended = 0

    def end(self, grace_s: float) -> None:
        self.num_ended += 1


def leading(engine: StoppedEngine, leader: FrozenLeader, followers: CountedFollowers) -> LeadingEngine:
    return LeadingEngine(*cast(Any, (engine, leader, followers)))


def test_followers_that_do_not_answer_are_ended_when_the_time_to_stop_is_over() -> None:
    """They were waited for as long as a step may take, whatever time there was to stop."""
    leader, followers = FrozenLeader(), CountedFollowers()
    leading(StoppedEngine(), leader, followers).stop(0.05)
    assert leader.is_aborted.is_set()
    assert followers.num_ended == 1


def test_a_step_that_hangs_is_aborted_and_no_follower_stays() -> None:
    leader, followers = FrozenLeader(), CountedFollowers()
    with pytest.raises(EngineFault, match="a step hangs"):
        leading(StoppedEngine(EngineFault("a step hangs")), leader, followers).stop(0.05)
    assert leader.is_aborted.is_set()
    assert followers.num_ended == 1
