"""Which peers may be read from, and is a read allowed to start? The part that all transports share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kv_transfer.memory import check_blocks
from kv_transfer.spans import Spans, check_spans, merged, span_bytes, whole_block
from protocol.errors import LayoutMismatch, TransferFailed
from protocol.handoff import Span, TransportEndpoint
from protocol.ids import BlockId


@dataclass(frozen=True, slots=True)
class Connection:
    """A peer, and what of its blocks is read."""

    peer: TransportEndpoint
    """This rank alone, without the others of its worker."""
    spans: Spans

    def num_bytes(self, blocks: Sequence[BlockId]) -> int:
        """Bytes that a read of `blocks` moves."""
        return len(blocks) * span_bytes(self.spans)


class PeerTable:
    """The connected peers of one transport and how many reads from each are pending."""

    def __init__(self, mine: TransportEndpoint) -> None:
        self._mine = mine
        self._peers: dict[str, Connection] = {}
        self._num_pending: dict[str, int] = {}
        self._is_closed = False

    def connection(self, peer: TransportEndpoint, spans: Sequence[Span] | None) -> Connection:
        """What a transport is asked for with `KvTransport.connect`, checked, and not yet made.

        `LayoutMismatch`: another kind of transport, other blocks, or spans beyond them. `TransferFailed`:
        this very agent, or the name of one that is connected and is another, or with other spans.
        """
        if self._is_closed:
            raise TransferFailed(f"the transport of {self._mine.agent} is closed")
        connection = Connection(replace(peer, others=()), self._spans_of(peer, spans))
        if peer.agent == self._mine.agent:
            raise TransferFailed(f"agent {peer.agent} cannot read from itself")
        known = self._peers.get(peer.agent)
        if known is not None and known.peer != connection.peer:
            raise TransferFailed(f"agent name {peer.agent} is used twice: names are never used again")
        if known is not None and known.spans != connection.spans:
            raise TransferFailed(f"{peer.agent} is connected with other spans: disconnect it first")
        return connection

    def has(self, connection: Connection) -> bool:
        """Whether it is made already."""
        return self._peers.get(connection.peer.agent) == connection

    def add(self, connection: Connection) -> None:
        self._peers[connection.peer.agent] = connection
        self._num_pending[connection.peer.agent] = 0

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

    def check_read(self, agent: str, remote: Sequence[BlockId], local: Sequence[BlockId]) -> Connection:
        """Raise `TransferFailed` unless the peer is connected and all blocks are in bounds."""
        connection = self._peers.get(agent)
        if connection is None:
            raise TransferFailed(f"no connected peer is called {agent}")
        try:
            check_blocks(remote, connection.peer.pool, local, self._mine.pool)
        except ValueError as error:
            raise TransferFailed(f"cannot read from {agent}: {error}") from error
        return connection

    def begin_read(self, agent: str) -> None:
        self._num_pending[agent] += 1

    def end_read(self, agent: str) -> None:
        self._num_pending[agent] -= 1

    def _spans_of(self, peer: TransportEndpoint, spans: Sequence[Span] | None) -> Spans:
        mine = self._mine
        if peer.transport != mine.transport:
            raise LayoutMismatch(
                f"KV moves by {mine.transport!r} here ({mine.agent}) and by {peer.transport!r} there "
                f"({peer.agent}): set the same transport on both"
            )
        if spans is not None:
            return _checked(merged(spans), peer, mine)
        if peer.pool.block_bytes != mine.pool.block_bytes:
            raise LayoutMismatch(
                f"a block has {mine.pool.block_bytes} bytes here ({mine.agent}: {mine.pool}) and "
                f"{peer.pool.block_bytes} there ({peer.agent}: {peer.pool})"
            )
        return whole_block(mine.pool.block_bytes)


def _checked(spans: Spans, peer: TransportEndpoint, mine: TransportEndpoint) -> Spans:
    try:
        check_spans(spans, their_block_bytes=peer.pool.block_bytes, my_block_bytes=mine.pool.block_bytes)
    except ValueError as error:
        raise LayoutMismatch(
            f"the spans that {mine.agent} would read of blocks of {peer.agent} are wrong: {error}"
        ) from error
    return spans
