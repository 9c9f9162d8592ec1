"""What tests can make a loopback network do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transport_kit import Wire, block_content, blocks, content, filled_pool, finish

from kv_transfer import FaultKind, FaultPlan, LoopbackNetwork, MemoryKind, PoolMemory
from kv_transfer.loopback import LoopbackTransport
from protocol.errors import StartupError, TransferFailed
from protocol.ports import FetchStatus, KvTransport

BLOCK_BYTES = 64


class Scene:
    """One reader, one owner, and a plan of what goes wrong."""

    def __init__(self, wire: Wire, plan: FaultPlan) -> None:
        self.plan = plan
        self.network = wire.network
        self.owner: KvTransport = wire.attach(filled_pool(6, BLOCK_BYTES, salt=1))
        self.memory = filled_pool(6, BLOCK_BYTES, salt=50)
        self.reader: KvTransport = wire.attach(self.memory)
        self.agent = self.owner.endpoint.agent
        self.reader.connect(self.owner.endpoint)


@pytest.fixture
def scene() -> Iterator[Scene]:
    plan = FaultPlan()
    wire = Wire("loopback", LoopbackNetwork(plan))
    yield Scene(wire, plan)
    wire.close()


def test_a_failing_read_has_spoiled_some_of_its_blocks_and_no_other(scene: Scene) -> None:
    expected = content(scene.memory)
    scene.plan.script(FaultKind.FAIL)
    handle = scene.reader.fetch(scene.agent, blocks(1, 2), blocks(3, 4))
    assert [finish(handle), handle.poll()] == [FetchStatus.FAILED] * 2
    expected[3] = block_content(BLOCK_BYTES, 1, 1)
    assert content(scene.memory) == expected


def test_a_stalled_read_is_pending_until_it_is_resumed(scene: Scene) -> None:
    before = content(scene.memory)
    scene.plan.script(FaultKind.STALL)
    handle = scene.reader.fetch(scene.agent, blocks(1), blocks(2))
    assert {handle.poll() for _ in range(100)} == {FetchStatus.PENDING}
    assert content(scene.memory) == before
    scene.plan.resume()
    assert finish(handle) is FetchStatus.DONE


def test_resume_does_not_reach_reads_that_stall_later(scene: Scene) -> None:
    scene.plan.script(FaultKind.STALL)
    scene.plan.resume()
    handle = scene.reader.fetch(scene.agent, blocks(1), blocks(2))
    assert handle.poll() is FetchStatus.PENDING
    scene.plan.resume()
    assert finish(handle) is FetchStatus.DONE


def test_a_delayed_read_takes_the_polls_it_was_given(scene: Scene) -> None:
    scene.plan.script(FaultKind.DELAY, num_polls=3)
    handle = scene.reader.fetch(scene.agent, blocks(1), blocks(2))
    assert [handle.poll() for _ in range(4)] == [FetchStatus.PENDING] * 3 + [FetchStatus.DONE]


def test_a_corrupted_read_is_done_with_one_wrong_byte(scene: Scene) -> None:
    scene.plan.script(FaultKind.CORRUPT)
    assert finish(scene.reader.fetch(scene.agent, blocks(1), blocks(2))) is FetchStatus.DONE
    wrong = zip(content(scene.memory)[2], block_content(BLOCK_BYTES, 1, 1), strict=True)
    assert sum(mine != theirs for mine, theirs in wrong) == 1


def test_a_scripted_fault_strikes_one_read(scene: Scene) -> None:
    scene.plan.script(None)
    scene.plan.script(FaultKind.FAIL)
    fates = [finish(scene.reader.fetch(scene.agent, blocks(1), blocks(2))) for _ in range(3)]
    assert fates == [FetchStatus.DONE, FetchStatus.FAILED, FetchStatus.DONE]


def test_reads_from_a_dead_peer_fail_and_it_cannot_be_connected_again(scene: Scene) -> None:
    pending = scene.reader.fetch(scene.agent, blocks(1), blocks(2))
    scene.network.detach(scene.agent)
    assert finish(pending) is FetchStatus.FAILED
    assert finish(scene.reader.fetch(scene.agent, blocks(1), blocks(2))) is FetchStatus.FAILED
    scene.reader.disconnect(scene.agent)
    with pytest.raises(TransferFailed, match="no agent"):
        scene.reader.connect(scene.owner.endpoint)


def test_nothing_can_be_taken_away_from_under_a_pending_read(scene: Scene) -> None:
    scene.plan.script(FaultKind.STALL)
    handle = scene.reader.fetch(scene.agent, blocks(1), blocks(2))
    for attempt in (handle.release, scene.reader.close, lambda: scene.reader.disconnect(scene.agent)):
        with pytest.raises(TransferFailed, match="pending"):
            attempt()
    scene.plan.resume()
    assert finish(handle) is FetchStatus.DONE


def test_random_faults_are_the_same_for_the_same_seed() -> None:
    rates = {FaultKind.FAIL: 0.3, FaultKind.DELAY: 0.3}
    first, second = FaultPlan(rates, seed=5), FaultPlan(rates, seed=5)
    fates = [first.take() for _ in range(200)]
    assert fates == [second.take() for _ in range(200)]
    assert {fate and fate.kind for fate in fates} == {None, FaultKind.FAIL, FaultKind.DELAY}


@pytest.mark.parametrize("rates", [{FaultKind.FAIL: 1.1}, {FaultKind.FAIL: -0.1}])
def test_impossible_rates_are_refused(rates: dict[FaultKind, float]) -> None:
    with pytest.raises(ValueError):
        FaultPlan(rates)


def test_agent_names_are_never_used_again() -> None:
    network = LoopbackNetwork()
    LoopbackTransport(PoolMemory.allocate(2, 8), "a", network).close()
    with pytest.raises(StartupError, match="used before"):
        LoopbackTransport(PoolMemory.allocate(2, 8), "a", network)


def test_device_memory_is_refused() -> None:
    with pytest.raises(StartupError, match="nixl"):
        LoopbackTransport(PoolMemory(4096, 2, 8, MemoryKind.DEVICE), "a", LoopbackNetwork())
