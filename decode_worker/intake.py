"""How does a decode worker take a prompt's KV over from its owner, while the owner still computes it?

    1. WAITING     the prefill has just begun: reserved blocks would idle (see `decode_worker.reservation`)
    2. RESERVING   ReserveSequence; the engine answers BlocksAllocated when it has room (back-pressure)
    3. FETCHING    read what the local prefix cache lacks, chunk by chunk (see `decode_worker.fetching`)
    4. VALIDATING  Release(ticket): only VALID makes the blocks worth anything
    5. ADMITTED    AdmitSequence, once `begin` has brought the first tokens: the sequence decodes
       RECOMPUTING the KV is void and the policy says so: RecomputeSequence, likewise after `begin`
       DROPPED     nobody wants the result, or the take-over failed: AbortSequence

The lease is renewed in 1 to 4. Every way out gives the ticket back, unless this worker is the trouble:
then the router offers it to another one. No request waits for a read that does not end; its blocks
do: AbortSequence is said when the read has ended, and until then they belong to the read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from decode_worker.config import OnKvFailure
from decode_worker.fetching import Fetch
from decode_worker.handback import compare, give_back, new_reader, release
from decode_worker.keeper import LeaseKeeper
from decode_worker.peers import Peer
from decode_worker.reservation import PrefillPace, reservation_delay_s
from decode_worker.submission import Submission, choices_mismatch
from decode_worker.tools import IntakeTools
from decode_worker.watch import Watch
from engine import (
    AbortSequence,
    AdmitSequence,
    BlocksAllocated,
    FirstTokens,
    RecomputeSequence,
    ReserveSequence,
    TokensSampled,
)
from protocol.errors import (
    EngineFault,
    InvalidRequest,
    LeaseExpired,
    SplitserveError,
    TransferError,
    WorkerUnavailable,
)
from protocol.generation import Receipt
from protocol.handoff import Released, Verdict
from protocol.ids import SequenceId

LAST_WORD_S = 0.5
"""How long a verdict may come after the news that the lease has ended, by this very verdict."""


class IntakeState(StrEnum):
    """The steps of the module's docstring."""

    WAITING = "waiting"
    RESERVING = "reserving"
    FETCHING = "fetching"
    VALIDATING = "validating"
    ADMITTED = "admitted"
    RECOMPUTING = "recomputing"
    DROPPED = "dropped"


