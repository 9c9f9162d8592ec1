"""How does a ticket get back to its owner, and what does the owner say about the KV then?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from uuid import uuid4

from decode_worker.peers import Peer
from decode_worker.tools import IntakeTools
from protocol.errors import LayoutMismatch, SplitserveError, TransferFailed
from protocol.handoff import Released, Ticket

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


def compare(ticket: Ticket, arrived: Mapping[int, int], theirs: Sequence[int]) -> None:
    """Raises `TransferFailed` unless blocks arrived as their owner has them, by the checksums of both.

    `arrived`: by index into the ticket's blocks; `theirs`: of all of them.
    """
    if len(theirs) != len(ticket.block_ids):
        raise TransferFailed(f"{len(theirs)} checksums came for {len(ticket.block_ids)} blocks")
    num_wrong = sum(theirs[index] != checksum for index, checksum in arrived.items())
    if num_wrong:
        raise TransferFailed(f"{num_wrong} of {len(arrived)} blocks arrived with a wrong checksum")
