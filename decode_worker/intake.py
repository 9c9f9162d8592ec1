"""How does a decode worker take a prompt's KV over from its owner?

    1. RESERVING   ReserveSequence; the engine answers BlocksAllocated when it has room (back-pressure)
    2. FETCHING    read what the local prefix cache lacks, and wait until that read has ended
    3. VALIDATING  Release(ticket): only VALID makes the blocks worth anything
    4. ADMITTED    AdmitSequence: the sequence decodes
       RECOMPUTING the KV is void and the policy says so: RecomputeSequence, the prompt is computed here
       DROPPED     AbortSequence: nobody wants the result, or the policy is to fail
       QUARANTINED the read never ended: the blocks are never touched again, the worker is unfit

The lease is renewed in 1 and 2. Every way out gives the ticket back. Between 2's start and its end
nothing but QUARANTINED leaves it: a block that is being read into belongs to the read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from decode_worker.config import DecodeWorkerConfig, OnKvFailure
from decode_worker.keeper import LeaseKeeper
from decode_worker.metrics import DecodeMetrics
from decode_worker.peers import Peer, Peers
from decode_worker.reader import BlockReader, Read
from engine import (
    AbortSequence,
    AdmitSequence,
    BlocksAllocated,
    Command,
    Event,
    RecomputeSequence,
    ReserveSequence,
)
from protocol.errors import (
    EngineFault,
    LeaseExpired,
    RequestCancelled,
    SplitserveError,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from protocol.generation import GenerationRequest, Receipt, Token
from protocol.handoff import Ticket, Verdict
from protocol.ids import BlockId, SequenceId
from protocol.ports import Clock, FetchStatus
from rpc import EngineLink, Health, TaskSet

RELEASE_PAUSE_S = 0.1


class IntakeState(StrEnum):
    """The steps of the module's docstring."""

    RESERVING = "reserving"
    FETCHING = "fetching"
    VALIDATING = "validating"
    ADMITTED = "admitted"
    RECOMPUTING = "recomputing"
    DROPPED = "dropped"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Submission:
    """What a router hands to a decode worker."""

    request: GenerationRequest
    ticket: Ticket
    first_token: Token

    def mismatch(self, block_size: int) -> str | None:
        """Why ticket and request cannot belong together; None when they can."""
        num_tokens = len(self.request.prompt_token_ids) + len(self.request.output_token_ids)
        if self.ticket.num_tokens != num_tokens:
            return f"the ticket covers {self.ticket.num_tokens} tokens and the request has {num_tokens}"
        if self.ticket.tokens_ready != num_tokens:
            return f"only {self.ticket.tokens_ready} of the ticket's {num_tokens} tokens are ready"
        num_blocks = -(-num_tokens // block_size)
        if len(self.ticket.block_ids) != num_blocks:
            return (
                f"the ticket names {len(self.ticket.block_ids)} blocks and the request needs {num_blocks}"
            )
        return None


@dataclass(frozen=True, slots=True)
class IntakeTools:
    """What all intakes of one worker share."""

    engine: EngineLink[Command, Event]
    peers: Peers
    reader: BlockReader
    tasks: TaskSet
    health: Health
    metrics: DecodeMetrics
    config: DecodeWorkerConfig
    block_size: int
    clock: Clock


class Intake:
    """The take-over of one ticket. `run` once; `allocated` and `drop` on the same event loop."""

    def __init__(self, submission: Submission, seq_id: SequenceId, tools: IntakeTools) -> None:
        self.state = IntakeState.RESERVING
        self.receipt = Receipt()
        self._request = submission.request
        self._ticket = submission.ticket
        self._first_token = submission.first_token
        self._seq_id = seq_id
        self._tools = tools
        self._received_s = tools.clock()
        self._is_given_back = False
        loop = asyncio.get_running_loop()
        self._allocation: asyncio.Future[BlocksAllocated] = loop.create_future()
        self._dropped: asyncio.Future[SplitserveError] = loop.create_future()

    def allocated(self, event: BlocksAllocated) -> None:
        """The engine's answer to step 1."""
        if not self._allocation.done():
            self._allocation.set_result(event)

    def drop(self) -> None:
        """Nobody wants the sequence any more, whatever its state: end it as soon as no read is pending."""
        if self.state in (IntakeState.ADMITTED, IntakeState.RECOMPUTING):
            self._tools.engine.post(AbortSequence(self._seq_id))
        elif not self._dropped.done():
            self._dropped.set_result(RequestCancelled("the request was dropped during its intake"))

    async def run(self) -> None:
        """Take all steps. Returns when the sequence is admitted or recomputes, with `receipt` filled.

        Raises what the request fails with: `RequestCancelled` after `drop`, `TransferError` where the
        policy is to fail, `LayoutMismatch`, `TransferTimeout` when the read never ended, or the engine's
        refusal. The sequence is gone then, or its blocks are quarantined.
        """
        with self._tools.peers.use(self._ticket.owner, self._ticket.owner_address) as peer:
            try:
                await self._take_over(peer)
            except SplitserveError as error:
                self._leave(error)
                raise
            finally:
                if not self._is_given_back:
                    self._tools.tasks.spawn(give_back(self._ticket, self._tools), "ticket return")

    async def _take_over(self, peer: Peer) -> None:
        keeper = LeaseKeeper(self._ticket, peer.owner, self._tools.clock)
        try:
            self._reserve()
            blocks = await self._wait_for_blocks(keeper)
            await self._fetch_and_validate(peer, keeper, blocks)
        except TransferError as error:
            self._fall_back(error)
        else:
            self._raise_if_dropped()
            self.state = IntakeState.ADMITTED
            self._tools.engine.post(AdmitSequence(self._seq_id))
        finally:
            await keeper.stop()

    def _reserve(self) -> None:
        request = self._request
        self._tools.engine.post(
            ReserveSequence(
                self._seq_id,
                request.prompt_token_ids,
                (*request.output_token_ids, self._first_token.token_id),
                request.sampling,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
        )

    async def _wait_for_blocks(self, keeper: LeaseKeeper) -> tuple[BlockId, ...]:
        """Step 1. A lost lease ends the wait only if there is nothing to recompute into."""
        waits: set[asyncio.Future[Any]] = {self._allocation, self._dropped}
        if self._tools.config.on_kv_failure is OnKvFailure.FAIL:
            waits.add(keeper.lost)
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_dropped()
        if not self._allocation.done():
            raise keeper.lost.result()
        return self._allocation.result().block_ids

    async def _fetch_and_validate(self, peer: Peer, keeper: LeaseKeeper, blocks: Sequence[BlockId]) -> None:
        """Steps 2 and 3. Raises `TransferError` when the KV is void."""
        allocated_s = self._tools.clock()
        self.receipt = Receipt(decode_queue_s=allocated_s - self._received_s)
        if keeper.lost.done():
            raise keeper.lost.result()
        num_cached_blocks = self._allocation.result().num_cached_tokens // self._tools.block_size
        remote = self._ticket.block_ids[num_cached_blocks:]
        local = blocks[num_cached_blocks : len(self._ticket.block_ids)]
        if not remote:
            return  # validated when they entered the cache; `run` gives the ticket back
        self.state = IntakeState.FETCHING
        num_bytes = await self._fetch(peer, remote, local)
        self._raise_if_dropped()
        self.state = IntakeState.VALIDATING
        await self._validate(peer)
        self.receipt = Receipt(
            decode_queue_s=self.receipt.decode_queue_s,
            fetch_s=self._tools.clock() - allocated_s,
            fetched_bytes=num_bytes,
        )
        self._tools.metrics.observe_fetch(self.receipt, len(remote))

    async def _fetch(self, peer: Peer, remote: Sequence[BlockId], local: Sequence[BlockId]) -> int:
        """Step 2. Returns the bytes read; comes back only when no read is pending (or never will end)."""
        agent = await peer.connect()
        self._raise_if_dropped()
        try:
            async with asyncio.timeout(self._tools.config.fetch_limit_s):
                read = await self._start_read(peer, agent, remote, local)
                await asyncio.wait([read.ended])
        except TimeoutError:
            self._quarantine(peer)
        peer.num_reading -= 1
        if read.ended.result() is not FetchStatus.DONE:
            peer.mark_stale()
            raise TransferFailed(f"the read from {peer.identity} failed")
        return read.num_bytes

    async def _start_read(
        self, peer: Peer, agent: str, remote: Sequence[BlockId], local: Sequence[BlockId]
    ) -> Read:
        peer.num_reading += 1
        try:
            return await self._tools.reader.read(agent, remote, local)
        except TransferFailed:
            peer.num_reading -= 1
            peer.mark_stale()
            raise

    def _quarantine(self, peer: Peer) -> NoReturn:
        self.state = IntakeState.QUARANTINED
        limit_s = self._tools.config.fetch_limit_s
        raise TransferTimeout(f"a read from {peer.identity} has not ended in {limit_s:g} s")

    async def _validate(self, peer: Peer) -> None:
        """Step 3. Asks again when the owner does not answer: verdicts are sticky."""
        verdict = await release(peer, self._ticket, self._tools.config.release_attempts)
        self._is_given_back = True
        if verdict is not Verdict.VALID:
            raise LeaseExpired(f"{peer.identity} says that the ticket is {verdict.value}")

    def _fall_back(self, error: TransferError) -> None:
        """The KV is void: recompute it here, or raise `error`."""
        self._tools.metrics.observe_transfer_failure(error)
        self._raise_if_dropped()
        recomputes = self._tools.config.on_kv_failure is OnKvFailure.RECOMPUTE
        if not recomputes or self.state is IntakeState.QUARANTINED:
            raise error
        self.state = IntakeState.RECOMPUTING
        self._tools.metrics.observe_recompute()
        self._tools.engine.post(RecomputeSequence(self._seq_id))

    def _leave(self, error: SplitserveError) -> None:
        if self.state is IntakeState.QUARANTINED:
            fault = EngineFault(f"{error.message}; its blocks are lost to this worker")
            # Later, so that this request is told its own error before all others are told the fault.
            asyncio.get_running_loop().call_soon(self._tools.health.report, fault)
        else:
            self.state = IntakeState.DROPPED
            self._tools.engine.post(AbortSequence(self._seq_id))

    def _raise_if_dropped(self) -> None:
        if self._dropped.done() and self.state is not IntakeState.QUARANTINED:
            raise self._dropped.result()


async def release(peer: Peer, ticket: Ticket, attempts: int) -> Verdict:
    """Give a ticket back and return the owner's verdict. Raises `TransferFailed` when it stays silent."""
    for remaining in reversed(range(attempts)):
        try:
            return await peer.owner.release(ticket)
        except SplitserveError as error:
            if remaining == 0:
                raise TransferFailed(f"{peer.identity} gives no verdict: {error.message}") from error
        await asyncio.sleep(RELEASE_PAUSE_S)
    raise AssertionError("release needs at least one attempt")


async def give_back(ticket: Ticket, tools: IntakeTools) -> None:
    """Tell the owner that nobody will read. Best effort: the lease's end frees the blocks anyway."""
    with tools.peers.use(ticket.owner, ticket.owner_address) as peer:
        try:
            await release(peer, ticket, tools.config.release_attempts)
        except TransferFailed as error:
            tools.metrics.observe_transfer_failure(error)