class Intake:
    """The take-over of one ticket. `run` once; everything else on the same event loop."""

    def __init__(self, submission: Submission, seq_id: SequenceId, tools: IntakeTools) -> None:
        self.state = IntakeState.WAITING
        self._request = submission.request
        self._ticket = submission.ticket
        self._reader = new_reader()
        self._seq_id = seq_id
        self._tools = tools
        self._receipt = Receipt()
        self._received_s = tools.clock()
        self._unwanted_choices: set[int] = set()
        self._is_given_back = False
        loop = asyncio.get_running_loop()
        self._allocation: asyncio.Future[BlocksAllocated] = loop.create_future()
        self._begun: asyncio.Future[FirstTokens] = loop.create_future()
        self._watch = Watch()
        self._is_reserved = False
        self._keeper: LeaseKeeper | None = None
        self._fetch: Fetch | None = None

    def allocated(self, event: BlocksAllocated) -> None:
        """The engine's answer to step 2."""
        if not self._allocation.done():
            self._allocation.set_result(event)

    def begin(self, first_tokens: FirstTokens) -> None:
        """The prefill is done; what its owner sampled. Raises `InvalidRequest` when that cannot be."""
        mismatch = choices_mismatch(self._request, [index for index, _ in first_tokens])
        if mismatch is not None:
            raise InvalidRequest(mismatch)
        if not self._begun.done():
            self._begun.set_result(first_tokens)
            if self._keeper is not None:
                self._keeper.complete()
        elif self._begun.result() != first_tokens:
            raise InvalidRequest("a request began twice, with different first tokens")

    def drop(self, error: SplitserveError) -> None:
        """Nobody wants the sequence any more, whatever its state: end it, with `error` for the reason."""
        if self.state in (IntakeState.ADMITTED, IntakeState.RECOMPUTING):
            self._tools.engine.post(AbortSequence(self._seq_id))
        else:
            self._watch.drop(error)

    def drop_choice(self, index: int) -> None:
        """As `drop` for one choice of several; the others go on."""
        if self.state in (IntakeState.ADMITTED, IntakeState.RECOMPUTING):
            self._tools.engine.post(AbortSequence(self._seq_id, index))
        else:
            self._unwanted_choices.add(index)

    def receipt(self, first: TokensSampled) -> Receipt:
        """For the first delta: what the client waited for. Reads that the prefill hid are not in it."""
        return self._receipt

    async def run(self) -> None:
        """Take all steps. Returns when the sequence is admitted or recomputes.

        Raises what the request fails with: the error of `drop`, `TransferError` where the policy is to
        fail or a read does not end, `LayoutMismatch`, or the engine's refusal.
        """
        with self._tools.peers.use(self._ticket.owner, self._ticket.owner_address) as peer:
            clock, ticket = self._tools.clock, self._ticket
            pace = PrefillPace(ticket.num_tokens, ticket.tokens_ready, peer.prefill_rate, clock)
            keeper = self._keeper = LeaseKeeper(ticket, peer.owner, pace, self._watch.lose, clock)
            if self._begun.done():
                keeper.complete()
            try:
                await self._take_over(peer, keeper, pace)
            except SplitserveError as error:
                self._leave(error)
                raise
            finally:
                await keeper.stop()

    async def _take_over(self, peer: Peer, keeper: LeaseKeeper, pace: PrefillPace) -> None:
        try:
            await self._reserve_in_time(peer, keeper, pace)
            await self._fetch_and_validate(peer, keeper)
        except TransferError as error:
            await self._recompute_instead(error)
        else:
            first_tokens = await self._first_tokens()
            self._hand_over(IntakeState.ADMITTED, AdmitSequence(self._seq_id, first_tokens))

    async def _reserve_in_time(self, peer: Peer, keeper: LeaseKeeper, pace: PrefillPace) -> None:
        """Step 1."""
        while not keeper.is_complete:
            read_s = peer.read_rate.time_for(self._ticket.num_tokens)
            delay_s = reservation_delay_s(pace.remaining_s(), read_s)
            if delay_s == 0:
                break
            await self._watch.until(keeper.progress, delay_s)
        self._reserve()

    def _reserve(self) -> None:
        request = self._request
        self.state = IntakeState.RESERVING
        self._is_reserved = True
        self._tools.engine.post(
            ReserveSequence(
                self._seq_id,
                request.prompt_token_ids,
                replace(request.sampling, prompt_logprobs=None),  # its owner scores the prompt
                request.output_token_ids,
                priority=request.priority,
                cache_salt=request.cache_salt,
                index=request.index,
                num_samples=request.n,
            )
        )

    async def _fetch_and_validate(self, peer: Peer, keeper: LeaseKeeper) -> None:
        """Steps 2 to 4. Raises `TransferError` when the KV is void."""
        reserved_s = self._tools.clock()
        await self._watch.until(self._allocation)
        allocated_s = self._tools.clock()
        self._receipt = Receipt(decode_queue_s=allocated_s - reserved_s)
        self._tools.metrics.observe_queue(self._receipt)
        num_cached = self._allocation.result().num_cached_tokens
        if num_cached >= self._ticket.num_tokens:
            return  # validated when they entered the cache; the ticket goes back after the prefill
        self.state = IntakeState.FETCHING
        self._fetch = Fetch(self._ticket, peer, keeper, self._watch, self._tools)
        await self._fetch.run(self._allocation.result().block_ids, num_cached, self._read_limit_s())
        self.state = IntakeState.VALIDATING
        await self._validate(peer, self._fetch.checksums)
        complete_s = allocated_s if keeper.complete_s is None else keeper.complete_s
        self._receipt = Receipt(
            decode_queue_s=self._receipt.decode_queue_s,
            fetch_s=self._tools.clock() - max(allocated_s, complete_s),
            fetched_bytes=self._fetch.num_bytes,
        )
        num_blocks = -(-(self._ticket.num_tokens - num_cached) // self._tools.block_size)
        self._tools.metrics.observe_fetch(self._receipt, num_blocks)

    def _read_limit_s(self) -> float:
        spent_s = self._tools.clock() - self._received_s
        return self._tools.config.read_limit_s(self._request.deadline_s - spent_s)

    async def _validate(self, peer: Peer, checksums: Mapping[int, int]) -> None:
        """Step 4. Raises `TransferError` unless the blocks hold what their owner computed.

        `checksums`: of what has arrived; empty when the reader takes none.
        """
        answer = await self._release(peer, wants_checksums=bool(checksums))
        if answer.verdict is not Verdict.VALID:
            raise LeaseExpired(f"{peer.identity} says that the ticket is {answer.verdict.value}")
        if checksums:
            compare(self._ticket, checksums, answer.checksums)

    async def _release(self, peer: Peer, *, wants_checksums: bool) -> Released:
        """The owner's verdict. A silent one is waited for only until the lease counts as lost; one that
        answers says in the same breath that the ticket is not held any more."""
        attempts = self._tools.config.release_attempts
        asking = asyncio.ensure_future(
            release(peer, self._ticket, self._reader, attempts, wants_checksums=wants_checksums)
        )
        try:
            await self._watch.until(asking)
        except TransferError:
            if not await self._watch.until_kept(asking, LAST_WORD_S):
                raise
        finally:
            self._is_given_back = asking.done()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        return asking.result()

    async def _first_tokens(self) -> FirstTokens:
        """What `begin` brings, without the choices that were dropped meanwhile."""
        await self._watch.until_kept(self._begun)
        return tuple(first for first in self._begun.result() if first[0] not in self._unwanted_choices)

    async def _recompute_instead(self, error: TransferError) -> None:
        """The KV is void: compute it here, or raise `error`."""
        self._watch.raise_if_dropped()
        self._tools.metrics.observe_transfer_failure(error)
        is_being_read = self._fetch is not None and self._fetch.pending is not None
        if is_being_read or self._tools.config.on_kv_failure is OnKvFailure.FAIL:
            raise error
        self._tools.metrics.observe_recompute()
        first_tokens = await self._first_tokens()
        if not self._is_reserved:
            self._reserve()
        self._hand_over(IntakeState.RECOMPUTING, RecomputeSequence(self._seq_id, first_tokens))

    def _hand_over(self, state: IntakeState, command: AdmitSequence | RecomputeSequence) -> None:
        """The sequence is the engine's from here. The prefill is done: the ticket may go back."""
        self.state = state
        self._tools.engine.post(command)
        self._give_back()

    def _leave(self, error: SplitserveError) -> None:
        """Give everything up, the blocks as soon as no read is pending."""
        self.state = IntakeState.DROPPED
        read = None if self._fetch is None else self._fetch.pending
        if read is None:
            self._discard(error)
        else:
            read.abandon(lambda: self._discard(error))

    def _discard(self, error: SplitserveError) -> None:
        if self._is_reserved:
            self._tools.engine.post(AbortSequence(self._seq_id))
        if not isinstance(error, WorkerUnavailable | EngineFault):  # another worker may read it then
            self._give_back()

    def _give_back(self) -> None:
        if not self._is_given_back:
            self._is_given_back = True
            self._tools.tasks.spawn(give_back(self._ticket, self._reader, self._tools), "ticket return")
