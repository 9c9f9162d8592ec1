"""How does a ticket get back to its owner, and what does the owner say about the KV then?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import uuid4

from decode_worker.owner import Released
from decode_worker.peers import Peer
from decode_worker.tools import Checksum, IntakeTools
from protocol.errors import LayoutMismatch, SplitserveError, TransferFailed
from protocol.handoff import Ticket
from protocol.ids import BlockId

RELEASE_PAUSE_S = 0.1


def new_reader() -> str:
    """A name for one reading of a ticket, which may be offered to several."""
    return uuid4().hex


async def release(
    peer: Peer, ticket: Ticket, reader: str, attempts: int, *, wants_checksums: bool = False
) -> Released:
    """Give a ticket back. Asks again when the owner does not answer: verdicts are sticky.

    Raises `TransferFailed` when it stays silent, and `LayoutMismatch` when it computes no checksums.
    """
    for remaining in reversed(range(attempts)):
        try:
            return await peer.owner.release(ticket, reader, wants_checksums)
        except LayoutMismatch:
            raise
        except SplitserveError as error:
            if remaining == 0:
                raise TransferFailed(f"{peer.identity} gives no verdict: {error.message}") from error
        await asyncio.sleep(RELEASE_PAUSE_S)
    raise AssertionError("release needs at least one attempt")


async def give_back(ticket: Ticket, reader: str, tools: IntakeTools) -> None:
    """Tell the owner that nobody will read. Best effort: the lease's end frees the blocks anyway."""
    with tools.peers.use(ticket.owner, ticket.owner_address) as peer:
        try:
            await release(peer, ticket, reader, tools.config.release_attempts)
        except TransferFailed as error:
            tools.metrics.observe_transfer_failure(error)


async def compare(checksum: Checksum, blocks: Sequence[BlockId], theirs: Sequence[int]) -> None:
    """Raises `TransferFailed` unless `blocks` hold what their owner has, by its checksums of them."""
    if len(theirs) != len(blocks):
        raise TransferFailed(f"the owner sent {len(theirs)} checksums for {len(blocks)} blocks")
    ours = await asyncio.to_thread(checksum, blocks)
    wrong = [i for i, (mine, their) in enumerate(zip(ours, theirs, strict=True)) if mine != their]
    if wrong:
        raise TransferFailed(f"{len(wrong)} of {len(blocks)} blocks arrived with a wrong checksum")
