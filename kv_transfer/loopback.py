"""How do KV blocks move inside one process? By copying, when the reader polls.

Ships in the product: a cluster composed in one process uses it, and so do tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.memory import MemoryKind, PoolMemory
from kv_transfer.peers import PeerTable
from kv_transfer.spans import Spans
from protocol.errors import StartupError, TransferFailed
from protocol.handoff import Span, TransportEndpoint
from protocol.ids import BlockId
from protocol.ports import FetchHandle, FetchStatus

LOOPBACK = "loopback"


class LoopbackNetwork:
    """The pools that can be reached by agent name.

    Shared by the transports of one process. A read sees what the owner has written before the poll that
    copies; as with every transport, only blocks that their owner has finished are worth reading.
    """

    def __init__(self) -> None:
        self._pools: dict[str, PoolMemory] = {}
        self._used_names: set[str] = set()

    def attach(self, agent: str, memory: PoolMemory) -> None:
        """Make a pool readable. Raises `StartupError` for a name that was ever used before."""
        if agent in self._used_names:
            raise StartupError(f"the agent name {agent} was used before; give every agent its own")
        self._used_names.add(agent)
        self._pools[agent] = memory

    def detach(self, agent: str) -> None:
        """The agent is gone, closed or dead: reads from it fail, pending ones at their next poll."""
        self._pools.pop(agent, None)

    def pool(self, agent: str) -> PoolMemory | None:
        """None when no such agent lives."""
        return self._pools.get(agent)


class LoopbackTransport:
    """The `KvTransport` between pools in host memory of one process."""

    def __init__(self, memory: PoolMemory, agent: str, network: LoopbackNetwork) -> None:
        """Raises `StartupError` for device memory or an agent name that was used before."""
        if memory.kind is not MemoryKind.HOST:
            raise StartupError("the loopback transport copies host memory only: set transport: nixl")
        network.attach(agent, memory)
        self._memory = memory
        self._network = network
        self._endpoint = TransportEndpoint(LOOPBACK, agent, memory.description, agent.encode())
        self._peers = PeerTable(self._endpoint)

    @property
    def endpoint(self) -> TransportEndpoint:
        return self._endpoint

    def connect(self, peer: TransportEndpoint, spans: Sequence[Span] | None = None) -> None:
        connection = self._peers.connection(peer, spans)
        if self._peers.has(connection):
            return
        if peer.metadata != peer.agent.encode():
            raise TransferFailed(f"the metadata of {peer.agent} is garbled")
        pool = self._network.pool(peer.agent)
        if pool is None or pool.description != peer.pool:
            raise TransferFailed(f"no agent {peer.agent} with {peer.pool} is on this loopback network")
        self._peers.add(connection)

    def disconnect(self, agent: str) -> None:
        self._peers.remove(agent)

    def fetch(
        self, agent: str, remote_blocks: Sequence[BlockId], local_blocks: Sequence[BlockId]
    ) -> FetchHandle:
        connection = self._peers.check_read(agent, remote_blocks, local_blocks)
        self._peers.begin_read(agent)
        num_bytes = connection.num_bytes(local_blocks)
        read = _Read(agent, tuple(remote_blocks), tuple(local_blocks), connection.spans, num_bytes)
        return LoopbackFetch(read, self._memory, self._network, self._peers)

    def close(self) -> None:
        self._peers.close()
        self._network.detach(self._endpoint.agent)


@dataclass(frozen=True, slots=True)
class _Read:
    agent: str
    remote_blocks: tuple[BlockId, ...]
    local_blocks: tuple[BlockId, ...]
    spans: Spans
    num_bytes: int


class LoopbackFetch:
    """The `FetchHandle` of one read: all blocks are copied by the poll that ends it."""

    def __init__(self, read: _Read, local: PoolMemory, network: LoopbackNetwork, peers: PeerTable) -> None:
        self._read = read
        self._local = local
        self._network = network
        self._peers = peers
        self._status = FetchStatus.PENDING

    @property
    def num_bytes(self) -> int:
        return self._read.num_bytes

    def poll(self) -> FetchStatus:
        if self._status is FetchStatus.PENDING:
            self._status = self._advance()
            if self._status is not FetchStatus.PENDING:
                self._peers.end_read(self._read.agent)
        return self._status

    def release(self) -> None:
        if self._status is FetchStatus.PENDING:
            raise TransferFailed(f"a read from {self._read.agent} is still pending")

    def _advance(self) -> FetchStatus:
        remote = self._network.pool(self._read.agent)
        if remote is None:
            return FetchStatus.FAILED
        for theirs, mine in zip(self._read.remote_blocks, self._read.local_blocks, strict=True):
            target, source = self._local.block_address(mine), remote.block_address(theirs)
            for span in self._read.spans:
                ctypes.memmove(target + span.my_offset, source + span.their_offset, span.num_bytes)
        return FetchStatus.DONE
