"""What a faulty transport makes of each kind of fault, over every transport."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transport_kit import ManualClock, Wire, block_content, blocks, content, filled_pool, finish

from kv_transfer import FaultKind, FaultyTransport, MemoryKind, PoolMemory, ReadFaults, block_checksums
from protocol.errors import StartupError, TransferFailed
from protocol.faults import FaultPlan
from protocol.handoff import Span
from protocol.ports import FetchStatus, KvTransport

BLOCK_BYTES = 64
NUM_BLOCKS = 6


class Scene:
    """One reader, one owner, and a plan of what goes wrong."""

    def __init__(self, wire: Wire, plan: FaultPlan[FaultKind] | None = None) -> None:
        self.plan: FaultPlan[FaultKind] = plan or FaultPlan()
        self.clock = ManualClock()
        self.owner_memory = filled_pool(NUM_BLOCKS, BLOCK_BYTES, salt=1)
        self.owner: KvTransport = wire.attach(self.owner_memory)
        self.memory = filled_pool(NUM_BLOCKS, BLOCK_BYTES, salt=50)
        self.reader = FaultyTransport(wire.attach(self.memory), self.memory, self.plan, self.clock)
        self.agent = self.owner.endpoint.agent
        self.reader.connect(self.owner.endpoint)

    def checksums_agree(self) -> bool:
        """After a read of blocks 1 and 2 into 3 and 4."""
        owners = block_checksums(self.owner_memory, blocks(1, 2))
        return block_checksums(self.memory, blocks(3, 4)) == owners


@pytest.fixture(params=["loopback", pytest.param("nixl", marks=pytest.mark.nixl)])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    wire = Wire(request.param)
    yield wire
    wire.close()


@pytest.fixture
def scene(wire: Wire) -> Scene:
    return Scene(wire)


def test_a_refused_read_touches_nothing(scene: Scene) -> None:
    before = content(scene.memory)
    scene.plan.script(FaultKind.REFUSE)
    with pytest.raises(TransferFailed, match="cannot be started"):
        scene.reader.fetch(scene.agent, blocks(1), blocks(2))
    assert content(scene.memory) == before
    scene.reader.disconnect(scene.agent)


def test_a_failing_read_has_spoiled_some_of_its_blocks_and_no_other(scene: Scene) -> None:
    expected = content(scene.memory)
    scene.plan.script(FaultKind.FAIL)
    handle = scene.reader.fetch(scene.agent, blocks(1, 2), blocks(3, 4))
    assert [finish(handle), handle.poll()] == [FetchStatus.FAILED] * 2
    expected[3] = block_content(BLOCK_BYTES, 1, 1)
    assert content(scene.memory) == expected
    scene.reader.disconnect(scene.agent)


def test_a_truncated_read_says_done_and_only_the_checksums_tell(scene: Scene) -> None:
    before = content(scene.memory)
    scene.plan.script(FaultKind.TRUNCATE)
    handle = scene.reader.fetch(scene.agent, blocks(1, 2), blocks(3, 4))
    assert finish(handle) is FetchStatus.DONE
    assert handle.num_bytes == 2 * BLOCK_BYTES
    assert content(scene.memory)[4] == before[4]
    assert not scene.checksums_agree()


def test_a_read_with_a_flipped_bit_says_done_and_only_the_checksums_tell(scene: Scene) -> None:
    scene.plan.script(FaultKind.BIT_FLIP)
    assert finish(scene.reader.fetch(scene.agent, blocks(1, 2), blocks(3, 4))) is FetchStatus.DONE
    mine = int.from_bytes(b"".join(content(scene.memory)[3:5]))
    theirs = int.from_bytes(b"".join(content(scene.owner_memory)[1:3]))
    assert (mine ^ theirs).bit_count() == 1
    assert not scene.checksums_agree()


def test_a_flipped_bit_is_one_of_those_that_were_read(scene: Scene) -> None:
    scene.reader.disconnect(scene.agent)
    scene.reader.connect(scene.owner.endpoint, [Span(0, 40, 1)])
    expected = content(scene.memory)
    scene.plan.script(FaultKind.BIT_FLIP)
    handle = scene.reader.fetch(scene.agent, blocks(1), blocks(3))
    assert handle.num_bytes == 1
    assert finish(handle) is FetchStatus.DONE
    byte = block_content(BLOCK_BYTES, 1, 1)[0]
    found = content(scene.memory)
    assert (found[3][40] ^ byte).bit_count() == 1
    expected[3] = expected[3][:40] + found[3][40:41] + expected[3][41:]
    assert found == expected


def test_the_checksums_of_a_read_without_fault_agree(scene: Scene) -> None:
    finish(scene.reader.fetch(scene.agent, blocks(1, 2), blocks(3, 4)))
    assert scene.checksums_agree()


def test_a_stalled_read_is_pending_until_it_is_resumed_and_writes_only_then(scene: Scene) -> None:
    before = content(scene.memory)
    scene.plan.script(FaultKind.STALL)
    handle = scene.reader.fetch(scene.agent, blocks(1), blocks(2))
    scene.clock.advance(1e6)
    assert {handle.poll() for _ in range(100)} == {FetchStatus.PENDING}
    assert content(scene.memory) == before
    scene.plan.resume()
    assert finish(handle) is FetchStatus.DONE
    assert content(scene.memory)[2] == block_content(BLOCK_BYTES, 1, 1)


def test_resume_does_not_reach_reads_that_stall_later(scene: Scene) -> None:
    scene.plan.script(FaultKind.STALL)
    scene.plan.resume()
    handle = scene.reader.fetch(scene.agent, blocks(1), blocks(2))
    assert handle.poll() is FetchStatus.PENDING
    scene.plan.resume()
    assert finish(handle) is FetchStatus.DONE


def test_a_delayed_read_takes_the_time_it_was_given(scene: Scene) -> None:
    scene.plan.script(FaultKind.DELAY, delay_s=2.0)
    handle = scene.reader.fetch(scene.agent, blocks(1), blocks(2))
    scene.clock.advance(1.9)
    assert handle.poll() is FetchStatus.PENDING
    scene.clock.advance(0.1)
    assert finish(handle) is FetchStatus.DONE


def test_a_delayed_read_that_cannot_be_started_has_failed(scene: Scene) -> None:
    scene.plan.script(FaultKind.DELAY, delay_s=2.0)
    handle = scene.reader.fetch(scene.agent, blocks(NUM_BLOCKS), blocks(2))
    scene.clock.advance(2.0)
    assert finish(handle) is FetchStatus.FAILED


def test_a_disconnected_peer_is_refused_until_it_is_connected_anew(scene: Scene) -> None:
    scene.plan.script(FaultKind.DISCONNECT)
    assert finish(scene.reader.fetch(scene.agent, blocks(1, 2), blocks(3, 4))) is FetchStatus.FAILED
    with pytest.raises(TransferFailed, match="disconnected"):
        scene.reader.fetch(scene.agent, blocks(1), blocks(2))
    scene.reader.disconnect(scene.agent)
    scene.reader.connect(scene.owner.endpoint)
    assert finish(scene.reader.fetch(scene.agent, blocks(1), blocks(2))) is FetchStatus.DONE


def test_nothing_can_be_taken_away_from_under_a_pending_read(scene: Scene) -> None:
    scene.plan.script(FaultKind.STALL)
    handle = scene.reader.fetch(scene.agent, blocks(1), blocks(2))
    for attempt in (handle.release, scene.reader.close, lambda: scene.reader.disconnect(scene.agent)):
        with pytest.raises(TransferFailed, match="pending"):
            attempt()
    scene.plan.resume()
    assert finish(handle) is FetchStatus.DONE


def test_a_scripted_fault_strikes_one_read(scene: Scene) -> None:
    scene.plan.script(None)
    scene.plan.script(FaultKind.FAIL)
    fates = [finish(scene.reader.fetch(scene.agent, blocks(1), blocks(2))) for _ in range(3)]
    assert fates == [FetchStatus.DONE, FetchStatus.FAILED, FetchStatus.DONE]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_goes_wrong_checksums_tell_each_wrong_byte_that_is_called_done(
    wire: Wire, seed: int
) -> None:
    kinds = [kind for kind in FaultKind if kind not in {FaultKind.STALL, FaultKind.DISCONNECT}]
    scene = Scene(wire, ReadFaults(dict.fromkeys(kinds, 0.15), seed=seed, max_delay_s=0.0).plan("a"))
    intact = [block_content(BLOCK_BYTES, 1, i) for i in (1, 2)]
    num_wrong = 0
    for _ in range(60):
        for block in blocks(3, 4):
            scene.memory.block_view(block)[:] = bytes(BLOCK_BYTES)
        try:
            handle = scene.reader.fetch(scene.agent, blocks(1, 2), blocks(3, 4))
        except TransferFailed:
            continue
        if finish(handle) is FetchStatus.DONE:
            is_right = content(scene.memory)[3:5] == intact
            assert scene.checksums_agree() == is_right
            num_wrong += not is_right
    assert num_wrong > 5
    scene.reader.close()


def test_device_memory_cannot_be_spoiled() -> None:
    wire = Wire("loopback")
    memory = PoolMemory(4096, 2, 8, MemoryKind.DEVICE)
    with pytest.raises(StartupError, match="faults"):
        FaultyTransport(wire.attach(PoolMemory.allocate(2, 8)), memory, FaultPlan())
    wire.close()


def test_each_agent_has_fates_of_its_own_that_are_the_same_in_every_run() -> None:
    faults = ReadFaults({FaultKind.FAIL: 0.5}, seed=4)
    plans = [faults.plan(agent) for agent in ("a", "a", "b")]
    first, again, other = ([plan.take() for _ in range(50)] for plan in plans)
    assert first == again
    assert first != other


def test_impossible_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="rates"):
        ReadFaults({FaultKind.FAIL: 0.6, FaultKind.STALL: 0.6})
