"""How do KV blocks move by torch.distributed? The owner sends what the reader asks for, two by two.

Other than with NIXL both sides work for a read, and so an owner has threads of its own for it. For the
worker it is the same: a reader reads, into blocks that only it owns, and an owner is never written to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kv_transfer.memory import PoolMemory
from kv_transfer.pairs.choose import make_fabric
from kv_transfer.pairs.messages import Shape
from kv_transfer.pairs.metadata import PairMetadata
from kv_transfer.pairs.owner import CLOSE_LIMIT_S, Owner
from kv_transfer.pairs.reader import Link, Read
from kv_transfer.peers import Connection, PeerTable
from protocol.errors import TransferFailed
from protocol.handoff import Span, TransportEndpoint
from protocol.ids import BlockId
from protocol.ports import FetchHandle, FetchStatus


class PairTransport:
    """The `KvTransport` over groups of two, by Gloo or NCCL."""

    def __init__(self, kind: str, memory: PoolMemory, agent: str, host: str) -> None:
        """`kind` is gloo or nccl; `host` this machine's address, as all peers reach it.

        Raises `StartupError` when the kind does not go with the memory, or with this torch.
        """
        self._fabric = make_fabric(kind, memory, host)
        self._owner = Owner(self._fabric, memory.description, agent, host)
        metadata = self._owner.metadata.to_bytes()
        self._endpoint = TransportEndpoint(kind, agent, memory.description, metadata)
        self._peers = PeerTable(self._endpoint)
        self._links: dict[str, Link] = {}

    @property
    def endpoint(self) -> TransportEndpoint:
        return self._endpoint

    def connect(self, peer: TransportEndpoint, spans: Sequence[Span] | None = None) -> None:
        """Waits for nobody: whether the owner answers shows with the reads."""
        connection = self._peers.connection(peer, spans)
        if self._peers.has(connection):
            return
        try:
            metadata = PairMetadata.from_bytes(peer.metadata)
        except ValueError as error:
            raise TransferFailed(f"the metadata of {peer.agent} is garbled: {error}") from error
        if metadata.agent != peer.agent:
            raise TransferFailed(f"the metadata of {peer.agent} is that of {metadata.agent}")
        self._links[peer.agent] = Link(metadata, self._fabric, *_shapes(connection, self._endpoint))
        self._peers.add(connection)

    def disconnect(self, agent: str) -> None:
        if self._peers.remove(agent):
            self._links.pop(agent).close()

    def fetch(
        self, agent: str, remote_blocks: Sequence[BlockId], local_blocks: Sequence[BlockId]
    ) -> FetchHandle:
        connection = self._peers.check_read(agent, remote_blocks, local_blocks)
        read = Read(tuple(remote_blocks), tuple(local_blocks))
        self._links[agent].submit(read)
        self._peers.begin_read(agent)
        return PairFetch(read, agent, connection.num_bytes(local_blocks), self._peers)

    def close(self) -> None:
        self._peers.close()
        for link in self._links.values():
            link.close()
        until_s = time.monotonic() + CLOSE_LIMIT_S
        for link in self._links.values():
            link.join(max(0.0, until_s - time.monotonic()))
        self._links.clear()
        self._owner.close()
        self._fabric.close()


class PairFetch:
    """The `FetchHandle` of one read, on the transport's thread."""

    def __init__(self, read: Read, agent: str, num_bytes: int, peers: PeerTable) -> None:
        self._read = read
        self._agent = agent
        self._num_bytes = num_bytes
        self._peers = peers
        self._status = FetchStatus.PENDING

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def poll(self) -> FetchStatus:
        if self._status is FetchStatus.PENDING:
            self._status = self._read.status
            if self._status is not FetchStatus.PENDING:
                self._peers.end_read(self._agent)
        return self._status

    def release(self) -> None:
        if self._status is FetchStatus.PENDING:
            raise TransferFailed(f"a read from {self._agent} is still pending")


def _shapes(connection: Connection, mine: TransportEndpoint) -> tuple[Shape, Shape]:
    """Of the owner's blocks, and of one's own."""
    theirs = tuple((span.their_offset, span.num_bytes) for span in connection.spans)
    ours = tuple((span.my_offset, span.num_bytes) for span in connection.spans)
    return Shape(connection.peer.pool.block_bytes, theirs), Shape(mine.pool.block_bytes, ours)
