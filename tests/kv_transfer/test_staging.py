"""A read of KV in another layout that never ends is no other read's trouble."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from layout_kit import NUM_TOKENS, Side
from transport_kit import ManualClock, Wire, all_finish, finish

from kv_transfer import FaultKind, FaultyTransport, LayoutReader, PoolMemory
from kv_transfer.staging import MAX_AREAS, MAX_CHUNKS
from kv_transfer.staging_area import NUM_SLOTS, STUCK_S
from protocol.errors import TransferFailed
from protocol.faults import FaultPlan
from protocol.ports import FetchStatus, KvTransport, TokenFetch

READS_PER_AREA = NUM_SLOTS // MAX_CHUNKS
"""So many endless ones hold all of an area."""


class Scene:
    """A reader of two owners; reads go wrong as scripted, and staging areas are counted."""

    def __init__(self) -> None:
        self.plan: FaultPlan[FaultKind] = FaultPlan()
        self.clock = ManualClock()
        self.owners = [Side(12, "float32", seed) for seed in (1, 2)]
        self.mine = Side(8, "float32", seed=3)
        self.num_areas = 0
        self.why_no_area: TransferFailed | None = None
        wire = Wire("loopback")
        self._wire = Wire("loopback", lambda inner, memory: FaultyTransport(inner, memory, self.plan))
        self._wire.network = wire.network
        self.endpoints = [wire.attach(owner.memory).endpoint for owner in self.owners]
        staging_bytes = (1 + NUM_SLOTS) * self.owners[0].layout.block_bytes
        self.reader = LayoutReader(
            self.mine.memory,
            self.mine.fingerprint,
            self._attach,
            staging_bytes=staging_bytes,
            clock=self.clock,
        )
        for owner, endpoint in zip(self.owners, self.endpoints, strict=True):
            self.reader.connect(endpoint, owner.fingerprint)

    def _attach(self, memory: PoolMemory, serial: int) -> KvTransport:
        if self.why_no_area is not None:
            raise self.why_no_area
        self.num_areas += serial > 0  # the first one reads straight into the pool
        return self._wire.attach(memory)

    def fetch(self, owner: int = 0) -> TokenFetch:
        agent = self.endpoints[owner].agent
        return self.reader.fetch_tokens(agent, self.owners[owner].table, self.mine.table, range(NUM_TOKENS))

    def endless(self) -> TokenFetch:
        """A read whose chunks do not end, as many as a read has under way."""
        for _ in range(MAX_CHUNKS):
            self.plan.script(FaultKind.STALL)
        fetch = self.fetch()
        assert fetch.poll() is FetchStatus.PENDING
        return fetch

    def assert_reads(self, owner: int) -> None:
        self.mine.poison()
        assert finish(self.fetch(owner)) is FetchStatus.DONE
        assert torch.equal(self.mine.tokens(), self.owners[owner].tokens())


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.plan.resume()
    scene.reader.close()


def test_one_endless_read_leaves_room_for_all_others(scene: Scene) -> None:
    endless = scene.endless()
    for owner in (1, 0, 1):
        scene.assert_reads(owner)
    assert scene.num_areas == 1
    scene.plan.resume()
    assert finish(endless) is FetchStatus.DONE


def test_endless_reads_that_hold_an_area_are_waited_for_a_while_and_then_left(scene: Scene) -> None:
    endless = [scene.endless() for _ in range(READS_PER_AREA)]
    waiting = scene.fetch(1)
    assert {waiting.poll() for _ in range(20)} == {FetchStatus.PENDING}
    scene.clock.advance(STUCK_S - 0.01)
    assert {waiting.poll() for _ in range(20)} == {FetchStatus.PENDING}
    assert scene.num_areas == 1
    scene.clock.advance(0.02)
    assert finish(waiting) is FetchStatus.DONE
    for owner in (0, 1):
        scene.assert_reads(owner)
    assert scene.num_areas == 2
    scene.plan.resume()
    assert all_finish(endless) == {FetchStatus.DONE}
    scene.assert_reads(1)


def test_an_owner_is_still_read_and_let_go_once_what_was_stuck_has_ended(scene: Scene) -> None:
    endless = [scene.endless() for _ in range(READS_PER_AREA)]
    scene.clock.advance(STUCK_S)
    scene.assert_reads(0)
    with pytest.raises(TransferFailed, match="pending"):
        scene.reader.disconnect(scene.endpoints[0].agent)
    scene.reader.disconnect(scene.endpoints[1].agent)
    scene.plan.resume()
    assert all_finish(endless) == {FetchStatus.DONE}
    scene.reader.disconnect(scene.endpoints[0].agent)
    for owner, endpoint in zip(scene.owners, scene.endpoints, strict=True):
        scene.reader.connect(endpoint, owner.fingerprint)
    for owner in (0, 1):
        scene.assert_reads(owner)


def test_the_memory_for_endless_reads_is_bounded(scene: Scene) -> None:
    endless = []
    for _ in range(MAX_AREAS):
        endless += [scene.endless() for _ in range(READS_PER_AREA)]
        scene.clock.advance(STUCK_S)
    waiting = scene.fetch(1)
    assert {waiting.poll() for _ in range(20)} == {FetchStatus.PENDING}
    assert scene.num_areas == MAX_AREAS
    scene.plan.resume()
    assert all_finish([*endless, waiting]) == {FetchStatus.DONE}


def test_a_read_fails_when_there_can_be_no_other_area(scene: Scene) -> None:
    """Its blocks are touched by nobody: they can be computed at once."""
    endless = [scene.endless() for _ in range(READS_PER_AREA)]
    waiting = scene.fetch(1)
    scene.clock.advance(STUCK_S)
    scene.why_no_area = TransferFailed("no memory")
    assert finish(waiting) is FetchStatus.FAILED
    scene.why_no_area = None
    scene.plan.resume()
    assert all_finish(endless) == {FetchStatus.DONE}
