"""Which peers may be read from, and is a read allowed to start? The part that all transports share."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.memory import check_blocks
from protocol.errors import LayoutMismatch, TransferFailed
from protocol.handoff import PoolDescription, TransportEndpoint
from protocol.ids import BlockId


class PeerTable:
    """The connected peers of one transport and how many reads from each are pending."""

    def __init__(self, mine: TransportEndpoint) -> None:
        self._mine = mine
        self._peers: dict[str, TransportEndpoint] = {}
        self._num_pending: dict[str, int] = {}
        self._is_closed = False

    def is_connected(self, peer: TransportEndpoint) -> bool:
        """Whether `peer` needs nothing more; raises if it cannot be connected at all.

        `LayoutMismatch`: another kind of transport or other blocks. `TransferFailed`: this very agent,
        or the name of another one that is still connected.
        """
        if self._is_closed:
            raise TransferFailed(f"the transport of {self._mine.agent} is closed")
        self._check_layout(peer)
        if peer.agent == self._mine.agent:
            raise TransferFailed(f"agent {peer.agent} cannot read from itself")
        known = self._peers.get(peer.agent)
        if known is not None and known != peer:
            raise TransferFailed(f"agent name {peer.agent} is used twice: names are never used again")
        return known is not None

    def add(self, peer: TransportEndpoint) -> None:
        self._peers[peer.agent] = peer
        self._num_pending[peer.agent] = 0

    def remove(self, agent: str) -> bool:
        """True when the peer was connected. Raises `TransferFailed` while reads from it are pending."""
        num_pending = self._num_pending.get(agent, 0)
        if num_pending:
            raise TransferFailed(f"{num_pending} reads from {agent} are still pending")
        self._num_pending.pop(agent, None)
        return self._peers.pop(agent, None) is not None

    def close(self) -> tuple[str, ...]:
        """Remove all peers, for good, and say which there were.

        Raises `TransferFailed`, and does nothing, while any read is pending.
        """
        pending = {agent: count for agent, count in self._num_pending.items() if count}
        if pending:
            raise TransferFailed(f"reads are still pending, per agent: {pending}")
        self._is_closed = True
        agents = tuple(self._peers)
        for agent in agents:
            self.remove(agent)
        return agents

    def check_read(self, agent: str, remote: Sequence[BlockId], local: Sequence[BlockId]) -> None:
        """Raise `TransferFailed` unless the peer is connected and all blocks are in bounds."""
        peer = self._peers.get(agent)
        if peer is None:
            raise TransferFailed(f"no connected peer is called {agent}")
        try:
            check_blocks(remote, peer.pool, local, self._mine.pool)
        except ValueError as error:
            raise TransferFailed(f"cannot read from {agent}: {error}") from error

    def begin_read(self, agent: str) -> None:
        self._num_pending[agent] += 1

    def end_read(self, agent: str) -> None:
        self._num_pending[agent] -= 1

    def _check_layout(self, peer: TransportEndpoint) -> None:
        mine = self._mine
        if peer.transport != mine.transport:
            raise LayoutMismatch(
                f"KV moves by {mine.transport!r} here ({mine.agent}) and by {peer.transport!r} there "
                f"({peer.agent}): set the same transport on both"
            )
        if peer.pool.block_bytes != mine.pool.block_bytes:
            raise LayoutMismatch(
                f"a block has {mine.pool.block_bytes} bytes here ({mine.agent}: {mine.pool}) and "
                f"{peer.pool.block_bytes} there ({peer.agent}: {peer.pool})"
            )


def num_read_bytes(blocks: Sequence[BlockId], pool: PoolDescription) -> int:
    """Bytes that a read of `blocks` moves."""
    return len(blocks) * pool.block_bytes
