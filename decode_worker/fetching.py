"""How do a ticket's blocks get here while its owner still computes them? Chunk by chunk, as they are ready.

ready: |####|####|....|....|    owner computes the third chunk
read:  |####|==  |              one read at a time; the next one takes all that is ready by then
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from decode_worker.keeper import LeaseKeeper
from decode_worker.peers import Peer
from decode_worker.pending_read import PendingRead
from decode_worker.tools import IntakeTools
from decode_worker.watch import Watch
from protocol.errors import TransferError, TransferFailed, TransferTimeout
from protocol.handoff import Ticket
from protocol.ids import BlockId

LAST_WAIT_S = 0.25
"""How long a read that has lost its lease may take to end: most do, and so the blocks are free for
computing the prompt here."""


class Fetch:
    """All reads of one intake."""

    def __init__(
        self, ticket: Ticket, peer: Peer, keeper: LeaseKeeper, watch: Watch, tools: IntakeTools
    ) -> None:
        self.num_bytes = 0
        self.checksums: dict[int, int] = {}
        """Of the ticket's blocks as they arrived, by index, where they are taken."""
        self.pending: PendingRead | None = None
        """The read under way. Still set after `run` raised: the blocks belong to it, not to the request."""
        self._ticket = ticket
        self._peer = peer
        self._keeper = keeper
        self._watch = watch
        self._tools = tools

    async def run(self, block_table: Sequence[BlockId], num_cached: int, read_limit_s: float) -> None:
        """Fill the blocks with the ticket's KV, from token `num_cached` on.

        Raises `TransferError` when that fails or takes too long, `LayoutMismatch`, and whatever the
        intake was dropped for.
        """
        num_read = num_cached
        while num_read < self._ticket.num_tokens:
            num_ready = self._num_ready()
            if num_ready > num_read:
                await self._read(block_table, range(num_read, num_ready), read_limit_s)
                num_read = num_ready
            else:
                await self._watch.until(self._keeper.progress)

    def _num_ready(self) -> int:
        """Tokens in whole blocks of the owner, and the rest once nothing will be added to the last one."""
        if self._keeper.is_complete:
            return self._ticket.num_tokens
        return self._keeper.tokens_ready - self._keeper.tokens_ready % self._peer.block_size

    async def _read(self, block_table: Sequence[BlockId], tokens: range, limit_s: float) -> None:
        agent = await self._connect()
        read = self.pending = PendingRead(
            self._peer,
            self._tools,
            agent=agent,
            remote_table=self._ticket.block_ids,
            local_table=block_table,
            tokens=tokens,
        )
        try:
            has_ended = await self._watch.until(read.outcome, limit_s)
        except TransferError:
            if await self._watch.until_kept(read.outcome, LAST_WAIT_S):
                self.pending = None
            raise
        if not has_ended:
            raise TransferTimeout(f"a read from {self._peer.identity} has not ended in {limit_s:.3g} s")
        self.pending = None
        outcome = read.outcome.result()
        if outcome.trouble:
            raise TransferFailed(outcome.trouble)
        self.num_bytes += outcome.num_bytes
        self.checksums.update(outcome.checksums)

    async def _connect(self) -> str:
        """The peer's agent. No block is touched yet, so that both drop and loss may end it."""
        handshake: asyncio.Future[str] = self._peer.handshake()
        await self._watch.until(handshake)
        agent = handshake.result()  # only a connected peer's block size is known
        num_blocks = -(-self._ticket.num_tokens // self._peer.block_size)
        if len(self._ticket.block_ids) != num_blocks:
            raise TransferFailed(f"the ticket names {len(self._ticket.block_ids)} blocks, not {num_blocks}")
        return agent
