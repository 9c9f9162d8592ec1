"""The directory tells who lives, and forgets who is silent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.directory import ENTRY_LIFETIME_S, DirectoryState, InProcessDirectory
from protocol.handoff import Fingerprint
from protocol.ids import Role, WorkerId, WorkerIdentity
from protocol.membership import Load, WorkerRecord


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record(worker_id: str, incarnation: str = "1", role: Role = Role.PREFILL) -> WorkerRecord:
    fingerprint = Fingerprint("m", "r", "float32", "float32", 2, 2, 16, 16)
    identity = WorkerIdentity(WorkerId(worker_id), incarnation)
    return WorkerRecord(identity, role, "127.0.0.1:1", fingerprint, max_model_len=64)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def state(clock: FakeClock) -> DirectoryState:
    return DirectoryState(clock)


def test_workers_are_listed_by_role_and_name_whoever_came_first(state: DirectoryState) -> None:
    for name, role in (("b", Role.PREFILL), ("c", Role.DECODE), ("a", Role.PREFILL)):
        state.announce(record(name, role=role))
    assert [r.identity.worker_id for r in state.workers()] == ["c", "a", "b"]


def test_a_silent_worker_vanishes_and_an_announcing_one_stays(
    state: DirectoryState, clock: FakeClock
) -> None:
    state.announce(record("silent"))
    state.announce(record("alive"))
    for _ in range(5):
        clock.now += ENTRY_LIFETIME_S / 4
        state.announce(record("alive"))
    assert state.workers() == (record("alive"),)


def test_a_worker_is_still_listed_when_its_lifetime_is_just_over(
    state: DirectoryState, clock: FakeClock
) -> None:
    state.announce(record("a"))
    clock.now += ENTRY_LIFETIME_S
    assert len(state.workers()) == 1
    clock.now += 0.01
    assert state.workers() == ()


def test_a_new_incarnation_replaces_the_old_one(state: DirectoryState) -> None:
    state.announce(record("a", "1"))
    state.announce(record("a", "2"))
    assert [r.identity.incarnation for r in state.workers()] == ["2"]


def test_a_late_farewell_does_not_remove_the_successor(state: DirectoryState) -> None:
    state.announce(record("a", "1"))
    state.announce(record("a", "2"))
    state.withdraw(record("a", "1").identity)
    assert len(state.workers()) == 1
    state.withdraw(record("a", "2").identity)
    state.withdraw(record("a", "2").identity)
    assert state.workers() == ()


def test_an_announcement_refreshes_the_load(state: DirectoryState) -> None:
    state.announce(record("a"))
    busy = replace(record("a"), load=Load(num_running=3))
    state.announce(busy)
    assert state.workers() == (busy,)


async def test_the_in_process_directory_answers_like_its_state(clock: FakeClock) -> None:
    directory = InProcessDirectory(clock)
    await directory.announce(record("a"))
    await directory.announce(record("b"))
    await directory.withdraw(record("a").identity)
    assert await directory.workers() == (record("b"),)
    clock.now += 60
    assert await directory.workers() == ()
