"""Would state machine and random load find a broken engine? Both must find each bug."""

from __future__ import annotations

import pytest
from engine_load import RandomLoad
from engine_machine import AnyOrder, machine_settings
from engine_world import World
from hypothesis import seed
from hypothesis.stateful import run_state_machine_as_test
from planted_bugs import ANY_LOAD, BUGS, RANKED_LOAD, Settings

from protocol.errors import EngineFault


@pytest.mark.parametrize("bug", BUGS)
def test_the_random_load_finds(bug: str) -> None:
    load, broken = BUGS[bug]
    world = World(**broken, **load)
    with pytest.raises((EngineFault, AssertionError)):
        RandomLoad(world, seed=3).run(3000)


NUM_CAMPAIGNS, NUM_RUNS = 16, 25
"""Short campaigns: Hypothesis tries less and less that is new in a long one."""


@pytest.mark.parametrize("bug", BUGS)
def test_the_state_machine_finds(bug: str) -> None:
    load, broken = BUGS[bug]

    class Broken(AnyOrder):
        def make_world(self, **engine_settings: object) -> World:
            return World(**broken, **{**engine_settings, **load})

    with pytest.raises((EngineFault, AssertionError)):
        run_campaigns(Broken)


def run_campaigns(machine: type[AnyOrder]) -> None:
    """The same ones every time."""
    for number in range(1, 1 + NUM_CAMPAIGNS):
        run_state_machine_as_test(seed(number)(machine), settings=machine_settings(NUM_RUNS, shrink=False))


@pytest.mark.parametrize("load", [ANY_LOAD, RANKED_LOAD], ids=["fcfs", "priority"])
def test_without_a_bug_nothing_is_found(load: Settings) -> None:
    RandomLoad(World(**load), seed=3).run(300)
