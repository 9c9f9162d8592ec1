"""What is the loopback transport's own: one network within one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transport_kit import Wire, blocks, filled_pool, finish

from kv_transfer import LoopbackNetwork, LoopbackTransport, MemoryKind, PoolMemory
from protocol.errors import StartupError, TransferFailed
from protocol.ports import FetchStatus


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire("loopback")
    yield wire
    wire.close()


def test_reads_from_a_dead_peer_fail_and_it_cannot_be_connected_again(wire: Wire) -> None:
    owner, reader = wire.attach(filled_pool(6, 64, salt=1)), wire.attach(filled_pool(6, 64, salt=50))
    agent = owner.endpoint.agent
    reader.connect(owner.endpoint)
    pending = reader.fetch(agent, blocks(1), blocks(2))
    wire.network.detach(agent)
    assert finish(pending) is FetchStatus.FAILED
    assert finish(reader.fetch(agent, blocks(1), blocks(2))) is FetchStatus.FAILED
    reader.disconnect(agent)
    with pytest.raises(TransferFailed, match="no agent"):
        reader.connect(owner.endpoint)


def test_agent_names_are_never_used_again() -> None:
    network = LoopbackNetwork()
    LoopbackTransport(PoolMemory.allocate(2, 8), "a", network).close()
    with pytest.raises(StartupError, match="used before"):
        LoopbackTransport(PoolMemory.allocate(2, 8), "a", network)


def test_device_memory_is_refused() -> None:
    with pytest.raises(StartupError, match="nixl"):
        LoopbackTransport(PoolMemory(4096, 2, 8, MemoryKind.DEVICE), "a", LoopbackNetwork())
