"""Would state machine and random load find a broken engine? Both must find each bug, but for rare ones."""

from __future__ import annotations

import pytest
from engine_load import RandomLoad
from engine_machine import AnyOrder, machine_settings
from engine_world import World
from hypothesis.stateful import run_state_machine_as_test
from planted_bugs import ANY_LOAD, BUGS, RANKED_LOAD, Settings

from protocol.errors import EngineFault


@pytest.mark.parametrize("bug", BUGS)
def test_the_random_load_finds(bug: str) -> None:
    load, broken = BUGS[bug]
    world = World(**broken, **load)
    with pytest.raises((EngineFault, AssertionError)):
        RandomLoad(world, seed=3).run(3000)


TOO_RARE = {"preemption in vain among those that share"}
"""What 400 runs of the state machine do not meet: the random load alone finds these."""


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug not in TOO_RARE])
def test_the_state_machine_finds(bug: str) -> None:
    load, broken = BUGS[bug]

    class Broken(AnyOrder):
        def make_world(self, **engine_settings: object) -> World:
            return World(**broken, **{**engine_settings, **load})

    with pytest.raises((EngineFault, AssertionError)):
        run_state_machine_as_test(Broken, settings=machine_settings(400, shrink=False))


@pytest.mark.parametrize("load", [ANY_LOAD, RANKED_LOAD], ids=["fcfs", "priority"])
def test_without_a_bug_nothing_is_found(load: Settings) -> None:
    RandomLoad(World(**load), seed=3).run(300)
